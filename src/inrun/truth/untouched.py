"""Borrow a model and hand it back bit for bit: weights, buffers, modes, gradients, random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, *, weights: bool = True) -> Iterator[None]:
    """Restore the model and all random states on the way out, whatever happens inside.

    Args:
        model: The model to borrow.
        weights: Whether the weights are written to inside; False saves their copy.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    values = [p.detach().clone() for p in parameters] if weights else []
    # A buffer may be written in place or be replaced by another tensor: keep the tensor itself and its content.
    buffers = [(module, name, b, b.detach().clone()) for module in modules for name, b in module.named_buffers(recurse=False)]
    with _random_states():
        try:
            yield
        finally:
            for module, name, buffer, content in buffers:
                setattr(module, name, buffer)
                if not _same_bits(buffer, content):
                    buffer.data.copy_(content)
            for p, value in zip(parameters, values, strict=bool(weights)):
                # Through .data: a backward the user still has pending sees the same bits and must not complain of a new version.
                p.data.copy_(value)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


@contextmanager
def _random_states() -> Iterator[None]:
    """Put the random states of Python, NumPy and torch back on the way out."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, so that a validation loss with random draws is one function of the weights."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nothing was written (NaN counts as written, which only costs a copy)."""
    return a.shape == b.shape and torch.equal(a, b)
