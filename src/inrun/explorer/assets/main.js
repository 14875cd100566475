// Which run, set and view are shown; following runs that are written.
import { ask, byId, keepTheme, notice, options, plural, whole } from "/assets/kit.js";
import { known, run, state } from "/assets/state.js";
import { addFilters, drawMarks, drawSamples, fitSamples, listenSamples } from "/assets/samples.js";
import { drawUses, listenSample, openSample } from "/assets/sample.js";
import { drawGroups, drawPair, drawRuns, fitViews, forget, go, listenViews, showAgain } from "/assets/views.js";

const EVERY = 2000;
const VIEWS = { samples: drawSamples, pair: drawPair, groups: drawGroups, runs: drawRuns };
const tabs = [...document.querySelectorAll("[role=tab]")];

function drawHead() {
  const r = run();
  byId("title").textContent = r.name;
  document.title = `${r.name} · inrun explorer`;
  const reached = r.last_step === null ? "no step yet" : `up to step ${whole(r.last_step)}`;
  byId("sub").textContent = `${plural(r.samples, "sample")}, ${whole(r.scored)} with a score; ${plural(r.steps, "step")}, ${reached}; ${r.credit === "whole" ? "whole credit" : "step game"}${r.hidden_sets ? `; ${plural(r.hidden_sets, "further validation set")} not shown` : ""}`;
  byId("badge").hidden = !r.at_work;
  byId("badge").textContent = `in progress: ${reached}`;
  if (r.error) notice(`The run cannot be read just now: ${r.error}`);
}

// A run as it is now: names may have changed with it.
async function fit() {
  options(byId("set"), run().sets.map((s) => [s.name, s.shown]), state.set ?? undefined);
  state.set = byId("set").value || null;
  drawHead();
  fitViews();
  await fitSamples();
}
async function show(view = state.view) {
  state.view = view;
  for (const tab of tabs) {
    const on = tab.getAttribute("aria-controls") === view;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !on;
  }
  await VIEWS[view]();
}
async function choose(number) {
  state.run = number;
  Object.assign(state, { set: null, offset: 0, filters: [] });
  byId("run").value = String(number);
  forget();
  await fit();
  await show();
}

async function load() {
  const found = await ask("runs", "/api/runs");
  if (!found) return false;
  known.runs = found.runs;
  known.measures = found.measures;
  return true;
}
// New steps: the head changes at once, the view that is open is asked for again; what people typed stays.
async function follow() {
  if (byId("follow").checked && !document.hidden) {
    const found = await ask("status", "/api/status");
    if (found) {
      const changed = found.runs.some((r, k) => r.version !== known.runs[k]?.version);
      found.runs.forEach((r, k) => Object.assign(known.runs[k], changed ? { error: r.error } : r));
      if (changed && await load()) {
        const sets = byId("set").options.length;
        if (sets !== run().sets.length || !byId("filter-column").options.length) await fit();
        drawHead();
        await show();
      } else { drawHead(); drawMarks(); }
    }
  }
  setTimeout(follow, EVERY);
}

function onTheme(value) {
  keepTheme(value);
  redraw();
}
function redraw() {
  showAgain();
  drawUses();
  if (state.view === "samples") drawSamples();
}

function listen() {
  byId("theme").addEventListener("change", (e) => onTheme(e.target.value));
  byId("run").addEventListener("change", (e) => choose(Number(e.target.value)));
  byId("set").addEventListener("change", (e) => { state.set = e.target.value; state.offset = 0; show(); });
  for (const tab of tabs) tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
  document.querySelector("[role=tablist]").addEventListener("keydown", (e) => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!turn) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + turn + tabs.length) % tabs.length];
    next.focus();
    show(next.getAttribute("aria-controls"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let timer = null;
  window.addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { showAgain(); drawUses(); }, 150); });
  go.toSamples = async (filters) => { addFilters(filters, true); state.search = ""; byId("search").value = ""; await show("samples"); byId("tab-samples").focus(); };
  go.toSample = async (number, id, from) => { if (number !== state.run) await choose(number); await openSample(id, from); };
}

async function start() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) document.querySelector(`#theme input[value="${chosen}"]`).checked = true;
  listen();
  listenSamples();
  listenSample();
  listenViews();
  if (await load()) {
    options(byId("run"), known.runs.map((r, k) => [String(k), known.runs.length > 1 ? `${k + 1}: ${r.name}` : r.name]), "0");
    byId("run-field").hidden = known.runs.length < 2;
    await choose(0);
    setTimeout(follow, EVERY);
  }
  document.documentElement.dataset.ready = "yes";
}
start();
