"use strict";
// What report and explorer share: elements, numbers for people, the theme. Text reaches a page by textContent only.
function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  const { text, ...attributes } = options;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Three digits, a real minus, and a sign where it matters.
function number(value, sign = false) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size < 1e-4 || size >= 1e6) text = size.toExponential(2).replace("e+", "e");
  else text = size >= 100 ? size.toFixed(0) : size < 1 ? size.toPrecision(3) : String(Number(size.toPrecision(3)));
  return (value < 0 ? "−" : sign ? "+" : "") + text.replace("-", "−");
}
function whole(value) { return typeof value === "number" ? value.toLocaleString("en-US") : String(value ?? "–"); }
function percent(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const shown = 100 * value;
  return `${shown.toFixed(Math.abs(shown) < 9.95 && shown !== 0 ? 1 : 0)}\u00a0%`.replace("-", "−");
}
function mood(value) { return value < 0 ? "bad" : value > 0 ? "good" : ""; }

function isDark() { return getComputedStyle(document.documentElement).colorScheme === "dark"; }
function token(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
// Show a theme from now on: "light", "dark", or "auto", which is what the system has.
function keepTheme(value) {
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  try {
    if (value === "auto") localStorage.removeItem("inrun-theme");
    else localStorage.setItem("inrun-theme", value);
  } catch (error) { /* storage may be forbidden */ }
}
