"""Conditions of training, one by one and with accumulation: each agrees with the plain run and trains the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import inrun
from conditions import GAMES, Loop, Net, distance, loss_of, net, rows, train, validation
from inrun.errors import StepError

#: Games that are tried with accumulation too.
ACCUMULATED = ("whole, sketch", "first", "midpoint")


def checkpointed(reentrant: bool, always: bool) -> Callable[[Any], Any]:
    def change(model: Net) -> nn.Module:
        model.reentrant, model.always = reentrant, always
        return model

    return change


def selective(*kept: str) -> Callable[[Any], Any]:
    """Keep the results of some operations in every block's checkpoint."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation.name() in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def change(model: Net) -> nn.Module:
        model.reentrant = False
        model.options = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
        return model

    return change


def decorated(model: Net) -> nn.Module:
    """Let every forward run under autocast, as ``@torch.autocast`` on it does."""
    plain = type(model).forward
    model.__class__ = type("Net", (type(model),), {"forward": torch.autocast("cpu", dtype=torch.bfloat16)(plain)})
    return model


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype)


def under(dtype: torch.dtype) -> Callable[[Any], Any]:
    def loss(model: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return validation(model)

    return loss


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


#: Name, what is changed, and how near the plain run it must come (of the batch's norm).
CONDITIONS: dict[str, tuple[dict[str, Any], float]] = {
    "checkpoints": ({"before": checkpointed(False, True)}, 1e-9),
    "reentrant checkpoints": ({"before": checkpointed(True, True)}, 1e-9),
    "reentrant checkpoints in training": ({"before": checkpointed(True, False)}, 1e-9),
    "selective checkpoints": ({"before": selective("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")}, 1e-9),
    "scaled loss": ({"scaler": scaler}, 1e-9),
    "variable length, one row, no row": (
        {"batches": ((4, 5), (1, 3), (0, 4), (3, 8), (2, 2)), "options": {"audit_every": 1}},
        1e-9,
    ),
    "autocast bfloat16": ({"around": autocast(torch.bfloat16), "validation": under(torch.bfloat16), "dtype": torch.float32}, 2e-2),
    "autocast float16, scaled": (
        {"around": autocast(torch.float16), "validation": under(torch.float16), "dtype": torch.float32, "scaler": scaler},
        2e-2,
    ),
    "decorated forward": ({"before": decorated, "dtype": torch.float32}, 2e-2),
    "bfloat16 weights": ({"dtype": torch.bfloat16}, 2e-2),
}


def plain_twin(loop: Loop) -> Loop:
    """The same run without the condition, in full precision; batches and accumulation stay."""
    return Loop(loop.game, batches=loop.batches, accumulate=loop.accumulate, optimizer=loop.optimizer)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# Loops that leave something out or do something twice


def parts(**options: Any) -> tuple[Net, torch.optim.Optimizer, inrun.Accountant]:
    model = net()
    optimizer = sgd(model.parameters())
    return model, optimizer, inrun.Accountant(model, optimizer, validation, audit_every=0, **options)


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("after_backward", [False, True])
def test_a_batch_that_the_loop_drops(game: str, after_backward: bool) -> None:
    """It leaves no trace but a line in the accounts: the steps around it score as if it had never been."""
    found = []
    for dropping in (False, True):
        model, optimizer, accountant = parts(**GAMES[game])
        for number in range(3):
            if dropping and number == 1:
                with accountant.step(range(50, 54)) as step:
                    loss = loss_of(model, rows(4, 77))
                    if after_backward:
                        loss.backward()
                        optimizer.zero_grad()
                    step.skip()
                assert accountant.last.skipped == "the loop dropped the batch"
                assert accountant.last.sample_ids.numel() == 0
            with accountant.step(range(4)):
                loss_of(model, rows(4, number)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(accountant.last.contributions["validation"])
        assert accountant.steps_done == 3 + dropping
        scores = accountant.scores()
        assert set(scores["sample_id"].to_pylist()) == {0, 1, 2, 3}
    assert distance(found[:1], found[1:]) < 1e-12


def test_a_dropped_step_must_not_have_happened() -> None:
    model, optimizer, accountant = parts(credit="step")
    with pytest.raises(StepError, match="has had its effect"), accountant.step(range(4)) as step:
        loss_of(model, rows(4, 0)).backward()
        optimizer.step()
        step.skip()
    optimizer.zero_grad()
    with pytest.raises(StepError, match=r"after step.skip\(\)"), accountant.step(range(4)) as step:
        loss_of(model, rows(4, 0)).backward()
        step.skip()
        optimizer.step()
    with pytest.raises(StepError, match="not open"):
        step.skip()


def test_gradient_of_a_batch_without_rows_is_named() -> None:
    """A penalty on the weights is no sample's; the control is the table above, where such a batch adds nothing."""
    model, optimizer, accountant = parts(credit="step")
    with pytest.raises(StepError, match="batch without rows"), accountant.step([]):
        (loss_of(model, rows(0, 0)) + model.head.weight.square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("game", GAMES)
def test_several_forwards_before_one_backward(game: str) -> None:
    """Two halves of the loss, each from a forward of its own over the same rows, are the whole."""
    found = []
    for forwards in (1, 2):
        model, optimizer, accountant = parts(**GAMES[game])
        for number in range(2):
            with accountant.step(range(4)):
                losses = [loss_of(model, rows(4, number)) / forwards for _ in range(forwards)]
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(accountant.last.contributions["validation"])
    assert distance(found[:1], found[1:]) < 1e-9


@pytest.mark.parametrize("game", GAMES)
def test_several_optimizers(game: str) -> None:
    """Two optimizers with the same rule are one."""
    found = []
    for count in (1, 2):
        model = net()
        inside = list(model.blocks.parameters())
        outside = [model.words.weight, model.places.weight]
        groups = [inside + outside] if count == 1 else [inside, outside]
        optimizers = [sgd(group) for group in groups]
        accountant = inrun.Accountant(model, optimizers, validation, audit_every=0, **GAMES[game])
        for number in range(2):
            with accountant.step(range(4)):
                loss_of(model, rows(4, number)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(accountant.last.contributions["validation"])
    assert distance(found[:1], found[1:]) < 1e-6


TABLE = [
    *((condition, game, 1) for condition in CONDITIONS for game in GAMES),
    *((condition, game, 2) for condition in CONDITIONS for game in ACCUMULATED),
]


@pytest.mark.parametrize(("condition", "game", "accumulate"), TABLE)
def test_conditions(condition: str, game: str, accumulate: int) -> None:
    changes, near = CONDITIONS[condition]
    # SGD, where rounding in bfloat16 stays rounding: Adam divides by it.
    loop = Loop(GAMES[game], accumulate=accumulate, optimizer=sgd, **changes)
    got = train(loop)
    expected = train(plain_twin(loop))
    assert got.ids == expected.ids
    # In less precision the weights themselves part from those of the plain run, step by step: the first one tells.
    compared = 1 if near > 1e-3 else len(got.ids)
    for a, b in list(zip(expected.contributions, got.contributions, strict=True))[:compared]:
        assert len(a) == 0 or distance([a], [b]) <= near
    unscored = train(loop, scored=False)
    assert distance(unscored.weights, got.weights) < {torch.float64: 1e-9, torch.float32: 1e-5}.get(loop.dtype, 2e-2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(6, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x))[0])


def spectral() -> nn.Module:
    """Runs again, in the precision that it ran in."""
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("make", [Recurrent, spectral])
@pytest.mark.parametrize("game", ["first", "whole, sketch"])
def test_autocast_of_modules_that_are_scored_as_a_whole(make: Callable[[], nn.Module], game: str) -> None:
    """The numbers are those without autocast, to its precision."""
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    found = []
    for low in (True, False):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with inrun.Accountant(model, optimizer, lambda m: m(x[:2]).square().mean(), **GAMES[game]) as accountant:
            with accountant.step(range(4)):
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    loss = model(x).float().sin().sum()
                loss.backward()
                optimizer.step()
        found.append(accountant.last.contributions["validation"])
    assert distance([found[1]], [found[0]]) < 0.05


@pytest.mark.parametrize("method", ["first", "second"])
def test_selective_checkpoints_with_several_validation_points(method: str) -> None:
    """Kept products serve one backward; the validation pass takes one per point, and has them recomputed."""
    found = []
    for change in (selective("aten::mm", "aten::addmm"), lambda model: model):
        model = change(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        several = lambda m: torch.stack([validation(m), loss_of(m, rows(3, 7))])  # noqa: E731
        accountant = inrun.Accountant(model, optimizer, several, credit="step", method=method, audit_every=1)
        with accountant.step(range(4)):
            loss_of(model, rows(4, 1)).backward()
            optimizer.step()
        found.append(torch.as_tensor(accountant.last.contributions["validation"]))
    assert torch.allclose(*found, rtol=1e-9)
