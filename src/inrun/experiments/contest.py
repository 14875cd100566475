"""The contestants of the efficiency experiment: on which models, whether they agree, what they count, how long they take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from inrun.bench.contestants import SCORED, Entry
from inrun.bench.measure import Made, keep_freed_memory, measure_made
from inrun.bench.shape import DTYPES, Shape
from inrun.experiments.ways import (
    MIDDLE,
    ORDER_1,
    ORDER_2,
    ByHand,
    DirectFirst,
    DirectSecond,
    Merged,
    Plain,
    Running,
    Scored,
    Task,
    by_autograd,
)
from inrun.methods import METHODS

#: How far the scores of two ways may lie apart, relative to the largest, in double precision.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Perceptron:
    """A multilayer perceptron without biases, trained by plain SGD: what the paper's recursion is derived for."""

    width: int = 768
    layers: int = 5
    classes: int = 10
    activation: str = "tanh"
    batch: int = 64
    validation_rows: int = 1
    dtype: str = "float32"

    def task(self) -> Task:
        """Return it as a task; inputs are drawn at random, which times do not depend on."""
        return Task(self._build, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), self._draw, self.batch, self.validation_rows,
                    activation=self.activation)  # fmt: skip

    def _build(self) -> nn.Module:
        torch.manual_seed(0)
        act = {"tanh": nn.Tanh, "relu": nn.ReLU}[self.activation]
        hidden = [x for _ in range(self.layers - 1) for x in (nn.Linear(self.width, self.width, bias=False), act())]
        return nn.Sequential(*hidden, nn.Linear(self.width, self.classes, bias=False)).to(DTYPES[self.dtype])

    def _draw(self, rows: int, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number + 1)
        inputs = torch.randn(rows, self.width, generator=generator, dtype=DTYPES[self.dtype])
        return inputs, torch.randint(0, self.classes, (rows,), generator=generator)


def gpt_task(shape: Shape) -> Task:
    """Return the GPT of a bench as a task."""

    def draw(rows: int, number: int) -> tuple[Tensor, Tensor]:
        tokens = shape.rows(rows, number)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(shape.build, shape.make_optimizer, draw, shape.batch, shape.validation_rows, shape.clip)


@dataclass(frozen=True)
class Trial:
    """A model and how often it is timed."""

    name: str
    shape: Shape | Perceptron
    rounds: int
    slow_rounds: int
    #: Steps of whole credit before the clock starts: 44 fill its window at β₁ = 0.9; None leaves whole credit out.
    window: int | None = 0

    def task(self) -> Task:
        """Return what is trained."""
        return self.shape.task() if isinstance(self.shape, Perceptron) else gpt_task(self.shape)

    def small(self) -> Task:
        """Return the same kind of model, tiny, in double precision, with plain SGD and no clipping: where scores are compared."""
        if isinstance(self.shape, Perceptron):
            return replace(self.shape, width=24, layers=4, batch=6, validation_rows=2, dtype="float64").task()
        tiny = replace(self.shape, width=16, layers=2, heads=2, context=12, vocab=40, batch=5, validation_rows=2)
        return gpt_task(replace(tiny, optimizer="sgd", clip=None, dtype="float64"))


@dataclass(frozen=True)
class Way:
    """A contestant."""

    name: str
    make: Callable[[Task], Running]
    #: The definition that its scores must meet in the game of plain SGD.
    meets: str | None = None
    slow: bool = False


def ways(trial: Trial, counting: bool = False) -> list[Way]:
    """Return the contestants, plain training and the limit first.

    Args:
        trial: The model.
        counting: Leave out audits and checks of rows, which some steps have and others do not: for counting operations.
    """
    audits = {"audit_every": 0, "check_rows": False} if counting else {}
    ghosts = [Way("first, ghost", lambda task: Merged(task, {"form": "gram", **audits}), ORDER_1)]
    if isinstance(trial.shape, Perceptron):
        ghosts = [
            Way("plain, by hand", ByHand),
            Way("first, ghost by hand", lambda task: ByHand(task, 1), ORDER_1),
            *ghosts,
            Way("second, ghost", lambda task: ByHand(task, 2), ORDER_2),
        ]
    whole = Way("whole credit", lambda task: Scored(task, {"credit": "whole", **audits}), MIDDLE)
    return [
        Way("plain", Plain),
        Way("limit", lambda task: Plain(task, task.validation_rows)),
        *ghosts,
        Way("first, direct", DirectFirst, ORDER_1, slow=True),
        Way("second, direct", DirectSecond, ORDER_2, slow=True),
        Way("first, merged", lambda task: Merged(task, audits), ORDER_1),
        *_ours(isinstance(trial.shape, Perceptron), audits),
        *([] if trial.window is None else [whole]),
    ]


def _ours(sgd: bool, options: dict[str, Any]) -> list[Way]:
    """Return one line per registered method and update: those of `inrun bench`, and the paper's proxy where it makes sense."""
    lines = []
    for method in METHODS.values():
        updates = ["sgd"] if not method.points and "sgd" not in method.refuses else []
        real = "sgd" if sgd else "secant"
        updates += [real if update == "real" else update for update in method.benchmarked_with]
        meets = MIDDLE if method.points else ORDER_2 if method.deferred else ORDER_1
        for update in dict.fromkeys(update for update in updates if update == "sgd" or not sgd):
            chosen = {"method": method.name, "update": update, **options}
            lines.append(Way(f"{method.name}+{update}", functools.partial(Scored, options=chosen), meets))
    return lines


def agreement(trial: Trial) -> dict[str, bool]:
    """Return for every way whether its scores are those of the definition, to 1e-6 of the largest, in double precision."""
    expected = by_autograd(trial.small(), 0)
    found = {}
    for way in ways(trial):
        if way.meets is None:
            continue
        running = way.make(trial.small())
        running.step(0)
        truth = expected[way.meets]
        found[way.name] = float((running.scores - truth).abs().max() / truth.abs().max()) < TOLERANCE
    return found


def _product_flops(into: Any, left: tuple[int, ...], right: tuple[int, ...], **others: Any) -> int:
    """A product ``[.., p, t]`` · ``[.., t, q]``: a multiplication and an addition for every entry of the left factor and column."""
    return 2 * math.prod(left) * right[-1]


#: Products that are added in place, which torch's own table leaves out.
IN_PLACE = {torch.ops.aten.addmm_: _product_flops, torch.ops.aten.baddbmm_: _product_flops}


def operations(trial: Trial) -> dict[str, int]:
    """Return the floating-point operations in matrix products of one step (the second), as torch counts them.

    Elementwise work, dot products and look-ups are not among them; attention is counted as the products it consists of.
    """
    found = {}
    for way in ways(trial, counting=True):
        running = way.make(trial.task())
        running.step(0)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            running.step(1)
        found[way.name] = int(counter.get_total_flops())
    return found


def timings(trial: Trial, tell: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Time all ways in interleaved rounds."""
    keep_freed_memory()
    made: list[Made] = []
    for way in ways(trial):
        running = way.make(trial.task())
        for number in range(trial.window or 0 if way.name == "whole credit" else 0):
            tell(f"{trial.name}: filling the window of whole credit", number, trial.window or 0)
            running.step(number)
        offset = trial.window or 0  # ids must not come twice in whole credit's window
        step = functools.partial(_later, running, offset)
        entry = Entry(way.name, lambda shape: (lambda number: None, lambda: 0), way.slow, warm_up=2 if way.slow else SCORED)
        made.append((entry, step, running.held))
    return [r.as_dict() for r in measure_made(made, "cpu", trial.rounds, trial.slow_rounds, tell)]


def _later(running: Running, offset: int, number: int) -> None:
    running.step(offset + number)
