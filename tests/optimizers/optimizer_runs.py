"""Real optimizers on random gradients, step by step, with what a rule says of each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.optimizers import GroupStep, Memory, UpdateRule, find_rule

STEPS = 8
#: A matrix, a vector, a tensor with three dimensions, a number.
SHAPES = ((5, 4), (3,), (2, 3, 4), ())


class Lion(torch.optim.Optimizer):
    """Stands in for lion-pytorch's under its name, by which it is recognized."""

    def __init__(self, params, **options) -> None:
        usual = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
        super().__init__(params, {**usual, **options})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in [p for p in group["params"] if p.grad is not None]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                z = -p.grad if group["maximize"] else p.grad.clone()
                if group.get("weight_decouple", True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    z += group["weight_decay"] * p
                p.sub_(group["lr"] * torch.sign(b1 * m + (1 - b1) * z))
                m.mul_(b2).add_(z, alpha=1 - b2)


Lion.__module__ = "lion_pytorch.lion_pytorch"


@dataclass
class Seen:
    """One real step of one group, and everything needed to check what a rule says of it."""

    number: int
    rule: UpdateRule
    step: GroupStep
    parameters: list[nn.Parameter]
    moved: list[Tensor]
    counts: list[int]


@dataclass
class Push:
    """q by definition: every gradient is kept, and weighted by the recursion."""

    weights: list[float] = field(default_factory=list)
    pushes: list[Tensor] = field(default_factory=list)
    #: The largest part of the sum: what rounding is relative to where parts cancel.
    size: Tensor | None = None

    def add(self, memory: Memory, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_s κ_{t,s} z_s and Σ_s a_s z_s."""
        self.weights = [memory.keep * a for a in self.weights] + [memory.enter]
        self.pushes.append(z)
        parts = [a * x for a, x in zip(self.weights, self.pushes, strict=True)]
        self.size = torch.stack([part.abs().max() for part in parts]).max()
        held = torch.stack(parts).sum(0)
        return memory.read * held + memory.direct * z, held


def sizes(dtype: torch.dtype, shapes=SHAPES) -> list[nn.Parameter]:
    """Small weights, so that moves are not lost in the rounding of the weights."""
    torch.manual_seed(1)
    return [nn.Parameter(0.03 * torch.randn(shape, dtype=dtype)) for shape in shapes]


def run(
    make: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
    shapes=SHAPES,
    gradient: Callable[[int, nn.Parameter], Tensor] | None = None,
    schedule: bool = True,
    other_betas: bool = True,
) -> Iterator[Seen]:
    """Yield every step of a run in which learning rates and betas change and a tensor pauses twice.

    The first row of the matrix never has a gradient.
    """
    parameters = sizes(dtype, shapes)
    optimizer = make(parameters, **options)
    rule, group = find_rule(optimizer), optimizer.param_groups[0]
    lr, betas, counts = group["lr"], group.get("betas"), [0] * len(parameters)
    for t in range(steps):
        if schedule:
            group["lr"] = None if lr is None else lr * (1.0, 0.5, 1.5)[t % 3]
            if betas is not None and other_betas and t > 3:
                group["betas"] = (betas[0] * (1.0, 0.9)[t % 2], betas[1])
        for i, p in enumerate(parameters):
            p.grad = torch.randn_like(p) if gradient is None else gradient(t, p)
            if p.dim() == 2 and gradient is None:
                p.grad[0] = 0.0
            if i == 1 and t in (2, 5):
                p.grad = None
        chosen = [i for i, p in enumerate(parameters) if p.grad is not None]
        stepping = [parameters[i] for i in chosen]
        rule.before_step(group, [optimizer.state[p] for p in stepping if p in optimizer.state])
        first = [rule.remembered(optimizer.state.get(p, {})) is None for p in stepping]
        before = [p.detach().clone() for p in stepping]
        gradients = [p.grad.clone() for p in stepping]
        optimizer.step()
        for i in chosen:
            counts[i] += 1
        step = GroupStep(before, gradients, group, [optimizer.state[p] for p in stepping], first)
        moved = [w - p.detach() for w, p in zip(before, stepping, strict=True)]
        yield Seen(t, rule, step, stepping, moved, [counts[i] for i in chosen])


def snapshot(seen: Seen) -> Any:
    """Copy everything that a rule is given."""
    step = seen.step
    group = {k: v for k, v in step.group.items() if k != "params"}
    given = (step.before, step.gradients, group, [dict(s) for s in step.states], step.first)
    return copy.deepcopy((given, [p.detach() for p in seen.parameters], seen.moved))


def same(a: Any, b: Any) -> bool:
    """Compare nested containers, tensors bit for bit."""
    if isinstance(a, Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def off(got: Tensor, want: Tensor, size: Tensor | None = None) -> float:
    """Largest difference relative to the largest entry, or to a size."""
    size = want.abs().max() if size is None else size
    return float((got - want).abs().max() / size.clamp_min(1e-300))


def move_off(got: Tensor, moved: Tensor, before: Tensor) -> float:
    """The same for a move, beyond what subtracting single precision weights rounds off."""
    slack = 0.0 if before.dtype == torch.float64 else 2 * torch.finfo(before.dtype).eps
    beyond = (got - moved).abs() - slack * torch.maximum(before.abs(), (before - moved).abs())
    return float(beyond.max().clamp_min(0.0) / moved.abs().max().clamp_min(1e-300))


def factors(seen: Seen) -> list[Tensor]:
    """A as tensors."""
    factor = seen.rule.factor(seen.step)
    if isinstance(factor, list):
        return factor
    return [torch.full_like(w, factor) for w in seen.step.before]
