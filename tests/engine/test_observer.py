"""Scoring does not change training: weights, random numbers, buffers, modes, hooks; errors and copies leave all usable."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from inrun.engine import Accountant
from inrun.errors import InrunError
from loops import METHODS, adamw, attach, distance, held_out, losses, perceptron, points, run_step, scores_by_id, sgd, train
from tiny import batch, next_token_loss, tiny

EVERY = pytest.mark.parametrize("method", METHODS)


class Reading(nn.Module):
    """Dropout, a table of positions that a norm works on before it meets the samples, and parameters that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(11, 6), nn.Embedding(6, 6), nn.LayerNorm(6)
        self.scale, self.token = (nn.Parameter(torch.rand(*size) + 0.5) for size in ((6,), (1, 1, 6)))
        self.mask = nn.Parameter(torch.rand(1, 1, 6, 6))
        self.inner, self.head, self.drop = nn.Linear(6, 6), nn.Linear(6, 11), nn.Dropout(0.2)
        self.batch_norm = nn.BatchNorm1d(6)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.inner(self.words(rows)) + self.norm(self.places(torch.arange(6)))
        x = self.drop((x * self.scale.exp() + self.scale).tanh_())
        x = x * torch.cat([self.token.expand(len(x), -1, -1), x], 1)[:, :1]
        y = x.unsqueeze(1)
        x = F.scaled_dot_product_attention(y, y, y, attn_mask=self.mask, dropout_p=0.3 * self.training).squeeze(1)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x * self.scale)


class Checkpointed(Reading):
    """The same in a checkpoint; buffers are written and numbers drawn again where it is recomputed."""

    reentrant, preserve = False, True

    def forward(self, rows: Tensor) -> Tensor:
        table = self.words(rows)
        run = lambda x: self.head(self.drop(self.batch_norm(self.inner(x).transpose(1, 2)).transpose(1, 2) * self.scale))  # noqa: E731
        return checkpoint(run, table, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)


class Reentrant(Checkpointed):
    reentrant = True


class Drawing(Checkpointed):
    preserve = False


def cross(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())


def rows_of(n: int, seed: int) -> Tensor:
    return torch.randint(0, 11, (n, 6), generator=torch.Generator().manual_seed(seed))


def weights_of(build: Callable[[], nn.Module], dtype: torch.dtype, low: bool, steps: int = 4, **options: Any) -> list[Tensor]:
    """Train, and return all that training left: weights, gradients as they were used, buffers and the random state."""
    torch.manual_seed(0)
    model = build().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held = {"a": lambda m: cross(m, rows_of(3, 99)), "b": lambda m: cross(m, rows_of(1, 98))}
    accountant = Accountant(model, optimizer, held, audit_every=1, **options) if options else None
    torch.manual_seed(7)
    used: list[Tensor] = []
    for t in range(steps):
        rows = rows_of(5, t)
        with accountant.step(range(5)) if accountant else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = cross(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            used += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    if accountant:
        accountant.close()
    return [*used, *(x.detach().clone() for x in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("low", [False, True], ids=["full", "autocast"])
@pytest.mark.parametrize("build", [Reading, Checkpointed, Reentrant, Drawing])
@pytest.mark.parametrize("method", ["whole", "first", "second"])
def test_bitwise_training_is_the_same_bit_for_bit(build: Callable[[], nn.Module], method: str, low: bool) -> None:
    plain = weights_of(build, torch.float32, low)
    scored = weights_of(build, torch.float32, low, **METHODS[method], bitwise=True)
    assert len(plain) == len(scored)
    assert all(map(torch.equal, plain, scored))


@pytest.mark.parametrize("build", [Reading, Checkpointed, Reentrant, Drawing])
@pytest.mark.parametrize("method", ["whole", "first"])
def test_training_is_the_same_to_rounding(build: Callable[[], nn.Module], method: str) -> None:
    plain = weights_of(build, torch.float64, False)
    scored = weights_of(build, torch.float64, False, **METHODS[method])
    assert all(torch.equal(a, b) or distance(b, a) < 1e-9 for a, b in zip(plain[:-1], scored[:-1], strict=True))
    assert torch.equal(plain[-1], scored[-1])


# What is left between steps and after closing


class Noisy(nn.Module):
    """Writes to a buffer and draws random numbers in every forward, in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        np.random.rand()
        torch.rand(1)
        return self.norm(self.a(x))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that an observer might leave behind, by name; tensors as bytes."""
    hooks = [n for n in vars(nn.Module()) if "hooks" in n]
    return {
        "classes": [type(m) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [{name: list(vars(m)[name].values()) for name in hooks} for m in model.modules()],
        "hooks of parameters": [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()],
        "hooks of the optimizer": [list(h.values()) for n, h in vars(optimizer).items() if "hooks" in n],
        "step": type(optimizer).step,
        "forwards": [type(m).forward for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "trainable": [p.requires_grad for p in model.parameters()],
        "state": {k: v.numpy().tobytes() for k, v in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()],
        "random": (torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()),
        "grad mode": torch.is_grad_enabled(),
        "functions": (Tensor.backward, torch.autograd.backward, torch.utils.checkpoint.CheckpointFunction),
    }


@EVERY
def test_validation_passes_leave_no_trace_and_run_in_eval_mode(method: str) -> None:
    model = Noisy()
    model.norm.eval()  # a user who keeps one module in eval mode
    optimizer = sgd(model)
    modes = []

    def validation(m: nn.Module) -> Tensor:
        modes.append([k.training for k in m.modules()])
        return m(points(2, 9, dtype=torch.float32)).square().sum()

    accountant = attach(model, optimizer, validation, audit_every=1, **METHODS[method])
    x = points(4, 0, dtype=torch.float32)
    with accountant.step(range(4)):
        model(x).square().sum().backward()
        optimizer.step()
        before = snapshot(model, optimizer)
    after = snapshot(model, optimizer)
    assert {k for k in before if before[k] != after[k]} == set()
    assert modes and not any(any(some) for some in modes)
    assert float(model.calls) == 1.0


@EVERY
def test_closing_leaves_model_and_optimizer_as_they_were(method: str) -> None:
    model = perceptron()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    accountant = attach(model, optimizer, **METHODS[method])
    changed = snapshot(model, optimizer)
    assert before["classes"] == changed["classes"] and before["forwards"] == changed["forwards"]
    accountant.close()
    accountant.close()
    after = snapshot(model, optimizer)
    assert {k for k in before if before[k] != after[k]} == set()
    with pytest.raises(InrunError, match="closed"):
        accountant.step([0])
    train(attach(model, optimizer, **METHODS[method]), range(2))  # and another may come


@pytest.mark.parametrize("kind", ["closed", "forgotten"])
def test_an_accountant_that_is_let_go_frees_the_model(kind: str) -> None:
    model = perceptron()
    optimizer = sgd(model)
    accountant = attach(model, optimizer)
    train(accountant, range(2))
    if kind == "closed":
        accountant.close()
    gone = weakref.ref(accountant)
    del accountant
    gc.collect()
    assert gone() is None
    losses(model, points(2, 0)).mean().backward()
    optimizer.step()
    other = attach(model, optimizer)
    train(other, range(2))
    model_gone = weakref.ref(model)
    del other, model, optimizer
    gc.collect()
    assert model_gone() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])  # noqa: S301
@pytest.mark.parametrize("inside", [False, True])
def test_a_copy_of_an_attached_model_is_a_plain_model(copied: Callable[[Any], Any], inside: bool) -> None:
    model = tiny(dtype=torch.float32)
    optimizer = sgd(model)
    accountant = attach(model, optimizer, lambda m: next_token_loss(m, batch(2, 9)))
    run_step(accountant, lambda: next_token_loss(model, batch(3, 0)), range(3))
    if inside:
        with accountant.step(range(3)):
            twin = copied(model)
            next_token_loss(model, batch(3, 1)).backward()
            optimizer.step()
    else:
        twin = copied(model)
    twin.zero_grad()
    next_token_loss(twin, batch(3, 1)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    steps = accountant.steps_done
    other = attach(twin, sgd(twin), lambda m: next_token_loss(m, batch(2, 9)))
    run_step(other, lambda: next_token_loss(twin, batch(3, 1)), range(3))
    assert (accountant.steps_done, other.steps_done) == (steps, 1)


# Errors inside a step


class Failure(Exception):
    """The user's own."""


PLACES = [
    "before the forward",
    "before the backward",
    "in the backward",
    "after the backward",
    "in the optimizer",
    "in the validation",
]


class Fragile(torch.optim.SGD):
    fails = False

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise Failure
        return super()._init_group(*args, **kwargs)


@EVERY
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_inside_a_step_leaves_everything_usable(place: str, method: str) -> None:
    """Weights are those of before or after the move, and later steps score as if the failed one had not been tried."""
    found = []
    for failing in (False, True):
        model = perceptron()
        optimizer = Fragile(model.parameters(), lr=0.05, momentum=0.9)
        trouble = [False]

        def validation(m: nn.Module, trouble: list[bool] = trouble) -> Tensor:
            if trouble[0]:
                raise Failure
            return held_out(m)

        accountant = attach(model, optimizer, validation, audit_every=1, **METHODS[method])
        train(accountant, range(2))
        if failing:
            weights = [p.detach().clone() for p in model.parameters()]
            trouble[0] = place == "in the validation" and method == "first"
            with pytest.raises(Failure), accountant.step(range(50, 54)):
                if place == "before the forward":
                    raise Failure
                out = model(points(4, 50))
                if place == "in the backward":
                    out.register_hook(lambda g: (_ for _ in ()).throw(Failure()))
                if place == "before the backward":
                    raise Failure
                out.square().mean().backward()
                if place == "after the backward":
                    raise Failure
                optimizer.fails = place == "in the optimizer"
                trouble[0] = place == "in the validation"
                optimizer.step()
            optimizer.fails, trouble[0] = False, False
            optimizer.zero_grad()
            assert torch.is_grad_enabled() and model.training
            moved = not all(map(torch.equal, weights, [p.detach() for p in model.parameters()]))
            assert moved == (place == "in the validation" and method not in ("first", "second"))
            assert accountant.steps_done == 2 + moved
            if moved:  # that step was made: what it left in the optimizer's memory is nobody's
                assert "exception" in accountant.last.skipped
                train(accountant, range(2, 4))
                assert set(scores_by_id(accountant)) == {100 * t + i for t in range(4) for i in range(4)}
                assert method == "step" or abs(accountant.last.accounts["validation"].inherited) > 0
                return
        train(accountant, range(2, 4))
        found.append(scores_by_id(accountant))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_adam_trains_on_after_a_failed_step() -> None:
    """The same with a state that counts steps."""
    model = perceptron()
    accountant = attach(model, adamw(model), sketch="exact")
    train(accountant, range(2))
    with pytest.raises(Failure), accountant.step(range(4)):
        losses(model, points(4, 9)).mean().backward()
        raise Failure
    model.zero_grad()
    train(accountant, range(2, 5))
    assert accountant.steps_done == 5
