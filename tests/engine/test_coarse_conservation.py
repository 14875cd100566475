"""Gradient that flows through no row is seen in bfloat16, too; rounding alone is not taken for it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.errors import ConservationError
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
