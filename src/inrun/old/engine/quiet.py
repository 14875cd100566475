"""Extra forward passes that leave no trace: random state, train/eval flags and ``.grad`` stay as they were.

Tensors that a forward writes to are the business of ``guards.py``, what it leaves in Python that of ``python_state.py``.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from inrun.torch_private import buffers_written_silently, checkpoints_keep_nothing, own_children


@contextlib.contextmanager
def forked_random(seed: int | None, devices: list[torch.device]) -> Iterator[None]:
    """Seed torch, numpy and Python for the time of the block (None: go on from where they are); put them back afterwards."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda = [d for d in devices if d.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        try:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                for device in cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(seed)
                random.seed(seed)
                if numpy is not None:
                    numpy.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules, each once; several times as fast as ``model.modules()``, which hands every one up the tree."""
    found, waiting = {model: None}, [model]
    while waiting:
        for child in own_children(waiting.pop()):
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


@contextlib.contextmanager
def modes(model: nn.Module, training: bool | None, batch_norm_eval: bool = False) -> Iterator[None]:
    """Set every module's ``training`` flag (None: leave it) for the time of the block."""
    before = [(m, m.training) for m in modules_of(model)]
    try:
        for m, flag in before:
            wanted = flag if training is None else training
            if batch_norm_eval and buffers_written_silently(m):
                wanted = False
            _set_training(m, wanted)
        yield
    finally:
        for m, flag in before:
            _set_training(m, flag)


def _set_training(module: nn.Module, flag: bool) -> None:
    """Set the flag; past ``nn.Module.__setattr__``, which looks for parameters, buffers and modules of that name first."""
    held = module.__dict__
    if held.get("training") is flag:
        return
    if "training" in held and type(module).__setattr__ is nn.Module.__setattr__:
        held["training"] = flag
    else:
        module.training = flag


class _NotReentrant:
    """Stands in for ``CheckpointFunction``: the same segments, recomputed by the kind that any backward may ask for."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Let all activation checkpoints be of the one kind that can be differentiated in any way, for the time of the block.

    Reentrant ones can only be differentiated into ``.grad``, and not at all where no input requires gradient. Selective ones, which
    keep nothing now, can be once: not for several points, nor twice.
    """
    before = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _NotReentrant  # type: ignore[assignment,misc]
    try:
        with checkpoints_keep_nothing():
            yield
    finally:
        checkpointing.CheckpointFunction = before  # type: ignore[misc]


def run_eagerly(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function so that nothing in it is compiled, nor runs as compiled before."""

    def plainly() -> Any:
        with torch.compiler.set_stance("force_eager"):
            return run(*args, **kwargs)

    # First out of any compiled call that this one is inside of, where the stance may not be changed.
    return torch.compiler.disable(plainly)()


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the devices that hold the model's parameters and may have a random state of their own."""
    if not torch.cuda.is_available():
        return []
    return list({p.device for p in model.parameters()})


def seed_of(step: int, salt: int) -> int:
    """Return the seed of the extra passes of one step."""
    return (step * 1_000_003 + salt) % (2**63 - 1)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
