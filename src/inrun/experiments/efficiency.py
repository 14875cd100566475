"""What scoring costs: the paper's throughput table on a scaled GPT-2, and on the perceptron that its ghost recursion is given for.

Times are means over interleaved steps (``inrun.bench``) and stand in ``timings.json`` and the tables; ``results.json`` has what
does not depend on the machine: whether all ways agree, in double precision, and the operations in their matrix products.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inrun.bench.shape import Shape
from inrun.experiments.contest import TOLERANCE, Perceptron, Trial, agreement, operations, timings
from inrun.experiments.recipes import Findings, Table, Work
from inrun.fidelity.picture import pyplot

#: Samples per second of GPT-2 small on an A100, the paper's table.
PAPER = {"plain": 76.2, "first, ghost": 70.5, "second, ghost": 34.4, "first, direct": 4.2, "second, direct": 1.8}


NOTES = (
    "Paper: GPT-2 small (124M parameters) on an A100; its samples per second are not comparable with ours, ratios are. Times "
    "here: one CPU core, mean step of interleaved rounds. 'floor' is plain training that also takes the gradient of the "
    "validation rows at every step. Tokens and inputs are drawn at random, and seeds play no part.",
    "'ghost', 'paper' and 'direct' are inrun.paper, the paper's own algorithms: products of positions with positions for every "
    "layer, the cheaper form for each layer, and one backward per sample. The others are the methods of the accountant.",
    "One row keeps a CPU core busy, not a GPU: the paper's factor of 18 for direct first order is that of a GPU.",
    "Operations are those of matrix products; what a way takes beyond them is memory traffic, elementwise work and Python.",
)
COLUMNS = (
    "way",
    "paper, samples/s",
    "of plain",
    "ours, samples per CPU second",
    "of plain (CPU)",
    "of plain (wall)",
    "of floor (CPU)",
    "operations, of plain",
    "peak memory over plain, MB",
    "scores meet the definition",
)
#: Wall time over CPU time of plain training beyond which the core was not ours alone.
SHARED = 1.2


@dataclass(frozen=True)
class EfficiencyConfig:
    """What is timed."""

    trials: tuple[Trial, ...]


#: GPT-2 with a sixth of its width, a third of its layers, an eighth of its positions and its batch: 1.1M parameters for 124M.
_SCALED = Shape(width=128, heads=4, layers=4, context=128, vocab=2048)
SIZES = {
    "smoke": EfficiencyConfig(
        (
            Trial("gpt", Shape(width=16, heads=2, layers=1, context=16, vocab=64, batch=4), 2, 1),
            Trial("mlp", Perceptron(width=32, layers=3, batch=8), 2, 1),
        )
    ),
    "quick": EfficiencyConfig((Trial("gpt", _SCALED, 50, 2), Trial("mlp", Perceptron(width=256), 50, 3))),
    "full": EfficiencyConfig((Trial("gpt", _SCALED, 50, 4), Trial("mlp", Perceptron(), 50, 3))),
}


def run(config: EfficiencyConfig, work: Work) -> Findings:
    """Compare, count and time."""
    facts, measured, tables = {}, {}, []
    for trial in config.trials:
        work.tell(f"{trial.name}: do all ways agree?", 0, 1)
        found = work.cell({"model": trial.name, "trial": trial, "part": "facts"}, functools.partial(_facts, trial))
        lines = work.cell({"model": trial.name, "trial": trial, "part": "times"}, functools.partial(timings, trial, work.tell))
        facts[trial.name] = {"scale": _scale(trial), **found}
        measured[trial.name] = lines
        tables.append(_table(trial, found, lines))
    agreed = all(ok for found in facts.values() for ok in found["agrees"].values())
    met = f"Every way meets its definition in the game of plain SGD to {TOLERANCE:g} (double precision, tiny model): {agreed}."
    notes = [*NOTES, met]
    return Findings({"trials": facts, "paper": PAPER}, tables, notes, measured, functools.partial(_draw, measured))


def _facts(trial: Trial) -> dict[str, Any]:
    return {"agrees": agreement(trial), "flops": operations(trial)}


def _scale(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial.shape), "parameters": sum(p.numel() for p in trial.task().build().parameters())}


def _table(trial: Trial, facts: dict[str, Any], lines: list[dict[str, Any]]) -> Table:
    mlp, scale = isinstance(trial.shape, Perceptron), _scale(trial)
    base, rows = lines[0]["peak_bytes"], []
    for line in lines:
        name, paper = line["name"], PAPER.get(line["name"])
        rows.append(
            [
                name,
                None if mlp else paper,
                None if mlp or paper is None else round(paper / PAPER["plain"], 3),
                round(scale["batch"] / line["cpu_seconds"], 1),
                round(line["relative_cpu"], 3),
                round(line["relative"], 3),
                round(line["of_floor_cpu"], 3),
                round(facts["flops"][name] / facts["flops"]["plain"], 3),
                f"{(line['peak_bytes'] - base) / 1e6:+.0f}",
                {True: "yes", False: "NO", None: ""}[facts["agrees"].get(name)],
            ]
        )
    about = ", ".join(f"{k} {v}" for k, v in scale.items() if k not in ("model", "seed", "device"))
    caption = f"Shape: {about}. Mean of {trial.rounds} steps ({trial.slow_rounds} for direct)."
    stretch = lines[0]["seconds"] / lines[0]["cpu_seconds"]
    if stretch > SHARED:
        caption += f" Other jobs shared the core: plain training took {stretch:.1f} times its CPU time, so read the CPU columns."
    return Table(f"Throughput: {trial.name}", COLUMNS, rows, caption)


def _draw(measured: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw throughput relative to plain training, with the paper's beside it."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(measured), figsize=(5.2 * len(measured), 4.6), squeeze=False, layout="constrained")
    for axis, (name, lines) in zip(axes.flat, measured.items(), strict=True):
        names = [line["name"] for line in lines]
        places = range(len(names))
        paper = [] if name == "mlp" else [(k, PAPER.get(n)) for k, n in enumerate(names)]
        axis.barh(list(places), [line["relative_cpu"] for line in lines], color="#1f6f8b", label="here, one core")
        seen = [(k, value / PAPER["plain"]) for k, value in paper if value is not None]
        if seen:
            axis.plot([x for _, x in seen], [k for k, _ in seen], "D", color="#c2571a", ms=6, label="paper, GPT-2 on an A100")
        axis.set_yticks(list(places), names, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color="0.6", lw=0.8)
        axis.set_xlabel("samples per CPU second, of plain training", fontsize=9)
        axis.set_title(name, fontsize=11)
        axis.tick_params(axis="x", labelsize=8)
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
