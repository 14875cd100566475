"""Nothing silent: gradient that flows through no row is caught by the parameter's name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.errors import ConservationError, CoverageError
from inrun.old.engine.audits import Schedule
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, train_step, validation


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_penalty_in_the_loss_is_caught_by_name(kind: str, dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
    train_step(accountant, model, optimizer, batch(4, 0))
    with pytest.raises(ConservationError, match=r"blocks\.1\.up\.weight") as caught, accountant.step(range(4)):
        loss = next_token_loss(model, batch(4, 1)) + 0.01 * model.blocks[1].up.weight.square().sum()
        loss.backward()
        optimizer.step()
    assert "down" not in str(caught.value)
    assert "weight_decay" in str(caught.value)


class OutsideHead(nn.Module):
    """Calls its head once, and multiplies by the head's weight once more without calling it (as TRL does)."""

    def __init__(self, call_it: bool) -> None:
        super().__init__()
        self.body, self.head, self.call_it = nn.Linear(4, 4), nn.Linear(4, 3, bias=False), call_it

    def forward(self, x):
        h = torch.tanh(self.body(x))
        out = F.linear(h, self.head.weight)
        return out + self.head(h) if self.call_it else out


@pytest.mark.parametrize(("call_it", "error"), [(True, ConservationError), (False, CoverageError)])
def test_weight_multiplied_outside_its_module_is_caught_by_name(call_it: bool, error: type) -> None:
    model = OutsideHead(call_it).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), audit_every=1, credit="step")
    with pytest.raises(error, match=r"head\.weight"), accountant.step(range(5)):
        model(x).square().sum().backward()
        optimizer.step()


def test_left_over_gradient_is_caught() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
    next_token_loss(model, batch(4, 5)).backward()
    with pytest.raises(ConservationError, match="left in .grad"):
        train_step(accountant, model, optimizer, batch(4, 1))


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_honest_training_passes_every_audit(kind: str, tied: bool, dtype: torch.dtype) -> None:
    model = tiny(tied=tied, dtype=dtype, dropout=0.1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, {"a": validation(), "b": validation(3)}, audit_every=1, credit="step")
    for step in range(20):
        result = train_step(accountant, model, optimizer, batch(6, step), clip=0.5)
        account = result.accounts["a"]
        assert account is not None
        assert account.data == pytest.approx(float(result.contributions["a"].sum()), rel=1e-5)
    assert accountant.ledger.accounts().num_rows == 40


def test_gradient_through_an_output_without_rows_is_refused() -> None:
    class LossInside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 1, 1))

        def forward(self, x):
            return nn.functional.conv_transpose1d(x.unsqueeze(1), self.scale).square().mean()  # an operation that no rule follows

    model = LossInside()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x), credit="step")
    with pytest.raises(CoverageError, match="scale.*no row per sample"), accountant.step(range(3)):
        model(x).backward()


def test_audit_schedule() -> None:
    assert [Schedule(3).due(s) for s in range(5)] == [True, False, False, True, False]
    assert not Schedule(0).due(0)
    automatic = Schedule(None)
    assert automatic.due(0)
    automatic.begin()
    automatic._began -= 1.0  # a step of one second
    automatic.spent(0.25)  # of which a quarter went into the audit
    automatic.finish(0, audited=True)
    assert automatic.next_step == pytest.approx(33, abs=1)
    assert not automatic.due(20)
    restored = Schedule(None)
    restored.load_state_dict(automatic.state_dict())
    assert restored.next_step == automatic.next_step
