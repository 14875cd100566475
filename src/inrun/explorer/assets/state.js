// What is chosen now, and the names behind it. Other files read it; changes go through the functions here.
export const state = { run: 0, set: null, view: "samples", search: "", sort: "s:score", order: "down", offset: 0, limit: 25, filters: [] };
export const known = { runs: [], measures: [] };
export const run = () => known.runs[state.run];
export const api = (what) => `/api/runs/${state.run}/${what}`;

export const MEASURES = {
  score: "score", standard_error: "standard error", estimate_error: "error of the estimate", step_score: "own step's part",
  times_used: "times used", pending: "pending uses", first_step: "first step", last_step: "last step",
};
export const TESTS = {
  text: { is: "is", not: "is not", has: "contains", empty: "is empty", filled: "is not empty" },
  number: { lt: "<", gt: ">", le: "≤", ge: "≥", is: "=", not: "≠", empty: "is empty", filled: "is not empty" },
  mark: { is: "is" },
};
export const MARKS = ["drop", "keep", "look"];

// Columns as the API names them: [key, what people call it, kind].
export function columns() {
  const scores = run().sets.length ? known.measures.map((m) => [`s:${m}`, MEASURES[m] ?? m, "number"]) : [];
  return [...run().columns.map((c) => [`c:${c.name}`, c.shown, c.kind]), ...scores, ["id", "sample id", "number"]];
}
export function columnName(key) {
  const [head, measure, ...rest] = key.split(":");
  if (head === "s" && rest.length) {
    const name = rest.join(":");
    return `${MEASURES[measure] ?? measure} for ${run().sets.find((s) => s.name === name)?.shown ?? name}`;
  }
  return key === "mark" ? "mark" : columns().find(([k]) => k === key)?.[1] ?? key;
}
// The parameters of a question about the samples that match.
export const matching = () => ({ set: state.set, search: state.search, filters: state.filters.length ? JSON.stringify(state.filters.map((f) => f.slice(0, 3))) : "" });
