"""Small training loops for tests of the engine: a model, an accountant made in one way, steps, and the credits that they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine import Accountant

#: All methods, and both memories of whole credit: the small sketch is lossy in the smallest models, too.
METHODS: dict[str, dict[str, Any]] = {
    "whole": {"method": "whole", "sketch": 64},
    "exact": {"method": "whole", "sketch": "exact"},
    "step": {"method": "step"},
    "first": {"method": "first"},
    "second": {"method": "second"},
}


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self, inputs: int = 4, hidden: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def perceptron(dtype: torch.dtype = torch.float64, seed: int = 0) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron().to(dtype)


def points(n: int, seed: int, size: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def losses(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return a loss per row."""
    out = model(x)
    return out.square().mean(1) + 0.3 * out.sin().sum(1)


def held_out(model: Callable[..., Tensor]) -> Tensor:
    """Return the validation loss of perceptrons."""
    weight = next(model.parameters())
    return losses(model, points(3, 99, weight.shape[-1], weight.dtype)).mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9} | options))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.01, "weight_decay": 0.1} | options))


def attach(model: nn.Module, optimizer: Any = None, validation: Any = held_out, **options: Any) -> Accountant:
    return Accountant(model, sgd(model) if optimizer is None else optimizer, validation, **({"audit_every": 0} | options))


def run_step(
    accountant: Accountant,
    loss: Callable[[], Tensor],
    ids: Any,
    between: Callable[[], Any] = lambda: None,
    set_to_none: bool = True,
) -> Tensor:
    """Train one step on a loss; ``between`` is called before the optimizers step. Return its contributions."""
    with accountant.step(ids):
        loss().backward()
        between()
        for optimizer in accountant._run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return next(iter(accountant.last.contributions.values())).clone()


def train(accountant: Accountant, steps: Iterable[int], n: int = 4, **options: Any) -> list[Tensor]:
    """Train a perceptron on the mean loss of n points per step; ids are those of the step's number."""
    model = accountant.model
    weight = next(model.parameters())
    found = []
    for t in steps:
        x = points(n, t, weight.shape[-1], weight.dtype)
        found.append(run_step(accountant, lambda x=x: losses(model, x).mean(), range(100 * t, 100 * t + n), **options))
    return found


def open_credits(accountant: Accountant) -> Tensor:
    """Return the credits of all uses that are not settled, in full precision: the oldest first, ``[uses, k]``."""
    window = accountant._run.scorer.window
    if window is None or not window.slots:
        return torch.zeros(0, 1, dtype=torch.float64)
    return torch.cat([window.credits_of(slot) for slot in window.slots]).double().cpu()


def scores_by_id(accountant: Accountant, validation: str | None = None) -> dict[int, float]:
    """Close, and return the score of every sample."""
    accountant.close()
    table = accountant.scores(validation=validation)
    return dict(zip(table["sample_id"].to_pylist(), table["score"].to_pylist(), strict=True))


def distance(got: Sequence[Tensor] | Tensor, expected: Sequence[Tensor] | Tensor) -> float:
    """Return the largest difference of a step, relative to the norm of the step that was expected."""
    some, others = ([x] if isinstance(x, Tensor) else x for x in (got, expected))
    off = [0.0]
    for a, b in zip(some, others, strict=True):
        off.append(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)) if b.numel() else 0.0)
    return max(off)
