"""The scatter of scores against true Shapley values: a row of panels per game, a column per learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inrun.fidelity.picture import pyplot

COLOURS = ("#c2571a", "#1f6f8b", "#6a4c93")


def draw(games: dict[str, Any], path: Path) -> None:
    """Draw the last step of every learning rate, all seeds in one panel; truth across, scores up, the diagonal grey."""
    plt = pyplot()
    lrs = sorted({c["lr"] for game in games.values() for c in game["cells"]})
    figure, axes = plt.subplots(
        len(games), len(lrs), figsize=(3.9 * len(lrs), 3.5 * len(games)), squeeze=False, layout="constrained"
    )
    for row, (name, game) in zip(axes, games.items(), strict=True):
        last = max(c["step"] for c in game["cells"])
        for axis, lr in zip(row, lrs, strict=True):
            cells = [c for c in game["cells"] if (c["lr"], c["step"]) == (lr, last)]
            _panel(axis, cells)
            axis.set_title(f"{name}: lr {lr:g}, step {last}", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(axis: Any, cells: list[dict[str, Any]]) -> None:
    truths = [t for c in cells for t in c["truths"].values()]
    truth = [x for t in truths for x in t["shapley"]]
    errors = [x for t in truths for x in t["standard_errors"]]
    for colour, (index, result) in zip(COLOURS, enumerate(cells[0]["results"]), strict=False):
        scores = [x for c in cells for x in c["results"][index]["contributions"]]
        mean = sum(c["results"][index]["spearman"] for c in cells) / len(cells)
        label = f"{result['method']}, ρ {mean:.3f}"
        axis.errorbar(truth, scores, xerr=errors, fmt="o", ms=3, lw=0.6, color=colour, alpha=0.8, label=label)
    span = [min(truth), max(truth)]
    axis.plot(span, span, color="0.6", lw=1, zorder=0)
    axis.set_xlabel("true Shapley value, nats", fontsize=8)
    axis.set_ylabel("score", fontsize=8)
    axis.ticklabel_format(style="sci", scilimits=(-2, 2))
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7, frameon=False)
