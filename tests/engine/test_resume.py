"""A run that is broken and goes on from a saved state equals the unbroken one bit for bit, in a plain loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from inrun.engine import Accountant
from inrun.engine.saved import join_state, split_state
from inrun.errors import ConfigurationError
from inrun.ledger import Ledger
from loops import METHODS, adamw, attach, held_out, losses, perceptron, points, sgd
from tiny import batch, next_token_loss, tiny

STEPS, STOPS = 50, (1, 23, 46)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it comes out of JSON and safetensors."""
    plain, tensors = split_state(state)
    return join_state(json.loads(json.dumps(plain)), None if tensors is None else load(save(tensors)))


class Points:
    """Two linear layers on points."""

    build, held_out = staticmethod(perceptron), staticmethod(held_out)

    @staticmethod
    def loss(model: nn.Module, t: int) -> Tensor:
        return losses(model, points(3 + t % 2, t)).mean()


class Single(Points):
    """The same in float32: NAdam's own state is rounded anew where it is loaded for parameters of float64."""

    @staticmethod
    def build() -> nn.Module:
        return perceptron(torch.float32)

    @staticmethod
    def loss(model: nn.Module, t: int) -> Tensor:
        return losses(model, points(3 + t % 2, t, dtype=torch.float32)).mean()


class Words:
    """A transformer with a table of words, of which rows are kept apart, in float32; every loss draws a random number."""

    @staticmethod
    def build() -> nn.Module:
        return tiny(dtype=torch.float32)

    @staticmethod
    def loss(model: nn.Module, t: int) -> Tensor:
        return next_token_loss(model, batch(3 + t % 2, t)) * (1.0 + 0.1 * torch.rand(()))

    @staticmethod
    def held_out(model: nn.Module) -> Tensor:
        return next_token_loss(model, batch(2, 99))


class Books:
    """A ledger that is a list."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.settled: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def settle(self, credits: list[Any]) -> None:
        self.settled += credits


def plain(x: Any) -> Any:
    """Return records as data that can be compared, bit by bit."""
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, Tensor):
        return plain(x.numpy())
    if isinstance(x, float):
        return np.float64(x).tobytes()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    return plain(vars(x)) if hasattr(x, "__dict__") else x


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "nesterov": lambda model: sgd(model, nesterov=True, weight_decay=0.1),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01, weight_decay=0.01),
}
#: Method, optimizer, problem.
CASES = [(m, "adamw", p) for m in METHODS for p in (Points, Words)]
CASES += [(m, o, p) for m in ("whole", "exact", "step") for o, p in (("nesterov", Points), ("nadam", Single))]


def train(
    problem: Any, build: Callable[[nn.Module], torch.optim.Optimizer], start: Any = None, stops: Any = (), **options: Any
) -> tuple[Any, ...]:
    """Train from a saved state, or from the beginning; return books, weights and the states at the stops."""
    model = problem.build()
    optimizer, books, first, saved = build(model), Books(), 0, {}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    if start is not None:
        first, weights, memory, rates, state, random = copy.deepcopy(start)
        model.load_state_dict(weights)
        optimizer.load_state_dict(memory)
        schedule.load_state_dict(rates)
    accountant = attach(model, optimizer, problem.held_out, ledger=books, **{"audit_every": None} | options)
    if start is not None:
        accountant.load_state_dict(through_a_file(state))
        assert accountant.steps_done == first
        torch.set_rng_state(random)
    for t in range(first, STEPS):
        if t in stops:
            parts = (model.state_dict(), optimizer.state_dict(), schedule.state_dict(), accountant.state_dict())
            saved[t] = copy.deepcopy((t, *parts, torch.get_rng_state()))
        with accountant.step([100 * t + i for i in range(3 + t % 2)]):
            problem.loss(model, t).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accountant.close()
    return books, [p.detach().clone() for p in model.parameters()], saved


@pytest.mark.parametrize(("method", "optimizer", "problem"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_resumed_equals_unbroken(method: str, optimizer: str, problem: Any) -> None:
    torch.manual_seed(0)
    alone, weights, _ = train(problem, OPTIMIZERS[optimizer], **METHODS[method])
    torch.manual_seed(0)
    unbroken, same, saved = train(problem, OPTIMIZERS[optimizer], stops=STOPS, **METHODS[method])
    expected = plain([unbroken.records, unbroken.settled])
    assert plain([alone.records, alone.settled]) == expected  # taking a state changes nothing
    assert all(map(torch.equal, weights, same))
    for t, start in saved.items():
        torch.manual_seed(17)
        resumed, again, _ = train(problem, OPTIMIZERS[optimizer], start, **METHODS[method])
        assert plain([unbroken.records[:t] + resumed.records, resumed.settled]) == expected, t
        assert all(map(torch.equal, again, weights)), t


def test_books_on_disk_count_every_step_once(tmp_path: Path) -> None:
    """Stopped after steps that the checkpoint does not know: the resumed run takes them back."""

    def run(folder: Path, until: int, stop: int | None = None, start: Any = None) -> tuple[Any, Any]:
        model = perceptron()
        optimizer, ledger, saved = adamw(model), folder, None
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
            ledger = Ledger.resume(folder, start[2]["ledger"])
        accountant = attach(model, optimizer, ledger=ledger, audit_every=None, sketch=64)
        if start is not None:
            accountant.load_state_dict(start[2])
        for t in range(accountant.steps_done, until):
            if t == stop:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), through_a_file(accountant.state_dict())))
            with accountant.step(range(4)):
                losses(model, points(4, t)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        accountant.close(settle=until == 60)
        scores = accountant.scores() if until == 60 else None
        if start is not None:
            ledger.close()
        return saved, scores

    _, expected = run(tmp_path / "unbroken", 60)
    saved, _ = run(tmp_path / "broken", 40, stop=33)
    _, found = run(tmp_path / "broken", 60, start=saved)
    assert found.equals(expected)
    assert found["times_used"].to_pylist() == [60] * 4
    assert Ledger.open(tmp_path / "broken").scores().equals(expected)
    assert Ledger.open(tmp_path / "broken").accounts().equals(Ledger.open(tmp_path / "unbroken").accounts())


def test_states_of_others_are_refused() -> None:
    model = perceptron()
    accountant = attach(model)
    state = accountant.state_dict()
    accountant.close()
    other: Accountant = attach(model, method="first")
    with pytest.raises(ConfigurationError, match='saved run used method="whole", this accountant has "first"'):
        other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="version 1; this release reads version 2"):
        other.load_state_dict({**state, "version": 1})
    other.close()
