// Samples: the ends of the list, searchable; and copies of one text side by side.
const PAGE = 10;
const LONG = 280;

function textOf(sample) {
  if (sample.t === undefined) return [];
  const long = sample.t.length > LONG || sample.t.split("\n").length > 5;
  const box = make("p", { class: long ? "text short" : "text", dir: "auto", text: sample.t });
  if (!long) return [box];
  const button = make("button", { type: "button", class: "link whole", "aria-expanded": "false", text: "Show all of it" });
  button.addEventListener("click", () => {
    const open = !box.classList.toggle("short");
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "Show less" : "Show all of it";
  });
  return [box, button];
}

const used = (sample) => `used ${sample.u === 1 ? "once" : `${whole(sample.u)} times`}, step${sample.w[0] === sample.w[1] ? ` ${whole(sample.w[0])}` : `s ${whole(sample.w[0])} to ${whole(sample.w[1])}`}`;

function nameOf(sample) {
  const parts = [make("strong", { text: `sample ${sample.n}` })];
  if (sample.i !== undefined) parts.push(make("bdi", { text: sample.i }));
  return parts;
}

function card(sample, most, shown) {
  const score = sample.s[state.set];
  const error = sample.e[state.set];
  const bar = make("i");
  bar.style.width = `${((100 * Math.abs(score)) / most).toFixed(1)}%`;
  bar.style.backgroundColor = token(score < 0 ? "--bad" : "--good");
  const mark = make("div", { class: "mark" }, make("span", { class: `score ${mood(score)}`, text: shown(score, true) }),
    error === null ? null : make("span", { class: "error", text: `± ${shown(error)}` }), make("div", { class: "meter", "aria-hidden": "true" }, bar));
  const chips = (sample.g ?? []).filter((g) => g !== null).map((g) => make("bdi", { class: "chip", text: g }));
  const others = data.sets.map((name, k) => [name, sample.s[k], k]).filter(([, value, k]) => k !== state.set && value !== null);
  const elsewhere = others.length ? make("span", { text: `elsewhere: ${others.slice(0, 4).map(([name, value]) => `${name} ${number(value, true)}`).join(", ")}` }) : null;
  const who = make("div", { class: "who" }, ...nameOf(sample), ...chips, make("span", { text: used(sample) }), elsewhere);
  return make("li", { class: "sample" }, mark, make("div", {}, who, ...openable(sample)));
}

// The text in short, and a button that opens all there is to see of a sample.
const openSamples = new Set();
function openable(sample) {
  const box = sample.t === undefined ? null : make("p", { class: "text short", dir: "auto", text: sample.t });
  const button = make("button", { type: "button", class: "link open" });
  const place = make("div", {});
  const show = () => {
    const now = openSamples.has(sample.n);
    if (box) box.classList.toggle("short", !now);
    button.setAttribute("aria-expanded", String(now));
    button.replaceChildren(now ? "Close" : "Open: text, uses, neighbours", make("span", { class: "unseen", text: ` of sample ${sample.n}` }));
    place.replaceChildren(...(now ? [opened(sample)] : []));
  };
  button.addEventListener("click", () => {
    if (!openSamples.delete(sample.n)) openSamples.add(sample.n);
    show();
  });
  show();
  return [box, button, place].filter((part) => part !== null);
}

// One sample alone, opened: a neighbour that was clicked.
function showOnly(sample) {
  openSamples.add(sample.n);
  state.only = sample;
  drawSamples();
  byId("samples-back").focus();
  byId("samples").scrollIntoView();
}

function matches(sample, query) {
  if (state.group !== "" && ((sample.g ?? [])[state.column] ?? "") !== state.group.slice(1)) return false;
  if (!query) return true;
  return [sample.n, sample.i ?? "", sample.t ?? "", ...(sample.g ?? [])].some((text) => (text ?? "").toLowerCase().includes(query));
}

const ENDS = { top: ["highest", "Helped most"], bottom: ["lowest", "Hurt most"] };
const endsShown = () => (state.end === "both" ? ["top", "bottom"] : [state.end]);

// What is listed of an end; where both stand side by side, what helped on one and what hurt on the other.
function listed(end) {
  const samples = (data.shown[end][state.set] ?? []).map((k) => data.shown.samples[k]);
  if (state.end !== "both") return samples;
  return samples.filter((s) => (end === "top" ? s.s[state.set] > 0 : s.s[state.set] < 0));
}
function matching(end) {
  const query = state.query.trim().toLowerCase();
  return listed(end).filter((sample) => matches(sample, query));
}

function endList(end, most, shownAs) {
  const found = matching(end);
  const none = listed(end).length ? "None of these matches." : `No sample is ${end === "top" ? "above" : "below"} zero.`;
  const list = found.length ? make("ol", { class: "samples" }, ...found.slice(0, state.count).map((sample) => card(sample, most, shownAs))) : make("p", { class: "fine", text: none });
  const title = state.end === "both" ? make("h3", { class: end === "top" ? "good" : "bad", text: ENDS[end][1] }) : null;
  return make("div", { class: "end" }, title, list);
}

function counted() {
  const ends = endsShown();
  const every = ends.map((end) => [matching(end).length, listed(end).length, ENDS[end][0]]);
  const [found, all] = [0, 1].map((k) => every.reduce((sum, row) => sum + row[k], 0));
  const shown = every.reduce((sum, [n]) => sum + Math.min(n, state.count), 0);
  if (found !== all) return `${found} of the ${all} ${every.map((row) => row[2]).join(" and ")} scores match${shown < found ? `, ${shown} shown` : ""}`;
  return `${every.map(([n, of, which]) => `${Math.min(n, state.count)} of the ${of} ${which}`).join(" and ")} scores for ${data.sets[state.set]}`;
}

function drawSamples() {
  const ends = endsShown();
  const both = ends.flatMap(listed);
  const most = Math.max(...(state.only ? [state.only] : both).map((s) => Math.abs(s.s[state.set])), 1e-300);
  const shownAs = scaled([most]);
  const place = byId("samples-list");
  place.classList.toggle("two", !state.only && ends.length > 1);
  if (state.only) place.replaceChildren(make("ol", { class: "samples" }, card(state.only, most, shownAs)));
  else place.replaceChildren(...ends.map((end) => endList(end, most, shownAs)));
  byId("samples-count").textContent = state.only ? `sample ${state.only.n} alone` : counted();
  byId("samples-back").hidden = !state.only;
  byId("samples-more").hidden = Boolean(state.only) || ends.every((end) => matching(end).length <= state.count);
}

// All that matches, as a table to take away.
function sampleRows() {
  const heads = ["end", "sample_id", "id", ...data.columns, "validation", "score", "standard_error", "times_used", "first_step", "last_step", ...(data.text ? ["text"] : [])];
  const row = (end, s) => [end, s.n, s.i, ...data.columns.map((_, k) => (s.g ?? [])[k]), data.sets[state.set], s.s[state.set], s.e[state.set], s.u, s.w[0], s.w[1], ...(data.text ? [s.t] : [])];
  if (state.only) return [heads, row("", state.only)];
  return [heads, ...endsShown().flatMap((end) => matching(end).map((s) => row(ENDS[end][0], s)))];
}

// The button to see more of a text goes where there is no more to see; how much fits is known once it is laid out.
function trimButtons(place) {
  for (const box of place.querySelectorAll(".text.short")) {
    if (box.scrollHeight > box.clientHeight + 1 || !box.clientHeight || !box.nextElementSibling?.classList.contains("whole")) continue;
    box.classList.remove("short");
    box.nextElementSibling.remove();
  }
}

// The groups that the shown samples belong to; a leading mark keeps "all" apart from a group without a name.
function fillGroups() {
  const select = byId("group");
  if (!select) return;
  const names = [...new Set(data.shown.samples.map((s) => (s.g ?? [])[state.column] ?? ""))].sort();
  select.replaceChildren(make("option", { value: "", text: "all" }), ...names.map((name) => make("option", { value: `=${name}`, text: name || "(no value)" })));
  state.group = "";
}

function copyRow(sample, shown, most) {
  const score = sample.s[state.set];
  const error = sample.e[state.set];
  const bar = make("i");
  bar.style.width = `${((100 * Math.abs(score ?? 0)) / most).toFixed(1)}%`;
  bar.style.backgroundColor = token(score < 0 ? "--bad" : "--good");
  const group = (sample.g ?? [])[state.column];
  const who = make("div", { class: "who" }, ...nameOf(sample), group ? make("bdi", { class: "chip", text: group }) : null, make("span", { text: used(sample) }));
  const mark = make("div", { class: "mark" }, make("span", { class: `score ${mood(score)}`, text: shown(score, true) }),
    error === null ? null : make("span", { class: "error", text: `± ${shown(error)}` }), make("div", { class: "meter", "aria-hidden": "true" }, bar));
  return make("li", { class: "copy" }, mark, who);
}

function drawTwins() {
  const place = byId("twins-list");
  if (!place) return;
  place.replaceChildren(...data.shown.twins.slice(0, state.twins).map(({ count, members }) => {
    const samples = members.map((k) => data.shown.samples[k]);
    const most = Math.max(...samples.map((s) => Math.abs(s.s[state.set] ?? 0)), 1e-300);
    const shown = scaled([most]);
    const more = count > samples.length ? make("p", { class: "fine", text: `and ${whole(count - samples.length)} more copies` }) : null;
    const title = make("h3", { text: `${whole(count)} copies, scores for ${data.sets[state.set]}` });
    return make("div", { class: "twin" }, title, ...textOf(samples[0]), make("ul", { class: "copies" }, ...samples.map((s) => copyRow(s, shown, most))), more);
  }));
  trimButtons(place);
  byId("twins-more").hidden = data.shown.twins.length <= state.twins;
}
