"""The processes of a run, as the rest of the engine sees them; ``group.py`` has those of a job of several.

Every rank scores its own samples. Whatever must be the same on all ranks is either a sum over them (``sum_``) or comes out of a
*meeting* (``together``): a block of local work after which ranks tell each other, in a few numbers, where they are and whether the
work succeeded. An error on one rank is raised on all, by name; ranks that came apart are told apart from ranks that died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from inrun.errors import ProcessError

#: What is gathered; all else is added up.
GATHERED = ("directions", "meetings", "messages")
#: What is gathered by rank 0 alone: the others hand it over once.
HANDED = ("parts for rank 0",)


@dataclass(frozen=True)
class Communication:
    """What the accountant exchanged in one step, beside what DDP or FSDP exchange, per rank.

    ``payload`` are bytes handed to collectives, by what they are. A ring all-reduce sends each of them 2(W − 1)/W times, an
    all-gather ("directions", "meetings" and "messages", where every rank hands over its own part) W − 1 times, and what rank 0
    alone gets ("parts for rank 0") is sent once by each other rank.
    """

    world: int
    payload: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    @property
    def bytes(self) -> int:
        """Return all bytes of the step that were handed to collectives."""
        return sum(self.payload.values())

    @property
    def wire(self) -> float:
        """Return how many bytes a rank sends, by rings."""
        gathered, handed = (sum(self.payload.get(what, 0) for what in kind) for kind in (GATHERED, HANDED))
        added = self.bytes - gathered - handed
        return gathered * (self.world - 1) + handed * (self.world > 1) + added * 2 * (self.world - 1) / self.world


@dataclass
class Meeting:
    """What ranks tell each other at one point: ``own`` numbers of this rank, then those of ``all``."""

    own: Sequence[int] = ()
    all: list[list[int]] = field(default_factory=list)

    def any(self, place: int) -> bool:
        """Whether a number is not 0 on some rank."""
        return any(x[place] != 0 for x in self.all)

    def first(self, place: int) -> int:
        """Return the number of the first rank, which decides for all."""
        return self.all[0][place]

    def same(self, place: int) -> bool:
        """Whether a number is the same on all ranks."""
        return len({x[place] for x in self.all}) == 1


class Processes:
    """One process alone: nothing is exchanged."""

    rank, world = 0, 1
    #: Whether parameters are split over processes; whether some process is gone, so that nothing can be exchanged any more.
    sharded = False
    broken = False

    def __init__(self, reduces: bool = False, rounds: Callable[[], bool] | None = None) -> None:
        """``reduces`` tells that a wrapper works on gradients when a backward ends, even for one process.

        ``rounds`` tells whether it does so in less than their own precision.
        """
        self.reduces, self.rounds = reduces, rounds or (lambda: False)

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def share(self) -> float:
        """Return what a sample's local gradient counts for in the gradient that is used: ranks are averaged."""
        return 1.0 / self.world

    @contextlib.contextmanager
    def together(self, where: str, step: int) -> Iterator[Meeting]:
        """Do local work, and go on only when every rank has done it."""
        meeting = Meeting()
        yield meeting
        meeting.all = [list(meeting.own)]

    def sum_(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Add tensors up over ranks, in place."""

    def mean_(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Average tensors over ranks, in place."""

    def summed(self, what: str, x: Tensor) -> Tensor:
        """Return a small tensor, added up over ranks."""
        return x

    def joined(self, x: Tensor) -> Tensor:
        """Return what was added up over the entries of parameters, over all their entries, where they are split."""
        return self.summed("products of shards", x) if self.sharded else x

    def agree(self, where: str, step: int, flag: bool) -> bool:
        """Whether something holds on some rank."""
        return flag

    def tell(self, what: Any) -> list[Any]:
        """Return a small plain object of every rank."""
        return [what]

    def first_says(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0, however long it takes, and return its plain result on all ranks; raise where it failed."""
        return work()

    def first_gets(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, on rank 0; none on the others."""
        return [data]

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
        """Return what the last step exchanged."""
        return Communication(1)
