"""What optimizers remember is audited; steps that no `with` block describes end the open uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from inrun import Accountant
from inrun.errors import CreditError
from inrun.ledger.record import Skip

X, Y = torch.randn(8, 12, 5, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1),
    "adam, coupled decay": lambda m: torch.optim.Adam(m.parameters(), lr=0.02, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov, maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True, maximize=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.02),
    "rmsprop with momentum": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    F.cross_entropy(model(X[i % 8]), Y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, audit_every: int = 1) -> Accountant:
    return Accountant(
        model, optimizer, lambda m: F.cross_entropy(m(X[0]), Y), method="whole", sketch="exact", audit_every=audit_every
    )


def scored(accountant: Accountant, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        with accountant.step(range(12)):
            step(model, optimizer, i)


@pytest.mark.parametrize("begun", [0, 3], ids=["new", "with momentum of before"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_what_an_optimizer_remembers_is_what_it_was_given(name: str, begun: int) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    for i in range(begun):
        step(model, optimizer, i)
    with attach(model, optimizer) as accountant:
        scored(accountant, model, optimizer, range(6))


def reset(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def shrink(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if name in state:
                state[name].mul_(0.8)


#: SGD tells that it starts anew, so that a reset is followed.
FOLLOWED = ("momentum", "nesterov, maximize")
CHANGES = [(name, change) for name in OPTIMIZERS for change in (reset, shrink) if change is shrink or name not in FOLLOWED]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_state_that_was_changed_is_named(name: str, change: Callable[[torch.optim.Optimizer], None]) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    accountant = attach(model, optimizer)
    scored(accountant, model, optimizer, range(4))
    change(optimizer)
    with pytest.raises(CreditError, match=r"step 4: what the optimizer remembers of .*(bias|weight)"):
        scored(accountant, model, optimizer, range(4, 6))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_steps_outside_settle_what_is_open(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    accountant = attach(model, optimizer)
    scored(accountant, model, optimizer, range(4))
    before = accountant.open_credits()
    for i in range(4, 6):
        step(model, optimizer, i)
    scored(accountant, model, optimizer, range(6, 9))  # the audit would see a momentum that is nobody's
    assert accountant.steps_done == 8 and "stepped outside of accountant.step()" in caplog.text
    accounts = accountant.ledger.accounts().to_pylist()  # type: ignore[attr-defined]
    assert [row["skipped"] for row in accounts if row["skipped"]] == [Skip.OUTSIDE.value]
    assert abs(accounts[5]["inherited"]) > 0
    credits = accountant.ledger.credits()  # type: ignore[attr-defined]
    assert sorted(set(credits.column("step").to_pylist())) == [c.step for c in before]
    accountant.close()


def test_steps_before_the_first_are_inherited() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model)
    accountant = attach(model, optimizer)
    for i in range(3):
        step(model, optimizer, i)
    scored(accountant, model, optimizer, range(3, 6))
    assert accountant.steps_done == 3
    assert abs(accountant.ledger.accounts().to_pylist()[0]["inherited"]) > 0  # type: ignore[attr-defined]
    accountant.close()
