"""What ranks tell each other, with two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import group

from inrun.engine.processes import Processes, find_processes


def together() -> Processes:
    return find_processes(group.WORLD, torch.device("cpu"))


def sums(rank: int, world: int) -> Any:
    p = together()
    tensors = [torch.full((3, 2), float(rank)), torch.ones(4, dtype=torch.float64).t(), torch.arange(6.0).view(2, 3).t() * rank]
    p.begin_step()
    p.all_reduce_("x", tensors)
    mean = torch.full((2,), float(rank))
    p.all_reduce_("y", [mean, mean], mean=True)
    return [*[x.tolist() for x in tensors], mean.tolist(), p.communication().payload, p.communication().calls]


def words(rank: int, world: int) -> Any:
    p = together()
    return [
        p.gather_objects({"rank": rank, "text": "ä" * rank}),
        p.gather_bytes(b"\1\2" * (rank + 1)),
        p.from_first(lambda: [p.rank, "first"]),
        p.any("here", 3, rank == 1),
        p.any("here", 4, False),
    ]


def fails(rank: int, world: int) -> None:
    with together().barrier("the work", 5):
        if rank == 1:
            raise KeyError("no such rows")


def first_fails(rank: int, world: int) -> None:
    def work() -> None:
        raise ValueError("not today")

    together().from_first(work)


def apart(rank: int, world: int) -> None:
    with together().barrier("here" if rank else "there", 5):
        pass


def not_wrapped(rank: int, world: int) -> None:
    find_processes(None, torch.device("cpu"))


EXCHANGES: dict[str, Callable[[int, int], Any]] = {f.__name__: f for f in (sums, words, fails, first_fails, apart, not_wrapped)}
#: What every rank must raise.
ERRORS = {
    "fails": "StepError: the work of step 5 failed on another rank.*rank 1: KeyError|^KeyError",
    "first_fails": "ProcessError: rank 0 failed: ValueError: not today|^ValueError: not today",
    "apart": "ProcessError: the ranks came apart: rank 0 is at there of step 5, rank 1 is at here of step 5",
    "not_wrapped": "ConfigurationError: torch.distributed runs with 2 processes.*process_group",
}
