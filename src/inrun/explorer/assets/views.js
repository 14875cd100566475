// The other views: two sets against each other, groups over stages, runs.
import { ask, button, byId, make, number, options, percent, plural, table, whole } from "/assets/kit.js";
import { cells, legend, lines } from "/assets/charts.js";
import { api, known, matching, run, state } from "/assets/state.js";

// Set by main.js: shows samples that fulfil filters.
export const go = { toSamples: () => {}, toSample: () => {} };
const hidden = { groups: new Set(), loss: new Set() };
let found = {};

const agreement = (f, what = "sample") => `${plural(f.samples, what)}. Correlation ${number(f.correlation)}${f.rank_correlation === null || f.rank_correlation === undefined ? "" : `, of ranks ${number(f.rank_correlation)}`}. The stronger the colour, the more ${what}s; the outermost 0.2 % are in the outer cells.`;

export async function drawPair() {
  const [x, y] = [byId("pair-x").value, byId("pair-y").value];
  const filters = byId("pair-filtered").checked ? matching() : {};
  const answer = await ask("pair", api("scatter"), { ...filters, x, y });
  if (!answer) return;
  found.pair = answer;
  showPair();
}
function showPair() {
  const answer = found.pair;
  if (!answer) return;
  const [x, y] = [byId("pair-x").value, byId("pair-y").value];
  const shown = (name) => run().sets.find((s) => s.name === name)?.shown ?? "";
  const between = (name, [low, high]) => [...(low === null ? [] : [[`s:score:${name}`, "ge", String(low), number(low)]]), ...(high === null ? [] : [[`s:score:${name}`, "lt", String(high), number(high)]])];
  const act = (ranges) => go.toSamples([...between(x, ranges.x), ...between(y, ranges.y)]);
  cells(byId("pair-chart"), answer, { name: `Scores for ${shown(x)} against ${shown(y)}`, xname: `score for ${shown(x)}`, yname: `score for ${shown(y)}`, act });
  byId("pair-caption").textContent = agreement(answer);
  const signs = [["ge", "ge"], ["ge", "lt"], ["lt", "ge"], ["lt", "lt"]];
  const words = { ge: "helps (or zero)", lt: "hurts" };
  const rows = answer.quarters.map((count, k) => [`${words[signs[k][0]]}`, words[signs[k][1]], whole(count), percent(count / answer.samples),
    button("Show", () => go.toSamples([[`s:score:${x}`, signs[k][0], "0"], [`s:score:${y}`, signs[k][1], "0"]]), `Show the ${whole(count)} samples: ${words[signs[k][0]]} ${shown(x)}, ${words[signs[k][1]]} ${shown(y)}`)]);
  byId("pair-table").replaceChildren(table([{ text: shown(x) }, { text: shown(y) }, { text: "samples", num: true }, { text: "share", num: true }, { text: "to see them", unseen: true }], rows));
}

export async function drawGroups() {
  if (!byId("by").value) {
    byId("groups-caption").textContent = "The samples of this run have no columns to group by.";
    return;
  }
  const answer = await ask("groups", api("groups"), { by: byId("by").value, stages: byId("stages").value, set: state.set });
  if (!answer) return;
  found.groups = answer;
  showGroups();
}
const VALUES = {
  sum: (g) => { let sum = 0; return g.totals.map((t) => (sum += t ?? 0)); },
  total: (g) => g.totals,
  mean: (g) => g.totals.map((t, k) => (g.uses[k] ? t / g.uses[k] : null)),
};
function showGroups() {
  const answer = found.groups;
  if (!answer) return;
  const measure = document.querySelector("#measure input:checked").value;
  const middle = answer.edges.slice(0, -1).map((e, k) => (measure === "sum" ? answer.edges[k + 1] - 1 : (e + answer.edges[k + 1] - 1) / 2));
  const series = answer.groups.map((g, place) => ({ name: g.name, place, points: VALUES[measure](g).map((v, k) => [middle[k], v]).filter((p) => p[1] !== null) }));
  legend(byId("groups-legend"), series, hidden.groups, showGroups);
  lines(byId("groups-chart"), series.filter((s) => !hidden.groups.has(s.name)), { name: `Value by ${answer.by} over training, for ${answer.set}`, xname: "step", zero: true });
  const words = { sum: "added up from the start", total: "in each stage", mean: "per use, in each stage" };
  byId("groups-caption").textContent = answer.groups.length ? `What the samples of each ${answer.by} did for ${answer.set}, ${words[measure]} (up: they helped).` : "No samples were used yet.";
  const rows = answer.groups.map((g) => {
    const [total, uses] = [g.totals.reduce((a, b) => a + (b ?? 0), 0), g.uses.reduce((a, b) => a + b, 0)];
    const show = g.value === null ? "" : button("Show", () => go.toSamples([[byId("by").value, "is", g.value, g.name]]), `Show the samples of ${g.name}`);
    return [g.name, whole(g.samples), whole(uses), number(total, true), uses ? number(total / uses, true) : "–", show];
  });
  byId("groups-table").replaceChildren(table([{ text: answer.by }, { text: "samples", num: true }, { text: "uses", num: true }, { text: "total", num: true }, { text: "per use", num: true }, { text: "to see them", unseen: true }], rows));
}

export async function drawRuns() {
  const answers = await Promise.all(known.runs.map((_, k) => ask(`curves${k}`, `/api/runs/${k}/curves`)));
  if (answers.some((a) => a === null)) return;
  found.curves = answers;
  showRuns();
  if (known.runs.length > 1) await drawCompare();
}
function showRuns() {
  if (!found.curves) return;
  const wanted = run().sets.find((s) => s.name === state.set)?.shown;
  const same = found.curves.map((answer) => answer.curves.find((c) => c.set === wanted) ?? null);
  const rows = known.runs.map((r, k) => {
    const points = same[k]?.points ?? [];
    const fall = points.length ? `${number(points[0][1])} → ${number(points[points.length - 1][1])}` : "–";
    return [r.name, r.model, r.method, r.credit === "whole" ? "whole credit" : "step game", whole(r.steps), whole(r.samples), whole(r.scored), fall, r.at_work ? "in progress" : "closed"];
  });
  const head = [{ text: "run" }, { text: "model" }, { text: "method" }, { text: "scores" }, { text: "steps", num: true }, { text: "samples", num: true }, { text: "scored", num: true }, { text: `loss on ${wanted ?? "–"}`, num: true }, { text: "state" }];
  byId("runs-table").replaceChildren(table(head, rows));
  const series = known.runs.length > 1
    ? known.runs.map((r, k) => ({ name: `${k + 1}: ${r.name}`, place: k, points: same[k]?.points ?? [] })).filter((s) => s.points.length)
    : found.curves[0].curves.map((c, k) => ({ name: c.set, place: k, points: c.points })).filter((s) => s.points.length);
  legend(byId("loss-legend"), series, hidden.loss, showRuns);
  lines(byId("loss-chart"), series.filter((s) => !hidden.loss.has(s.name)), { name: "Validation loss over steps", xname: "step" });
  byId("loss-caption").textContent = known.runs.length > 1 ? `The loss on ${wanted ?? "–"} before each step.` : "The loss on every validation set before each step.";
}

// What samples are matched by: what was chosen for these two runs, or what the server takes for them.
let chosenKey = "";
export async function drawCompare() {
  const asked = { a: byId("compare-a").value, b: byId("compare-b").value, x: byId("compare-x").value, y: byId("compare-y").value, key: chosenKey };
  const answer = await ask("compare", "/api/compare", asked);
  if (!answer) return;
  options(byId("compare-key"), [["id", "sample id"], ...answer.keys.map((k) => [`c:${k}`, k])], answer.key);
  found.compare = answer;
  showCompare();
}
function showCompare() {
  const answer = found.compare;
  if (!answer) return;
  const shown = (side, set) => { const r = known.runs[Number(byId(side).value)]; return `${r.name}, ${r.sets.find((s) => s.name === byId(set).value)?.shown ?? ""}`; };
  const [a, b] = [shown("compare-a", "compare-x"), shown("compare-b", "compare-y")];
  cells(byId("compare-chart"), answer, { name: `Scores of ${a} against ${b}`, xname: a, yname: b });
  const by = answer.key === "id" ? "" : answer.key.slice(2);
  const what = by === "" ? "sample" : by;
  const strange = answer.others ? `${whole(answer.others)} sample ids mean ${answer.keys.includes("document") ? "pieces of different documents" : "different texts"} in the two runs` : "";
  const said = by === "" ? (strange ? `Careful: ${strange}, so unrelated samples are compared. ` : "Compared sample by sample, by id. ") : `Compared by ${by}: the scores of all samples with the same one are added up${strange ? ` (${strange})` : ""}. `;
  byId("compare-caption").textContent = said + agreement(answer, what);
  const head = [{ text: what }, { text: a, num: true }, { text: b, num: true }, { text: "apart, in standard deviations", num: true }, { text: "to see it", unseen: true }];
  const place = Number(byId("compare-a").value);
  const rows = answer.moved.map((m) => [m.key, number(m.x, true), number(m.y, true), number(m.gap, true), button("Open", (e) => go.toSample(place, m.id, e.target), `Open sample ${m.id}`)]);
  byId("compare-table").replaceChildren(table(head, rows, "Where the two differ most"));
}

const setsOf = (k) => known.runs[k].sets.map((s) => [s.name, s.shown]);
export function fitViews() {
  const sets = setsOf(state.run);
  options(byId("pair-x"), sets, byId("pair-x").value);
  options(byId("pair-y"), sets, byId("pair-y").value || sets[1]?.[0]);
  options(byId("by"), run().columns.filter((c) => c.name !== "text" && c.name !== "preview" && c.name !== "id").map((c) => [`c:${c.name}`, c.shown]), byId("by").value || "c:domain");
  byId("compare-panel").hidden = known.runs.length < 2;
  const runs = known.runs.map((r, k) => [String(k), `${k + 1}: ${r.name}`]);
  options(byId("compare-a"), runs, byId("compare-a").value || "0");
  options(byId("compare-b"), runs, byId("compare-b").value || "1");
  for (const [side, set] of [["compare-a", "compare-x"], ["compare-b", "compare-y"]]) options(byId(set), setsOf(Number(byId(side).value)), byId(set).value);
  if (!byId("compare-key").options.length) options(byId("compare-key"), [["id", "sample id"]]);
}
export const showAgain = () => { showPair(); showGroups(); showRuns(); showCompare(); };
export const forget = () => { found = {}; };

export function listenViews() {
  for (const id of ["pair-x", "pair-y", "pair-filtered"]) byId(id).addEventListener("change", drawPair);
  for (const id of ["by", "stages"]) byId(id).addEventListener("change", () => { hidden.groups.clear(); drawGroups(); });
  byId("measure").addEventListener("change", showGroups);
  for (const id of ["compare-a", "compare-b"]) byId(id).addEventListener("change", () => { chosenKey = ""; fitViews(); drawCompare(); });
  for (const id of ["compare-x", "compare-y"]) byId(id).addEventListener("change", drawCompare);
  byId("compare-key").addEventListener("change", () => { chosenKey = byId("compare-key").value; drawCompare(); });
}
