"""Whole credit after an exception in a step, and after the optimizer's memory was exchanged: nobody is paid for others' pushes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import CreditError

STEPS, LR, MU = 8, 0.05, 0.9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(t: int) -> tuple[Tensor, Tensor]:
    """Draw a batch of four; that of step 3 is thirty times as large."""
    draw = torch.Generator().manual_seed(t)
    size = 30.0 if t == 3 else 1.0
    return torch.randn(4, 6, generator=draw, dtype=torch.float64) * size, torch.randn(4, 3, generator=draw, dtype=torch.float64)


def slopes(model: nn.Module) -> list[Tensor]:
    return [torch.randn(p.shape, generator=torch.Generator().manual_seed(9), dtype=p.dtype) for p in model.parameters()]


class Logging(Exception):
    """What fails behind the optimizer."""


def play(memory: str, fails: str) -> tuple[dict[int, float], dict[int, float], list[str]]:
    """Train with a linear validation loss, so that credits have a closed form; return them, the truth and what was raised."""
    model = net()
    along = slopes(model)
    body, head = list(model[0].parameters()), list(model[2].parameters())
    optimizers = [torch.optim.SGD(part, lr=LR, momentum=MU) for part in (body, head)]
    validation = lambda m: sum((p * r).sum() for p, r in zip(m.parameters(), along, strict=True)) + 0 * m(rows(99)[0]).sum()  # noqa: E731
    accountant = inrun.Accountant(model, optimizers, validation, credit_memory=memory, audit_every=0)
    truth, raised = {}, []
    for t in range(STEPS):
        x, y = rows(t)
        plain = copy.deepcopy(model)
        for i in range(4):
            g = torch.autograd.grad((plain(x[i : i + 1]) - y[i : i + 1]).square().sum() / 4, list(plain.parameters()))
            pushed = float(sum((a * b).sum() for a, b in zip(g, along, strict=True)))
            truth[4 * t + i] = LR * pushed * sum(MU**k for k in range(STEPS - t))
        try:
            with accountant.step(range(4 * t, 4 * t + 4)):
                (model(x) - y).square().sum().div(4).backward()
                optimizers[0].step()
                if t == 3 and fails == "between":
                    raise Logging
                optimizers[1].step()
                if t == 3 and fails == "behind":
                    raise Logging
        except Logging:
            raised.append("logging")
        except CreditError:
            raised.append("credit")
        for optimizer in optimizers:
            optimizer.zero_grad()
    accountant.close()
    scores = accountant.scores()
    found = dict(zip(scores["sample_id"].to_pylist(), scores["score"].to_pylist(), strict=True))
    return found, truth, raised


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_a_step_that_happened_counts_in_spite_of_an_exception_behind_it(memory: str) -> None:
    found, truth, raised = play(memory, "behind")
    assert raised == ["logging"]
    assert found.keys() == truth.keys()
    assert max(abs(found[i] - truth[i]) for i in truth) < 1e-6


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_half_a_step_is_nobodys_and_the_run_goes_on(memory: str) -> None:
    """One of two optimizers has moved: what it remembers is booked as inherited, and later samples get what is theirs."""
    found, truth, raised = play(memory, "between")
    assert raised == ["logging"]
    assert not set(range(12, 16)) & found.keys()
    later = range(16, 4 * STEPS)
    assert max(abs(found[i] - truth[i]) for i in later) < 1e-6


@pytest.mark.parametrize("memory", ["exact", "sketch"])
@pytest.mark.parametrize("audit_every", [0, 1])
def test_an_older_memory_of_the_optimizer_is_seen(memory: str, audit_every: int) -> None:
    model = net()
    along = slopes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MU)
    validation = lambda m: sum((p * r).sum() for p, r in zip(m.parameters(), along, strict=True)) + 0 * m(rows(99)[0]).sum()  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, validation, credit_memory=memory, audit_every=audit_every)
    old: Any = None

    def step(t: int) -> None:
        x, y = rows(t)
        with accountant.step(range(4)):
            (model(x) - y).square().sum().div(4).backward()
            optimizer.step()
            optimizer.zero_grad()

    for t in range(3):
        step(t)
        old = copy.deepcopy(optimizer.state_dict()) if t == 1 else old
    optimizer.load_state_dict(old)
    with pytest.raises(CreditError, match="what the optimizer remembers is not what the samples"):
        step(4)


def test_the_audit_of_exact_memory_is_resumed() -> None:
    def trained(model: nn.Module, optimizer: Any, accountant: Any, some: range) -> None:
        for t in some:
            x, y = rows(t)
            with accountant.step(range(4)):
                (model(x) - y).square().sum().div(4).backward()
                optimizer.step()
                optimizer.zero_grad()

    def made(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return optimizer, inrun.Accountant(model, optimizer, lambda m: m(rows(9)[0]).sin().mean(), credit_memory="exact")

    model = net()
    optimizer, accountant = made(model)
    trained(model, optimizer, accountant, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), accountant.state_dict()))
    assert any(name.startswith("audit.") for name in saved[2]["credit"]["tensors"])
    again = net()
    other, resumed = made(again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    trained(again, other, resumed, range(3, 5))
    with torch.no_grad():  # the control: the memory is changed behind its back
        next(iter(other.state.values()))["exp_avg"].mul_(3.0)
    with pytest.raises(CreditError, match="the gradients differ by"):
        trained(again, other, resumed, range(5, 6))
