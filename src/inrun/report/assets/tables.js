// Tables: they say in figures what the charts show, and are what screen readers and printers get.
function table(heads, rows, kind = "") {
  const head = make("tr", {}, ...heads.map(({ text, num }) => make("th", { text, scope: "col", ...(num ? { class: "num" } : {}) })));
  return make("table", kind ? { class: kind } : {}, make("thead", {}, head), make("tbody", {}, ...rows));
}
const figure = (text, tone = "") => make("td", { text, class: `num ${tone}`.trim() });

function rowHead(name, place, grouping) {
  const cell = make("th", { scope: "row", title: name });
  if (grouping) cell.append(swatch(colour(place, grouping), undefined, again(place, grouping)));
  const text = make("span", { text: name, dir: "auto" });
  cell.append(text);
  return cell;
}

// A cell's tint: blue for help, orange for harm; the figure in it says the same.
function tint(cell, part) {
  const [r, g, b] = part >= 0 ? (isDark() ? [74, 163, 223] : [0, 114, 178]) : isDark() ? [240, 128, 60] : [213, 94, 0];
  cell.style.backgroundColor = `rgba(${r}, ${g}, ${b}, ${(0.04 + 0.42 * Math.min(Math.abs(part), 1)).toFixed(3)})`;
  cell.style.color = token("--ink");
}
