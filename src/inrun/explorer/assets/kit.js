// Small things that everything else is made of. Text reaches the page by textContent and attributes only, never as markup.
export const byId = (id) => document.getElementById(id);
export const SVG = "http://www.w3.org/2000/svg";

// Shared with the report: both.js runs before this.
export const { make, number, whole, percent, mood, isDark, token, keepTheme } = globalThis;

export function draw(tag, attributes = {}, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export const plural = (count, what) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`;

// Okabe and Ito's palette, as in the report; lines differ by their dashes, too.
const PALETTES = {
  light: ["#0072b2", "#b87a00", "#009e73", "#b8508a", "#3791c4", "#d55e00", "#3d4a5c", "#8f7f00"],
  dark: ["#4aa3df", "#f0b429", "#2fbf94", "#e29cc2", "#8fd0f5", "#f0803c", "#c9d2dc", "#e3d54a"],
};
const DASHES = ["", "7 3", "2 3", "8 3 2 3", "12 4", "12 3 3 3"];
export const colour = (place) => PALETTES[isDark() ? "dark" : "light"][place % 8];
export const dashes = (place) => DASHES[(place + (place >> 3)) % DASHES.length];

export function notice(text) {
  const place = byId("notice");
  place.hidden = !text;
  place.textContent = text ?? "";
}

// Every question carries a number: an answer that was overtaken by a later one of its kind is dropped.
const latest = {};
export async function ask(kind, path, parameters = {}) {
  const turn = (latest[kind] = (latest[kind] ?? 0) + 1);
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
  document.body.dataset.asking = String(Number(document.body.dataset.asking ?? 0) + 1);
  try {
    const answer = await fetch(`${path}${query ? `?${query}` : ""}`, { credentials: "same-origin" });
    const found = await reply(answer);
    if (turn !== latest[kind]) return null;
    if (kind !== "status") notice(null);
    return found;
  } catch (error) {
    if (turn === latest[kind]) notice(error.message);
    return null;
  } finally {
    document.body.dataset.asking = String(Number(document.body.dataset.asking) - 1);
  }
}
export async function tell(path, body) {
  try {
    const answer = await fetch(path, { method: "POST", credentials: "same-origin", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    return await reply(answer);
  } catch (error) {
    notice(error.message);
    return null;
  }
}
async function reply(answer) {
  if (answer.status === 403) throw new Error("The token is no longer known: the explorer was started again. Open the address that it printed.");
  let found = null;
  try { found = await answer.json(); } catch (error) { /* not ours */ }
  if (!answer.ok) throw new Error(found?.error ?? `The explorer answered ${answer.status}.`);
  return found;
}

export function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", { value, text })));
  if (chosen !== undefined && entries.some(([value]) => value === chosen)) select.value = chosen;
}
export function table(head, rows, caption) {
  const top = make("tr", {}, ...head.map((h) => make("th", { scope: "col", ...(h.num ? { class: "num" } : {}) }, make("span", { text: h.text, dir: "auto", ...(h.unseen ? { class: "unseen" } : {}) }))));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, k) => {
    const tag = k === 0 ? "th" : "td";
    const place = make(tag, { ...(k === 0 ? { scope: "row" } : {}), ...(head[k].num ? { class: "num" } : {}) });
    place.append(cell instanceof Node ? cell : make("bdi", { text: String(cell) }));
    return place;
  })));
  return make("table", {}, caption ? make("caption", { text: caption }) : null, make("thead", {}, top), make("tbody", {}, ...body));
}
export function button(text, act, name) {
  const element = make("button", { type: "button", class: "button", text, ...(name ? { "aria-label": name } : {}) });
  element.addEventListener("click", act);
  return element;
}
