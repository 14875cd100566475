"""Conditions of training, one by one and with accumulation: each agrees with the plain run and trains the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conditions import GAMES, Loop, Net, distance, train, validation

FORCED = ("whole, sketch", "first", "midpoint")


def checkpointed(reentrant: bool, always: bool) -> Callable[[Any], Any]:
    def change(model: Net) -> nn.Module:
        model.reentrant, model.always = reentrant, always
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
    "scaled loss": ({"scaler": scaler}, 1e-9),
    "variable length, one row, no row": ({"batches": ((4, 5), (1, 3), (0, 4), (3, 8), (2, 1)), "options": {"audit_every": 1}}, 1e-9),
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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions(condition: str, game: str, accumulate: int) -> None:
    changes, near = CONDITIONS[condition]
    if accumulate == 2 and (game not in FORCED or any(n < 2 for n, _ in changes.get("batches", ()))):
        pytest.skip("a few games are enough")
    # SGD, where rounding in bfloat16 stays rounding: Adam divides by it.
    loop = Loop(GAMES[game], accumulate=accumulate, optimizer=sgd, **changes)
    got = train(loop)
    expected = train(plain_twin(loop))
    assert got.ids == expected.ids
    for a, b in zip(expected.contributions, got.contributions, strict=True):
        assert len(a) == 0 or distance([a], [b]) <= near
    unscored = train(loop, scored=False)
    assert distance(unscored.weights, got.weights) < {torch.float64: 1e-9, torch.float32: 1e-5}.get(loop.dtype, 2e-2)
