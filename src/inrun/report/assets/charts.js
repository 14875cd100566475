// The charts. Each has a legend of buttons beside it, which the keyboard reaches, and a caption in words.
const CONFIG = { displayModeBar: false, displaylogo: false, showLink: false, plotlyServerURL: "", responsive: true, doubleClick: "reset" };
const hiddenKeys = {};

function layout(options) {
  const axis = { gridcolor: token("--grid"), zerolinecolor: token("--line"), linecolor: token("--line"), automargin: true, exponentformat: "power", nticks: innerWidth < 500 ? 5 : 8 };
  const { xaxis = {}, yaxis = {}, ...more } = options;
  return {
    font: { family: token("--sans"), size: 12.5, color: token("--muted") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 14, t: 10, b: 44 },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: token("--surface"), bordercolor: token("--line"), font: { color: token("--ink"), size: 12.5 }, namelength: -1 },
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
    xaxis: { ...axis, zeroline: false, ...xaxis, title: { text: xaxis.title, standoff: 8 } },
    yaxis: { ...axis, ...yaxis, title: { text: yaxis.title, standoff: 8 } },
    ...more,
  };
}

// Draw traces of the form { name, swatch, trace }; keys that were switched off stay off.
function draw(id, items, options, caption) {
  const chart = byId(`${id}-chart`);
  const off = (hiddenKeys[id] ??= new Set());
  const legend = byId(`${id}-legend`);
  legend.replaceChildren();
  byId(`${id}-caption`).textContent = caption;
  if (!items.length) {
    Plotly.purge(chart);
    chart.replaceChildren();
    return;
  }
  chart.classList.remove("none");
  if (!chart.classList.contains("js-plotly-plot")) chart.replaceChildren();
  const traces = items.map(({ name, trace }) => ({ ...trace, name: label(name), visible: off.has(name) ? "legendonly" : true }));
  Plotly.react(chart, traces, layout(options), CONFIG);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `Chart. ${caption}`);
  for (const item of items) {
    const key = make("button", { type: "button", class: "key", "aria-pressed": String(!off.has(item.name)) }, swatch(item.swatch, item.trace.stackgroup ? undefined : item.trace.line?.dash, item.hatched), make("b", { text: item.name }));
    key.addEventListener("click", () => {
      const gone = !off.delete(item.name);
      if (gone) off.add(item.name);
      key.setAttribute("aria-pressed", String(!gone));
      Plotly.restyle(chart, { visible: items.map(({ name }) => (off.has(name) ? "legendonly" : true)) });
    });
    legend.append(key);
  }
}

function none(id, why) {
  draw(id, [], {}, "");
  const chart = byId(`${id}-chart`);
  chart.classList.add("none");
  chart.removeAttribute("role");
  chart.removeAttribute("aria-label");
  chart.textContent = why;
}

const line = (x, y, color, more = {}) => {
  const { width = 2, dash = "solid", ...rest } = more;
  return { type: "scatter", mode: x.length < 25 ? "lines+markers" : "lines", x, y, line: { color, width, dash }, marker: { color, size: 6 }, ...rest };
};

// One range of steps for the loss and the accounts, so that the two can be held against each other.
function span() {
  const steps = [...data.loss.map((curve) => curve.step), ...data.books.map((books) => books.curve.step ?? []), data.metrics?.training?.step ?? [], ...(data.metrics?.evaluation ?? []).map((curve) => curve.step)].flat();
  if (!steps.length) return {};
  const [low, high] = [Math.min(...steps), Math.max(...steps)];
  const room = Math.max((high - low) * 0.02, 0.5);
  return { range: [low - room, high + room] };
}

function drawLoss() {
  const items = [];
  const training = data.metrics?.training;
  if (training) items.push({ name: "training loss", swatch: OTHER[mode()], trace: line(training.step, training.loss, OTHER[mode()], { width: 1.2 }) });
  data.sets.forEach((name, k) => {
    const curve = data.loss[k];
    if (!curve.step.length) return;
    const width = k === state.set ? 3 : 1.6;
    items.push({ name, swatch: colour(k), trace: line(curve.step, curve.loss, colour(k), { width, dash: DASHES[k % 8] }) });
  });
  (data.metrics?.evaluation ?? []).forEach((curve, k) => {
    const known = data.sets.indexOf(curve.name);
    const fill = colour(known < 0 ? (data.sets.length + k) % 8 : known);
    items.push({ name: `${curve.name} (evaluation)`, swatch: fill, trace: line(curve.step, curve.loss, fill, { width: 1.2, dash: "dot", mode: "lines" }) });
  });
  if (!items.length) return none("loss", "No validation loss was recorded.");
  const evaluated = (data.metrics?.evaluation ?? []).find((curve) => curve.name === data.sets[state.set]);
  const at = (evaluated ?? data.loss[state.set]).loss;
  const audited = data.books[state.set].audited;
  const part = audited ? ` The accounts beside it add up the falls within ${whole(audited)} audited steps only, over the same range.` : "";
  const said = at.length ? `The loss on ${data.sets[state.set]} went from ${number(at[0])} to ${number(at[at.length - 1])}.${part}` : "";
  draw("loss", items, { xaxis: { title: "optimizer step", ...span() }, yaxis: { title: "loss" } }, said);
}

const ACCOUNTS = [
  ["fall", "fall of the loss", () => token("--ink"), { width: 7, opacity: 0.3 }],  // wide and pale: the data often lie on it
  ["data", "data", () => colour(0), { width: 3 }],
  ["momentum", "momentum", () => colour(1), { dash: "dash" }],
  ["decay", "weight decay", () => colour(3), { dash: "dot" }],
  ["inherited", "inherited", () => colour(1), { dash: "dash" }],
  ["rounding", "rounding", () => colour(4), { dash: "dot" }],
  ["residual", "residual", () => colour(2), { dash: "dashdot" }],
];

// What the optimizer's memory did to the loss, beside the samples of the steps themselves.
function role({ fall, data: paid, momentum }) {
  const memory = (momentum ?? []).at(-1);
  if (memory === undefined || memory === null) return "";
  if (memory < 0) return ": here they undid part of what the samples of these steps gained";
  return (paid ?? [0]).at(-1) < fall.at(-1) ? ", which is why the data account alone does not reach the fall" : "";
}

function drawBooks() {
  const books = data.books[state.set];
  if (!books.audited) return none("books", "No step was audited, so the accounts were not measured. Ask for it with audit_every= when training.");
  const items = ACCOUNTS.filter(([key]) => books.curve[key]).map(([key, name, fill, style]) => ({
    name, swatch: fill(), trace: line(books.curve.step, books.curve[key], fill(), style),
  }));
  const said = `Added up over ${whole(books.audited)} audited of ${whole(books.steps)} steps; up means that the loss fell. ` +
    (data.credit === "whole"
      ? "Data is the parts paid to samples for all their pushes so far; inherited is momentum from before scoring began."
      : books.curve.momentum ? `Momentum is made of earlier samples' pushes${role(books.curve)}.`
        : "The method takes the step for one of plain SGD; what that leaves of the fall is the residual.");
  draw("books", items, { xaxis: { title: "optimizer step", ...span() }, yaxis: { title: "loss, added up" } }, said);
}
