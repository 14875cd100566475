"""Tables and the figure of the curation experiment, from its cells."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from inrun.experiments.figures import pyplot
from inrun.experiments.recipes import Table, shown
from inrun.experiments.text_runs import TITLES, TextRun

Cell = dict[str, Any]
PAPER_SAVED = {"proxy_first": "about 25 %", "proxy_second": "about 25 %", "influence_function": "a little less"}
COLOURS = {
    "proxy_first": "#c98a00",
    "proxy_second": "#8a6d00",
    "step": "#1f6f8b",
    "whole": "#0b3954",
    "significant": "#4f9d69",
    "proxy_by_step": "#e8c468",
    "by_step": "#7d6bb0",
    "own_step": "#5f9ea0",
    "proxy_specific": "#6b4f00",
    "specific": "#2a6fdb",
    "own_specific": "#008f5a",
    "influence_function": "#b3446c",
    "gradient_product": "#e39fbb",
    "influence_specific": "#7a1f45",
    "influence_iterative": "#d9467c",
    "trak": "#d1603d",
    "tracin_cp": "#9c6b30",
    "less": "#5b7f95",
    "gradient_cosine": "#c77dff",
    "bm25": "#4f9d69",
    "random": "#888888",
}

#: What an arm drops.
_WHICH = {"own": "its own negatives", "equal": "as many as whole credit"}


def steps_to(curve: list[list[float]], target: float) -> float | None:
    """Return after how many steps a loss is reached, between measurements by a straight line; None for never."""
    before: list[float] | None = None
    for done, loss in curve:
        if loss <= target:
            if before is None:
                return done
            return before[0] + (done - before[0]) * (before[1] - target) / (before[1] - loss)
        before = [done, loss]
    return None


def summary(cells: list[Cell], arm: str, kind: str) -> dict[str, Any] | None:
    """Return an arm's figures over seeds; None where it was not run."""
    found = [(c, a) for c in cells for a in c["arms"] if (a["arm"], a["share"]) == (arm, kind)]
    if not found:
        return None
    steps = [steps_to(a["curve"], c["original"][-1][1]) for c, a in found]
    lower = np.array([c["original"][-1][1] - a["curve"][-1][1] for c, a in found])
    random = [x for x in (_random_of(c) for c, _ in found) if x is not None]
    return {
        "steps": steps,
        "lower": lower,
        "dropped": np.array([a["dropped"] / a["of"] for _, a in found]),
        # Paired by seed: same documents, weights, order and test rows.
        "over_random": lower - np.array(random) if len(random) == len(found) else None,
    }


def _random_of(cell: Cell) -> float | None:
    for arm in cell["arms"]:
        if arm["arm"] == "random":
            return float(cell["original"][-1][1] - arm["curve"][-1][1])
    return None


def spread(values: Any, form: str = ".3f") -> str:
    """Return mean and standard deviation, without the latter for one value; a dash where a value is not defined."""
    x = np.asarray(values, float)
    if not np.isfinite(x).all():
        return shown(math.nan)
    return f"{x.mean():{form}}" + (f" ± {x.std(ddof=1):{form.lstrip('+')}}" if len(x) > 1 else "")


def order_noise(cells: list[Cell]) -> float:
    """Return the spread of one run's final loss over orders of the data, nothing dropped."""
    return float(np.sqrt(np.mean([np.var(c["finals_by_order"], ddof=1) for c in cells])))


def reached_table(name: str, run: TextRun, cells: list[Cell]) -> Table:
    """Return when each arm has the original's final loss, and how much lower it ends."""
    rows: list[list[object]] = []
    for kind, words in _WHICH.items():
        for arm, title in TITLES.items():
            found = summary(cells, arm, kind)
            if found is None:
                continue
            reached = [s for s in found["steps"] if s is not None]
            # A run that never gets there has saved nothing; it counts with all its steps.
            all_steps = [run.steps if s is None else s for s in found["steps"]]
            rows.append(
                [
                    title,
                    words if arm != "random" else "as many as whole credit",
                    spread(100 * found["dropped"], ".0f") + " %",
                    f"{len(reached)} of {len(all_steps)}",
                    spread(all_steps, ".0f"),
                    f"{100 * (1 - np.mean(all_steps) / run.steps):.0f} %",
                    PAPER_SAVED.get(arm) if kind == "own" else None,
                    spread(found["lower"], "+.4f"),
                    None if found["over_random"] is None or arm == "random" else spread(found["over_random"], "+.4f"),
                ]
            )
    noise = order_noise(cells)
    draws = _single_draws(cells)
    below = sum(x > 0 for lower in draws for x in lower)
    final = spread([c["original"][-1][1] for c in cells])
    return Table(
        f"{name}: steps to the original's final test loss",
        [
            "dropped by",
            "which",
            "share dropped",
            "reached",
            f"steps (of {run.steps})",
            "saved",
            "paper",
            "final loss lower by",
            "lower than random removal by",
        ],
        rows,
        f"Mean ± standard deviation over {len(cells)} seed(s). The original ends at {final} nats. A run that never reaches its "
        f"loss counts with all its steps. The last column is paired by seed. Random removal is the mean of "
        f"{len(draws[0]) if draws else 0} draws a seed; single ones end below the original in {below} of "
        f"{sum(map(len, draws))} runs. With nothing dropped, the final loss of a single run varies by {noise:.4f} (standard "
        f"deviation over {len(cells[0]['finals_by_order'])} orders a seed) with the order of the data.",
    )


def _single_draws(cells: list[Cell]) -> list[list[float]]:
    """Return by seed how much lower than the original single random removals end."""
    randoms = [(c, a) for c in cells for a in c["arms"] if a["arm"] == "random"]
    return [[c["original"][-1][1] - final for final in a["finals"]] for c, a in randoms]


def negatives_table(cells: list[Cell]) -> Table:
    """Return the share of documents with a negative score."""
    rows = []
    for arm, title in TITLES.items():
        found = summary(cells, arm, "own")
        if found is not None and arm != "random":
            rows.append([title, spread(100 * found["dropped"], ".1f") + " %", "16 %" if arm == "proxy_second" else None])
    return Table("Share of documents with a negative score", ["score", "negative", "paper"], rows)


def domains_table(cells: list[Cell]) -> Table:
    """Return which share of each domain is dropped."""
    arms = [arm for arm in TITLES if arm != "random" and summary(cells, arm, "own") is not None]
    rows = []
    for domain in sorted(cells[0]["documents_by_domain"]):
        row: list[object] = [domain]
        for arm in arms:
            shares = [
                a["dropped_by_domain"][domain] / c["documents_by_domain"][domain]
                for c in cells
                for a in c["arms"]
                if (a["arm"], a["share"]) == (arm, "own")
            ]
            row.append(f"{100 * np.mean(shares):.0f} %")
        rows.append(row)
    return Table(
        "What is dropped: share of each domain's documents", ["domain", *(_short(arm) for arm in arms)], rows, "Mean over seeds."
    )


def _short(arm: str) -> str:
    return TITLES[arm].removeprefix("in-run, ").removesuffix(" (SGD proxy, the paper's)")


def draw_curves(cells: list[Cell], path: Path) -> None:
    """Draw the test loss over steps, relative to the original's final one: a panel per study and kind of share, a line per arm."""
    plt = pyplot()
    studies = list(dict.fromkeys(c["study"] for c in cells))
    panels = [(s, kind) for s in studies for kind in _WHICH if any(a["share"] == kind for a in _arms(cells, s))]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6.2 * columns, 4.2 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (study, kind) in zip(axes.flat, panels, strict=False):
        mine = [c for c in cells if c["study"] == study]
        _draw_line(axis, [c["original"] for c in mine], mine, "original", {"color": "black", "lw": 1.8})
        ends = [0.0]
        for arm, colour in COLOURS.items():
            # Whole credit sets the share, and as many are dropped at random: they are in both.
            own = "own" if arm in ("whole", "random") else kind
            curves = [a["curve"] for a in _arms(cells, study) if (a["arm"], a["share"]) == (arm, own)]
            if curves:
                dashes = "--" if arm == "random" else "-"
                style = {"color": colour, "lw": 1.4, "ls": dashes}
                ends.append(_draw_line(axis, curves, mine, _short(arm), style))
        noise = order_noise(mine)
        axis.axhspan(-noise, noise, color="0.9", zorder=0, label="one run, by order of the data (± s.d.)")
        axis.axhline(0, color="0.6", lw=0.8, zorder=1)
        axis.set_ylim(1.3 * min(ends) - noise, 0.3)
        steps = mine[0]["original"][-1][0]
        axis.set_xlim(0.15 * steps, steps)
        seeds = f"{len(mine)} seed{'s' if len(mine) > 1 else ''}"
        axis.set_title(f"{study}; {_WHICH[kind]} dropped ({seeds})", fontsize=9)
        axis.set_xlabel("steps")
        axis.set_ylabel("test loss − the original's at the end (nats)", fontsize=9)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _arms(cells: list[Cell], study: str) -> list[dict[str, Any]]:
    return [arm for cell in cells if cell["study"] == study for arm in cell["arms"]]


def _draw_line(axis: Any, curves: list[Any], cells: list[Cell], label: str, style: dict[str, Any]) -> float:
    """Draw the mean over seeds, each relative to its own original; return where it ends."""
    relative = [np.array(curve)[:, 1] - c["original"][-1][1] for curve, c in zip(curves, cells, strict=True)]
    mean = np.mean(relative, axis=0)
    axis.plot(np.array(curves[0])[:, 0], mean, label=label, **style)
    return float(mean[-1])
