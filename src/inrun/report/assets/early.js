"use strict";
// Runs before anything is painted, so that a chosen theme does not flash.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("inrun-theme"); } catch (error) { /* storage may be forbidden on file:// */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  // Plotly sets a few style attributes as text, which the page's policy forbids; through the object model they are allowed.
  const setAttribute = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
  // It also brings the styles of maps, which are not used here and would be refused.
  Object.defineProperty(HTMLStyleElement.prototype, "textContent", { set() {}, get() { return ""; } });
})();
