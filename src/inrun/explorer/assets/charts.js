// Charts as small SVG drawings: lines over steps, bars with a line, and counts in cells.
import { colour, dashes, draw, make, number, token, whole } from "/assets/kit.js";

const EDGE = { left: 74, right: 12, top: 10, bottom: 38 };

// Round numbers that divide a range into a handful of parts.
function ticks(low, high, about = 5) {
  const rough = (high - low) / about;
  if (!(rough > 0) || !isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(k === 0 ? 0 : k * step);
  return found;
}
const short = (value) => {
  if (Math.abs(value) >= 1000 && Number.isInteger(value)) return whole(value);
  const text = number(Number(value.toPrecision(6)));
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text.replace(/\.?0*e/, "e");
};

function frame(place, height, name) {
  const width = Math.max(place.clientWidth || 640, 240);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  place.replaceChildren(svg);
  return { svg, width, height };
}

function axes({ svg, width, height }, [x0, x1], [y0, y1], xname, yname) {
  const inner = { w: width - EDGE.left - EDGE.right, h: height - EDGE.top - EDGE.bottom };
  const x = (v) => EDGE.left + ((v - x0) / (x1 - x0 || 1)) * inner.w;
  const y = (v) => EDGE.top + inner.h - ((v - y0) / (y1 - y0 || 1)) * inner.h;
  for (const v of ticks(y0, y1)) {
    svg.append(draw("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(v), y2: y(v), class: v === 0 ? "zero" : "axis" }));
    svg.append(draw("text", { x: EDGE.left - 6, y: y(v) + 4, "text-anchor": "end" }, short(v)));
  }
  const most = Math.max(Math.floor(inner.w / 90), 2);
  for (const v of ticks(x0, x1, most)) {
    svg.append(draw("text", { x: x(v), y: height - EDGE.bottom + 16, "text-anchor": "middle" }, short(v)));
  }
  svg.append(draw("text", { x: EDGE.left + inner.w / 2, y: height - 5, "text-anchor": "middle" }, xname));
  if (yname) svg.append(draw("text", { x: 12, y: EDGE.top + inner.h / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${EDGE.top + inner.h / 2})` }, yname));
  return { x, y, inner };
}
const range = (values, zero) => {
  const known = values.filter((v) => v !== null && isFinite(v));
  let low = known.reduce((a, b) => Math.min(a, b), zero ? 0 : Infinity);
  let high = known.reduce((a, b) => Math.max(a, b), zero ? 0 : -Infinity);
  if (!isFinite(low)) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  return [low, high];
};

// series: { name, points: [[x, y]], place }: its colour and dashes go by its place.
export function lines(place, series, { name, xname, zero = false }) {
  const points = series.flatMap((s) => s.points);
  if (!points.length) return place.replaceChildren(make("p", { class: "fine", text: "Nothing to draw yet." }));
  const box = frame(place, 320, name);
  const scale = axes(box, range(points.map((p) => p[0])), range(points.map((p) => p[1]), zero), xname);
  for (const s of series) {
    const path = s.points.filter((p) => p[1] !== null).map(([a, b], k) => `${k ? "L" : "M"}${scale.x(a).toFixed(1)} ${scale.y(b).toFixed(1)}`).join("");
    const line = draw("path", { d: path, fill: "none", stroke: colour(s.place), "stroke-width": 2, "stroke-dasharray": dashes(s.place) });
    line.append(draw("title", {}, s.name));
    box.svg.append(line);
    if (s.points.length === 1) box.svg.append(draw("circle", { cx: scale.x(s.points[0][0]), cy: scale.y(s.points[0][1]), r: 3, fill: colour(s.place) }));
  }
}

export function legend(place, series, hidden, act) {
  const focus = [...place.children].indexOf(document.activeElement);
  place.replaceChildren(...series.map((s) => {
    const key = make("button", { type: "button", class: "key", "aria-pressed": String(!hidden.has(s.name)) }, sample(s.place), make("b", { text: s.name, dir: "auto" }));
    key.addEventListener("click", () => { if (!hidden.delete(s.name)) hidden.add(s.name); act(); });
    return key;
  }));
  place.children[focus]?.focus();
}
function sample(place) {
  const svg = draw("svg", { width: 22, height: 8, "aria-hidden": "true" });
  svg.append(draw("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(place), "stroke-width": 3, "stroke-dasharray": dashes(place) }));
  return svg;
}

// One sample over time: a bar for its value at each use, and a line for what they add up to.
export function uses(place, rows, name) {
  let sum = 0;
  const added = rows.map(([step, value]) => [step, (sum += value ?? 0)]);
  const box = frame(place, 240, name);
  const steps = range(rows.map((r) => r[0]));
  const scale = axes(box, steps, range([...rows.map((r) => r[1]), ...added.map((r) => r[1])], true), "step");
  const wide = Math.min(Math.max(scale.inner.w / (rows.length * 2.5), 1.5), 9);
  for (const [step, value, , pending] of rows) {
    if (value === null) continue;
    const [top, end] = [scale.y(Math.max(value, 0)), scale.y(Math.min(value, 0))];
    const fill = token(value < 0 ? "--bad" : "--good");
    const bar = draw("rect", { x: scale.x(step) - wide / 2, y: top, width: wide, height: Math.max(end - top, 1), fill, "fill-opacity": pending ? 0.45 : 1 });
    bar.append(draw("title", {}, `step ${whole(step)}: ${number(value, true)}${pending ? " (pending)" : ""}`));
    box.svg.append(bar);
  }
  const path = added.map(([a, b], k) => `${k ? "L" : "M"}${scale.x(a).toFixed(1)} ${scale.y(b).toFixed(1)}`).join("");
  box.svg.append(draw("path", { d: path, fill: "none", stroke: token("--muted"), "stroke-width": 1.5, "stroke-dasharray": "4 3" }));
}

// Counts on a grid; the darker a cell, the more samples (by the logarithm). A click hands over the cell's ranges.
export function cells(place, found, { name, xname, yname, act }) {
  if (!found.samples) return place.replaceChildren(make("p", { class: "fine", text: "No sample has both scores." }));
  const side = Math.min(Math.max(place.clientWidth || 480, 260), 560);
  const box = frame(place, side, name);
  const scale = axes(box, found.x, found.y, xname, yname);
  const most = Math.log1p(found.cells.reduce((a, c) => Math.max(a, c[2]), 1));
  const [dx, dy] = [(found.x[1] - found.x[0]) / found.size, (found.y[1] - found.y[0]) / found.size];
  const fill = token("--accent");
  for (const [i, j, count] of found.cells) {
    const at = { x: [found.x[0] + i * dx, found.x[0] + (i + 1) * dx], y: [found.y[0] + j * dy, found.y[0] + (j + 1) * dy] };
    const [left, right, top, end] = [scale.x(at.x[0]), scale.x(at.x[1]), scale.y(at.y[1]), scale.y(at.y[0])];
    const cell = draw("rect", { x: left, y: top, width: Math.max(right - left - 0.4, 1), height: Math.max(end - top - 0.4, 1), fill, "fill-opacity": (0.15 + 0.85 * Math.log1p(count) / most).toFixed(3) });
    cell.append(draw("title", {}, `${whole(count)} samples`));
    if (act) {
      cell.classList.add("pair-cell");
      // The outer cells take in all that lies beyond them.
      cell.addEventListener("click", () => act({ x: [i ? at.x[0] : null, i < found.size - 1 ? at.x[1] : null], y: [j ? at.y[0] : null, j < found.size - 1 ? at.y[1] : null] }));
    }
    box.svg.append(cell);
  }
  if (found.x[0] < 0 && found.x[1] > 0) box.svg.append(draw("line", { x1: scale.x(0), x2: scale.x(0), y1: EDGE.top, y2: side - EDGE.bottom, class: "zero" }));
}
