"""Whole credit where a step is moved by its own gradient alone: nothing is sketched, and credits are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import inrun
from inrun.engine.credit.exact_store import ExactStore
from inrun.engine.credit.sketch_store import SketchStore
from inrun.errors import DeferredMemoryError
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny

STEPS = 5
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd with coupled decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


def begin(kind, options, **more):
    """A tiny model with its optimizer and an accountant of one validation loss."""
    torch.manual_seed(0)
    model = tiny()
    optimizer = kind(model.parameters(), **options)
    rows = batch(3, 99)
    return model, optimizer, inrun.Accountant(model, optimizer, lambda m: next_token_loss(m, rows), audit_every=1, **more)


def step(model, optimizer, accountant, t: int) -> None:
    """Four samples in two microbatches, clipped."""
    data = batch(4, t)
    with accountant.step() as open_:
        for part in ([0, 1], [2, 3]):
            with open_.microbatch([4 * t + j for j in part]):
                (next_token_loss(model, data[part]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def scores(kind, options, steps=STEPS, **more):
    """Train; return the scores by sample, and the accountant."""
    model, optimizer, accountant = begin(kind, options, **more)
    for t in range(steps):
        step(model, optimizer, accountant, t)
    table = accountant.scores()
    accountant.close()
    return table["score"].to_numpy(), accountant


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_the_exact_memory(name) -> None:
    kind, options = OPTIMIZERS[name]
    found, accountant = scores(kind, options, credit="whole")
    wanted, _ = scores(kind, options, credit="whole", credit_memory="exact")
    sketched, other = scores(kind, options, credit="whole", sketch=64)
    assert isinstance(accountant._run.credit.store, ExactStore)
    assert not accountant._run.credit.store.entries and not accountant._run.credit.open
    np.testing.assert_array_equal(found, wanted)
    # The control: sketches that are asked for are made, and are estimates.
    assert isinstance(other._run.credit.store, SketchStore)
    assert np.abs(sketched - wanted).max() > 1e-6 * np.abs(wanted).max()


def test_under_sgd_it_is_the_midpoint_of_the_step_game() -> None:
    found, _ = scores(torch.optim.SGD, {"lr": 0.1})
    wanted, _ = scores(torch.optim.SGD, {"lr": 0.1}, credit="step", method="midpoint", update="secant")
    first, _ = scores(torch.optim.SGD, {"lr": 0.1}, credit="step", method="first", update="secant")
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * scale)  # the ledger keeps single precision
    assert np.abs(first - wanted).max() > 1e-3 * scale


@pytest.mark.parametrize("options", [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}])
def test_momentum_is_sketched(options) -> None:
    _, accountant = scores(torch.optim.SGD, options, steps=1, credit="whole")
    assert isinstance(accountant._run.credit.store, SketchStore)


def test_one_group_with_memory_is_enough() -> None:
    torch.manual_seed(0)
    model = tiny()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "momentum": 0.5}], lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: next_token_loss(m, batch(3, 99)))
    assert isinstance(accountant._run.credit.store, SketchStore)


def with_momentum_later(**more):
    """Momentum is turned on after two steps."""
    model, optimizer, accountant = begin(torch.optim.SGD, {"lr": 0.1}, credit="whole", **more)
    for t in range(STEPS):
        if t == 2:
            optimizer.param_groups[0]["momentum"] = 0.9
        step(model, optimizer, accountant, t)
    return accountant


def test_momentum_that_comes_later_is_followed() -> None:
    found, wanted = with_momentum_later(), with_momentum_later(credit_memory="exact")
    assert len(found._run.credit.open) == STEPS - 2
    pairs = zip(found._run.credit.open, wanted._run.credit.open, strict=True)
    assert all(torch.equal(a.credit, b.credit) for a, b in pairs)
    assert all(shape.parts()[0].device.type == "cpu" for e in found._run.credit.store.entries for _, _, shape in e.held)


def test_its_memory_is_said_when_it_comes() -> None:
    one_step = begin(torch.optim.SGD, {"lr": 0.1}, credit="whole")
    step(*one_step, 0)
    entry_bytes = one_step[2]._run.credit.free
    moved = sum(x.nbytes for r in entry_bytes.values() for x in (r.q, r.gain) if isinstance(x, torch.Tensor))
    with pytest.raises(DeferredMemoryError, match="host memory for 4 rows in each of 44 steps"):
        with_momentum_later(deferred_memory=moved + 200_000)


def test_a_state_of_sketches_without_windows_is_taken() -> None:
    model, optimizer, old = begin(torch.optim.SGD, {"lr": 0.1}, credit="whole", sketch=64)
    for t in range(2):
        step(model, optimizer, old, t)
    state = old.state_dict()
    new_model, new_optimizer, new = begin(torch.optim.SGD, {"lr": 0.1}, credit="whole")
    new_model.load_state_dict(model.state_dict())
    new.load_state_dict(state)
    step(new_model, new_optimizer, new, 2)
    step(model, optimizer, old, 2)
    assert new._run.credit.steps == old._run.credit.steps == 3
    assert new.last.step == old.last.step == 2
