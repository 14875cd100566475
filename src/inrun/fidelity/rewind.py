"""Steps that did not happen: weights, optimizer state, gradients, buffers and random state are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def rewound(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Take back everything that training steps in the block do."""
    parameters = list(model.parameters())
    moved = {p for o in optimizers for g in o.param_groups for p in g["params"]} | set(parameters)
    weights = {p: p.detach().clone() for p in moved}
    grads = {p: p.grad for p in moved}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    states = [{p: {k: (v, _copy(v)) for k, v in state.items()} for p, state in o.state.items()} for o in optimizers]
    devices = list({p.device for p in parameters if p.device.type == "cuda"})
    for p in moved:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for p, w in weights.items():
                p.copy_(w)
                p.grad = grads[p]
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
            for optimizer, state in zip(optimizers, states, strict=True):
                _put_back(optimizer, state)


def _put_back(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    """Restore the state, in the very tensors it was in."""
    optimizer.state.clear()
    for p, entries in before.items():
        for key, (original, copy) in entries.items():
            if isinstance(original, Tensor):
                original.copy_(copy)
            optimizer.state[p][key] = original
