"use strict";
// Runs before anything is painted, so that a chosen theme does not flash. The token leaves the address bar and the history.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("inrun-theme"); } catch (error) { /* storage may be forbidden */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  if (location.search) history.replaceState(null, "", location.pathname);
})();
