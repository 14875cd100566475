"""Models whose parameters are split over processes by ``fully_shard``: which part is here, and passes that leave no trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import ConfigurationError
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored, local
from inrun.old.layers.shards import Shards
from inrun.torch_private import fsdp_groups, fsdp_in_own_precision, fsdp_parameters


def shard_group(model: nn.Module) -> Any:
    """Return the process group that the parameters are split over; None where no parameter is."""
    sharded = fsdp_parameters(model)
    group = None
    for name, p in model.named_parameters():
        if getattr(p, "placements", None) is None:
            if sharded and p.requires_grad:
                raise ConfigurationError(
                    f"{name} is not split over processes while other parameters are; apply fully_shard to the model itself, "
                    "too, so that all of them are averaged"
                )
            continue
        placements = ", ".join(str(x) for x in p.placements)  # type: ignore[attr-defined]
        mesh: Any = getattr(p, "device_mesh", None)
        if mesh is None or p not in sharded or mesh.ndim != 1 or not p.placements[0].is_shard(0):  # type: ignore[attr-defined]
            raise ConfigurationError(
                f"{name} is a DTensor ({placements}) that fully_shard did not make, or not on a mesh of one dimension: tensor "
                "parallel plans, hybrid sharding and shards of other dimensions than the first are not scored, since no process "
                "sees a sample's whole gradient. Take fully_shard on a mesh of one dimension, or DistributedDataParallel."
            )
        group = mesh.get_group()
    return group


def tell_shards(model: nn.Module, scored: Sequence[Scored], processes: Processes, group: Any) -> None:
    """Tell every parameter how it is split."""
    held = fsdp_parameters(model)
    for s in scored:
        shards = Shards(group, processes.rank, processes.world, s.parameter.shape, functools.partial(processes.count, "directions"))
        s.split(shards, held[s.parameter])


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters: the next pass gathers them as they are then."""
    for module in model.modules():
        again: Any = getattr(module, "reshard", None)
        if callable(again) and hasattr(module, "_get_fsdp_state"):
            again()


@contextlib.contextmanager
def in_own_precision(model: nn.Module) -> Iterator[bool]:
    """Run passes in the precision of the parameters themselves; tell whether a policy of ``fully_shard`` takes less else.

    For differences between passes at weights that are closer to each other than the policy's precision can tell: rounded weights
    would be the same ones, or others by chance.
    """
    with fsdp_in_own_precision(model) as rounds_else:
        try:
            yield rounds_else
        except Exception as error:
            if rounds_else:
                error.add_note(
                    "(in a validation pass in the precision of the parameters themselves, as differences of gradients are taken "
                    'under a mixed-precision policy of fully_shard; method="midpoint" needs no such pass)'
                )
            raise


def backward_beside(model: nn.Module, point: Tensor, parameters: Sequence[nn.Parameter], last: bool) -> list[Tensor | None]:
    """Return the gradients of a loss, the mean over processes, each process its rows; ``.grad`` stays as it was.

    Split parameters get their gradient in ``.grad`` and nowhere else: it is taken out and put back.
    """
    # Not model.parameters(): while a parameter is whole, its module has the one that stands for it.
    held = [(p, p.grad) for p in fsdp_parameters(model)]
    groups = [(g, g.reduce_grads, g.all_reduce_grads) for g in fsdp_groups(model)]
    for p, _ in held:
        p.grad = None
    for g, _, _ in groups:
        g.reduce_grads = g.all_reduce_grads = True
    try:
        point.backward()
        with torch.no_grad():
            return [None if p.grad is None else local(p.grad).clone() for p in parameters]
    finally:
        for p, grad in held:
            p.grad = grad
        for g, reduces, all_reduces in groups:
            g.reduce_grads, g.all_reduce_grads = reduces, all_reduces
