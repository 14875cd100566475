"""Bad input gets one clear error and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import inrun
from inrun.errors import (
    ConfigurationError,
    CoverageError,
    IdsError,
    LedgerError,
    OptimizerError,
    StepError,
    ValidationError,
)
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, train_step, validation


@pytest.fixture
def parts():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), credit="step")
    yield model, optimizer, accountant
    accountant.close()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", "b"], "integers"),
        ([0.5, 1.5], "float"),
        ([True, False], "bool"),
        ([[[0, 1], [2, 3]]], r"shape \[n\]"),
        ("ab", "str"),
        (3, "int"),
        ([2**70, 1], "64 bits"),
        (torch.zeros(3), "float32"),
        (object(), "object"),
    ],
)
def test_ids(parts, ids, words: str) -> None:
    with pytest.raises(IdsError, match=words):
        parts[2].step(ids)


@pytest.mark.parametrize(
    "ids",
    [
        range(2),
        [5, 5],
        (1, -9),
        torch.tensor([2**62, -(2**63)]),
        np.array([3, 4], np.int32),
        torch.tensor([1, 2], dtype=torch.uint8),
    ],
)
def test_accepted_ids(parts, ids) -> None:
    model, optimizer, accountant = parts
    result = train_step(accountant, model, optimizer, batch(2, 0), ids=ids)
    assert result.sample_ids.tolist() == [int(i) for i in ids]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda m: 3.0, "float"),
        (lambda m: torch.zeros(2, 2), r"\(2, 2\)"),
        (lambda m: torch.zeros(0), r"\(0,\)"),
        (lambda m: torch.tensor(3), "int64"),
        (lambda m: validation()(m).detach(), "without gradient"),
    ],
)
def test_validation_callables(fn, words: str) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, {"mine": fn}, credit="step")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValidationError, match=words) as caught, accountant.step([0]):
        pass
    assert "'mine'" in str(caught.value)
    assert accountant.open_step is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "third"}, ConfigurationError, "third.*first"),
        ({"update": "adam"}, ConfigurationError, "adam.*sgd.*frozen"),
        ({"refresh": 0}, ConfigurationError, "refresh"),
        ({"audit_every": -1}, ConfigurationError, "audit_every"),
        ({"audit_every": True}, ConfigurationError, "audit_every"),
        ({"form": "gram"}, ConfigurationError, "gram"),
        ({"form": "shared", "bitwise": True}, ConfigurationError, "bitwise"),
        ({"validation_mode": "test"}, ConfigurationError, "validation_mode"),
        ({"validation": {}}, ConfigurationError, "empty"),
        ({"validation": {"a": 3}}, ConfigurationError, "'a'.*callable"),
        ({"ledger": 3}, LedgerError, "folder"),
        ({"ledger": object()}, LedgerError, "write"),
        ({"optimizer": "adam"}, ConfigurationError, "str"),
        ({"optimizer": []}, ConfigurationError, "none"),
        ({"model": "gpt"}, ConfigurationError, "Module"),
    ],
)
def test_arguments(options: dict, error: type, words: str) -> None:
    model = tiny()
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "validation": validation()}
    arguments |= options
    with pytest.raises(error, match=words):
        inrun.Accountant(**arguments)
    assert "forward" not in model.tokens.__dict__


def test_optimizer_of_another_model() -> None:
    with pytest.raises(ConfigurationError, match="another model"):
        inrun.Accountant(tiny(), torch.optim.SGD(tiny().parameters(), lr=0.1), validation(), credit="step")


def test_unknown_optimizer_names_the_known_ones() -> None:
    class Mine(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-group["lr"])

    model = tiny()
    optimizer = Mine(model.parameters())
    with pytest.raises(OptimizerError, match="Mine.*Adam, AdamW.*SGD.*sgd"):
        inrun.Accountant(model, optimizer, validation(), credit="step")
    accountant = inrun.Accountant(model, optimizer, validation(), update="sgd")
    assert train_step(accountant, model, optimizer, batch(3, 0)).contributions["validation"].abs().min() > 0


def test_subclass_with_its_own_step_is_unknown() -> None:
    class Twisted(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = tiny()
    with pytest.raises(OptimizerError, match="Twisted"):
        inrun.Accountant(model, Twisted(model.parameters(), lr=0.1), validation(), credit="step")


def test_second_accountant(parts) -> None:
    model, optimizer, _ = parts
    with pytest.raises(ConfigurationError, match="already has an accountant"):
        inrun.Accountant(model, optimizer, validation(), credit="step")


def test_embedding_options_with_another_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True))
    with pytest.raises(CoverageError, match="0 cannot be scored.*scale_grad_by_freq"):
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), validation(), credit="step")


def test_nested_steps(parts) -> None:
    _, _, accountant = parts
    with (
        pytest.raises(StepError, match="nested"),
        accountant.step([0]),
        accountant.step([0]),
    ):
        pass
    assert accountant.open_step is None


def test_step_order(parts) -> None:
    model, optimizer, accountant = parts
    rows = batch(2, 0)
    with pytest.raises(StepError, match="no backward"), accountant.step([0, 1]):
        next_token_loss(model, rows)
    with pytest.raises(StepError, match="without a backward"), accountant.step([0, 1]):
        optimizer.step()
    with pytest.raises(StepError, match=r"without optimizer\.step"), accountant.step([0, 1]):
        next_token_loss(model, rows).backward()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="twice"), accountant.step([0, 1]):
        next_token_loss(model, rows).backward()
        optimizer.step()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="no microbatch"), accountant.step():
        pass
    with pytest.raises(StepError, match="already covers"), accountant.step([0, 1]) as step, step.microbatch([0, 1]):
        pass
    with pytest.raises(StepError, match="closure"), accountant.step([0, 1]):
        next_token_loss(model, rows).backward()
        optimizer.step(lambda: next_token_loss(model, rows))
    optimizer.zero_grad()
    assert accountant.steps_done == 0
    train_step(accountant, model, optimizer, rows)
    assert accountant.steps_done == 1


def test_backward_of_a_forward_outside_the_step(parts) -> None:
    model, optimizer, accountant = parts
    loss = next_token_loss(model, batch(2, 0))
    with pytest.raises(CoverageError, match="forward outside the step"), accountant.step([0, 1]):
        loss.backward()
        optimizer.step()


def test_optimizer_in_backward(parts) -> None:
    model, optimizer, accountant = parts
    last = model.tokens.weight
    handle = last.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(StepError, match="inside the backward"), accountant.step([0, 1]):
        next_token_loss(model, batch(2, 0)).backward()
    handle.remove()


def test_non_finite_validation_loss_is_recorded_as_skipped() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: validation()(m) * float("nan"), audit_every=1, credit="step")
    result = train_step(accountant, model, optimizer, batch(2, 0))
    assert "not finite" in result.skipped
    assert accountant.scores().num_rows == 0
    assert accountant.ledger.accounts()["skipped"].to_pylist() == [result.skipped]


def test_non_finite_training_gradient_is_recorded_as_skipped(parts) -> None:
    model, optimizer, accountant = parts
    with accountant.step([0, 1]):
        (next_token_loss(model, batch(2, 0)) * float("inf")).backward()
    assert "did not step" in accountant.last.skipped
    optimizer.zero_grad()
    with accountant.step([0, 1]):
        (next_token_loss(model, batch(2, 0)) * float("nan")).backward()
        optimizer.step()
    assert "not finite" in accountant.last.skipped
    assert accountant.scores().num_rows == 0
    assert accountant.steps_done == 2


@pytest.mark.parametrize("change", ["value", "group", "noise", "one"])
def test_changes_of_the_gradient_that_are_not_one_factor(parts, change: str) -> None:
    model, optimizer, accountant = parts
    with pytest.raises(OptimizerError, match="one factor"), accountant.step([0, 1]):
        next_token_loss(model, batch(2, 0)).backward()
        if change == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        elif change == "group":
            torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1e-3)
        elif change == "noise":
            for p in model.parameters():
                p.grad += 1e-3 * torch.randn_like(p)
        else:
            model.norm.weight.grad[0] *= 1.01
        optimizer.step()


def test_parameter_group_added_later(parts) -> None:
    _, optimizer, accountant = parts
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(OptimizerError, match="group was added"), accountant.step([0]):
        pass


def test_exceptions_of_the_user_pass_through(parts) -> None:
    model, optimizer, accountant = parts
    with pytest.raises(KeyError), accountant.step([0, 1]):
        raise KeyError("mine")
    train_step(accountant, model, optimizer, batch(2, 0))


def test_all_errors_derive_from_one() -> None:
    for name in dir(inrun.errors):
        kind = getattr(inrun.errors, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert issubclass(kind, inrun.errors.InrunError)
