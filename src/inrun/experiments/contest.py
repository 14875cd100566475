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

from inrun.bench.contestants import WARM_UP, Entry
from inrun.bench.measure import Made, keep_freed_memory, measure_made
from inrun.bench.shape import DTYPES, Shape
from inrun.experiments.ways import MIDDLE, ORDER_1, ORDER_2, Paper, Plain, Running, Scored, Task, by_autograd
from inrun.methods import METHODS

#: How far the scores of two ways may lie apart, relative to the largest, in double precision.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Perceptron:
    """A multilayer perceptron without biases, trained by plain SGD: what the paper derives its recursion for."""

    width: int = 768
    layers: int = 5
    classes: int = 10
    activation: str = "tanh"
    batch: int = 64
    validation_rows: int = 1
    dtype: str = "float32"

    def task(self) -> Task:
        """Return it as a task; inputs are drawn at random, which times do not depend on."""
        return Task(self._build, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), self._draw, self.batch, self.validation_rows)

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

    @property
    def warm_up(self) -> int:
        """Return the steps before the first that is timed."""
        return WARM_UP if self.name in METHODS else 2


def ways(counting: bool = False) -> list[Way]:
    """Return the contestants, plain training and the floor first.

    Args:
        counting: Leave out audits and checks of rows, which some steps have and others do not: for counting operations.
    """
    audits = {"audit_every": 0, "check_rows": False} if counting else {}
    meets = {"whole": MIDDLE, "step": MIDDLE, "first": ORDER_1, "second": ORDER_2}
    return [
        Way("plain", Plain),
        Way("floor", functools.partial(Plain, validation_gradient=True)),
        Way("first, ghost", functools.partial(Paper, form="gram"), ORDER_1),
        Way("second, ghost", functools.partial(Paper, order=2, form="gram"), ORDER_2),
        Way("first, paper", Paper, ORDER_1),
        Way("second, paper", functools.partial(Paper, order=2), ORDER_2),
        Way("first, direct", functools.partial(Paper, form="direct"), ORDER_1, slow=True),
        Way("second, direct", functools.partial(Paper, order=2, form="direct"), ORDER_2, slow=True),
        *(Way(m, functools.partial(Scored, options={"method": m, **audits}), meets[m]) for m in METHODS),
    ]


def agreement(trial: Trial) -> dict[str, bool]:
    """Return for every way whether its scores are those of the definition, to 1e-6 of the largest, in double precision."""
    expected = by_autograd(trial.small(), 0)
    found = {}
    for way in ways():
        if way.meets is None:
            continue
        running = way.make(trial.small())
        running.step(0)
        scores, truth = running.scores, expected[way.meets]
        found[way.name] = float((scores - truth).abs().max() / truth.abs().max()) < TOLERANCE
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
    for way in ways(counting=True):
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
    for way in ways():
        running = way.make(trial.task())
        entry = Entry(way.name, lambda shape: (lambda number: None, lambda: 0), way.slow, warm_up=way.warm_up)
        made.append((entry, running.step, running.held))
    return [r.as_dict() for r in measure_made(made, "cpu", trial.rounds, trial.slow_rounds, tell)]
