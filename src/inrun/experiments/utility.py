"""How close the Taylor expansions are to what a step does: U(S) of random subsets of the batch, true and expanded.

U(S) = ℓ(w) − ℓ(w + Δ_S), U₁(S) = −⟨∇ℓ, Δ_S⟩, U₂(S) = U₁(S) − ½Δ_SᵀHΔ_S, with Δ_S the move that the optimizer makes on the
gradient of the samples in S alone. Beside them what scores say, U(∅) + Σ_{n∈S} c_n, by ``method="step"``,
and in the SGD game by ``"second"``.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inrun.experiments.fidelity import GAMES, PAPERS_OWN, StudyConfig
from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.states import State, count_states, states
from inrun.fidelity import random_subsets, score_once
from inrun.fidelity.picture import pyplot
from inrun.fidelity.rewind import rewound
from inrun.truth import StepGame, agreement

#: The expansions and the scores, as they are called in tables.
KINDS = {"one": "first order", "two": "second order", "scores": "sum of scores"}


@dataclass(frozen=True)
class UtilityConfig:
    """What is looked at, in every game."""

    study: StudyConfig
    subsets: int = 60


SIZES = {
    "smoke": UtilityConfig(StudyConfig(steps=(3,), batch=4, context=12, width=8, layers=1), 10),
    "quick": UtilityConfig(StudyConfig(steps=(30,)), 40),
    "full": UtilityConfig(StudyConfig()),
}
NOTES = (
    "The paper shows this for GPT-2 as a figure; in words: first order is accurate already (Spearman above 0.94), and the "
    "second-order term brings no notable improvement. It names neither the step nor the rate of the figure.",
    "Text, model and games as in `fidelity`. Error: root mean square difference from the true utility, over the standard "
    "deviation of the true utility over subsets; 1 is no better than the mean.",
    "Under AdamW, Δ_S holds momentum and decay in every subset, so that an expansion around w must bridge them; scores begin "
    "after them.",
)


def _look(state: State, proxy: bool, subsets: int) -> dict[str, Any]:
    """Return the true and the expanded utilities of random subsets at one state."""
    optimizers = [state.optimizer]
    method = "second" if proxy else "step"
    c = score_once(state.model, optimizers, state.validation, state.sample_losses, method, state.max_norm)
    with rewound(state.model, optimizers):
        game = StepGame(state.model, optimizers, state.validation, state.sample_losses, max_norm=state.max_norm, proxy=proxy)
        masks = random_subsets(game.n, subsets, state.seed)
        empty = game.utilities(torch.zeros(1, game.n, dtype=torch.bool))
        true = game.utilities(masks)
        kinds = {
            "one": game.taylor_utilities(masks, 1),
            "two": game.taylor_utilities(masks, 2),
            "scores": empty + masks.double() @ c,
        }
    spread = float(true.std())
    found: dict[str, Any] = {"seed": state.seed, "lr": state.lr, "step": state.step, "true": true.tolist()}
    for kind, values in kinds.items():
        met = agreement(values, true)
        found[kind] = {
            "values": values.tolist(),
            "pearson": met.pearson,
            "spearman": met.spearman,
            "rmse": met.rmse,
            "error": met.rmse / spread,
        }
    return found


def _cells_of(
    study: StudyConfig, name: str, seed: int, subsets: int, tell: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    config = study.game(name, seed)
    total = count_states(config)
    found: list[dict[str, Any]] = []
    for state in states(config):
        tell(f"{name}, seed {seed}, lr {state.lr:g}, step {state.step}", len(found), total)
        found.append(_look(state, config.proxy, subsets))
    return found


def run(config: UtilityConfig, work: Work) -> Findings:
    """Draw the same subsets in every game."""
    data: dict[str, Any] = {}
    for name, about in GAMES.items():
        cells: list[dict[str, Any]] = []
        for seed in work.seeds:
            key = {"game": name, "seed": seed, "subsets": config.subsets, "config": config.study.game(name, seed)}
            cells += work.cell(key, functools.partial(_cells_of, config.study, name, seed, config.subsets, work.tell))
        data[name] = {"about": about, "summary": _summary(cells), "cells": cells}
    tables = [_table(name, game["summary"], config) for name, game in data.items()]
    return Findings({"games": data}, tables, list(NOTES), draw=functools.partial(_draw, data))


def _summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per learning rate, step and kind: means and worst over seeds."""
    rows = []
    for lr, step in sorted({(c["lr"], c["step"]) for c in cells}):
        mine = [c for c in cells if (c["lr"], c["step"]) == (lr, step)]
        for kind in KINDS:
            row: dict[str, Any] = {"lr": lr, "step": step, "kind": kind}
            for figure in ("spearman", "pearson", "rmse", "error"):
                values = [c[kind][figure] for c in mine]
                row[figure] = statistics.fmean(values)
                row[f"{figure}_deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
                row[f"{figure}_worst"] = min(values) if figure in ("spearman", "pearson") else max(values)
            rows.append(row)
    return rows


def _table(name: str, summary: list[dict[str, Any]], config: UtilityConfig) -> Table:
    rows = []
    for row in summary:
        paper = "> 0.94" if name in PAPERS_OWN and row["kind"] == "one" else None
        rank = f"{row['spearman']:.3f} ± {row['spearman_deviation']:.3f}"
        found = [rank, f"{row['spearman_worst']:.3f}", f"{row['pearson']:.3f}", f"{row['rmse']:.1e}", f"{row['error']:.2g}"]
        rows.append([f"{row['lr']:g}", row["step"], KINDS[row["kind"]], *found, paper])
    columns = ["lr", "step", "utility by", "Spearman (± over seeds)", "worst", "Pearson", "RMSE", "error", "paper: Spearman"]
    return Table(f"{name}: {GAMES[name]}", columns, rows, f"{config.subsets} random subsets of uniform size, per seed.")


def _draw(games: dict[str, Any], path: Path) -> None:
    """Draw true utilities across and the others up: a row of panels per game, a column per learning rate."""
    plt = pyplot()
    lrs = sorted({c["lr"] for game in games.values() for c in game["cells"]})
    figure, axes = plt.subplots(
        len(games), len(lrs), figsize=(3.9 * len(lrs), 3.5 * len(games)), squeeze=False, layout="constrained"
    )
    for row, (name, game) in zip(axes, games.items(), strict=True):
        for axis, lr in zip(row, lrs, strict=True):
            cells = [c for c in game["cells"] if c["lr"] == lr]
            true = [x for c in cells for x in c["true"]]
            for (kind, words), colour in zip(KINDS.items(), ("#c2571a", "#1f6f8b", "#6a4c93"), strict=True):
                mean = statistics.fmean(c[kind]["spearman"] for c in cells)
                values = [x for c in cells for x in c[kind]["values"]]
                axis.plot(true, values, "o", ms=2.2, color=colour, alpha=0.6, label=f"{words}, ρ {mean:.3f}")
            axis.plot([min(true), max(true)], [min(true), max(true)], color="0.6", lw=1, zorder=0)
            axis.set_title(f"{name}: lr {lr:g}, step {cells[-1]['step']}", fontsize=10)
            axis.set_xlabel("true utility of a subset, nats", fontsize=8)
            axis.set_ylabel("utility as expanded", fontsize=8)
            axis.ticklabel_format(style="sci", scilimits=(-2, 2))
            axis.tick_params(labelsize=7)
            axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
