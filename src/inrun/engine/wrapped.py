"""What the user's model is wrapped in: DistributedDataParallel, ``fully_shard``, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from inrun.errors import ConfigurationError
from inrun.torch_private import fsdp_parameters, uncompiled

#: Wrappers that are not scored, by class name, and what to do instead.
REFUSED = {
    "DataParallel": "Take DistributedDataParallel, with one process per device.",
    "FullyShardedDataParallel": "Take fully_shard (FSDP2), or DistributedDataParallel.",
    "DeepSpeedEngine": "Take fully_shard (FSDP2), or DistributedDataParallel.",
    "PipelineStage": "Take fully_shard (FSDP2), or DistributedDataParallel.",
}


@dataclass(frozen=True)
class Wrapped:
    """A model as it is scored, the process group that its wrapper averages gradients over, and whether it is split."""

    model: nn.Module
    group: Any = None
    sharded: bool = False


def unwrap(model: nn.Module) -> Wrapped:
    """Return what is inside a wrapper; refuse wrappers that are not scored by name."""
    inner, group = uncompiled(model), None
    for module in inner.modules():
        name = next((c.__name__ for c in type(module).__mro__ if c.__name__ in REFUSED), None)
        if name is not None:
            raise ConfigurationError(f"the model is, or contains, a {name}, which is not scored. {REFUSED[name]}")
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        group, inner = inner.process_group, uncompiled(inner.module)
    if any(hasattr(p, "ds_id") for p in inner.parameters()):
        raise ConfigurationError("the parameters are split by DeepSpeed ZeRO-3, which is not scored. Take fully_shard (FSDP2).")
    shards = _shard_group(inner)
    return Wrapped(inner, group if shards is None else shards, shards is not None)


def check_model(model: nn.Module) -> None:
    """Refuse modules in which samples of different processes meet."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{name} is a SyncBatchNorm: samples of different processes meet in it, and no process sees what a sample does to "
                "the others. Take GroupNorm, or BatchNorm per process."
            )


def _shard_group(model: nn.Module) -> Any:
    """Return the process group that the parameters are split over; None where no parameter is."""
    sharded, group = fsdp_parameters(model), None
    for name, p in model.named_parameters():
        placements: Any = getattr(p, "placements", None)
        if placements is None:
            if sharded and p.requires_grad:
                raise ConfigurationError(
                    f"{name} is not split over processes while other parameters are. Apply fully_shard to the model itself, too, "
                    "so that the gradients of all of them are averaged."
                )
            continue
        mesh: Any = getattr(p, "device_mesh", None)
        if mesh is None or p not in sharded or mesh.ndim != 1 or not placements[0].is_shard(0):
            raise ConfigurationError(
                f"{name} is a DTensor ({', '.join(map(str, placements))}) that fully_shard did not make, or not on a mesh of one "
                "dimension. Tensor parallel plans, hybrid sharding and shards of other dimensions than the first are not scored. "
                "Take fully_shard on a mesh of one dimension, or DistributedDataParallel."
            )
        group = mesh.get_group()
    return group
