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
  const said = at.length ? `The loss on ${data.sets[state.set]} went from ${number(at[0])} to ${number(at[at.length - 1])}.` : "";
  draw("loss", items, { xaxis: { title: "optimizer step" }, yaxis: { title: "loss" } }, said);
}

const ACCOUNTS = [
  ["fall", "fall of the loss", () => token("--ink"), { width: 2.4 }],
  ["data", "data", () => colour(0), { width: 3 }],
  ["momentum", "momentum", () => colour(1), { dash: "dash" }],
  ["optimizer", "optimizer", () => colour(1), { dash: "dash" }],
  ["decay", "weight decay", () => colour(3), { dash: "dot" }],
  ["residual", "residual", () => colour(2), { dash: "dashdot" }],
];

// What the optimizer's memory did to the loss, beside the samples of the steps themselves.
function role({ fall, data: paid, momentum, optimizer }) {
  const memory = (momentum ?? optimizer ?? []).at(-1);
  if (memory === undefined || memory === null) return "";
  if (memory < 0) return ": here they undid part of what the samples of these steps gained";
  return (paid ?? [0]).at(-1) < fall.at(-1) ? ", which is why the data account alone does not reach the fall" : "";
}

function drawBooks() {
  const books = data.books[state.set];
  if (!books.audited) return none("books", "No step was audited, so the accounts were not measured. Ask for it with audit_every= when training.");
  const split = books.curve.momentum && books.curve.decay;
  const items = ACCOUNTS.filter(([key]) => books.curve[key] && !(key === "optimizer" && split)).map(([key, name, fill, style]) => ({
    name, swatch: fill(), trace: line(books.curve.step, books.curve[key], fill(), style),
  }));
  const said = `Added up over ${whole(books.audited)} audited of ${whole(books.steps)} steps; up means that the loss fell. ` +
    `Momentum is made of earlier samples' pushes${role(books.curve)}.`;
  draw("books", items, { xaxis: { title: "optimizer step" }, yaxis: { title: "loss, added up" } }, said);
}

const CLARITY = { harmful: ["negative", 5], unclear: ["within two standard errors of zero", null], helpful: ["positive", 0] };

function drawSpread() {
  const scores = data.scores[state.set];
  if (!scores.samples) return none("spread", "No sample was scored for this validation set.");
  const edges = scores.edges;
  const middle = edges.slice(1).map((edge, k) => (edge + edges[k]) / 2);
  const widths = edges.slice(1).map((edge, k) => edge - edges[k]);
  const judged = Boolean(scores.bars.unclear);
  const range = edges.slice(1).map((edge, k) => `${number(edges[k], true)} to ${number(edge, true)}`);
  const items = Object.entries(scores.bars).map(([kind, counts]) => {
    const [name, place] = CLARITY[kind];
    const fill = place === null ? OTHER[mode()] : colour(place);
    const called = judged && kind !== "unclear" ? `clearly ${name}` : name;
    return { name: called, swatch: fill, trace: { type: "bar", x: middle, y: counts, width: widths, marker: { color: fill, line: { width: 0 } }, customdata: range, hovertemplate: "%{customdata}: %{y} samples" } };
  });
  const zero = { type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: token("--ink"), width: 1.5 } };
  const mark = { x: 0, yref: "paper", y: 1, yanchor: "top", xanchor: "left", xshift: 4, text: "zero", showarrow: false, font: { color: token("--ink") } };
  const shown = scaled([scores.mean, scores.median]);
  const beyond = scores.beyond[0] + scores.beyond[1];
  const said = `${percent(scores.negative / scores.samples)} of ${whole(scores.samples)} samples are below zero` +
    (judged ? `, ${percent(scores.clear / scores.samples)} by more than two standard errors (the median standard error is ${shown(scores.standard_error)})` : "; without folds there are no standard errors") +
    `. The mean is ${shown(scores.mean, true)}, the median ${shown(scores.median, true)}.` +
    (beyond ? ` The outermost bars hold ${whole(beyond)} samples that lie further out.` : "");
  draw("spread", items, { barmode: "stack", bargap: 0, shapes: [zero], annotations: [mark], hovermode: "closest", xaxis: { title: "score (loss; positive = helped)" }, yaxis: { title: "samples" } }, said);
}

const summed = (list) => { let sum = 0; return list.map((x) => (sum += x)); };

const hatch = (fill) => ({ fillpattern: { shape: "/", size: 7, solidity: 0.25, fgcolor: token("--surface"), bgcolor: fill } });

function drawStages() {
  const grouping = data.groupings[state.column];
  const groups = grouping.stages[state.set];
  const cumulative = state.span === "cumulative";
  const totals = groups.map((g) => (cumulative ? summed(g.total) : g.total));
  const counts = groups.map((g) => (cumulative ? summed(g.new) : g.uses));
  const names = groups.map((_, k) => (k < grouping.colours ? grouping.names[k] : "other"));
  const steps = data.stages.last;
  const share = state.measure === "share";
  const positive = steps.map((_, s) => totals.reduce((sum, t) => sum + Math.max(t[s], 0), 0));
  const values = totals.map((t, k) => t.map((x, s) => {
    if (share) return positive[s] > 0 ? (100 * Math.max(x, 0)) / positive[s] : null;
    return counts[k][s] ? x / counts[k][s] : null;
  }));
  const few = steps.length < 3;
  const items = names.map((name, k) => {
    const fill = colour(k, grouping);
    const hatched = again(k, grouping);
    const hover = { hovertemplate: share ? "%{y:.1f} %" : "%{y:.3g}" };
    let trace;
    if (share && few) trace = { type: "bar", x: steps, y: values[k], marker: { color: fill } };
    else if (share) trace = { type: "scatter", mode: "lines", x: steps, y: values[k], stackgroup: "all", line: { color: token("--surface"), width: 0.8 }, fillcolor: fill, ...(hatched ? hatch(fill) : {}) };
    else trace = line(steps, values[k], fill, { dash: k < grouping.colours ? dashOf(k) : "dot", connectgaps: true, marker: { color: fill, size: 6, symbol: hatched ? "diamond" : "circle" } });
    return { name, swatch: fill, hatched: share && hatched, trace: { ...trace, ...hover } };
  });
  const out = names.filter((_, k) => totals[k][steps.length - 1] < 0);
  const when = cumulative ? "from the start up to each step" : `in each of ${steps.length} stages`;
  let said;
  if (share) said = `Share of the positive total for ${data.sets[state.set]}, ${when}.` + (out.length ? ` A group whose total is below zero has no share there; at the end: ${out.join(", ")}.` : "");
  else said = cumulative ? `Score per sample used so far, for ${data.sets[state.set]}.` : `Score per use within each stage, for ${data.sets[state.set]}. Later uses earn less: the learning rate falls, and there is less left to learn.`;
  const yaxis = share ? { title: "share of value, %", range: [0, 100] } : { title: cumulative ? "score per sample" : "score per use", zerolinecolor: token("--muted") };
  draw("stages", items, { barmode: "stack", xaxis: { title: "optimizer step" }, yaxis }, said);
}
