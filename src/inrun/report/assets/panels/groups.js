// Value by a metadata column: over training, over the run, and for each validation set.
const shown = { measure: "share", span: "cumulative" };
const TOTALS = {
  step: "Totals speak of the data account only: with momentum, most of a sample's push arrives later, in the optimizer's account.",
  whole: "Totals are whole credits: what a sample's pushes did to the loss at once and, through momentum, at later steps.",
};
const summed = (list) => { let sum = 0; return list.map((x) => (sum += x)); };

const hatch = (fill) => ({ fillpattern: { shape: "/", size: 7, solidity: 0.25, fgcolor: token("--surface"), bgcolor: fill } });

function drawStages(found) {
  const grouping = found.groupings[state.column];
  const groups = grouping.stages[state.set];
  const cumulative = shown.span === "cumulative";
  const totals = groups.map((g) => (cumulative ? summed(g.total) : g.total));
  const counts = groups.map((g) => (cumulative ? summed(g.new) : g.uses));
  const names = groups.map((_, k) => (k < grouping.colours ? grouping.names[k] : "other"));
  const steps = found.stages.last;
  const share = shown.measure === "share";
  const positive = steps.map((_, s) => totals.reduce((sum, t) => sum + Math.max(t[s], 0), 0));
  const values = totals.map((t, k) => t.map((x, s) => {
    if (share) return positive[s] > 0 ? (100 * Math.max(x, 0)) / positive[s] : null;
    return counts[k][s] ? x / counts[k][s] : null;
  }));
  const few = steps.length < 3;
  const items = names.map((name, k) => {
    const fill = colour(k, grouping);
    const hatched = again(k, grouping);
    const hover = { hovertemplate: share ? "%{y:.1f} %" : "%{y:.3g}" };
    let trace;
    if (share && few) trace = { type: "bar", x: steps, y: values[k], marker: { color: fill } };
    else if (share) trace = { type: "scatter", mode: "lines", x: steps, y: values[k], stackgroup: "all", line: { color: token("--surface"), width: 0.8 }, fillcolor: fill, ...(hatched ? hatch(fill) : {}) };
    else trace = line(steps, values[k], fill, { dash: k < grouping.colours ? dashOf(k) : "dot", connectgaps: true, marker: { color: fill, size: 6, symbol: hatched ? "diamond" : "circle" } });
    return { name, swatch: fill, hatched: share && hatched, trace: { ...trace, ...hover } };
  });
  const out = names.filter((_, k) => totals[k][steps.length - 1] < 0);
  const when = cumulative ? "from the start up to each step" : `in each of ${steps.length} stages`;
  let said;
  if (share) said = `Share of the positive total for ${data.sets[state.set]}, ${when}.` + (out.length ? ` A group whose total is below zero has no share there; at the end: ${out.join(", ")}.` : "");
  else said = cumulative ? `Score per sample used so far, for ${data.sets[state.set]}.` : `Score per use within each stage, for ${data.sets[state.set]}. Later uses earn less: the learning rate falls, and there is less left to learn.`;
  const yaxis = share ? { title: "share of value, %", range: [0, 100] } : { title: cumulative ? "score per sample" : "score per use", zerolinecolor: token("--muted") };
  draw("stages", items, { barmode: "stack", xaxis: { title: "optimizer step" }, yaxis }, said);
}

// What helped beside what hurt: a bar per group, on either side of zero.
function drawSides(grouping) {
  const groups = grouping.whole[state.set].map((g, k) => ({ ...g, name: grouping.names[k] })).filter((g) => g.samples);
  const ordered = [...groups].sort((a, b) => a.total - b.total);
  const [away, folds] = [grouping.away[state.set], grouping.folds[state.set]];
  const judged = away !== null && groups.some((g) => g.error !== null); // by the same measure as the finding
  const clear = (g) => !judged || Math.abs(g.total) > away * g.error;
  const kinds = [[judged ? "helped" : "above zero", colour(0), (g) => g.total > 0 && clear(g)], [judged ? "hurt" : "below zero", colour(5), (g) => g.total < 0 && clear(g)], ["not clear of its error", OTHER[mode()], (g) => !clear(g) || g.total === 0]];
  const narrow = innerWidth < 500;
  const cut = (name) => label(narrow && name.length > 15 ? `${name.slice(0, 14)}…` : name);
  const rows = ordered.map((g, y) => ({ ...g, y }));
  const items = kinds.map(([name, fill, mine]) => {
    const own = rows.filter(mine);
    const error = judged ? { error_x: { type: "data", array: own.map((g) => away * g.error), color: token("--ink"), thickness: 1.2, width: 3 } } : {};
    return { name, swatch: fill, count: own.length, trace: { type: "bar", orientation: "h", x: own.map((g) => g.total), y: own.map((g) => g.y), customdata: own.map((g) => label(g.name)), marker: { color: fill }, hovertemplate: "%{customdata}: %{x:.3g}", ...error } };
  }).filter((item) => item.count);
  byId("sides-chart").style.height = `${Math.max(150, 70 + 30 * rows.length)}px`;
  const said = `Total per ${grouping.column} for ${data.sets[state.set]}: right of zero lowered the loss, left raised it.` + (judged ? ` The whiskers are ${away.toFixed(1)} standard errors, over ${whole(folds)} folds: what they keep clear of zero helped or hurt clearly.` : folds > 1 ? ` ${whole(folds)} folds cannot say how sure a total is.` : " Without folds nothing says how sure a total is.");
  draw("sides", items, { barmode: "overlay", bargap: 0.3, hovermode: "closest", margin: { l: 10, r: 14, t: 10, b: 44 }, xaxis: { title: "loss (right = it fell)", zeroline: true, zerolinecolor: token("--ink") }, yaxis: { tickvals: rows.map((g) => g.y), ticktext: rows.map((g) => cut(g.name)), showgrid: false, zeroline: false, nticks: undefined, range: [-0.6, rows.length - 0.4] } }, said);
}

function drawGroups(grouping) {
  const groups = grouping.whole[state.set];
  const positive = groups.reduce((sum, g) => sum + Math.max(g.total, 0), 0);
  const judged = groups.some((g) => g.clear !== null);
  const heads = [{ text: grouping.column }, ...["Total", ...(judged ? ["± error"] : []), "Share", "Per sample", "Samples", "Uses", "Negative", ...(judged ? ["Clearly so"] : [])].map((text) => ({ text, num: true }))];
  const gathered = (k) => Number(grouping.gathered > 0 && k === groups.length - 1);  // comes last, whatever its total
  const order = groups.map((_, k) => k).sort((a, b) => gathered(a) - gathered(b) || groups[b].total - groups[a].total);
  const total = scaled(groups.map((g) => g.total));
  const average = scaled(groups.map((g) => (g.samples ? g.total / g.samples : null)));
  const rows = order.map((k) => {
    const g = groups[k];
    const per = (x) => (g.samples && x !== null ? percent(x / g.samples) : "–");
    const part = (x) => (g.samples && x !== null ? x / g.samples : null);
    const share = g.total > 0 && positive > 0 ? g.total / positive : null;
    return make("tr", gathered(k) ? { class: "sum" } : {}, rowHead(grouping.names[k], k, grouping), figure(total(g.total, true), mood(g.total), g.total),
      ...(judged ? [figure(total(g.error), "", g.error)] : []),
      figure(percent(share), "", share), figure(average(part(g.total), true), "", part(g.total)),
      figure(whole(g.samples), "", g.samples), figure(whole(g.uses), "", g.uses), figure(per(g.negative), "", part(g.negative)), ...(judged ? [figure(per(g.clear), "", part(g.clear))] : []));
  });
  putTable("groups-table", table(heads, rows, "fold"));
}

function drawHeat(grouping) {
  const averages = data.sets.map((_, s) => grouping.whole[s].map((g) => (g.samples ? g.total / g.samples : null)));
  const most = averages.map((list) => Math.max(...list.map((x) => Math.abs(x ?? 0)), 1e-300));
  const shown = averages.map(scaled);
  const rows = grouping.names.map((name, k) => {
    const cells = data.sets.map((_, s) => {
      const cell = figure(shown[s](averages[s][k], true), "", averages[s][k]);
      if (averages[s][k] !== null) tint(cell, averages[s][k] / most[s]);
      return cell;
    });
    return make("tr", {}, rowHead(name, k, grouping), ...cells);
  });
  putTable("heat-table", table([{ text: grouping.column }, ...data.sets.map((text) => ({ text }))], rows, data.sets.length > 2 ? "heat fold" : "heat"));
}

function build(section, found) {
  const redraw = (name) => (value) => { shown[name] = value; drawStages(found); };
  const switches = make("div", { class: "switches" },
    switchOf("measure", "Measure", { share: "Share of value", average: "Average" }, redraw("measure")),
    switchOf("span", "Span", { cumulative: "Cumulative", stage: "Per stage" }, redraw("span")));
  section.append(
    make("figure", { class: "panel" }, make("h3", { text: "What helped, and what hurt" }), ...chartParts("sides")),
    make("figure", { class: "panel" }, make("div", { class: "panel-head" }, make("h3", { text: "Over training" }), switches), ...chartParts("stages")),
    make("div", { class: "panel" }, tableHead("Over the whole run", "groups-table"), scrolled("groups-table", "Scores by group"),
      make("p", { class: "fine", text: TOTALS[data.credit] })));
  if (data.sets.length > 1) section.append(make("div", { class: "panel" }, tableHead("Which group helps which validation set", "heat-table"),
    scrolled("heat-table", "Average score by group and validation set"),
    make("p", { class: "fine", text: "Average score per sample. Colours compare the groups of one validation set (a column), since sets differ in scale." })));
}

function drawAll(found) {
  const grouping = found.groupings[state.column];
  byId("groups-title").replaceChildren("Value by ", make("span", { dir: "auto", text: grouping.column }));
  drawSides(grouping);
  drawStages(found);
  drawGroups(grouping);
  if (data.sets.length > 1) drawHeat(grouping);
}

panels.groups = { build, draw: drawAll };
