"""Conditions of training that a bench may put on a contestant: less precision, compiled code, recomputed activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inrun.bench.shape import Shape
from inrun.torch_private import allow_graphs
from inrun.training.gpt import GPT


@dataclass(frozen=True)
class Condition:
    """What is done to a model before it trains, and what is around its forward."""

    name: str
    #: Returns what is called in place of the model (and given to the Accountant).
    prepare: Callable[[nn.Module], Any] = lambda model: model
    around: Callable[[Shape], AbstractContextManager[Any]] = lambda shape: nullcontext()


#: As it is.
NONE = Condition("")


class CheckpointedGPT(GPT):
    """Our GPT, whose blocks are run once more in the backward instead of keeping their activations."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _checkpointed(model: nn.Module) -> nn.Module:
    if isinstance(model, GPT):
        model.__class__ = CheckpointedGPT
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def _compiled(model: nn.Module, backend: str) -> Any:
    allow_graphs(64)  # every contestant has variants of its own
    return torch.compile(model, backend=backend)


def conditions(backend: str = "inductor") -> list[Condition]:
    """Return the conditions of the bench; ``backend`` is the compiler's."""
    return [
        Condition("bf16 autocast", around=lambda shape: torch.autocast(torch.device(shape.device).type, torch.bfloat16)),
        Condition("torch.compile", prepare=lambda model: _compiled(model, backend)),
        Condition("checkpointing", prepare=_checkpointed),
    ]
