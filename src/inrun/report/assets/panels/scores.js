// How scores are spread: a histogram, zero marked.
const CLARITY = { harmful: ["negative", 5], unclear: ["within two standard errors of zero", null], helpful: ["positive", 0] };

function drawSpread(found) {
  const scores = found[state.set];
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

panels.scores = {
  build: (section) => section.append(make("figure", { class: "panel" }, ...chartParts("spread"))),
  draw: drawSpread,
};
