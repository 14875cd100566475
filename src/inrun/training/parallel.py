"""A model on several processes: whole on each of them (DDP), or split over them (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inrun.training.processes import Job


def spread(model: nn.Module, job: Job, mode: str) -> nn.Module:
    """Return the model as it is called in training, by ``mode`` "ddp" or "fsdp"; one process calls the model itself.

    FSDP splits the parameters of the model itself: an optimizer is made afterwards.
    """
    if job.world == 1:
        return model
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
        return model
    device = torch.device(job.device)
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered one at a time: the members of every outermost list of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


@contextlib.contextmanager
def without_sync(called: Any) -> Iterator[None]:
    """Accumulate gradients in the block without averaging them over processes."""
    if hasattr(called, "no_sync"):
        with called.no_sync():
            yield
        return
    called.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        called.set_requires_gradient_sync(True)


def is_split(model: nn.Module) -> bool:
    """Whether the parameters of a model are split over processes."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def whole(x: Tensor) -> Tensor:
    """Return a tensor that may be split as a whole one; all processes ask together."""
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def split_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Split a whole tensor as a parameter of the same shape is; every process has all of it."""
    if not hasattr(parameter, "device_mesh") or x.shape != parameter.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
