// Samples: the ends of the list, searchable; and copies of one text side by side.
const PAGE = 10;
const LONG = 280;

function textOf(sample) {
  if (sample.t === undefined) return [];
  const long = sample.t.length > LONG || sample.t.split("\n").length > 5;
  const box = make("p", { class: long ? "text short" : "text", dir: "auto", text: sample.t });
  if (!long) return [box];
  const button = make("button", { type: "button", class: "link", "aria-expanded": "false", text: "Show all of it" });
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
  return make("li", { class: "sample" }, mark, make("div", {}, who, ...textOf(sample)));
}

function matches(sample, query) {
  if (state.group !== "" && ((sample.g ?? [])[state.column] ?? "") !== state.group.slice(1)) return false;
  if (!query) return true;
  return [sample.n, sample.i ?? "", sample.t ?? "", ...(sample.g ?? [])].some((text) => (text ?? "").toLowerCase().includes(query));
}

function drawSamples() {
  const list = data.shown[state.end][state.set] ?? [];
  const samples = list.map((k) => data.shown.samples[k]);
  const query = state.query.trim().toLowerCase();
  const found = samples.filter((sample) => matches(sample, query));
  const most = Math.max(...samples.map((s) => Math.abs(s.s[state.set])), 1e-300);
  const shownAs = scaled([most]);
  byId("samples-list").replaceChildren(...found.slice(0, state.count).map((sample) => card(sample, most, shownAs)));
  trimButtons(byId("samples-list"));
  const which = state.end === "top" ? "highest" : "lowest";
  const shown = Math.min(found.length, state.count);
  byId("samples-count").textContent = found.length === samples.length
    ? `${shown} of the ${samples.length} ${which} scores for ${data.sets[state.set]}`
    : `${found.length} of the ${samples.length} ${which} scores match${shown < found.length ? `, ${shown} shown` : ""}`;
  byId("samples-more").hidden = found.length <= state.count;
}

// The button to see more of a text goes where there is no more to see; how much fits is known once it is laid out.
function trimButtons(place) {
  for (const box of place.querySelectorAll(".text.short")) {
    if (box.scrollHeight > box.clientHeight + 1 || !box.clientHeight) continue;
    box.classList.remove("short");
    box.nextElementSibling.remove();
  }
}

// The groups that the shown samples belong to; a leading mark keeps "all" apart from a group without a name.
function fillGroups() {
  const select = byId("group");
  if (!select) return;
  const names = [...new Set(data.shown.samples.map((s) => (s.g ?? [])[state.column] ?? ""))].sort();
  select.replaceChildren(make("option", { value: "", text: "all" }), ...names.map((name) => make("option", { value: `=${name}`, text: name || "(no metadata)" })));
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
