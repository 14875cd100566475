// Do validation sets rank samples alike? A table of rank correlations.
function drawAgreement({ matrix }) {
  const rows = data.sets.map((name, i) => {
    const cells = data.sets.map((_, j) => {
      const value = matrix[i][j];
      const cell = figure(value === null ? "–" : value.toFixed(2).replace("-", "−"), "", value);
      if (value !== null) tint(cell, value);
      return cell;
    });
    return make("tr", {}, rowHead(name), ...cells);
  });
  putTable("agreement-table", table([{ text: "validation set" }, ...data.sets.map((text) => ({ text }))], rows, "heat small"));
}

function build(section, { thinned }) {
  const said = "Rank agreement (Spearman): 1 means that two sets put all samples in the same order, 0 that their orders have nothing in common." +
    (thinned > 1 ? ` Computed on every ${thinned}th sample.` : "");
  section.append(make("div", { class: "panel" }, tableHead("Rank agreement", "agreement-table"), scrolled("agreement-table", "Rank agreement of validation sets"), make("p", { class: "fine", text: said })));
}

panels.agreement = { build, draw: drawAgreement };
