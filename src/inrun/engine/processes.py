"""The processes that train together, and everything they tell each other.

Every rank scores its own samples. Whatever must be the same on all ranks is a sum over them (:meth:`Processes.all_reduce_`), or
is settled at a *barrier*: a block of local work after which the ranks tell each other where they are and whether it succeeded. An
error on one rank is raised on all, by name. :class:`Processes` itself is one process alone, where nothing is exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.errors import ConfigurationError, ProcessError

#: Kinds of traffic in which every rank hands over its own part, and those that only rank 0 receives; all else is added up.
GATHERED, HANDED = ("directions", "barriers", "messages"), ("parts for rank 0",)


@dataclass(frozen=True)
class Communication:
    """What the accountant exchanged in one step, beside what DDP or FSDP exchange, per rank.

    ``payload`` are bytes handed to collectives, by what they are; ``calls`` is the number of collectives.
    """

    world: int
    payload: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    @property
    def bytes(self) -> int:
        """Return all bytes handed to collectives."""
        return sum(self.payload.values())

    @property
    def wire(self) -> float:
        """Return how many bytes a rank sends, by rings: 2(W−1)/W per byte of a sum, W−1 per byte of an all-gather."""
        gathered, handed = (sum(self.payload.get(what, 0) for what in kind) for kind in (GATHERED, HANDED))
        added = self.bytes - gathered - handed
        return gathered * (self.world - 1) + handed * (self.world > 1) + added * 2 * (self.world - 1) / self.world


@dataclass
class Meeting:
    """What a barrier exchanges beside errors: one number of this rank, and when it is passed those of all."""

    number: int = 0
    numbers: list[int] = field(default_factory=list)


class Processes:
    """One process alone."""

    rank, world = 0, 1
    #: Whether parameters are split over the processes; whether a process is gone, so that nothing can be exchanged any more.
    sharded = False
    broken = False

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @contextlib.contextmanager
    def barrier(self, where: str, step: int) -> Iterator[Meeting]:
        """Do local work, and go on only when every rank has done it; an error on one rank is raised on all."""
        meeting = Meeting()
        yield meeting
        meeting.numbers = [meeting.number]

    def any(self, where: str, step: int, flag: bool) -> bool:
        """Return whether something holds on some rank; a barrier."""
        return flag

    def all_reduce_(self, what: str, tensors: Sequence[Tensor], mean: bool = False) -> None:
        """Add up or average tensors over ranks, in place and in few calls; ``what`` is the name for :class:`Communication`."""

    def all_reduced(self, what: str, x: Tensor) -> Tensor:
        """Return a small tensor, added up over ranks."""
        return x

    def all_gather(self, what: str, mine: Tensor) -> Tensor:
        """Return vectors of equal length of every rank, ``[world, m]``."""
        return mine.unsqueeze(0)

    def all_true(self, flag: Tensor) -> Tensor:
        """Return whether a flag holds on every rank, as a tensor like it."""
        return self.all_reduced("flags", (~flag).float()) == 0 if self.several else flag

    def over_shards(self, x: Tensor) -> Tensor:
        """Return what was added up over the entries of parameters that are here, over all their entries."""
        return self.all_reduced("products of shards", x) if self.sharded else x

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return a small plain object (JSON) of every rank."""
        return [mine]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, on rank 0; nothing on the others."""
        return [data]

    def from_first(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0, however long it takes; return its plain result, or raise its error, on all ranks."""
        return work()

    def announce(self, error: BaseException) -> None:
        """Leave word of an error for ranks that will miss this one."""

    def explain(self, error: BaseException) -> ProcessError | None:
        """Return who is missing, where an error is that of a broken connection."""
        return None

    def count(self, what: str, nbytes: int) -> None:
        """Count bytes that were exchanged elsewhere."""

    def begin_step(self) -> None:
        """Count what is exchanged from here on."""

    def communication(self) -> Communication:
        """Return what was exchanged since the last step began."""
        return Communication(1)


def find_processes(group: Any, device: torch.device, sharded: bool = False) -> Processes:
    """Return the processes of a run.

    Args:
        group: The process group over which gradients are averaged; None where a model is not wrapped.
        device: Where the parameters are.
        sharded: Whether they are split over the processes.
    """
    import torch.distributed as dist

    from inrun.engine.group import Group

    running = dist.is_available() and dist.is_initialized()
    if group is None:
        if running and dist.get_world_size() > 1:
            raise ConfigurationError(
                f"torch.distributed runs with {dist.get_world_size()} processes, but the model is neither wrapped in "
                "DistributedDataParallel nor sharded by fully_shard. Give the Accountant the wrapper, or the module inside it with "
                "Options(process_group=torch.distributed.group.WORLD). If every process trains a model of its own, give a group of "
                "one: Options(process_group=torch.distributed.new_subgroups(1)[0])."
            )
        return Processes()
    if not running:
        raise ConfigurationError(
            "process_group= is given, but torch.distributed is not initialised. Call init_process_group first."
        )
    if dist.get_world_size(group) <= 1 and not sharded:
        return Processes()
    return Group(group, device, sharded)
