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

function drawGroups() {
  const grouping = data.groupings[state.column];
  const groups = grouping.whole[state.set];
  const positive = groups.reduce((sum, g) => sum + Math.max(g.total, 0), 0);
  const judged = groups.some((g) => g.clear !== null);
  const heads = [{ text: grouping.column }, ...["Total", "Share", "Per sample", "Samples", "Uses", "Negative", ...(judged ? ["Clear of error"] : [])].map((text) => ({ text, num: true }))];
  const gathered = (k) => Number(grouping.gathered > 0 && k === groups.length - 1);  // comes last, whatever its total
  const order = groups.map((_, k) => k).sort((a, b) => gathered(a) - gathered(b) || groups[b].total - groups[a].total);
  const total = scaled(groups.map((g) => g.total));
  const average = scaled(groups.map((g) => (g.samples ? g.total / g.samples : null)));
  const rows = order.map((k) => {
    const g = groups[k];
    const per = (x) => (g.samples && x !== null ? percent(x / g.samples) : "–");
    return make("tr", {}, rowHead(grouping.names[k], k, grouping), figure(total(g.total, true), mood(g.total)),
      figure(g.total > 0 && positive > 0 ? percent(g.total / positive) : "–"), figure(average(g.samples ? g.total / g.samples : null, true)),
      figure(whole(g.samples)), figure(whole(g.uses)), figure(per(g.negative)), ...(judged ? [figure(per(g.clear))] : []));
  });
  byId("groups-table").replaceChildren(table(heads, rows));
}

// A cell's tint: blue for help, orange for harm; the figure in it says the same.
function tint(cell, part) {
  const [r, g, b] = part >= 0 ? (isDark() ? [74, 163, 223] : [0, 114, 178]) : isDark() ? [240, 128, 60] : [213, 94, 0];
  cell.style.backgroundColor = `rgba(${r}, ${g}, ${b}, ${(0.04 + 0.42 * Math.min(Math.abs(part), 1)).toFixed(3)})`;
  cell.style.color = token("--ink");
}

function drawHeat() {
  const place = byId("heat-table");
  if (!place) return;
  const grouping = data.groupings[state.column];
  const averages = data.sets.map((_, s) => grouping.whole[s].map((g) => (g.samples ? g.total / g.samples : null)));
  const most = averages.map((list) => Math.max(...list.map((x) => Math.abs(x ?? 0)), 1e-300));
  const shown = averages.map(scaled);
  const rows = grouping.names.map((name, k) => {
    const cells = data.sets.map((_, s) => {
      const cell = make("td", { text: shown[s](averages[s][k], true) });
      if (averages[s][k] !== null) tint(cell, averages[s][k] / most[s]);
      return cell;
    });
    return make("tr", {}, rowHead(name, k, grouping), ...cells);
  });
  place.replaceChildren(table([{ text: grouping.column }, ...data.sets.map((text) => ({ text }))], rows, "heat"));
}

function drawAgreement() {
  const place = byId("agreement-table");
  if (!place || !data.agreement) return;
  const rows = data.sets.map((name, i) => {
    const cells = data.sets.map((_, j) => {
      const value = data.agreement.matrix[i][j];
      const cell = make("td", { text: value === null ? "–" : value.toFixed(2).replace("-", "−") });
      if (value !== null) tint(cell, value);
      return cell;
    });
    return make("tr", {}, rowHead(name), ...cells);
  });
  const corner = make("th", { scope: "col" }, make("span", { class: "unseen", text: "Validation set" }));
  const head = make("tr", {}, corner, ...data.sets.map((text) => make("th", { text, scope: "col" })));
  place.replaceChildren(make("table", { class: "heat small" }, make("thead", {}, head), make("tbody", {}, ...rows)));
}
