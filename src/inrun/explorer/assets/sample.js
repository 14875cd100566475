// One sample: its text, what is known of it, its scores for every set, and its value at each use.
import { ask, byId, make, mood, number, plural, table, whole } from "/assets/kit.js";
import { uses } from "/assets/charts.js";
import { api, run, state } from "/assets/state.js";
import { drawSamples, markButtons, openerOf } from "/assets/samples.js";

let opener = null;
let one = null;

export async function openSample(id, from) {
  const found = await ask("sample", api("sample"), { id });
  if (!found) return;
  opener = from ?? null;
  one = found;
  byId("one-title").textContent = `Sample ${found.id}`;
  byId("one-marks").replaceChildren(markButtons(found, drawSamples));
  const facts = make("dl", { class: "facts" }, ...found.more.filter((m) => m.value !== null).map((m) =>
    make("div", {}, make("dt", { text: m.name, dir: "auto" }), make("dd", {}, make("bdi", { text: String(m.value) })))));
  const head = [{ text: "validation set" }, { text: "score", num: true }, { text: "± between folds", num: true }, { text: "± estimate", num: true },
    { text: "own step's part", num: true }, { text: "times used", num: true }, { text: "pending", num: true }];
  const rows = found.scores.map((s) => [s.set, make("span", { class: mood(s.score), text: number(s.score, true) }), number(s.standard_error),
    number(s.estimate_error), number(s.step_score, true), whole(s.times_used), whole(s.pending)]);
  byId("one-body").replaceChildren(
    ...(found.text === undefined || found.text === null ? [] : [make("p", { class: "text", dir: "auto", text: found.text, tabindex: "0", role: "region", "aria-label": "Text" })]),
    make("h3", { text: "Scores" }), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores" }, table(head, rows)),
    make("h3", { text: "Value at each use" }), chooser(), make("div", { class: "drawing", id: "one-chart" }), make("p", { class: "fine", id: "one-caption" }),
    make("details", {}, make("summary", { text: "As a table" }), make("div", { id: "one-uses", class: "scroll", tabindex: "0", role: "region", "aria-label": "Uses" })),
    ...(found.more.length ? [make("h3", { text: "What is known of it" }), facts] : []));
  if (!byId("one").open) byId("one").showModal();
  drawUses();
}

function chooser() {
  const select = make("select", { id: "one-set" }, ...run().sets.map((s, k) => make("option", { value: String(k), text: s.shown })));
  select.value = String(Math.max(run().sets.findIndex((s) => s.name === state.set), 0));
  select.addEventListener("change", drawUses);
  return make("label", { class: "field" }, make("span", { text: "Validation set" }), select);
}

export function drawUses() {
  if (!one || !byId("one").open) return;
  const place = Number(byId("one-set").value);
  const rows = one.uses.filter((u) => u[0] === place).map((u) => u.slice(1));
  const name = run().sets[place]?.shown ?? "";
  if (rows.length) uses(byId("one-chart"), rows, `Value of sample ${one.id} at each use, for ${name}`);
  else byId("one-chart").replaceChildren(make("p", { class: "fine", text: "This sample was not used." }));
  byId("one-caption").textContent = rows.length ? `Bars: what each use did to the validation loss of ${name} (up: it helped). Dashed: added up over ${plural(rows.length, "step")}${one.uses_cut ? ", the first ones" : ""}.` : "";
  const head = [{ text: "step", num: true }, { text: "value", num: true }, { text: "uses", num: true }, { text: "state" }];
  byId("one-uses").replaceChildren(table(head, rows.slice(0, 500).map(([step, value, n, pending]) => [whole(step), number(value, true), whole(n), pending ? "pending" : "–"])));
}

export function listenSample() {
  byId("one-close").addEventListener("click", () => byId("one").close());
  byId("one").addEventListener("close", () => { (opener?.isConnected ? opener : openerOf(one?.id))?.focus(); });
}
