// One sample, opened: its text, its value at each use, and its neighbours.
const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Bars at the steps of its uses. Few numbers: a chart of Plotly's for every sample would be slow.
function usesChart(sample) {
  const values = sample.v?.[state.set];
  if (!values || values.every((v) => v === null)) return [make("p", { class: "fine", text: "Its value at each use is not in this page, which would grow too large; inrun serve has it." })];
  const [wide, high, foot] = [420, 116, 18];
  const steps = sample.p;
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const most = Math.max(...values.map((v) => Math.max(v ?? 0, 0)), 0);
  const least = Math.min(...values.map((v) => Math.min(v ?? 0, 0)), 0);
  const shown = scaled([most, least]);
  const marked = [...new Set([most, 0, least])].map((v) => [v, v === 0 ? "0" : shown(v, true)]);
  const left = 12 + 7 * Math.max(...marked.map(([, text]) => text.length));
  const x = (step) => left + 8 + (last > first ? ((step - first) / (last - first)) * (wide - left - 18) : (wide - left - 18) / 2);
  const y = (value) => 6 + ((most - value) / (most - least || 1)) * (high - foot - 12);
  const thick = Math.max(2.5, Math.min(10, 240 / steps.length));
  const bars = steps.map((step, k) => {
    const value = values[k];
    if (value === null) return null;
    const top = Math.min(y(value), y(0));
    const title = drawn("title", {});
    title.textContent = `step ${whole(step)}: ${shown(value, true)}`;
    return drawn("rect", { x: x(step) - thick / 2, y: top, width: thick, height: Math.max(Math.abs(y(value) - y(0)), 1), fill: token(value < 0 ? "--bad" : "--good"), rx: 1 }, title);
  }).filter((bar) => bar !== null);
  const words = (text, at, more) => {
    const element = drawn("text", { ...at, fill: token("--muted"), "font-size": 11.5, ...more });
    element.textContent = text;
    return element;
  };
  const zero = drawn("line", { x1: left, x2: wide, y1: y(0), y2: y(0), stroke: token("--muted"), "stroke-width": 1 });
  const marks = marked.map(([v, text]) => words(text, { x: left - 6, y: Math.min(y(v) + 4, high - foot) }, { "text-anchor": "end" }));
  const ends = [words(whole(first), { x: x(first), y: high - 3 }, { "text-anchor": last > first ? "start" : "middle" }), ...(last > first ? [words(whole(last), { x: x(last), y: high - 3 }, { "text-anchor": "end" })] : [])];
  const each = steps.map((step, k) => `step ${step} ${number(values[k], true)}`).join(", ");
  const chart = drawn("svg", { class: "uses", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `Value at each use: ${each}` }, zero, ...bars, ...marks, ...ends);
  const many = sample.m ? ` A bar is the mean of up to ${sample.m} uses.` : "";
  const rest = sample.u - (sample.m ? sample.u : steps.length);
  return [chart, make("p", { class: "fine", text: `Over the steps of its ${sample.u === 1 ? "one use" : `${whole(sample.u)} uses`}, for ${data.sets[state.set]}.${many}${rest > 0 ? ` Uses in one step are added.` : ""}` })];
}

// Samples at either end for the chosen set, from the highest to the lowest, each once.
function atTheEnds() {
  const places = [...new Set([...(data.shown.top[state.set] ?? []), ...[...(data.shown.bottom[state.set] ?? [])].reverse()])];
  return places.map((k) => data.shown.samples[k]).filter((s) => s.s[state.set] !== null).sort((a, b) => b.s[state.set] - a.s[state.set]);
}

function neighbourRow(name, score, text, known) {
  const title = known
    ? make("button", { type: "button", class: "link go", text: `sample ${name}` })
    : make("span", { text: `sample ${name}` });
  if (known) title.addEventListener("click", () => showOnly(known));
  return make("li", {}, make("span", { class: `figure ${mood(score)}`, text: number(score, true) }), title, make("span", { class: "cut", dir: "auto", text: text ?? "" }));
}

const near = (other) => neighbourRow(other.n, other.s[state.set], other.t ?? other.i, other);
const block = (title, rows) => (rows.length ? [make("div", {}, title, make("ul", { class: "near" }, ...rows))] : []);

function neighbours(sample) {
  const ends = atTheEnds();
  const at = ends.indexOf(sample);
  const score = sample.s[state.set];
  const beside = at < 0 ? [] : ends.slice(Math.max(at - 2, 0), at + 3).filter((other) => other !== sample);
  const group = (sample.g ?? [])[state.column];
  const alike = group === undefined || group === null ? [] : ends.filter((other) => other !== sample && (other.g ?? [])[state.column] === group)
    .sort((a, b) => Math.abs(a.s[state.set] - score) - Math.abs(b.s[state.set] - score)).slice(0, 4).sort((a, b) => b.s[state.set] - a.s[state.set]);
  const pieces = (sample.f ?? []).map(([name, scores, text]) => neighbourRow(name, scores[state.set], text, ends.find((other) => other.n === name)));
  const title = (...parts) => make("h4", {}, ...parts);
  return [
    ...block(title("Next to it in score"), beside.map(near)),
    ...(group ? block(title("Nearest in score among ", make("bdi", { text: group })), alike.map(near)) : []),
    ...(sample.d ? block(title("Around it in ", make("bdi", { text: sample.d })), pieces) : []),
  ];
}

// What a sample opens to. Filled when it is opened, since a page may show hundreds.
function opened(sample) {
  const found = neighbours(sample);
  return make("div", { class: "opened" }, make("div", {}, make("h4", { text: "Value at each use" }), ...usesChart(sample)),
    ...(found.length ? found : [make("p", { class: "fine", text: "No neighbours of it are in this page." })]));
}
