"""Scores against the true Shapley values of single steps, on a small GPT (the paper's fidelity and utility figures).

A GPT of about 115,000 parameters is trained in double precision on text of the Python installation; at chosen steps the
next step is played out with the real optimizer and the real loss, for every method beside the truth.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.states import FidelityConfig, byte_rows, count_states, sample_losses_of, states
from inrun.fidelity import FidelityReport, fidelity

__all__ = ["SIZES", "Cell", "FidelityConfig", "as_data", "byte_rows", "run", "run_fidelity", "sample_losses_of", "tabulate"]


@dataclass(frozen=True)
class Cell:
    """One step of one run."""

    seed: int
    lr: float
    report: FidelityReport


def run_fidelity(config: FidelityConfig, tell: Callable[[str, int, int], None] = lambda what, done, total: None) -> list[Cell]:
    """Train and compare; ``tell`` is called with what is being done and progress."""
    cells: list[Cell] = []
    total = count_states(config)
    for state in states(config):
        tell(f"seed {state.seed}, lr {state.lr:g}, step {state.step}", len(cells), total)
        report = fidelity(
            state.model,
            state.optimizer,
            state.validation,
            state.sample_losses,
            methods=config.methods,
            game="sgd" if config.proxy else "real",
            max_norm=state.max_norm,
            permutations=config.permutations,
            subsets=config.subsets,
            seed=state.seed,
            step=state.step,
            name="docs and code",
        )
        cells.append(Cell(state.seed, state.lr, report))
    tell("done", total, total)
    return cells


def tabulate(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return one row per learning rate, step and method: worst, median and best over seeds."""
    rows = []
    keys = sorted({(c.lr, c.report.step) for c in cells})
    for lr, step in keys:
        mine = [c.report for c in cells if (c.lr, c.report.step) == (lr, step)]
        truths = [truth for report in mine for truth in report.truths.values()]
        for index, choice in enumerate(mine[0].results):
            found = [report.results[index] for report in mine]
            spearman = [r.spearman for r in found]
            rows.append(
                {
                    "lr": lr,
                    "step": step,
                    "method": choice.method,
                    "seeds": len(found),
                    "spearman_min": min(spearman),
                    "spearman_median": statistics.median(spearman),
                    "pearson_min": min(r.pearson for r in found),
                    "rmse_median": statistics.median(r.rmse for r in found),
                    "spread_median": statistics.median(statistics.fmean(map(abs, t.shapley)) for t in truths),
                    "residual_max": max(r.residual for r in found),
                    "residual_median": statistics.median(r.residual for r in found),
                    "noise": max(max(t.standard_errors) for t in truths),
                }
            )
    return rows


def as_data(config: FidelityConfig, cells: list[Cell]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "config": asdict(config),
        "table": tabulate(cells),
        "cells": [{"seed": c.seed, "lr": c.lr, **c.report.as_dict()} for c in cells],
    }


#: The paper's three learning rates, with its RMSE and Spearman (GPT-2 at step 3,500, batch 16, 1,000 permutations).
PAPER: dict[float, tuple[float, float | None]] = {3e-4: (0.0003, None), 6e-4: (0.0012, 0.99), 5e-3: (0.0017, 0.79)}
#: Whose update each game plays, in words.
GAMES = {
    "paper": "the paper's SGD game as printed: w ← w − lr·Σ∇ℓ, losses added up, nothing clipped, at states of an AdamW run",
    "proxy": "the same for the gradient that training takes: mean loss, norm clipped at 1",
    "adamw": "the real step of AdamW with its momentum, decay and clipping",
}
#: Only the first two have numbers of the paper beside them.
PAPERS_OWN = ("paper", "proxy")


@dataclass(frozen=True)
class StudyConfig:
    """Which states are looked at, in every game; seeds are those of the run."""

    lrs: tuple[float, ...] = tuple(PAPER)
    steps: tuple[int, ...] = (100,)
    permutations: int = 60
    batch: int = 16
    context: int = 64
    width: int = 64
    layers: int = 2

    def game(self, name: str, seed: int) -> FidelityConfig:
        """Return one game of one seed as a study."""
        own = name in PAPERS_OWN
        return FidelityConfig(
            lrs=self.lrs,
            steps=self.steps,
            seeds=(seed,),
            batch=self.batch,
            permutations=self.permutations,
            proxy=own,
            summed=name == "paper",
            context=self.context,
            width=self.width,
            layers=self.layers,
        )


SIZES = {
    "smoke": StudyConfig(steps=(3,), permutations=6, batch=4, context=12, width=8, layers=1),
    "quick": StudyConfig(steps=(30,), permutations=30),
    "full": StudyConfig(),
}
NOTES = (
    "A GPT of 120,576 parameters on bytes of Python's own text (full and quick size), double precision, 4 validation rows of two "
    "domains. The paper: GPT-2 with 124M parameters on the Pile. RMSE is in nats and grows with the step, so it is not comparable "
    "across models; divided by the mean |true value| it is.",
    "The paper gives one number for both orders at each rate. Standard errors of the truth are in results.json.",
)


def _cells_of(config: FidelityConfig, tell: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    return [{"seed": c.seed, "lr": c.lr, **c.report.as_dict()} for c in run_fidelity(config, tell)]


def run(config: StudyConfig, work: Work) -> Findings:
    """Play every game for every seed."""
    data: dict[str, Any] = {}
    tables = []
    for name, about in GAMES.items():
        found: list[dict[str, Any]] = []
        for seed in work.seeds:
            game = config.game(name, seed)
            found += work.cell({"game": name, "seed": seed, "config": game}, functools.partial(_cells_of, game, work.tell))
        summary = summarise(found)
        data[name] = {"about": about, "summary": summary, "cells": found}
        tables.append(_table(name, summary, config))
    from inrun.experiments.fidelity_figure import draw

    return Findings(
        {"games": data, "paper": [[lr, *x] for lr, x in PAPER.items()]}, tables, list(NOTES), draw=functools.partial(draw, data)
    )


def summarise(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per learning rate, step and method: mean over seeds, worst Spearman, RMSE also of the mean |true value|."""
    rows = []
    for lr, step in sorted({(c["lr"], c["step"]) for c in cells}):
        mine = [c for c in cells if (c["lr"], c["step"]) == (lr, step)]
        truths = [truth for c in mine for truth in c["truths"].values()]
        sizes = [statistics.fmean(map(abs, truth["shapley"])) for truth in truths]
        for index, choice in enumerate(mine[0]["results"]):
            found = [c["results"][index] for c in mine]
            ranks = [r["spearman"] for r in found]
            rows.append(
                {
                    "lr": lr,
                    "step": step,
                    "method": choice["method"],
                    "spearman": statistics.fmean(ranks),
                    "spearman_deviation": statistics.stdev(ranks) if len(ranks) > 1 else 0.0,
                    "spearman_worst": min(ranks),
                    "rmse": statistics.fmean(r["rmse"] for r in found),
                    "rmse_relative": statistics.fmean(r["rmse"] / size for r, size in zip(found, sizes, strict=True)),
                    "mean_absolute_value": statistics.fmean(sizes),
                    "residual": statistics.fmean(r["residual"] for r in found),
                    "truth_error": max(max(t["standard_errors"]) / size for t, size in zip(truths, sizes, strict=True)),
                }
            )
    return rows


def _table(name: str, summary: list[dict[str, Any]], config: StudyConfig) -> Table:
    own = name in PAPERS_OWN
    columns = ["lr", "step", "method", "Spearman (± over seeds)", "worst", "RMSE", "RMSE / mean |value|", "residual"]
    rows = []
    for row in summary:
        spread = f"{row['spearman']:.3f} ± {row['spearman_deviation']:.3f}"
        ours = [
            spread,
            f"{row['spearman_worst']:.3f}",
            f"{row['rmse']:.1e}",
            f"{row['rmse_relative']:.2g}",
            f"{row['residual']:.2g}",
        ]
        rmse, rank = PAPER.get(row["lr"], (None, None)) if own else (None, None)
        rows.append([f"{row['lr']:g}", row["step"], row["method"], *ours, *([rank, rmse] if own else [])])
    caption = f"{config.permutations} antithetic permutations. Residual: |Σ scores − truth's total| / Σ|scores|."
    title = f"{name}: {GAMES[name]}"
    return Table(title, [*columns, *(["paper: Spearman", "RMSE"] if own else [])], rows, caption)
