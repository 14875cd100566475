"""Gradient that flows through no row is seen in bfloat16, too; rounding alone is not taken for it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.errors import ConservationError, CreditError
from inrun.training.gpt import GPT, GPTConfig, next_token_loss

V, D, N, T = 50, 32, 16, 8


class RawHead(nn.Module):
    """A tied head that is multiplied without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.inner.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.table(tokens))), self.table.weight)


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_without_its_module_is_seen(dtype: torch.dtype) -> None:
    model = RawHead().to(dtype)
    optimizer = torch.optim.SGD([model.table.weight], lr=0.1)
    drawn = [torch.randint(0, V, (N, T)) for _ in range(4)]
    validation = lambda m: loss_of(m, *drawn[2:])  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, validation, method="first", update="sgd", audit_every=1)
    with pytest.raises(ConservationError, match=r"table\.weight: contributions sum to"):
        with accountant.step(range(N)):
            loss_of(model, *drawn[:2]).backward()
            optimizer.step()


@pytest.mark.parametrize("condition", ["weights", "autocast"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_rounding_alone_passes(condition: str, microbatches: int) -> None:
    model = GPT(GPTConfig(vocab=300, context=T * 4, width=64, layers=2, heads=2))
    model = model.to(torch.bfloat16 if condition == "weights" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    held = torch.randint(0, 300, (4, T * 4))

    def loss(m: nn.Module, rows: Tensor) -> Tensor:
        on = torch.autocast("cpu", torch.bfloat16) if condition == "autocast" else contextlib.nullcontext()
        with on:
            return next_token_loss(m, rows)

    accountant = inrun.Accountant(model, optimizer, lambda m: loss(m, held), method="first", update="sgd", audit_every=1)
    for _ in range(3):
        with accountant.step() as step:
            for _ in range(microbatches):
                with step.microbatch(range(N)):
                    (loss(model, torch.randint(0, 300, (N, T * 4))) / microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert accountant.last.skipped is None


@pytest.mark.parametrize("method", ["first", "midpoint"])
@pytest.mark.parametrize("seed", [1, 2])
def test_rounding_alone_passes_in_adams_first_step(seed: int, method: str) -> None:
    """There v = η/|G| ∘ ∇ℓ: where samples cancel in G, the rounding of each counts for much."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab=1024, context=64, width=64, layers=2, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held, rows = torch.randint(0, 1024, (1, 64)), torch.randint(0, 1024, (64, 64))

    def loss(m: nn.Module, some: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(m, some)

    with inrun.Accountant(model, optimizer, lambda m: loss(m, held), method=method, credit="step", audit_every=1) as accountant:
        for _ in range(2):
            with accountant.step(range(N)):
                loss(model, rows[torch.randint(0, 64, (N,))]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert accountant.last.skipped is None


def test_control_a_head_without_its_module_is_seen_under_adam_and_autocast() -> None:
    torch.manual_seed(0)
    model = RawHead()
    optimizer = torch.optim.AdamW([model.table.weight], lr=1e-3)
    drawn = [torch.randint(0, V, (N, T)) for _ in range(4)]

    def loss(m: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m, tokens, labels)

    options = {"method": "midpoint", "credit": "step", "audit_every": 1}
    accountant = inrun.Accountant(model, optimizer, lambda m: loss(m, *drawn[2:]), **options)
    with pytest.raises(ConservationError, match=r"table\.weight: contributions sum to"):
        for _ in range(4):
            with accountant.step(range(N)):
                loss(model, *drawn[:2]).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("penalty", [0.0, 1e-4])
@pytest.mark.parametrize("loss_scale", [1.0, 1000.0])
@pytest.mark.parametrize("game", [{"method": "first"}, {"method": "midpoint"}, {"credit": "whole"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_cancel_are_no_lost_gradient(
    dtype: torch.dtype, game: dict[str, str], loss_scale: float, penalty: float
) -> None:
    """A head that begins at zero, and as many samples of each class: next to no gradient at its bias, and much of each sample.

    The control is a penalty of a few thousandths of what a sample pushes.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 2).to(dtype)
    with torch.no_grad():
        model.weight.mul_(1e-3)
        model.bias.zero_()
    x, y, towards = 1e-3 * torch.randn(16, 5, dtype=dtype), torch.arange(16) % 2, torch.tensor([penalty, -penalty], dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / loss_scale)
    held_out = lambda m: F.cross_entropy(m(x[:3]), y[:3])  # noqa: E731
    refused = pytest.raises((ConservationError, CreditError), match="bias") if penalty else contextlib.nullcontext()
    with inrun.Accountant(model, optimizer, held_out, audit_every=1, **game) as accountant, refused:
        for _ in range(2):
            with accountant.step(range(16)):
                (loss_scale * (F.cross_entropy(model(x), y) + model.bias @ towards)).backward()
                optimizer.step()
                optimizer.zero_grad()
