"""Forwards that leave something behind: what extra forwards leave is taken back, or refused by name. Weights tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.engine.guards import BufferGuard, LookGuard
from inrun.errors import RowOwnershipError, StepError, ValidationError

D = 6


def rows(step: int, n: int = 4) -> Tensor:
    return torch.randn(n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + step))


def squares(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def weights(
    make: Callable[[], nn.Module],
    attached: bool,
    given: Callable[[int], Any] = rows,
    loss: Callable[[nn.Module, Any], Tensor] = squares,
    steps: int = 6,
    **options: Any,
) -> list[Tensor]:
    """Train and return the weights and buffers."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"method": "midpoint", "credit": "step", **options}
    accountant = inrun.Accountant(model, optimizer, lambda m: loss(m, given(99)), **options) if attached else None
    torch.manual_seed(3)
    for step in range(steps):
        with accountant.step(range(4)) if accountant else contextlib.nullcontext():
            loss(model, given(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if accountant is not None:
        accountant.close()
    return [x.detach().clone() for x in model.state_dict().values()]


def assert_same_training(make: Callable[[], nn.Module], **options: Any) -> None:
    for plain, scored in zip(weights(make, False, **options), weights(make, True, **options), strict=True):
        assert torch.allclose(plain, scored, rtol=1e-12, atol=1e-14)


# Buffers and parameters


class LateStatistics(nn.Module):
    """Writes to a buffer after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.inner(x))
        out = self.head(z - 0.1 * self.average)
        if self.training:
            self.count += 1
            if self.count > 5:
                self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return out


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_buffer_may_be_written_to_late(mode: str) -> None:
    assert_same_training(LateStatistics, steps=10, audit_every=2, validation_mode=mode)


class Codebook(nn.Module):
    """A moving average of codes in a frozen parameter, written to without being counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            self.codes.data[nearest] = 0.9 * codes.detach() + 0.1 * z.detach()
        return self.head(z + (codes - z).detach())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_frozen_parameter_may_be_written_to(mode: str) -> None:
    assert_same_training(Codebook, audit_every=1, validation_mode=mode)


class Drifting(nn.Module):
    """Changes a weight of a layer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.inner.weight.mul_(0.99)
        return self.head(torch.tanh(self.inner(x)))


def test_a_weight_may_change_in_the_forward() -> None:
    assert_same_training(Drifting, audit_every=1)


class Clamped(nn.Module):
    """Clamps a parameter that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(D, 3), nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6)
        return self.inner(x) * self.scale.exp() * 0.01


def test_a_parameter_that_is_clamped_where_it_is_read_is_refused_by_name() -> None:
    with pytest.raises(StepError, match=r"its forward writes to scale itself.*behind optimizer\.step"):
        weights(Clamped, True)


def test_what_was_not_copied_and_is_written_is_said() -> None:
    model = LateStatistics()
    guard = BufferGuard(model.eval())
    with guard.hold():
        pass
    with pytest.raises(ValidationError, match="wrote to average.*train mode only"), guard.hold():
        model.average += 1
    look = LookGuard(model, parameters=True)
    with look.hold():
        model.inner.bias.data += 1  # around the first pass all are copied
    with look.hold():
        pass
    with pytest.raises(RowOwnershipError, match=r"writes to head\.weight"), look.hold(), torch.no_grad():
        model.head.weight += 1


def test_the_weights_under_an_adapter_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inrun.engine.guards.MOST_FROZEN", 100)
    model = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 3)).requires_grad_(False)
    guard = BufferGuard(model)
    with guard.hold():
        for p in model.parameters():
            p.data += 1
    assert len(guard.written[(True, True, True)]) == 3, "4 · (4 + 3 + 12) bytes are, 4 · 24 more are not"
