"""Activation checkpoints: every kind may be differentiated in any way, as often as needed, without a trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from inrun.torch_private import CACHED_MODE, keep_version_counter


class _NoReentry:
    """Stands in for reentrant checkpointing, through which gradients of chosen tensors cannot be taken."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Checkpoint without reentry; it recomputes the same values."""
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(wanted):  # reentrant segments give no gradient where no input wants one
            return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@contextlib.contextmanager
def no_reentry() -> Iterator[None]:
    """Let all activation checkpoints in the block be of the kind that any backward may ask for."""
    before = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _NoReentry  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = before  # type: ignore[misc]


@contextlib.contextmanager
def kept_results() -> Iterator[None]:
    """Let selective checkpoints keep their results in the block: a backward takes them, so that a second one would fail."""
    cls = CACHED_MODE
    if cls is None:
        yield
        return
    enter, leave = cls.__enter__, cls.__exit__

    def entering(mode: Any) -> Any:
        mode.inrun_kept = {key: copy.copy(results) for key, results in mode.storage.items()}
        return enter(mode)

    def leaving(mode: Any, *error: Any) -> Any:
        mode.storage.update(mode.__dict__.pop("inrun_kept", {}))
        return leave(mode, *error)

    cls.__enter__, cls.__exit__ = entering, leaving
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


@contextlib.contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Put back buffers and random numbers of the CPU that extra passes through checkpoints change as they run a forward again."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    state = torch.get_rng_state()
    try:
        with kept_results():
            yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, content in buffers:
                with keep_version_counter(buffer):
                    buffer.copy_(content)
