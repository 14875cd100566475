"""Passes in the precision of the parameters, beside training under a bfloat16 policy: what they leave behind, and without them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any
from unittest.mock import patch

import torch
from jobs import BY_NAME, HALF, SECOND, SINGLE, rough, sharded
from plays import Play, full, ids_of, loss_of, play_part, validation_of
from torch import Tensor

import inrun
from inrun import torch_private
from inrun.training.gpt import GPT, GPTConfig

ROUGH = BY_NAME["fsdp second, bfloat16, rough"]


def playing(again: bool) -> Play:
    return Play("second", {**SECOND, "bitwise": True}, wrap=sharded(again, HALF), model=SINGLE, optimizer=rough, steps=3, clip=None)


def train(play: Play, rank: int, validation: Any, called: Any = None) -> list[Tensor]:
    """Train with the own slice of every batch, scored if there is a validation; return the weights."""
    called = play.wrap(play.model()) if called is None else called
    optimizer = play.optimizer(called.parameters())
    accountant = None if validation is None else inrun.Accountant(called, optimizer, validation, audit_every=1, **play.options)
    try:
        for step in range(play.steps):
            with contextlib.nullcontext() if accountant is None else accountant.step(ids_of(play, step, 0, rank)):
                loss_of(called, play, step, 0, [rank], 1).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if accountant is not None:
            accountant.close()
    return [full(x) for x in called.state_dict().values()]


def weights(again: bool, scored: bool, rank: int, world: int) -> list[Tensor]:
    play = playing(again)
    return train(play, rank, validation_of(play, [rank], world) if scored else None)


def not_put_back(rank: int, world: int) -> list[Tensor]:
    """The control: a policy that stays off after the first step that was scored."""

    def exchange(*arguments: Any, **named: Any) -> Any:
        for_good(*arguments, **named)
        return lambda: None

    for_good = torch_private._exchange
    with patch("inrun.torch_private._exchange", exchange):
        return weights(True, True, rank, world)


def rounded(rank: int, world: int) -> dict[str, Any]:
    """The control: differences between passes with rounded weights."""
    with patch("inrun.old.engine.validation.in_own_precision", lambda model: contextlib.nullcontext(False)):
        return play_part(ROUGH, rank, world)


def failing(again: bool, rank: int, world: int) -> dict[str, Any]:
    """A validation callable that fails where it is given wide numbers; then training as if nothing had been."""
    play = playing(again)

    def loss(model: Any) -> Tensor:
        logits = model(torch.zeros(2, 8, dtype=torch.int64))
        if logits.dtype == torch.float32:
            raise ZeroDivisionError("wide numbers")
        return logits.float().square().mean()

    called = play.wrap(play.model())
    try:
        train(play, rank, loss, called)
    except ZeroDivisionError as error:
        told = "\n".join(error.__notes__)
        for p in called.parameters():
            p.grad = None
        return {"told": told, "weights": train(play, rank, None, called)}
    return {"told": "", "weights": []}


class Autocast(GPT):
    """Rounds by itself, as models that Accelerate prepared do."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)  # type: ignore[no-any-return]


def autocast(rank: int, world: int) -> list[Tensor]:
    """Passes are rounded whatever the weights are: wide ones, which cost more, would bring nothing."""
    play = dataclasses.replace(playing(True), model=lambda: Autocast(GPTConfig(23, 12, 8, 2, 2, 0.0, True)))
    with patch("inrun.old.engine.validation.in_own_precision", side_effect=AssertionError):
        return train(play, rank, validation_of(play, [rank], world))


JOBS: dict[str, dict[str, Any]] = {
    "own precision": {
        **{
            f"{'scored' if scored else 'plain'}, {'again' if again else 'kept'}": functools.partial(weights, again, scored)
            for scored in (True, False)
            for again in (True, False)
        },
        "failing, again": functools.partial(failing, True),
        "failing, kept": functools.partial(failing, False),
        "not put back": not_put_back,
        "rounded": rounded,
        "autocast": autocast,
    }
}
