"""Losses and layers that couple rows: a sample's share is what flows through its own rows, and it is said once what that means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from reference import relative_error

N, D, RATE = 5, 4, 0.1


class Towers(nn.Module):
    """Two views of every sample, embedded; optionally their similarities, which are what in-batch negatives are made of."""

    def __init__(self, similarities: bool, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else None
        self.similarities = similarities

    def embed(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden if self.norm is None else self.norm(hidden)))

    def forward(self, x: Tensor) -> Any:
        a, b = self.embed(x[:, 0]), self.embed(x[:, 1])
        return a @ b.t() if self.similarities else (a, b)


def contrastive(out: Any) -> Tensor:
    logits = out if isinstance(out, Tensor) else out[0] @ out[1].t()
    return F.cross_entropy(logits, torch.arange(len(logits)))


def with_copies(model: Towers, x: Tensor) -> list[Tensor]:
    """The gradient with one copy of every parameter per row: what row n's copy gets is row n's share."""
    copies = {k: p.detach().expand(len(x), *p.shape).clone().requires_grad_() for k, p in model.named_parameters()}

    def linear(name: str, rows: Tensor) -> Tensor:
        return torch.einsum("noi,ni->no", copies[f"{name}.weight"], rows) + copies[f"{name}.bias"]

    def embed(rows: Tensor) -> Tensor:
        hidden = linear("first", rows)
        if model.norm is not None:
            hidden = F.batch_norm(hidden, None, None, training=True) * copies["norm.weight"] + copies["norm.bias"]
        return linear("last", torch.tanh(hidden))

    loss = contrastive((embed(x[:, 0]), embed(x[:, 1])))
    return list(torch.autograd.grad(loss, list(copies.values())))


@pytest.mark.parametrize(("similarities", "norm"), [(False, False), (True, False), (False, True)])
def test_shares_of_coupled_rows(similarities: bool, norm: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Towers(similarities, norm).double()
    x, other = torch.randn(2, N, 2, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    val = lambda m: contrastive(m(other))  # noqa: E731
    model.eval()
    slopes = torch.autograd.grad(val(model), list(model.parameters()))
    model.train()
    shares = with_copies(model, x)
    want = RATE * sum((g * v).reshape(N, -1).sum(1) for g, v in zip(shares, slopes, strict=True))
    with caplog.at_level(logging.WARNING, logger="inrun"):
        accountant = inrun.Accountant(model, optimizer, val, credit="step", method="first", audit_every=1)
        for step in range(2):
            with accountant.step(range(N)):
                contrastive(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 0:
                assert relative_error(accountant.last.contributions["validation"], want) < 1e-9
    said = [record.getMessage() for record in caplog.records if "own rows" in record.getMessage()]
    assert len(said) == (similarities or norm)
    # A loss outside the model is seen by nobody: the control.
    assert not (said and not similarities and not norm)


@pytest.mark.parametrize("options", [{"credit": "whole"}, {"credit": "step", "method": "midpoint"}])
def test_shares_add_up_in_other_games(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Callable[[Tensor], Any] = Towers(True).double()
    x, other = torch.randn(2, N, 2, D, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, lambda m: contrastive(m(other)), audit_every=1, **options)
    for _ in range(3):
        with accountant.step(range(N)):
            contrastive(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    account = accountant.last.accounts["validation"]
    assert abs(account.residual) < 0.05 * account.spread
