"""One process of several: barriers, sums over ranks, exchanged objects, and who is missing when one does not answer."""

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

from inrun.engine.processes import Communication, Meeting, Processes
from inrun.errors import ProcessError, StepError
from inrun.torch_private import default_store

#: Bytes that are reduced at a time.
BUCKET = 64 * 2**20
#: Seconds between looks into the store, and seconds that other ranks are given to leave word there.
POLL, PATIENCE = 0.05, 3.0
#: Numbers the answers of rank 0; all ranks ask in the same order.
_answers = itertools.count()


class Group(Processes):
    """One process of several."""

    def __init__(self, group: Any, device: torch.device, sharded: bool = False) -> None:
        """``group`` is that over which gradients are averaged; sums are taken on ``device``, all else on the host."""
        import torch.distributed as dist

        self.sharded = sharded
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._dist, self._group = dist, group
        gloo = "gloo" in dist.get_backend(group)
        self._device = torch.device("cpu") if gloo and device.type == "cpu" else device
        ranks = dist.get_process_group_ranks(group)
        self._host = group if gloo else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._payload: dict[str, int] = {}
        self._calls = 0
        #: Host and process id by rank.
        self._homes = [("an unknown host", 0)] * self.world
        self._homes = self.gather_objects((platform.node(), os.getpid()))

    # Barriers

    @contextlib.contextmanager
    def barrier(self, where: str, step: int) -> Iterator[Meeting]:
        """Do local work, and go on only when every rank has done it; an error on one rank is raised on all."""
        meeting, failure = Meeting(), None
        try:
            yield meeting
        except ProcessError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must know
            failure = error
        meeting.numbers = self._meet(where, step, failure, meeting.number)

    def any(self, where: str, step: int, flag: bool) -> bool:
        """Return whether something holds on some rank; a barrier."""
        return any(self._meet(where, step, None, int(flag)))

    def _meet(self, where: str, step: int, failure: Exception | None, number: int) -> list[int]:
        found = self._gather([zlib.crc32(where.encode()), step, int(failure is not None), number])
        if any(x[2] for x in found):
            self._raise(where, step, failure)
        if any(x[:2] != found[0][:2] for x in found):
            places = self.gather_objects(f"{where} of step {step}")
            raise ProcessError(
                "the ranks came apart: " + ", ".join(f"rank {r} is at {place}" for r, place in enumerate(places)) + ". All ranks "
                "must open, step and leave the same steps, with the same microbatches and optimizers."
            )
        return [x[3] for x in found]

    def _raise(self, where: str, step: int, failure: Exception | None) -> None:
        """Raise the error of this rank, or name those of others."""
        texts = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            failure.add_note(f"(rank {self.rank} of {self.world})")
            raise failure
        failed = "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text is not None)
        raise StepError(f"{where} of step {step} failed on another rank, so nothing is recorded on any. {failed}")

    # Sums

    @torch.no_grad()
    def all_reduce_(self, what: str, tensors: Sequence[Tensor], mean: bool = False) -> None:
        """Add up or average tensors over ranks, in place: one flat all-reduce per dtype and 64 MB."""
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._reduce(what, bucket[0], mean)
                continue
            flat = torch.cat([x.reshape(-1) for x in bucket])
            self._reduce(what, flat, mean)
            parts = [part.view(x.shape) for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True)]
            torch._foreach_copy_(bucket, parts)

    def _reduce(self, what: str, x: Tensor, mean: bool) -> None:
        sent = x if x.device.type == self._device.type else x.to(self._device)
        self._call(what, x.nbytes, lambda: self._dist.all_reduce(sent, group=self._group))
        if sent is not x:
            x.copy_(sent)
        if mean:
            x.div_(self.world)

    def all_reduced(self, what: str, x: Tensor) -> Tensor:
        """Return a small tensor, added up over ranks."""
        found = x.detach().clone()
        self.all_reduce_(what, [found])
        return found

    def all_gather(self, what: str, mine: Tensor) -> Tensor:
        """Return vectors of equal length of every rank, ``[world, m]``."""
        return self._all_gather(what, mine, self._group)

    # Objects

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        return self._all_gather("barriers", mine, self._host).tolist()  # type: ignore[no-any-return]

    def _all_gather(self, what: str, mine: Tensor, group: Any) -> Tensor:
        found = torch.empty(self.world * len(mine), dtype=mine.dtype, device=mine.device)
        # The second name is the first's in releases up to 2.12.
        gather = getattr(self._dist, "all_gather_single", None) or self._dist.all_gather_into_tensor
        self._call(what, mine.nbytes, lambda: gather(found, mine, group=group))
        return found.view(self.world, -1)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return a small plain object (JSON) of every rank."""
        # Not by all_gather_object, which unpickles whatever arrives.
        sent, sizes = self._padded(json.dumps(mine).encode())
        lines = self._all_gather("messages", sent, self._host)
        return [json.loads(bytes(line[:size].tolist())) for line, size in zip(lines, sizes, strict=True)]

    def _padded(self, data: bytes) -> tuple[Tensor, list[int]]:
        sizes = [size for (size,) in self._gather([len(data)])]
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return sent, sizes

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, on rank 0; nothing on the others."""
        sent, sizes = self._padded(data)
        found = [torch.empty_like(sent) for _ in sizes] if self.rank == 0 else None
        first = self._dist.get_global_rank(self._host, 0)
        self._call("parts for rank 0", sent.nbytes, lambda: self._dist.gather(sent, found, dst=first, group=self._host))
        return [x[:size].numpy().tobytes() for x, size in zip(found or [], sizes, strict=False)]

    def from_first(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0, however long it takes; return its plain result, or raise its error, on all ranks.

        The others look into the store: a collective would give up after its timeout.
        """
        key = f"inrun/answer/{next(_answers)}"
        if self.rank == 0:
            try:
                found = work()
            except BaseException as error:
                self._answer_failed(key, error)
                raise
            default_store().set(key, json.dumps(found))
            return found
        try:
            store = default_store()
            while not store.check([key]):
                if store.check([f"{key}/failed"]):
                    text = store.get(f"{key}/failed").decode()
                    store.set(f"{key}/heard/{self.rank}", "1")
                    raise ProcessError(f"rank 0 failed: {text}")
                time.sleep(POLL)
            return json.loads(store.get(key))
        except RuntimeError as error:
            raise ProcessError(f"rank 0 did not answer: it died while rank {self.rank} waited for it ({error})") from error

    def _answer_failed(self, key: str, error: BaseException) -> None:
        """Tell why rank 0 failed, and wait a little until all have read it: the store may end with this process."""
        with contextlib.suppress(Exception):
            store, until = default_store(), time.monotonic() + PATIENCE
            store.set(f"{key}/failed", f"{type(error).__name__}: {error}"[:2000])
            heard = [f"{key}/heard/{rank}" for rank in range(1, self.world)]
            while not store.check(heard) and time.monotonic() < until:
                time.sleep(POLL)

    # Counting

    def count(self, what: str, nbytes: int) -> None:
        """Count bytes that were exchanged elsewhere."""
        self._payload[what] = self._payload.get(what, 0) + nbytes
        self._calls += 1

    def begin_step(self) -> None:
        """Count what is exchanged from here on."""
        self._payload, self._calls = {}, 0

    def communication(self) -> Communication:
        """Return what was exchanged since the last step began."""
        return Communication(self.world, dict(self._payload), self._calls)

    # Ranks that are gone

    def _call(self, what: str, nbytes: int, collective: Callable[[], Any]) -> None:
        if self.broken:
            raise ProcessError("another process of the run is gone; nothing can be exchanged any more. Start the run again.")
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
        missing, failed = self._missing()
        names = ", ".join(f"rank {r} (process {self._homes[r][1]} on {self._homes[r][0]})" for r in missing) or "some rank"
        words = "".join(f" Rank {r} had failed: {text}." for r, text in failed.items())
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        return ProcessError(
            f"{names} did not answer: it died, was stopped, or waits elsewhere.{words} This is rank {self.rank} of {self.world}; "
            f"the step is not recorded. ({type(error).__name__}: {reason})"
        )

    def _missing(self) -> tuple[list[int], dict[int, str]]:
        others = [r for r in range(self.world) if r != self.rank]
        failed: dict[int, str] = {}
        gone = others
        try:
            store = default_store()
            store.set(f"inrun/here/{self.rank}", "1")
            until = time.monotonic() + PATIENCE
            while gone and time.monotonic() < until:
                gone = [r for r in gone if not store.check([f"inrun/here/{r}"])]
                time.sleep(POLL)
            failed = {r: store.get(f"inrun/failed/{r}").decode() for r in others if store.check([f"inrun/failed/{r}"])}
        except Exception:  # noqa: BLE001 - the store was perhaps the first rank's
            gone = others
        dead = [r for r in gone if self._homes[r][0] == platform.node() and not _is_alive(self._homes[r][1])]
        return dead or gone, failed


def _is_alive(process: int) -> bool:
    """Return whether a process of this host runs; one that ended and was not waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.isdir("/proc/self")


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Put tensors of one dtype together, up to a size, in their order; one that is there twice is taken once."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for x in tensors:
        if x.numel() and (x.data_ptr(), x.shape) not in seen:
            seen.add((x.data_ptr(), x.shape))
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
