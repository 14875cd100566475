// Tables: they say in figures what the charts show, and are what screen readers and printers get. Every one of them can be sorted.
function table(heads, rows, kind = "") {
  const head = make("tr", {}, ...heads.map(({ text, num }) => make("th", { text, scope: "col", ...(num ? { class: "num" } : {}) })));
  const whole = make("table", kind ? { class: kind } : {}, make("thead", {}, head), make("tbody", {}, ...rows));
  if (kind.split(" ").includes("fold")) foldable(whole, heads);
  return whole;
}
const figure = (text, tone = "", value = undefined) => make("td", { text, class: `num ${tone}`.trim(), ...(value === undefined || value === null ? {} : { "data-value": value }) });

// A row becomes a small block on a phone, each figure with its name; roles keep it a table for those who hear it.
function foldable(whole, heads) {
  whole.setAttribute("role", "table");
  for (const part of whole.querySelectorAll("thead, tbody")) part.setAttribute("role", "rowgroup");
  for (const row of whole.rows) {
    row.setAttribute("role", "row");
    [...row.cells].forEach((cell, k) => {
      cell.setAttribute("role", cell.tagName === "TD" ? "cell" : cell.scope === "row" ? "rowheader" : "columnheader");
      if (cell.tagName === "TD") cell.dataset.label = heads[k].text;
    });
  }
}

function rowHead(name, place, grouping) {
  const cell = make("th", { scope: "row", title: name, "data-value": name });
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

// What a cell is sorted by and taken away as: a text for heads of rows, else its number, null where there is none.
function valueOf(cell) {
  const told = cell.dataset.value;
  if (cell.tagName === "TH") return told ?? cell.textContent;
  return told === undefined || told === "" ? null : Number(told);
}
const rowsOf = (whole) => [[...whole.tHead.rows[0].cells].map((cell) => cell.textContent), ...[...whole.tBodies[0].rows].map((row) => [...row.cells].map(valueOf))];

// The order that was chosen, by table: it stays when the table is drawn again for another validation set.
const orders = {};
const inOrder = new Intl.Collator("en", { numeric: true });

function sortRows(whole, column, down) {
  const stays = (row) => Number(row.classList.contains("sum"));  // sums and what is gathered come last, whatever the order
  const ordered = [...whole.tBodies[0].rows].map((row, place) => [row, valueOf(row.cells[column]), place]);
  ordered.sort(([a, x, i], [b, y, j]) => {
    if (stays(a) !== stays(b)) return stays(a) - stays(b);
    if (x === null || y === null) return Number(x === null) - Number(y === null) || i - j;
    const less = typeof x === "string" ? inOrder.compare(x, y) : x - y;
    return (down ? -less : less) || i - j;
  });
  whole.tBodies[0].append(...ordered.map(([row]) => row));
  [...whole.tHead.rows[0].cells].forEach((head, k) => head.setAttribute("aria-sort", k !== column ? "none" : down ? "descending" : "ascending"));
}

function sortable(whole, key) {
  [...whole.tHead.rows[0].cells].forEach((head, column) => {
    const button = make("button", { type: "button", class: "sort" }, ...head.childNodes);
    button.addEventListener("click", () => {
      const before = orders[key];
      const text = column === 0;
      orders[key] = { column, down: before?.column === column ? !before.down : !text };
      sortRows(whole, column, orders[key].down);
    });
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
  });
  if (orders[key]) sortRows(whole, orders[key].column, orders[key].down);
  return whole;
}

// Put a table into its place, sortable; and the head of a panel with the buttons that take its table away.
const putTable = (id, whole) => byId(id).replaceChildren(sortable(whole, id));
function tableHead(title, id, ...more) {
  return make("div", { class: "panel-head" }, make("h3", { text: title }), make("span", { class: "switches" }, ...more, takes(title, () => rowsOf(byId(id).querySelector("table")))));
}
function takeWritten() {
  for (const whole of document.querySelectorAll("table[data-name]")) {
    sortable(whole, whole.dataset.name);
    whole.closest(".scroll").before(make("div", { class: "panel-head end" }, takes(whole.dataset.name, () => rowsOf(whole))));
  }
}
