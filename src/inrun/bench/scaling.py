"""`inrun bench --processes N`: plain and scored training in several processes, beside one, and what they exchange.

Every process has a batch (`--batch` rows) and validation rows of its own, so that N processes do N times the work of one.
Rounds are interleaved as in `measure`; all processes take their turn together, and the slowest one's time counts. While the first
process trains alone, which is what the others are compared with, they wait.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inrun.bench.contestants import WARM_UP
from inrun.bench.measure import keep_freed_memory
from inrun.bench.shape import Shape
from inrun.engine import Accountant
from inrun.engine.options import Options
from inrun.errors import ConfigurationError, ProcessError
from inrun.training.loss import next_token_loss
from inrun.training.parallel import blocks_of
from inrun.training.processes import launched

#: Called with what is being done, how much of it is done, and how much there is.
Tell = Callable[[str, int, int], None]
#: Makes such a function; the first process enters it.
Telling = Callable[[], AbstractContextManager[Tell]]
#: Seconds after which a process that does not answer is given up.
PATIENCE = 1800.0


@dataclass
class Scaled:
    """What was measured of one contestant."""

    name: str
    processes: int
    #: Seconds of the mean step with all processes, and of the first process alone.
    seconds: float
    seconds_alone: float
    #: Samples per second relative to plain training in as many processes, and (one process against one) alone.
    relative: float
    relative_alone: float
    #: Samples per second of all processes over those of one; N is perfect.
    scaling: float
    #: Bytes that a process hands to collectives beyond DDP's or FSDP's own: of the median step, by kind.
    payload: dict[str, int]
    #: Bytes that a process sends, by rings.
    wire: float

    @property
    def bytes(self) -> int:
        """Return what a process hands to collectives in a step."""
        return sum(self.payload.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "bytes": self.bytes}


class Trainee:
    """A model that one contestant trains: alone, or with the other processes."""

    def __init__(self, shape: Shape, method: str | None, mode: str, group: Any) -> None:
        """``method`` is the Accountant's, None for plain training; ``group`` of one process makes it train alone."""
        self.shape, self.rank, self.world = shape, dist.get_rank(), dist.get_world_size()
        self.model = shape.build()
        self.called = self.model if group is not None else _spread(self.model, mode, shape.device)
        self.optimizer = shape.make_optimizer(self.model)
        held_out = shape.rows(shape.validation_rows, -1 - self.rank)

        def validation(model: nn.Module) -> Tensor:
            return next_token_loss(model, held_out)

        self.accountant: Accountant | None = None
        if method is not None:
            options = Options(process_group=group)
            self.accountant = Accountant(self.called, self.optimizer, validation, method=method, options=options)

    def train(self, number: int) -> None:
        """Train one step on this process's rows."""
        turn = number * self.world + self.rank
        rows = self.shape.rows(self.shape.batch, turn)
        ids = range(turn * self.shape.batch, (turn + 1) * self.shape.batch)
        with nullcontext() if self.accountant is None else self.accountant.step(ids):
            next_token_loss(self.called, rows).backward()
            if self.shape.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.shape.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def _spread(model: nn.Module, mode: str, device: str) -> nn.Module:
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
        return model
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.startswith("cuda") else None)


#: The methods by name, plain training first.
CONTESTANTS = {"plain": None, "first": "first", "whole": "whole"}
#: What a step exchanged: bytes by kind, and bytes that are sent by rings.
Exchanged = tuple[dict[str, int], float]


def measure_scaling(shape: Shape, rounds: int, mode: str, tell: Tell = lambda name, done, total: None) -> list[Scaled]:
    """Measure all contestants, in every process of a group that is there; all of them return the same."""
    keep_freed_memory()
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = dist.new_subgroups(1)[0]
    shared = {name: Trainee(shape, method, mode, None) for name, method in CONTESTANTS.items()}
    single = {name: Trainee(shape, method, mode, alone) for name, method in CONTESTANTS.items()} if rank == 0 else {}
    turns = [(name, apart) for name in CONTESTANTS for apart in (False, True)]
    mean = dict.fromkeys(turns, 0.0)
    exchanged: dict[str, list[Exchanged]] = {name: [] for name in CONTESTANTS}
    total = (WARM_UP + rounds) * len(turns)
    for number in range(WARM_UP + rounds):
        first = number % len(turns)
        for i, (name, apart) in enumerate(turns[first:] + turns[:first]):
            tell(f"{name}, {'alone' if apart else f'{world} processes'}", number * len(turns) + i, total)
            trainee = single.get(name) if apart else shared[name]
            accountant = None if trainee is None or apart else trainee.accountant
            seconds = _time_slowest(trainee, number, shape.device)
            if number < WARM_UP:
                continue
            mean[name, apart] += seconds / rounds
            if accountant is not None:
                found = accountant.communication
                exchanged[name].append((found.payload, found.wire))
    for trainee in (*shared.values(), *single.values()):
        if trainee.accountant is not None:
            trainee.accountant.close(settle=False)
    return [_result(name, world, mean, exchanged[name]) for name in CONTESTANTS]


def _time_slowest(trainee: Trainee | None, number: int, device: str) -> float:
    """Return the seconds that the slowest process takes for a step; all begin at once, and those without a model wait."""
    dist.barrier()
    gc.disable()
    began = time.perf_counter()
    if trainee is not None:
        trainee.train(number)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _result(name: str, world: int, mean: dict[tuple[str, bool], float], exchanged: list[Exchanged]) -> Scaled:
    # Audited steps exchange more: the median step is not audited.
    usual = statistics.median_low(sum(payload.values()) for payload, _ in exchanged) if exchanged else 0
    payload, wire = next((x for x in exchanged if sum(x[0].values()) == usual), ({}, 0.0))
    shared, apart = mean[name, False], mean[name, True]
    relative, relative_alone = mean["plain", False] / shared, mean["plain", True] / apart
    return Scaled(name, world, shared, apart, relative, relative_alone, world * apart / shared, payload, wire)


# The processes


def _quiet(what: str, done: int, total: int) -> None:
    """Show nothing."""


def tell_nobody() -> AbstractContextManager[Tell]:
    """Show nothing of progress."""
    return nullcontext(_quiet)


def check(shape: Shape, processes: int | None) -> None:
    """Raise ConfigurationError for what cannot be measured."""
    shape.check()
    _, world = launched()
    if world > 1 and processes not in (None, world):
        raise ConfigurationError(
            f"--processes is {processes}, but a launcher started {world}; leave --processes out under torchrun"
        )
    count = processes or world
    if count < 2:
        raise ConfigurationError("scaling needs two processes at least: --processes 2, or torchrun --nproc-per-node 2")
    if world == 1 and shape.device.startswith("cuda") and torch.cuda.device_count() < count:
        raise ConfigurationError(f"{count} processes need {count} GPUs; torch sees {torch.cuda.device_count()}")


def scale(
    shape: Shape, processes: int | None, rounds: int, mode: str, threads: int, telling: Telling = tell_nobody
) -> list[Scaled] | None:
    """Measure in the processes that a launcher started, or in new ones; return results, in the first process only.

    Args:
        shape: Model and batch; rows are those of one process.
        processes: How many to start; None under a launcher.
        rounds: Interleaved rounds, after some that warm up.
        mode: "ddp" or "fsdp".
        threads: Of every process.
        telling: Makes what progress is told to; a function of a module, since another process makes it.
    """
    check(shape, processes)
    rank, world = launched()
    if world > 1:
        found = _join("env://", rank, world, int(os.environ.get("LOCAL_RANK", rank)), shape, rounds, mode, threads, telling)
        return found if rank == 0 else None
    assert processes is not None
    with tempfile.TemporaryDirectory() as folder:
        _spawn(processes, (processes, folder, shape, rounds, mode, threads, telling))
        return [Scaled(**x) for x in json.loads((Path(folder) / "found.json").read_text())]


def _spawn(count: int, args: tuple[Any, ...]) -> None:
    """Run processes until all have ended; one that fails ends all, and none outlives this one."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    try:
        spawn(_be_one, args, nprocs=count, join=True, daemon=True)
    except ProcessExitedException as error:
        raise ProcessError(f"rank {error.error_index} of {count} died: {error}") from error
    except ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        raise ProcessError(f"rank {error.error_index} of {count} failed: {last}") from error


def _be_one(rank: int, world: int, folder: str, shape: Shape, rounds: int, mode: str, threads: int, telling: Telling) -> None:
    """Be one of the processes that were started; the first leaves the results."""
    found = _join(f"file://{folder}/init", rank, world, rank, shape, rounds, mode, threads, telling)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps([asdict(x) for x in found]))
    # Not through the interpreter's end: DDP keeps gloo's threads beyond its group (`_leave` of inrun.cli.main).
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _join(
    where: str, rank: int, world: int, local: int, shape: Shape, rounds: int, mode: str, threads: int, telling: Telling
) -> list[Scaled]:
    """Find the others, measure with them, and part."""
    torch.set_num_threads(threads)
    if rank > 0:  # all say the same
        logging.getLogger("inrun").setLevel(logging.ERROR)
    backend = "gloo"
    if shape.device.startswith("cuda"):
        shape, backend = replace(shape, device=f"cuda:{local}"), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(local)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE))
    with telling() if rank == 0 else tell_nobody() as tell:
        found = measure_scaling(shape, rounds, mode, tell)
    dist.barrier()
    dist.destroy_process_group()
    return found
