// The switches, and what each of them changes.
const shownPanels = Object.entries(data.panels);
function drawPanels() {
  for (const [id, found] of shownPanels) panels[id].draw(found);
}

function everything() {
  if (byId("loss-chart")) { drawLoss(); drawBooks(); }
  drawPanels();
  if (byId("samples-list")) drawSamples();
  drawTwins();
}

// Parts that were written for each validation set, and findings for each set and column: one of them is shown.
function showWritten() {
  for (const element of document.querySelectorAll(".of-set, .story")) {
    const column = Number(element.dataset.column ?? -1);
    element.hidden = Number(element.dataset.set) !== state.set || (column >= 0 && column !== state.column);
  }
}

function onSet(value) {
  state.set = value;
  relist();
  showWritten();
  everything();
}

function onColumn(value) {
  state.column = value;
  state.only = null;
  showWritten();
  for (const element of document.querySelectorAll(".column-name")) element.textContent = data.columns[value];
  fillGroups();
  drawPanels(); drawSamples(); drawTwins();
}

function onTheme(value) {
  keepTheme(value);
  everything();
}

function listen(id, event, act) {
  const element = byId(id);
  if (element) element.addEventListener(event, act);
}

listen("set", "change", (e) => onSet(Number(e.target.value)));
listen("column", "change", (e) => onColumn(Number(e.target.value)));
listen("theme", "change", (e) => onTheme(e.target.value));
// From the start of the list, and all of it.
const relist = () => { state.count = PAGE; state.only = null; };
listen("end", "change", (e) => { state.end = e.target.value; relist(); drawSamples(); });
listen("group", "change", (e) => { state.group = e.target.value; relist(); drawSamples(); });
listen("search", "input", (e) => { state.query = e.target.value; relist(); drawSamples(); });
listen("samples-back", "click", () => { relist(); drawSamples(); document.querySelector("#end input:checked").focus(); });
listen("samples-more", "click", () => {
  const first = state.count;
  state.count += PAGE;
  drawSamples();
  const next = [...document.querySelectorAll("#samples-list .samples")].map((list) => list.children[first]).find(Boolean);
  if (next) { next.setAttribute("tabindex", "-1"); next.focus(); }
});
// "See them": the lowest samples alone, all groups, nothing searched for.
for (const link of document.querySelectorAll("a.see")) {
  link.addEventListener("click", () => {
    state.end = "bottom"; state.group = ""; state.query = "";
    document.querySelector("#end input[value=bottom]").checked = true;
    byId("search").value = "";
    if (byId("group")) byId("group").value = "";
    relist();
    drawSamples();
  });
}
listen("twins-more", "click", () => {
  const first = state.twins;
  state.twins = data.shown.twins.length;
  drawTwins();
  const next = byId("twins-list").children[first];
  if (next) { next.setAttribute("tabindex", "-1"); next.focus(); }
});

// On paper: light, and as wide as the sheet.
let onScreen = null;
window.addEventListener("beforeprint", () => {
  onScreen = document.documentElement.dataset.theme ?? "";
  document.documentElement.dataset.theme = "light";
  state.count = PAGE * 2;
  for (const part of document.querySelectorAll("details")) part.open = true;
  everything();
  for (const chart of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(chart, { width: 660, height: 300, autosize: false });
});
window.addEventListener("afterprint", () => {
  if (onScreen === null) return;
  if (onScreen) document.documentElement.dataset.theme = onScreen;
  else delete document.documentElement.dataset.theme;
  onScreen = null;
  for (const chart of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(chart, { width: null, height: null, autosize: true });
  everything();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);

const chosen = document.documentElement.dataset.theme;
if (chosen) document.querySelector(`#theme input[value="${chosen}"]`).checked = true;
// Browsers remember what a form held before a reload; the page starts from its own state.
for (const id of ["set", "column"]) if (byId(id)) byId(id).value = "0";
if (byId("search")) byId("search").value = "";
const end = document.querySelector("#end input");
if (end) end.checked = true;
if (data.columns.length) fillGroups();
if (byId("samples-takes")) byId("samples-takes").replaceWith(takes("samples", sampleRows));
takeWritten();
for (const [id, found] of shownPanels) panels[id].build(byId(id), found);
everything();
document.documentElement.dataset.ready = "yes";
