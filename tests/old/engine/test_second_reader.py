"""Faults that a second reader of the seam found: each gave wrong numbers, or changed training, without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import OptimizerError, StepError
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

N, D = 3, 4


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


class OneRow(nn.Module):
    """A look-up without a batch whose row is used in a way that an expanded output would not survive: copies are made later."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.use = nn.Embedding(3, D), nn.Linear(D, D), use

    def forward(self, x: Tensor) -> Tensor:
        row = self.table(torch.tensor([1]))
        used = {"first": lambda: row[0], "mean": lambda: row.mean(0), "scalar": lambda: row.mean(), "plain": lambda: row}[
            self.use
        ]()
        return self.inner(torch.tanh(x) * used)


@pytest.mark.parametrize("use", ["first", "mean", "scalar", "plain"])
def test_equal_copies_do_not_hide_whose_is_used(use: str) -> None:
    model, x = OneRow(use).double(), floats(N, D)
    params = list(model.parameters())
    g_n = sample_gradients(lambda j: square(model, x[j : j + 1]), N, params)
    optimizer = torch.optim.SGD(params, lr=0.1)
    want = contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], gradients(square(model, x[:1]), params))
    accountant = inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=1, credit="step")
    with accountant.step(range(N)):
        square(model, x).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


class Half(nn.Module):
    """A module without a rule, of whose parameters one never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(floats(D, seed=1)), nn.Parameter(floats(D, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.a + 0 * self.b)


def test_modules_that_run_again_are_booked_once() -> None:
    """One parameter streams and one waits: the first must not be booked again with the second."""
    found, x = [], floats(N, D)
    for microbatches in (False, True):
        model = nn.Sequential(Half()).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=0, credit="step") as accountant:
            for _ in range(3):
                with accountant.step(None if microbatches else range(N)) as step:
                    if microbatches:
                        with step.microbatch(range(N)):
                            square(model, x).backward()
                    else:
                        square(model, x).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(accountant.last.contributions["validation"])
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(found[:3], found[3:], strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_modules_that_run_again_beside_another_optimizer(order: tuple[int, int]) -> None:
    x, found = floats(N, D), []
    for other_trains in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Half()).double()
        optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.0), torch.optim.AdamW(model[1].parameters(), lr=0.1)]
        used = [optimizers[i] for i in order] if other_trains else [optimizers[1]]
        model[0].requires_grad_(other_trains)
        with inrun.Accountant(model, used, lambda m: square(m, x[:1]), audit_every=0, credit="step") as accountant:
            for _ in range(3):
                with accountant.step(range(N)):
                    square(model, x).backward()
                    for optimizer in used:
                        optimizer.step()
                        optimizer.zero_grad()
            found.append(accountant.last.contributions["validation"])
    assert relative_error(found[1], found[0]) < 1e-12


@pytest.mark.parametrize("with_rule", [True, False])
def test_a_use_with_the_weights_frozen_is_not_scored(with_rule: bool) -> None:
    """As in adversarial training: the same module, once with its weights frozen."""
    x, other = floats(N, D), floats(N, D, seed=5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D) if with_rule else Half()).double()
    params = list(model.parameters())
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(params, lr=0.01)

    def loss(m: nn.Module, rows: Tensor, others: Tensor) -> Tensor:
        m[1].requires_grad_(False)
        first = square(m, rows)
        m[1].requires_grad_(True)
        return first + square(m, others)

    twins = list(twin.parameters())
    g_n = sample_gradients(lambda j: loss(twin, x[j : j + 1], other[j : j + 1]), N, twins)
    want = contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], gradients(square(twin, x[:1]), twins))
    with inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=1, credit="step") as accountant:
        with accountant.step(range(N)):
            loss(model, x, other).backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


def test_functional_call_on_modules_without_a_rule_is_not_scored() -> None:
    x = floats(N, D)
    torch.manual_seed(0)
    model = nn.Sequential(Half(), nn.Linear(D, D)).double()
    teacher = {k: v.detach() * 1.3 for k, v in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=1, credit="step") as accountant,
        accountant.step(range(N)),
    ):
        taught = torch.func.functional_call(model, teacher, (x,))
        assert not taught.requires_grad
        (model(x) - taught).square().sum().backward()
        optimizer.step()


def test_changes_through_data_are_seen() -> None:
    x, weights = floats(N, D), torch.tensor([1.0, 1.0, 50.0, 50.0], dtype=torch.float64)
    model = nn.Linear(D, D).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=0, credit="step")
    with pytest.raises(OptimizerError, match="one factor"), accountant.step(range(N)):
        (model(x).square() * weights).sum().backward()
        model.weight.grad.data.view(-1)[8:].clamp_(-5, 5)
        optimizer.step()


class Registers(nn.Module):
    """Registers its child's weight, and uses it itself from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.on = nn.Linear(D, D, bias=False), False
        self.weight = self.child.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.child(x))
        return h @ self.weight if self.on else h


def test_a_parameter_that_was_not_used_may_be_used_later() -> None:
    x = floats(N, D)
    model = Registers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=2, credit="step") as accountant:
        for step in range(6):
            model.on = step >= 4
            with accountant.step(range(N)):
                square(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()


class CopiesItself(nn.Linear):
    """A copy that takes over all attributes, ours too."""

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        new.__dict__["_parameters"] = {k: nn.Parameter(v.detach() * 0.5, False) for k, v in self._parameters.items()}
        return new


class ReducesItself(nn.Module):
    def __init__(self, size: int = D) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def __reduce__(self) -> Any:
        return (self.__class__, (D,), self.__dict__)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_copies_by_other_ways_are_plain() -> None:
    x = floats(N, D)
    model = nn.Sequential(CopiesItself(D, D), nn.Tanh()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), form="shared", credit="step") as accountant,
        accountant.step(range(N)),
    ):
        twin = copy.deepcopy(model[0])
        want = nn.functional.linear(x, model[0].weight * 0.5, model[0].bias * 0.5)
        assert torch.equal(twin(x), want)
        square(model, x).backward()
        optimizer.step()
    root = ReducesItself().double()
    with inrun.Accountant(root, torch.optim.SGD(root.parameters(), lr=0.01), lambda m: square(m, x[:1]), credit="step"):
        twin = copy.deepcopy(root)
        assert type(twin) is ReducesItself
        assert torch.equal(twin(x), root(x))


def test_a_step_that_took_gradient_of_an_older_one_is_not_recorded() -> None:
    x = floats(N, D)
    model = nn.Linear(D, D).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accountant = inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=0, credit="step")
    with pytest.raises(KeyError), accountant.step(range(N)):
        late = square(model, x)
        raise KeyError
    with pytest.raises(StepError, match="failed"), accountant.step(range(N)):
        with pytest.raises(StepError, match="earlier step"):
            late.backward()
        optimizer.zero_grad()
        square(model, x).backward()
        optimizer.step()
