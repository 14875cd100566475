"""Scoring must not change training."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, validation


def train(score: bool, credit: str = "step", **options) -> tuple[dict, torch.Tensor]:
    model = tiny(dropout=0.2, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    accountant = (
        inrun.Accountant(model, optimizer, {"a": validation(), "b": validation(5, 1)}, credit=credit, **options) if score else None
    )
    torch.manual_seed(7)
    for step in range(30):
        rows = batch(5, step)

        def update(rows=rows):
            next_token_loss(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        if accountant is None:
            update()
        else:
            with accountant.step(range(5)):
                update()
    return model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("credit", [{}, {"credit": "whole"}, {"credit": "whole", "credit_memory": "exact"}])
def test_bitwise_mode_gives_the_same_bits_with_dropout(credit: dict) -> None:
    plain, random_plain = train(False)
    scored, random_scored = train(True, bitwise=True, audit_every=1, **credit)
    assert all(torch.equal(plain[k], scored[k]) for k in plain)
    assert torch.equal(random_plain, random_scored)


class Reading(nn.Module):
    """A table of positions that a norm works on before it meets the samples, and parameters that are read, in ``kind``'s way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(11, 6), nn.Embedding(6, 6), nn.LayerNorm(6)
        self.scale, self.token, self.mask = (nn.Parameter(torch.rand(*size) + 0.5) for size in ((6,), (1, 1, 6), (1, 1, 6, 6)))
        self.inner, self.head, self.kind = nn.Linear(6, 6), nn.Linear(6, 11), kind

    def forward(self, rows: Tensor) -> Tensor:
        x = self.inner(self.words(rows))
        if self.kind == "norm of a table":
            x = x + self.norm(self.places(torch.arange(6)))
        elif self.kind == "scale":
            x = (x * self.scale.exp() + self.scale).tanh_()
        elif self.kind == "in place":
            x *= self.scale
        elif self.kind == "power":
            x = self.scale ** x.tanh()
        elif self.kind == "token":
            x = x * torch.cat([self.token.expand(len(x), -1, -1), x], 1)[:, :1]
        else:
            y = x.unsqueeze(1)
            x = F.scaled_dot_product_attention(y, y, y, attn_mask=self.mask, dropout_p=0.3 * self.training).squeeze(1)
        return self.head(x)


@pytest.mark.parametrize("kind", ["norm of a table", "scale", "in place", "power", "token", "mask"])
@pytest.mark.parametrize("credit", ["step", "whole"])
def test_bitwise_mode_gives_the_same_bits_where_parameters_are_read(kind: str, credit: str) -> None:
    """Sums over the copies of a parameter would round in another order than the framework's."""
    finals = []
    for scored in (False, True):
        torch.manual_seed(0)
        model = Reading(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = lambda m, rows: F.cross_entropy(m(rows).flatten(0, 1), rows.flatten())  # noqa: E731
        held, used = torch.randint(0, 11, (3, 6)), []
        options = {"credit": credit, "bitwise": True, "audit_every": 1}
        accountant = inrun.Accountant(model, optimizer, lambda m: loss(m, held), **options) if scored else None  # noqa: B023
        torch.manual_seed(7)
        for step in range(3):
            rows = torch.randint(0, 11, (7, 6), generator=torch.Generator().manual_seed(step))
            with accountant.step(range(7)) if accountant else contextlib.nullcontext():
                loss(model, rows).backward()
                used += [p.grad for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        finals.append([*used, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


@pytest.mark.parametrize("credit", ["step", "whole"])
@pytest.mark.parametrize("form", ["auto", "shared", "project"])
def test_default_mode_gives_the_same_weights_to_rounding(form: str, credit: str) -> None:
    plain, random_plain = train(False)
    scored, random_scored = train(True, form=form, credit=credit)
    for k in plain:
        torch.testing.assert_close(plain[k], scored[k], rtol=1e-4, atol=2e-5)
    assert torch.equal(random_plain, random_scored)


class Noisy(nn.Module):
    """Writes to buffers and draws random numbers in every forward, in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        random.random()
        np.random.rand()
        torch.rand(1)
        return self.norm(self.layer(x))


def test_validation_pass_leaves_no_trace() -> None:
    model = Noisy().double()
    model.norm.eval()  # a user who keeps one module in eval mode
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4, dtype=torch.float64)
    modes_inside = []

    def loss(m):
        modes_inside.append([k.training for k in m.modules()])
        return m(x[:1]).square().sum()

    accountant = inrun.Accountant(model, optimizer, loss, credit="step")
    model(x).square().sum().backward()
    marks = [p.grad.clone() for p in model.parameters()]
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    flags = [m.training for m in model.modules()]
    for _ in range(2):
        with pytest.raises(KeyError), accountant.step():
            raise KeyError
    assert not any(any(row) for row in modes_inside)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
    assert flags == [m.training for m in model.modules()]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), marks, strict=True))


def test_validation_mode_train_keeps_dropout() -> None:
    model = tiny(dropout=0.5)
    seen = []

    def loss(m):
        seen.append(m.training)
        return next_token_loss(m, batch(1, 0))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, loss, validation_mode="train", credit="step")
    with pytest.raises(KeyError), accountant.step():
        raise KeyError
    assert seen == [True]


def test_close_restores_every_forward() -> None:
    model = tiny()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    classes = [type(m) for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), credit="step")
    assert [type(m) for m in model.modules()] != classes
    accountant.close()
    accountant.close()
    after = {name: dict(m.__dict__) for name, m in model.named_modules()}
    assert [type(m) for m in model.modules()] == classes
    assert {k: set(v) for k, v in before.items()} == {k: set(v) for k, v in after.items()}
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(inrun.errors.StepError, match="closed"), accountant.step([0]):
        pass
