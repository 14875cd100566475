"""When uses are settled, and what odd steps do to open uses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import ValidationError
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, train_step, validation


def attach(model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, inrun.Accountant]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, inrun.Accountant(model, optimizer, **{"validation": validation(), "sketch": 512, **options})


def open_steps(accountant: inrun.Accountant) -> list[int]:
    return [s.step for s in accountant.open_credits()]


def test_uses_settle_when_their_window_has_passed() -> None:
    model = tiny(dtype=torch.float32)
    optimizer, accountant = attach(model, audit_every=0)
    for t in range(47):
        train_step(accountant, model, optimizer, batch(2, t), ids=[t, 1000])
        if t % 10 == 9 or t > 40:
            assert len(open_steps(accountant)) == min(t + 1, 43)  # the 44th step is the last that pays
    table = accountant.scores().to_pydict()
    pending = dict(zip(table["sample_id"], table["pending"], strict=True))
    assert (pending[0], pending[46], pending[1000]) == (0, 1, 43)
    settled = accountant.ledger.credits()
    assert sorted(set(settled["step"].to_pylist())) == list(range(4)) and min(settled["paid"].to_pylist()) > 0.98
    accountant.close()
    assert accountant.ledger.credits().num_rows == 94 and set(accountant.scores()["pending"].to_pylist()) == {0}


def test_a_parameter_that_is_frozen_for_good_keeps_no_window_open() -> None:
    model = tiny(dtype=torch.float32)
    optimizer, accountant = attach(model, audit_every=0, check_rows=False)
    for t in range(54):
        if t == 5:
            next(model.parameters()).requires_grad_(False)
        train_step(accountant, model, optimizer, batch(2, t))
    assert len(open_steps(accountant)) == 43


def test_a_validation_loss_that_is_not_finite_pays_nothing_and_the_run_goes_on() -> None:
    """The step's samples are remembered: later steps pay them, and the audits agree."""
    model, broken, rows = tiny(), [], batch(2, 99)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3)
    loss = lambda m: next_token_loss(m, rows) * (float("nan") if broken else 1.0)  # noqa: E731
    _, accountant = attach(model, optimizer, validation=loss, sketch="exact", audit_every=1)
    for t in range(3):
        train_step(accountant, model, optimizer, batch(4, t))
    before = [s.credits["validation"] for s in accountant.open_credits()]
    broken.append(1)
    assert "validation loss is not finite" in train_step(accountant, model, optimizer, batch(4, 3)).skipped
    after = [s.credits["validation"] for s in accountant.open_credits()]
    assert all((a == b).all() for a, b in zip(after[:3], before, strict=True)) and not after[3].any()
    broken.clear()
    account = train_step(accountant, model, optimizer, batch(4, 4)).accounts["validation"]
    assert account is not None and abs(account.residual or 1.0) < 1e-2 * account.spread
    assert open_steps(accountant) == list(range(5)) and accountant.open_credits()[3].credits["validation"].any()


def test_a_learning_rate_of_zero_pays_nothing() -> None:
    model = tiny()
    optimizer, accountant = attach(model, audit_every=1)
    for t, lr in enumerate((1e-2, 0.0, 1e-2)):
        optimizer.param_groups[0]["lr"] = lr
        paid = train_step(accountant, model, optimizer, batch(4, t)).contributions["validation"]
        assert bool(paid.any()) is (lr > 0.0)


def test_momentum_may_be_switched_off() -> None:
    """Old pushes count nothing then."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, accountant = attach(model, optimizer, audit_every=0)
    for t in range(4):
        train_step(accountant, model, optimizer, batch(4, t))
    before = accountant.scores()["score"].to_pylist()
    optimizer.param_groups[0]["momentum"] = 0.0
    found = train_step(accountant, model, optimizer, batch(4, 5), ids=range(10, 14)).contributions["validation"]
    after = accountant.scores()["score"].to_pylist()
    assert after[:4] == pytest.approx(before, rel=1e-6) and after[4:] == pytest.approx(found.tolist(), rel=1e-6)


def points(model: Any, step: int) -> Tensor:
    rows = batch(4, 50)
    return torch.stack([next_token_loss(model, rows[j : j + 1]) for j in range(2 + step % 2)])


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_validation_losses_must_stay_the_same(names: tuple[str, str]) -> None:
    """Their number within a run, and their names in a resumed one."""
    model = tiny()
    optimizer, accountant = attach(model, validation=points)
    train_step(accountant, model, optimizer, batch(4, 0))
    with pytest.raises(ValidationError, match="number of points and folds, and the names, must stay the same"):
        train_step(accountant, model, optimizer, batch(4, 1))
    accountant.close()

    optimizer, accountant = attach(model, validation={"a": validation(1), "b": validation(2)})
    train_step(accountant, model, optimizer, batch(4, 0))
    state = copy.deepcopy(accountant.state_dict())
    accountant.close(settle=False)
    _, resumed = attach(model, optimizer, validation={name: validation(1 if name == "a" else 2) for name in names})
    resumed.load_state_dict(state)
    if names == ("a", "b"):
        train_step(resumed, model, optimizer, batch(4, 1))
    else:
        with pytest.raises(ValidationError, match="are b, a, and were a, b before"):
            train_step(resumed, model, optimizer, batch(4, 1))
