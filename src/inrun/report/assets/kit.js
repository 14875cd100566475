"use strict";
// Small things that everything else is made of, beside those of both.js.
const data = JSON.parse(document.getElementById("data").textContent);
const state = { set: 0, column: 0, end: "both", only: null, group: "", query: "", count: 10, twins: 5 };
const byId = (id) => document.getElementById(id);
// Panels register here, by id: build(section, found) adds what stays to the section, draw(found) shows what is chosen.
const panels = {};

// One number of decimals for figures that are compared: the largest gets three digits.
function scaled(values) {
  const most = Math.max(...values.map((x) => Math.abs(x ?? 0)), 0);
  const decimals = most > 0 ? Math.max(2 - Math.floor(Math.log10(most)), 0) : 0;
  if (decimals > 7 || most >= 1e6) return number;
  return (value, sign = false) => {
    if (value === null || value === undefined) return "–";
    const text = Math.abs(value).toFixed(decimals);
    return (Number(text) === 0 ? "" : value < 0 ? "−" : sign ? "+" : "") + text;
  };
}
// Plotly reads a little HTML and entities in labels; escaped text comes out as it was.
const MOST_LABEL = 32;
function label(text) {
  const cut = text.length > MOST_LABEL ? text.slice(0, MOST_LABEL - 1) + "…" : text;
  return cut.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Colours: Okabe and Ito's palette, with a last grey for what is gathered; told apart with any kind of colour vision.
const PALETTES = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#3d4a5c", "#b5a100"],
  dark: ["#4aa3df", "#f0b429", "#2fbf94", "#e29cc2", "#8fd0f5", "#f0803c", "#c9d2dc", "#e3d54a"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"];
const OTHER = { light: "#9aa5b1", dark: "#66727f" };
const mode = () => (isDark() ? "dark" : "light");
function colour(place, grouping) {
  const gathered = grouping !== undefined && place >= grouping.colours;
  return gathered ? OTHER[mode()] : PALETTES[mode()][place % 8];
}
// Sixteen groups share eight colours: areas of the second eight are hatched, lines have other dashes and marks.
const again = (place, grouping) => place >= 8 && place < grouping.colours;
const dashOf = (place) => DASHES[(place + (place >= 8 ? 3 : 0)) % 8];

// A key's patch of colour; of a line, with its dashes, so that colour is not all that tells lines apart.
function swatch(fill, dash, hatched = false) {
  const element = make("span", { class: dash ? "swatch line" : "swatch", "aria-hidden": "true" });
  if (dash) element.style.borderTop = `3px ${dash === "solid" ? "solid" : dash === "dot" ? "dotted" : "dashed"} ${fill}`;
  else if (hatched) element.style.backgroundImage = `repeating-linear-gradient(45deg, ${fill} 0 3px, ${token("--surface")} 3px 4.5px)`;
  else element.style.backgroundColor = fill;
  return element;
}

// Parts that panels are built of: a chart with its legend and caption, a table that scrolls, a choice of one.
function chartParts(id) {
  return [make("div", { class: "legend", id: `${id}-legend` }), make("div", { class: "chart", id: `${id}-chart` }), make("figcaption", { id: `${id}-caption` })];
}
const scrolled = (id, name) => make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, make("div", { id }));
function switchOf(id, name, choices, act) {
  const options = Object.entries(choices).map(([value, text], k) =>
    make("label", {}, make("input", { type: "radio", name: id, value, ...(k ? {} : { checked: "" }) }), make("span", { text })));
  const element = make("fieldset", { class: "switch", id }, make("legend", { class: "unseen", text: name }), ...options);
  element.addEventListener("change", (e) => act(e.target.value));
  return element;
}
