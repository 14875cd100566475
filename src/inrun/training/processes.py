"""The processes of one training: how they find each other, and which part of every batch is whose.

``torchrun --nproc-per-node N -m inrun train config.yaml`` starts N processes that read the same configuration. The samples of a
step are those of the global batch, whatever N is: each rank takes its slice of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine.processes import Processes, find_processes
from inrun.errors import ConfigurationError, ProcessError
from inrun.training.config import TrainConfig
from inrun.training.order import Ids

log = logging.getLogger("inrun")


def launched() -> tuple[int, int]:
    """Return rank and number of processes as a launcher (torchrun) tells them; 0 and 1 without one."""
    try:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise ConfigurationError(
            f"RANK is {os.environ.get('RANK')!r} and WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}; torchrun sets both: a rank, "
            "counted from 0, and the number of processes"
        )
    return rank, world


@dataclass
class Job:
    """One process of a training.

    Attributes:
        processes: All of them.
        device: Where this one computes.
    """

    processes: Processes
    device: str

    @property
    def rank(self) -> int:
        """Return the number of this process."""
        return self.processes.rank

    @property
    def world(self) -> int:
        """Return how many there are."""
        return self.processes.world

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.processes.rank == 0

    def part(self, ids: Ids) -> Ids:
        """Return this rank's slice of a global batch."""
        return np.array_split(ids, self.world)[self.rank]

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Leave word of an error for the others, and say who is missing where a connection broke."""
        try:
            yield
        except BaseException as error:
            self.processes.announce(error)
            lost = self.processes.explain(error)
            if lost is not None:
                raise lost from error
            raise

    def sum(self, what: str, values: Any) -> Tensor:
        """Add numbers up over ranks, in double precision."""
        return self.processes.all_reduced(what, torch.as_tensor(values, dtype=torch.float64))


@contextlib.contextmanager
def job_of(config: TrainConfig) -> Iterator[Job]:
    """Join the other processes that a launcher started, if any, for the time of the block."""
    rank, world = launched()
    if world == 1:
        yield Job(Processes(), config.device)
        return
    _check(config, world)
    import torch.distributed as dist

    device = torch.device(config.device)
    if device.type == "cuda":
        if device.index is not None:
            raise ConfigurationError(f"device is {config.device!r}; of several processes each takes its own, by device=cuda")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=config.distributed.timeout))
        except (RuntimeError, ValueError) as error:
            raise ProcessError(f"rank {rank} of {world} did not find the others: {str(error).splitlines()[0][:300]}") from error
    job = Job(find_processes(dist.group.WORLD, device), str(device))
    with job.named_errors():
        yield job
    if own:  # not after an error: others may be gone, and the process ends
        dist.destroy_process_group()


def _check(config: TrainConfig, world: int) -> None:
    b = config.batch
    if b.size < world * b.accumulation:
        raise ConfigurationError(
            f"batch.size {b.size} cannot be split over {world} processes and batch.accumulation {b.accumulation}: every process "
            "needs a sample in every backward. Start fewer processes, or take a larger batch.size"
        )
    if b.size % world and launched()[0] == 0:
        most = -(-b.size // world)
        log.warning(
            "inrun: batch.size %d is no multiple of %d processes: the first %d take %d samples of every step, the others %d. "
            "Scores and weights are those of the whole batch all the same",
            *(b.size, world, b.size % world, most, most - 1),
        )
