"""One process of several: the only place that talks to ``torch.distributed``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.errors import ConfigurationError, ProcessError, StepError
from inrun.old.engine.processes import Communication, Meeting, Processes
from inrun.torch_private import default_store

#: Numbers of a meeting: where, step, failed or not, and as many of its own.
HEAD, OWN = 3, 5
#: Bytes that are reduced at a time.
BUCKET = 64 * 2**20
#: Numbers for what rank 0 says, of this process: all ranks ask for the same. Seconds between looks whether it has.
_said, LOOK = itertools.count(), 0.05
#: Seconds in which the other ranks that also lost somebody are waited for.
PATIENCE = 3.0


class Group(Processes):
    """One process of several."""

    def __init__(self, group: Any, device: torch.device, sharded: bool, rounds: Callable[[], bool] | None) -> None:
        """``group`` is that over which gradients are averaged; ``device`` is where small numbers are exchanged."""
        import torch.distributed as dist

        super().__init__(reduces=True, rounds=rounds)
        self.sharded = sharded
        self._dist, self._group, self._device = dist, group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._payload: dict[str, int] = {}
        self._calls = 0
        #: Host and process id by rank.
        self._homes = [("an unknown host", 0)] * self.world
        self._homes = self._objects((platform.node(), os.getpid()))

    # What ranks tell each other

    @contextlib.contextmanager
    def together(self, where: str, step: int) -> Iterator[Meeting]:
        """Do local work, and go on only when every rank has done it; raise on all where one failed."""
        meeting, failure = Meeting(), None
        try:
            yield meeting
        except ProcessError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must know
            failure = error
        sent = [zlib.crc32(where.encode()), step, int(failure is not None), *meeting.own]
        sent += [0] * (HEAD + OWN - len(sent))
        found = self._gather(sent)
        if failure is not None or any(x[2] for x in found):
            self._raise(where, step, failure)
        if any(x[:2] != found[0][:2] for x in found):
            places = self._objects(f"{where} of step {step}")
            raise ProcessError(
                "the ranks came apart: " + ", ".join(f"rank {r} is at {place}" for r, place in enumerate(places)) + ". All ranks "
                "must open, settle and leave the same steps, with the same microbatches and optimizers."
            )
        meeting.all = [x[HEAD:] for x in found]

    def _raise(self, where: str, step: int, failure: Exception | None) -> None:
        """Raise the error of this rank, or tell those of others."""
        told = self._objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            failure.add_note(f"(rank {self.rank} of {self.world})")
            raise failure
        failed = "; ".join(f"rank {r}: {text}" for r, text in enumerate(told) if text is not None)
        raise StepError(f"{where} of step {step} failed on another rank, so that nothing is recorded on any. {failed}")

    def agree(self, where: str, step: int, flag: bool) -> bool:
        """Whether something holds on some rank."""
        with self.together(where, step) as meeting:
            meeting.own = [int(flag)]
        return meeting.any(0)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        found = torch.empty(self.world * len(numbers), dtype=torch.int64, device=self._device)
        self._all_gather("meetings", found, mine)
        return found.view(self.world, -1).tolist()  # type: ignore[no-any-return]

    def _all_gather(self, what: str, found: Tensor, mine: Tensor) -> None:
        # The second name is the first's in releases up to 2.12.
        gather = getattr(self._dist, "all_gather_single", None) or self._dist.all_gather_into_tensor
        self._call(what, mine.nbytes, lambda: gather(found, mine, group=self._group))

    def tell(self, what: Any) -> list[Any]:
        """Return a small plain object of every rank."""
        return self._objects(what)

    def _objects(self, mine: Any) -> list[Any]:
        # As JSON, not by all_gather_object, which unpickles whatever arrives.
        text = json.dumps(mine).encode()
        sizes = [size for (size,) in self._gather([len(text)])]
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sent, found = sent.to(self._device), torch.empty(self.world * len(sent), dtype=torch.uint8, device=self._device)
        self._all_gather("messages", found, sent)
        lines = found.cpu().view(self.world, -1)
        return [json.loads(bytes(line[:size].tolist())) for line, size in zip(lines, sizes, strict=True)]

    def first_says(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0, however long it takes, and return its plain result on all ranks; raise where it failed.

        The others look into the store: a collective would give up after its timeout.
        """
        key = f"inrun/said/{next(_said)}"
        if self.rank == 0:
            try:
                found = work()
            except BaseException as error:
                self._say_failed(key, error)
                raise
            default_store().set(key, json.dumps(found))
            return found
        try:
            store = default_store()
            while not store.check([key]):
                if store.check([f"{key}/failed"]):
                    said = store.get(f"{key}/failed").decode()
                    store.set(f"{key}/heard/{self.rank}", "1")
                    raise ProcessError(f"rank 0 failed: {said}")
                time.sleep(LOOK)
            return json.loads(store.get(key))
        except RuntimeError as error:
            raise ProcessError(f"rank 0 did not answer: it died while rank {self.rank} waited for it ({error})") from error

    def _say_failed(self, key: str, error: BaseException) -> None:
        """Tell why rank 0 failed, and wait a little until all have heard it: the store may be this process's, and end with it."""
        with contextlib.suppress(Exception):
            store, until = default_store(), time.monotonic() + PATIENCE
            store.set(f"{key}/failed", f"{type(error).__name__}: {error}"[:2000])
            heard = [f"{key}/heard/{rank}" for rank in range(1, self.world)]
            while not store.check(heard) and time.monotonic() < until:
                time.sleep(LOOK)

    def first_gets(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, on rank 0; none on the others."""
        sizes = [size for (size,) in self._gather([len(data)])]
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = sent.to(self._device)
        found = [torch.empty_like(sent) for _ in sizes] if self.rank == 0 else None
        first = self._dist.get_global_rank(self._group, 0)
        self._call("parts for rank 0", sent.nbytes, lambda: self._dist.gather(sent, found, dst=first, group=self._group))
        return [x[:size].cpu().numpy().tobytes() for x, size in zip(found or [], sizes, strict=False)]

    # Sums

    @torch.no_grad()
    def sum_(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Add tensors up over ranks, in place: one flat all-reduce per kind of number and 64 MB."""
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._reduce(what, bucket[0])
                continue
            flat = torch.cat([x.reshape(-1) for x in bucket])
            self._reduce(what, flat)
            for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view(x.shape))

    def _reduce(self, what: str, x: Tensor) -> None:
        sent = x if x.device.type == self._device.type else x.to(self._device)
        self._call(what, x.nbytes, lambda: self._dist.all_reduce(sent, group=self._group))
        if sent is not x:
            x.copy_(sent)

    @torch.no_grad()
    def mean_(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Average tensors over ranks, in place."""
        self.sum_(what, tensors)
        for x in tensors:
            x.div_(self.world)

    def summed(self, what: str, x: Tensor) -> Tensor:
        """Return a small tensor, added up over ranks."""
        found = x.detach().clone()
        self.sum_(what, [found])
        return found

    # Counting

    def begin_step(self) -> None:
        """Count what is exchanged from here on."""
        self._payload, self._calls = {}, 0

    def communication(self) -> Communication:
        """Return what was exchanged since the last step began."""
        return Communication(self.world, dict(self._payload), self._calls)

    def count(self, what: str, nbytes: int) -> None:
        """Count bytes that were exchanged elsewhere."""
        self._payload[what] = self._payload.get(what, 0) + nbytes
        self._calls += 1

    # Ranks that are gone

    def _call(self, what: str, nbytes: int, collective: Callable[[], Any]) -> None:
        if self.broken:
            raise ProcessError("another process of the run is gone; nothing can be exchanged any more")
        self.count(what, nbytes)
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(error) from error

    def announce(self, error: BaseException) -> None:
        """Leave word of an error for ranks that will miss this one."""
        with contextlib.suppress(Exception):
            default_store().set(f"inrun/failed/{self.rank}", f"{type(error).__name__}: {error}"[:2000])

    def explain(self, error: BaseException) -> ProcessError | None:
        """Return who is missing, where an error is that of a broken connection (DDP's own reduction notices it first)."""
        text = str(error).lower()
        signs = ("connection", "timed out", "timeout", "socket", "broken pipe", "nccl", "peer")
        if not isinstance(error, RuntimeError) or isinstance(error, ProcessError) or not any(s in text for s in signs):
            return None
        return self._lost(error)

    def _lost(self, error: BaseException) -> ProcessError:
        """Find out who did not come, by what the others leave in the store."""
        self.broken = True
        missing, said = self._missing()
        names = ", ".join(f"rank {r} (process {self._homes[r][1]} on {self._homes[r][0]})" for r in missing) or "some rank"
        words = "".join(f" Rank {r} had failed: {text}." for r, text in said.items())
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        return ProcessError(
            f"{names} did not answer: it died, was stopped, or waits elsewhere.{words} This is rank {self.rank} of {self.world}; "
            f"the step is not recorded. ({type(error).__name__}: {reason})"
        )

    def _missing(self) -> tuple[list[int], dict[int, str]]:
        others = [r for r in range(self.world) if r != self.rank]
        said: dict[int, str] = {}
        try:
            store = default_store()
            store.set(f"inrun/here/{self.rank}", "1")
            until = time.monotonic() + PATIENCE
            gone = others
            while gone and time.monotonic() < until:
                gone = [r for r in gone if not store.check([f"inrun/here/{r}"])]
                time.sleep(0.05)
            said = {r: store.get(f"inrun/failed/{r}").decode() for r in others if store.check([f"inrun/failed/{r}"])}
        except Exception:  # noqa: BLE001 - the store was perhaps the first rank's
            gone = others
        dead = [r for r in gone if self._homes[r][0] == platform.node() and not _is_alive(self._homes[r][1])]
        return dead or gone, said


def _is_alive(process: int) -> bool:
    """Whether a process of this host runs; one that ended and was not yet waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.isdir("/proc/self")


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Put tensors of one kind together, up to a size, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        if x.numel():
            kinds.setdefault((x.dtype, x.device), []).append(x)
    found: list[list[Tensor]] = []
    for some in kinds.values():
        size = BUCKET
        for x in some:
            if size + x.nbytes > BUCKET:
                found.append([])
                size = 0
            found[-1].append(x)
            size += x.nbytes
    return found


def find_processes(
    wrapped_group: Any,
    process_group: Any,
    device: torch.device,
    sharded: bool = False,
    rounds: Callable[[], bool] | None = None,
) -> Processes:
    """Return the processes of a run.

    Args:
        wrapped_group: The group of the wrapper around the model; None where there is none.
        process_group: What the user gave.
        device: Where the parameters are.
        sharded: Whether they are split over the processes.
        rounds: Tells whether gradients are reduced in less than their own precision.
    """
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    group = process_group if process_group is not None else wrapped_group
    if group is None:
        if running and dist.get_world_size() > 1:
            raise ConfigurationError(
                f"torch.distributed runs with {dist.get_world_size()} processes, but the model is neither wrapped in "
                "DistributedDataParallel nor sharded by fully_shard. Give the Accountant the wrapper; or the module inside it with "
                "process_group=torch.distributed.group.WORLD; or, if every process trains a model of its own, a group of one: "
                "process_group=torch.distributed.new_subgroups(1)[0]."
            )
        return Processes()
    if not running:
        raise ConfigurationError("process_group= is given, but torch.distributed is not initialised; call init_process_group first")
    if dist.get_world_size(group) <= 1 and not sharded:
        return Processes(reduces=wrapped_group is not None)
    backend = dist.get_backend(group)
    return Group(group, device if device.type != "cpu" and "gloo" not in backend else torch.device("cpu"), sharded, rounds)
