// The list: search, filters, order, pages, marks.
import { ask, byId, make, mood, number, options, plural, tell, token, whole } from "/assets/kit.js";
import { MARKS, TESTS, api, columnName, columns, matching, run, state } from "/assets/state.js";
import { openSample } from "/assets/sample.js";

let shown = { total: 0, rows: [] };

export async function drawSamples() {
  const found = await ask("samples", api("samples"), { ...matching(), sort: state.sort, order: state.order, offset: state.offset, limit: state.limit });
  if (!found) return;
  if (found.offset && found.offset >= found.total) { state.offset = 0; return drawSamples(); }
  shown = found;
  const most = Math.max(...found.rows.map((r) => Math.abs(r.score ?? 0)), 1e-300);
  const place = focused();
  byId("list").replaceChildren(...found.rows.map((row) => card(row, most)));
  focusAgain(place);
  const [first, last] = [found.total ? found.offset + 1 : 0, found.offset + found.rows.length];
  const narrowed = state.search || state.filters.length;
  byId("count").textContent = `${whole(first)}–${whole(last)} of ${plural(found.total, "sample")}${narrowed ? " that match" : ""}`;
  const end = last >= found.total;
  for (const id of ["next", "next-below"]) byId(id).disabled = end;
  byId("next-below").parentElement.hidden = end;
  for (const id of ["first", "previous"]) byId(id).disabled = found.offset === 0;
  drawMarks();
}

// A list that is drawn again, as by new steps, must not take the focus away: it goes to the same button of the same sample.
function focused() {
  const item = document.activeElement?.closest("#list .sample");
  return item ? [item.dataset.id, [...item.querySelectorAll("button")].indexOf(document.activeElement)] : null;
}
function focusAgain(place) {
  const item = place && [...byId("list").children].find((li) => li.dataset.id === place[0]);
  if (item) item.querySelectorAll("button")[place[1]]?.focus();
}
export const openerOf = (id) => [...byId("list").children].find((li) => li.dataset.id === id)?.querySelector(".link");

function card(row, most) {
  const bar = make("i");
  bar.style.width = `${((100 * Math.abs(row.score ?? 0)) / most).toFixed(1)}%`;
  bar.style.backgroundColor = token(row.score < 0 ? "--bad" : "--good");
  const error = row.standard_error ?? row.estimate_error;
  const mark = make("div", { class: "mark" },
    make("span", { class: `score ${mood(row.score)}`, text: row.times_used ? number(row.score, true) : "not used" }),
    error === null || error === undefined ? null : make("span", { class: "error", text: `± ${number(error)}` }),
    make("div", { class: "meter", "aria-hidden": "true" }, bar));
  const chips = row.more.map((value, k) => [run().shown_columns[k], value]).filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => make("bdi", { class: "chip", text: String(value), title: name }));
  const open = make("button", { type: "button", class: "link", text: "All about it", "aria-label": `All about it: sample ${row.id}` });
  open.addEventListener("click", () => openSample(row.id, open));
  const used = row.times_used ? `used ${row.times_used === 1 ? "once" : `${whole(row.times_used)} times`}, step${row.first_step === row.last_step ? ` ${whole(row.first_step)}` : `s ${whole(row.first_step)}–${whole(row.last_step)}`}` : null;
  const pending = row.pending ? `, ${whole(row.pending)} pending` : "";
  const who = make("div", { class: "who" }, make("strong", { text: `sample ${row.id}` }), ...chips, used ? make("span", { text: used + pending }) : null);
  const text = row.text === undefined || row.text === null ? null : make("p", { class: "text short", dir: "auto", text: row.text });
  const item = make("li", { class: "sample", "data-id": row.id }, mark, make("div", {}, who, text, open, markButtons(row, item_of)));
  function item_of() { item.className = `sample${row.mark ? ` marked-${row.mark}` : ""}`; }
  item_of();
  return item;
}

// Three switches; pressing the one that is on takes the mark off. `row` has id and mark.
export function markButtons(row, changed) {
  const place = make("span", { class: "mark-row", role: "group", "aria-label": `Mark of sample ${row.id}` });
  const buttons = MARKS.map((mark) => {
    const element = make("button", { type: "button", text: mark, "data-mark": mark });
    element.addEventListener("click", async () => {
      const wanted = row.mark === mark ? null : mark;
      const told = await tell(api("marks"), { ids: [row.id], mark: wanted });
      if (!told) return;
      row.mark = wanted;
      run().marks = told.marks;
      press();
      changed();
      drawMarks();
    });
    return element;
  });
  const press = () => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.mark === row.mark)));
  press();
  place.append(...buttons);
  return place;
}

export function drawMarks() {
  const counts = MARKS.filter((m) => run().marks[m]).map((m) => `${whole(run().marks[m])} ${m}`);
  byId("marks-count").textContent = counts.length ? counts.join(", ") : "none";
  byId("export").setAttribute("href", api("marks.jsonl"));
  byId("scope").options[0].textContent = `this page (${whole(shown.rows.length)})`;
  byId("scope").options[1].textContent = `all that match (${whole(shown.total)})`;
}

async function markMany(mark) {
  const all = byId("scope").value === "all";
  const asked = Object.fromEntries(Object.entries(matching()).filter(([, v]) => v !== null && v !== ""));
  const told = await tell(api("marks"), all ? { mark, matching: asked } : { mark, ids: shown.rows.map((r) => r.id) });
  if (!told) return;
  run().marks = told.marks;
  await drawSamples();
}

export function addFilters(entries, replace = false) {
  state.filters = [...(replace ? [] : state.filters), ...entries];
  state.offset = 0;
  drawFilters();
}
function drawFilters() {
  byId("filters").replaceChildren(...state.filters.map((filter, k) => {
    const [key, test, value, text] = filter;
    const kind = key === "mark" ? "mark" : columns().find(([c]) => c === key)?.[2] ?? "number";
    const words = `${columnName(key)} ${TESTS[kind][test] ?? test} ${["empty", "filled"].includes(test) ? "" : text ?? value}`;
    const remove = make("button", { type: "button", "aria-label": `${words}: remove this filter` }, make("bdi", { text: words }), make("span", { text: " ×", "aria-hidden": "true" }));
    remove.addEventListener("click", () => { state.filters.splice(k, 1); state.offset = 0; drawFilters(); (byId("filters").querySelector("button") ?? byId("search")).focus(); drawSamples(); });
    return make("li", {}, remove);
  }));
}

// The form for a filter: which test and which kind of value fit the column.
async function fitTest() {
  const kind = columns().find(([key]) => key === byId("filter-column").value)?.[2] ?? "text";
  options(byId("filter-test"), Object.entries(TESTS[kind]), byId("filter-test").value);
  await fitValue();
}
async function fitValue() {
  const [key, test] = [byId("filter-column").value, byId("filter-test").value];
  const kind = columns().find(([k]) => k === key)?.[2];
  const chosen = kind === "text" && ["is", "not"].includes(test);
  byId("filter-choice-field").hidden = !chosen;
  byId("filter-value-field").hidden = chosen || ["empty", "filled"].includes(test);
  byId("filter-value").inputMode = kind === "number" ? "decimal" : "text";
  if (!chosen) return;
  const found = await ask("values", api("values"), { column: key });
  if (found) {
    choices = found.values;
    options(byId("filter-choice"), choices.map((v, k) => [String(k), `${v.shown} (${whole(v.samples)})`]));
  }
}
let choices = [];

function onFilter(event) {
  event.preventDefault();
  const [key, test] = [byId("filter-column").value, byId("filter-test").value];
  if (!byId("filter-choice-field").hidden) {
    const chosen = choices[Number(byId("filter-choice").value)];
    if (chosen) addFilters([[key, test, chosen.value, chosen.shown]]);
  } else addFilters([[key, test, byId("filter-value").value.trim()]]);
  drawSamples();
}

export function fitSamples() {
  options(byId("sort"), columns().map(([key, text]) => [key, text]), state.sort);
  if (byId("sort").value !== state.sort) state.sort = byId("sort").value;
  const usual = ["c:domain", "c:source", "c:owner"].find((key) => columns().some(([k]) => k === key));
  options(byId("filter-column"), columns().map(([key, text]) => [key, text]), byId("filter-column").value || usual);
  drawFilters();
  return fitTest();
}

let timer = null;
export function listenSamples() {
  const again = (change) => { change(); state.offset = 0; drawSamples(); };
  byId("search").addEventListener("input", (e) => {
    clearTimeout(timer);
    timer = setTimeout(() => again(() => { state.search = e.target.value.trim(); }), 250);
  });
  byId("sort").addEventListener("change", (e) => again(() => { state.sort = e.target.value; }));
  byId("order").addEventListener("change", (e) => again(() => { state.order = e.target.value; }));
  byId("limit").addEventListener("change", (e) => again(() => { state.limit = Number(e.target.value); }));
  byId("filter-column").addEventListener("change", fitTest);
  byId("filter-test").addEventListener("change", fitValue);
  byId("filter-form").addEventListener("submit", onFilter);
  const turn = (offset) => async () => {
    state.offset = Math.max(offset(), 0);
    await drawSamples();
    byId("count").scrollIntoView({ block: "nearest" });
  };
  byId("first").addEventListener("click", turn(() => 0));
  byId("previous").addEventListener("click", turn(() => state.offset - state.limit));
  for (const id of ["next", "next-below"]) byId(id).addEventListener("click", turn(() => state.offset + state.limit));
  for (const element of document.querySelectorAll("[data-bulk]")) element.addEventListener("click", () => markMany(element.dataset.bulk || null));
  byId("show-marked").addEventListener("click", () => { addFilters([["mark", "is", "any"]], true); drawSamples(); });
}
