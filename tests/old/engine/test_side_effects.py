"""Forwards that leave something behind: what extra forwards leave is taken back, or refused by name. Weights tell."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import RowOwnershipError, StepError, ValidationError
from inrun.old.engine.guards import BufferGuard, LookGuard
from inrun.old.engine.python_state import PythonState

D = 6


def rows(step: int, n: int = 4) -> Tensor:
    return torch.randn(n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + step))


def squares(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def weights(
    make: Callable[[], nn.Module],
    attached: bool,
    given: Callable[[int], Any] = rows,
    loss: Callable[[nn.Module, Any], Tensor] = squares,
    validation: Callable[[nn.Module, Any], Tensor] = squares,
    steps: int = 6,
    **options: Any,
) -> list[Tensor]:
    """Train and return the weights and buffers."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"method": "midpoint", "credit": "step", **options}
    accountant = inrun.Accountant(model, optimizer, lambda m: validation(m, given(99)), **options) if attached else None
    torch.manual_seed(3)
    for step in range(steps):
        with accountant.step(range(4)) if accountant else contextlib.nullcontext():
            loss(model, given(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if accountant is not None:
        accountant.close()
    return [x.detach().clone() for x in model.state_dict().values()]


def assert_same_training(make: Callable[[], nn.Module], **options: Any) -> None:
    for plain, scored in zip(weights(make, False, **options), weights(make, True, **options), strict=True):
        assert torch.allclose(plain, scored, rtol=1e-12, atol=1e-14)


# Buffers and parameters


class LateStatistics(nn.Module):
    """Writes to a buffer after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.inner(x))
        out = self.head(z - 0.1 * self.average)
        if self.training:
            self.count += 1
            if self.count > 5:
                self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return out


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_buffer_may_be_written_to_late(mode: str) -> None:
    assert_same_training(LateStatistics, steps=10, audit_every=2, validation_mode=mode)


class Codebook(nn.Module):
    """A moving average of codes in a frozen parameter, written to without being counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            self.codes.data[nearest] = 0.9 * codes.detach() + 0.1 * z.detach()
        return self.head(z + (codes - z).detach())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_frozen_parameter_may_be_written_to(mode: str) -> None:
    assert_same_training(Codebook, audit_every=1, validation_mode=mode)


class Drifting(nn.Module):
    """Changes a weight of a layer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.inner.weight.mul_(0.99)
        return self.head(torch.tanh(self.inner(x)))


def test_a_weight_may_change_in_the_forward() -> None:
    assert_same_training(Drifting, audit_every=1)


class Normalised(nn.Module):
    """A weight that is made once for two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


@pytest.mark.parametrize("options", [{}, {"bitwise": True}, {"credit": "whole", "method": None}, {"check_rows": False}])
def test_forwards_may_run_with_cached_parametrisations(options: dict[str, Any]) -> None:
    def cached(model: nn.Module, x: Tensor) -> Tensor:
        with torch.nn.utils.parametrize.cached():
            return squares(model, x)

    assert_same_training(Normalised, loss=cached, validation=cached, **options)


class Projected(nn.Module):
    """Gives a parameter other memory, as peft's CPT does: also where weights are held elsewhere to validate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data = self.inner.weight.detach().clamp(-0.3, 0.3)
        return self.inner(x)


@pytest.mark.parametrize("game", [{}, {"credit": "whole", "method": None}])
def test_a_parameter_may_get_other_memory_in_the_forward(game: dict[str, Any]) -> None:
    assert_same_training(Projected, **game)


class Clamped(nn.Module):
    """Clamps a parameter that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(D, 3), nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6)
        return self.inner(x) * self.scale.exp() * 0.01


def test_a_parameter_that_is_clamped_where_it_is_read_is_refused_by_name() -> None:
    with pytest.raises(StepError, match=r"its forward writes to scale itself.*behind optimizer\.step"):
        weights(Clamped, True)


def test_what_was_not_copied_and_is_written_is_said() -> None:
    model = LateStatistics()
    guard = BufferGuard(model.eval())
    with guard.hold():
        pass
    with pytest.raises(ValidationError, match="wrote to average.*train mode only"), guard.hold():
        model.average += 1
    look = LookGuard(model, parameters=True)
    with look.hold():
        model.inner.bias.data += 1  # around the first pass all are copied
    with look.hold():
        pass
    with pytest.raises(RowOwnershipError, match=r"writes to head\.weight"), look.hold(), torch.no_grad():
        model.head.weight += 1


def test_the_weights_under_an_adapter_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inrun.old.engine.guards.MOST_FROZEN", 100)
    model = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 3)).requires_grad_(False)
    guard = BufferGuard(model)
    with guard.hold():
        for p in model.parameters():
            p.data += 1
    assert len(guard.written[(True, True, True)]) == 3, "4 · (4 + 3 + 12) bytes are, 4 · 24 more are not"


# What forwards leave in Python

SEEN: list[Tensor] = []
TIMES = 0


def cooled(model: nn.Module, x: Tensor, times: float) -> Tensor:
    return model.head(torch.tanh(model.inner(x)) / (1 + 0.1 * times))


class Base(nn.Module):
    """Two layers, and something beside them."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.inner, self.head, self.kept = nn.Linear(D, 8), nn.Linear(8, 3), kept


class Counter(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = (self.kept or 0) + 1
        return cooled(self, x, self.kept)


class Counters(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.setdefault("calls", []).append(1)
        self.kept.setdefault("last", x)
        return cooled(self, x, len(self.kept["calls"]))


class Queue(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.kept[-1] + 1 if self.kept else 1.0)
        return cooled(self, x, sum(self.kept))


class Names(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.add(str(float(x.detach().sum())))
        return cooled(self, x, len(self.kept))


class Attributes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.times += 1
        return cooled(self, x, self.kept.times)


class Carried(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) != len(x):
            self.kept = torch.zeros(len(x), 8, dtype=x.dtype)
        hidden = torch.tanh(self.inner(x)) + 0.1 * self.kept
        self.kept = hidden.detach()
        return self.head(hidden)


class Unregistered(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return cooled(self, x, float(self.kept))


class Drawing(Base):
    def forward(self, x: Tensor) -> Tensor:
        return cooled(self, x, self.kept())


class OfTheClass(Base):
    times = 0

    def forward(self, x: Tensor) -> Tensor:
        OfTheClass.times = self.times + 1
        return cooled(self, x, self.times)


class Global(Base):
    def forward(self, x: Tensor) -> Tensor:
        global TIMES
        TIMES += 1
        return cooled(self, x, TIMES)


class Lazy(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "times"):
            self.times = 0
        self.times += 1
        return cooled(self, x, self.times)


@dataclass
class Tally:
    times: int = 0


@dataclass(slots=True)
class SlottedTally:
    times: int = 0


class Draws:
    """A generator of an object's own."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        self.generator, self.draw = generator, draw

    def __call__(self) -> float:
        return self.draw(self.generator)


LEAVING: dict[str, Callable[[], nn.Module]] = {
    "counter": Counter,
    "list in a dictionary": lambda: Counters({}),
    "queue": lambda: Queue(deque([1.0, 2.0], maxlen=3)),
    "list": lambda: Queue([]),
    "set": lambda: Names(set()),
    "dataclass": lambda: Attributes(Tally()),
    "dataclass with slots": lambda: Attributes(SlottedTally()),
    "namespace": lambda: Attributes(SimpleNamespace(times=0)),
    "last state": Carried,
    "tensor that is no buffer": lambda: Unregistered(torch.zeros(())),
    "torch generator": lambda: Drawing(Draws(torch.Generator().manual_seed(0), lambda g: float(torch.rand((), generator=g)))),
    "numpy generator": lambda: Drawing(Draws(np.random.default_rng(0), lambda g: g.random())),
    "numpy state": lambda: Drawing(Draws(np.random.RandomState(0), lambda g: g.rand())),
    "python generator": lambda: Drawing(Draws(random.Random(0), lambda g: g.random())),
    "class": OfTheClass,
    "global": Global,
    "made in the first forward": Lazy,
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", LEAVING)
def test_what_a_forward_keeps_is_put_back(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at every step, and a validation pass or more beside them."""

    def make() -> nn.Module:
        monkeypatch.setattr(OfTheClass, "times", 0)
        monkeypatch.setitem(globals(), "TIMES", 0)
        return LEAVING[name]()

    assert_same_training(make, audit_every=1, validation_mode=mode, steps=12)


# What hooks collect


class Collector:
    """Collects outputs, as a method or when it is called."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self.last: Tensor | None = None

    def __call__(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.add(out)

    def hook(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.add(out)

    def add(self, out: Tensor) -> None:
        self.found.append(out)
        self.last = out


def to_global(module: nn.Module, given: Any, out: Tensor) -> None:
    collect(out)


def collect(out: Tensor) -> None:
    SEEN.append(out)


def hooks(kind: str) -> tuple[Callable[..., None], list[Tensor]]:
    found: list[Tensor] = []
    collector = Collector()
    return {
        "closure": (lambda module, given, out: found.append(out), found),
        "default": (lambda module, given, out, found=found: found.append(out), found),
        "partial": (functools.partial(lambda found, module, given, out: found.append(out), found), found),
        "method": (collector.hook, collector.found),
        "callable": (collector, collector.found),
        "global": (to_global, SEEN),
    }[kind]


@pytest.mark.parametrize("method", ["first", "midpoint"])
@pytest.mark.parametrize("kind", ["closure", "default", "partial", "method", "callable", "global"])
def test_what_hooks_collect_is_put_back(kind: str, method: str) -> None:
    """Features that are collected in a list and used up with the loss."""
    held: list[list[Tensor]] = []

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))
        hook, found = hooks(kind)
        held[:] = [found]
        model[1].register_forward_hook(hook)
        return model

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        total = out.square().mean() + torch.stack([f.mean() for f in held[0]]).mean()
        held[0].clear()
        return total

    assert_same_training(make, loss=loss, audit_every=1, method=method)


def test_a_count_in_a_hook_is_put_back() -> None:
    def make() -> nn.Module:
        model, times = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3)), 0

        def hook(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            nonlocal times
            times += 1
            return out / (1 + 0.1 * times)

        model[1].register_forward_hook(hook)
        return model

    assert_same_training(make, audit_every=1)


class Experts(nn.Module):
    """Adds to a list at every forward, in a module without a rule, which runs again after the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(D, 3), nn.Parameter(torch.randn(3, 3))
        self.found: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(1.0)
        return torch.linalg.solve(self.table @ self.table.t() + torch.eye(3, dtype=x.dtype), self.inner(x).t()).t()


@pytest.mark.parametrize("credit", ["step", "whole"])
def test_what_a_module_without_a_rule_leaves_is_put_back(credit: str, caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = squares(model, x) * sum(model.found, 1.0)
        model.found.clear()
        return total

    assert_same_training(Experts, loss=loss, audit_every=2, credit=credit)
    assert "no rule for" in caplog.text


class TiedTable(nn.Module):
    """A module without a rule that only registers a child's weight, and counts its calls: a look runs it on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)
        self.weight, self.scale, self.times = self.inner.weight, nn.Parameter(torch.ones(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return torch.special.erfinv(torch.tanh(self.inner(x) * self.scale) * 0.5)


@pytest.mark.parametrize("check_rows", [True, False])
def test_a_module_that_is_run_to_see_what_it_uses_leaves_nothing(check_rows: bool) -> None:
    made: list[TiedTable] = []
    weights(lambda: nn.Sequential(made.append(TiedTable()) or made[0], nn.Tanh()), True, check_rows=check_rows, steps=5)
    assert made[0].times == 5


def test_what_begins_late_is_put_back_from_the_next_full_pass_on() -> None:
    """Validation passes hold everything at some steps; from what was seen to change there on, that at all of them."""
    model = Queue([])
    state = PythonState(model)
    kept = []
    for step in range(1000, 1012):  # a run that was resumed
        for _ in range(2):
            with state.hold(step=step):
                model.kept.extend([step] if step > 1004 else [])
        kept.append(len(model.kept))
    assert kept == [0] * 5 + [2, 4, 6, 6, 6, 6, 6], "steps 5, 6 and 7 are not held, 8 is, and so are all after it"


# What forwards are given


class Pair(NamedTuple):
    x: Tensor
    more: list[Tensor]


@dataclass
class Batch:
    x: Tensor
    labels: Tensor | None


def popped(batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return batch["x"] - labels


def written(batch: Any) -> Tensor:
    batch["x"] = batch["x"] * 2 - 1
    return batch["x"]


def consumed(batch: list[Tensor]) -> Tensor:
    return batch.pop(0) - batch.pop()


def consumed_in_pair(batch: Pair) -> Tensor:
    return batch.x - batch.more.pop()


def taken(batch: Batch) -> Tensor:
    labels, batch.labels = batch.labels, None
    return batch.x - labels


def cleared(batch: Any) -> Tensor:
    x = batch["logits"] - batch["loss"]
    batch.logits = x
    return x


GIVEN: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor, Tensor], Any]]] = {
    "pop": (popped, lambda x, y: {"x": x, "labels": y}),
    "write": (written, lambda x, y: {"x": x}),
    "list": (consumed, lambda x, y: [x, y]),
    "named tuple": (consumed_in_pair, lambda x, y: Pair(x, [y])),
    "dataclass": (taken, Batch),
    "in place": (lambda x: x.mul_(2).sub_(1), lambda x, y: x),
    "in place, uncounted": (lambda x: x.data.mul_(2), lambda x, y: x),
    "in place in a dictionary": (lambda b: b["x"].mul_(2), lambda x, y: {"x": x}),
}


class Takes(nn.Module):
    """Takes what it is given apart; with large numbers, another way that calls one layer more."""

    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.head, self.rare = nn.Linear(D, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.take = take

    def forward(self, batch: Any) -> Tensor:
        x = self.take(batch)
        hidden = torch.tanh(self.inner(x))
        return self.head(self.rare(hidden) if float(x.detach().max()) > 100 else hidden)


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_forward_does_to_its_batch_is_undone(name: str) -> None:
    take, given = GIVEN[name]
    assert_same_training(lambda: Takes(take), given=lambda step: given(rows(step), rows(step + 1000)), audit_every=1)


@pytest.mark.parametrize("kind", ["encoding", "output"])
def test_batches_of_transformers_are_whole_again(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    take = popped if kind == "encoding" else cleared

    def given(step: int) -> Any:
        x, y = rows(step), rows(step + 1000)
        if kind == "encoding":
            return transformers.BatchEncoding({"x": x, "labels": y})
        return transformers.modeling_outputs.CausalLMOutput(loss=y, logits=x)

    assert_same_training(lambda: Takes(take), given=given, audit_every=1)


def large(step: int) -> Tensor:
    """A batch that takes another way at a step at which nobody looks."""
    return rows(step) * (1000 if step == 5 else 1)


def test_a_look_after_the_forward_gets_what_the_forward_got() -> None:
    assert_same_training(lambda: Takes(popped), given=lambda step: {"x": large(step), "labels": rows(step)}, audit_every=0)


def test_inputs_that_changed_cannot_be_looked_at_afterwards() -> None:
    with pytest.raises(RowOwnershipError, match=r"changes its input in place \(of shape \(4, 6\)\).*x\.clone"):
        weights(lambda: Takes(lambda x: x.mul_(2)), True, given=large, audit_every=0)


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)

    def forward(self, x: Tensor, factors: Any) -> Tensor:
        return self.inner(x) * next(factors)


@pytest.mark.parametrize("make", [lambda: iter([1.0, 2.0]), lambda: (x for x in (1.0, 2.0)), lambda: map(float, (1, 2))])
def test_an_iterator_is_refused_and_not_consumed(make: Callable[[], Any]) -> None:
    model, factors = Iterating().double(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(rows(9), make()).mean(), credit="step")
    with (
        accountant,
        pytest.raises(RowOwnershipError, match=r"an iterator \(.*argument 2\).*check_rows=False"),
        accountant.step(range(4)),
    ):
        model(rows(0), factors)
    assert list(factors) == [1.0, 2.0]
    with inrun.Accountant(model, optimizer, lambda m: m(rows(9), make()).mean(), credit="step", check_rows=False) as accountant:
        factors = make()
        with accountant.step(range(4)):
            model(rows(0), factors).mean().backward()
            optimizer.step()
        assert list(factors) == [2.0]


def test_a_forward_that_is_no_function_of_its_inputs_is_called_that() -> None:
    """What an iterator of the model's own has given away cannot be put back."""
    counter = itertools.count(1)
    with pytest.raises(RowOwnershipError, match=r"not a function of its inputs.*differ at head.*Seen as: rows at head"):
        weights(lambda: Drawing(counter.__next__), True)
