"""Forwards that write to weights, buffers and batches, and hooks that collect: training is that without scores."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from inrun.engine import Accountant
from inrun.engine.options import Options
from inrun.errors import ValidationError
from loops import METHODS, distance
from reference import gradients, relative_error, sample_gradients

D = 6
EVERY = pytest.mark.parametrize("method", ["whole", "step", "first", "second"])


def rows(step: int, n: int = 4) -> Tensor:
    return torch.randn(n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + step))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def weights(
    make: Callable[[], nn.Module], method: str | None, given: Callable[[int], Any], loss: Any, mode: str, **options: Any
) -> list[Tensor]:
    """Train and return weights and buffers."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options |= {**METHODS.get(method or "", {}), "audit_every": 1, "options": Options(validation_mode=mode)}
    accountant = Accountant(model, optimizer, lambda m: loss(m, given(99)), **options) if method else None
    torch.manual_seed(3)
    for step in range(8):
        with accountant.step(range(4)) if accountant else contextlib.nullcontext():
            loss(model, given(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    loss(model, given(8))  # what a forward makes of weights, it makes of them wherever it runs last
    return [x.detach().clone() for x in model.state_dict().values()]


def assert_same_training(
    make: Callable[[], nn.Module], method: str, given: Any = rows, loss: Any = squares, mode: str = "eval", near: float = 1e-12
) -> None:
    plain, scored = (weights(make, m, given, loss, mode, bitwise=True) for m in (None, method))
    assert all(torch.equal(a, b) or distance(b, a) < near for a, b in zip(plain, scored, strict=True))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)


class LateStatistics(Base):
    """Writes to a buffer after a warm-up."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.inner(x))
        out = self.head(z - 0.1 * self.average)
        if self.training:
            self.count += 1
            if self.count > 5:
                self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return out


class Codebook(Base):
    """A moving average of codes in a frozen parameter, written to without being counted."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            self.codes.data[nearest] = 0.9 * codes.detach() + 0.1 * z.detach()
        return self.head(z + (codes - z).detach())


class Drifting(Base):
    """Changes a weight of a layer in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.inner.weight.mul_(0.99)
        return self.head(torch.tanh(self.inner(x)))


class Projected(Base):
    """Gives a parameter other memory: also where weights are held elsewhere to validate."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data = self.inner.weight.detach().clamp(-0.3, 0.3)
        return self.head(self.inner(x))


class Clamped(Base):
    """Clamps a parameter that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.bias.clamp_(-0.1, 0.1)
        return self.head(self.inner(x)) * self.head.bias.exp()


@EVERY
@pytest.mark.parametrize("make", [LateStatistics, Codebook, Drifting, Projected, Clamped])
def test_forwards_may_write_to_buffers_and_parameters(make: Callable[[], nn.Module], method: str) -> None:
    assert_same_training(make, method)


def test_a_validation_pass_in_training_mode_that_writes_late_is_refused() -> None:
    """What it overwrote was not copied: all buffers are around the first pass, later those that one wrote to."""
    with pytest.raises(ValidationError, match="wrote to average.*train mode only"):
        weights(LateStatistics, "first", rows, squares, "train")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


@EVERY
def test_validation_in_training_mode_leaves_training_alone(method: str) -> None:
    """Batch norm's kernel writes its statistics without counting: they must come back all the same."""
    assert_same_training(Noisy, method, mode="train")


class Normalised(nn.Module):
    """A weight that is made once for two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


@EVERY
def test_forwards_may_run_with_cached_parametrisations(method: str) -> None:
    def cached(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return squares(model, x)

    assert_same_training(Normalised, method, loss=cached)


def reparametrised(kind: str) -> nn.Module:
    first = nn.Linear(D, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "weight norm":
            nn.utils.weight_norm(first)
        elif kind == "spectral norm":
            nn.utils.spectral_norm(first)
        else:
            nn.utils.prune.random_unstructured(first, "weight", 0.3)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3))


@EVERY
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "pruned"])
def test_reparametrisations_by_hooks_train_as_without_scores(kind: str, method: str) -> None:
    assert_same_training(lambda: reparametrised(kind), method)


@pytest.mark.parametrize("kind", ["weight norm", "pruned"])
def test_reparametrisations_by_hooks_are_scored(kind: str) -> None:
    torch.manual_seed(0)
    model = reparametrised(kind).double()
    params, x = [p for p in model.parameters() if p.requires_grad], rows(0)
    each = sample_gradients(lambda j: model(x[j : j + 1]).square().sum(), 4, params)
    slope = gradients(squares(model, rows(9)), params)
    truth = 0.1 * torch.stack([sum((a * b).sum() for a, b in zip(g, slope, strict=True)) for g in each])
    optimizer = torch.optim.SGD(params, lr=0.1)
    with Accountant(model, optimizer, lambda m: squares(m, rows(9)), method="first", audit_every=1) as accountant:
        with accountant.step(range(4)):
            model(x).square().sum().backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


# What forwards are given


class Takes(nn.Module):
    """Takes what it is given apart."""

    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.take = nn.Linear(D, 3), take

    def forward(self, batch: Any) -> Tensor:
        return torch.tanh(self.inner(self.take(batch)))


GIVEN: dict[str, tuple[Callable[[Any], Tensor], Callable[[int], Any]]] = {
    "popped": (lambda b: b["x"] - b.pop("y"), lambda k: {"x": rows(k), "y": rows(k + 100)}),
    "consumed": (lambda b: b.pop(0) - b.pop(), lambda k: [rows(k), rows(k + 100)]),
    "in place": (lambda x: x.mul_(2).sub_(1), rows),
    "in place, uncounted": (lambda x: x.data.mul_(2), rows),
    "an iterator": (lambda b: b[0] * next(b[1]), lambda k: (rows(k), iter([1.0, 2.0]))),
}


@pytest.mark.parametrize("method", ["whole", "first"])
@pytest.mark.parametrize("name", GIVEN)
def test_forwards_may_take_their_batch_apart(name: str, method: str) -> None:
    """They run once."""
    take, given = GIVEN[name]
    assert_same_training(lambda: Takes(take), method, given=given)


@pytest.mark.parametrize("method", ["whole", "first"])
def test_what_hooks_collect_is_of_the_training_forward(method: str) -> None:
    """Features that are collected in a list and used up with the loss, in validation, too."""
    held: list[list[Tensor]] = []

    def make() -> nn.Module:
        model, found = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3)), []
        held[:] = [found]
        model[1].register_forward_hook(lambda m, args, out: found.append(out))
        return model

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = squares(model, x) + torch.stack([f.mean() for f in held[0]]).mean()
        held[0].clear()
        return total

    assert_same_training(make, method, loss=loss)


class Cast(nn.Module):
    """A forward that turns autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_a_decorated_forward_leaves_autocast_off() -> None:
    model, x = Cast(), rows(0).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Accountant(model, optimizer, lambda m: m(x[:1]).float().square().sum(), audit_every=1) as accountant:
        for _ in range(2):
            with accountant.step(range(4)):
                model(x).float().square().sum().backward()
                assert not torch.is_autocast_enabled("cpu")
                optimizer.step()
                optimizer.zero_grad()
    assert not torch.is_autocast_enabled("cpu")
