"""Interleaved timing: every contestant trains one step per round, and the mean of its steps counts.

Steps are timed in steady state, after the warm-up of each contestant. None is left out: audits and the settlement of whole credit
come in some steps only, and the fastest step, which has neither, says nothing about the cost of a run.
Interleaving gives every contestant the same share of quiet moments. The order rotates, since a contestant inherits the caches and
the heap of the one before it; and on a CPU freed memory is kept, or page faults (a fifth of a step) would be dealt out by chance.
Where tensors happen to lie in memory moves a step by 3 to 7 per cent for as long as a contestant lives, so many rounds are shared
out over several instances of each.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from inrun.bench.contestants import Entry
from inrun.bench.shape import Shape

#: How often each contestant is made at most, and how many consecutive steps each instance trains at least.
INSTANCES, ROUNDS_EACH = 3, 50
#: A contestant, its step, and a function that tells the bytes held between steps.
Made = tuple[Entry, Callable[[int], None], Callable[[], int]]


@dataclass
class Result:
    """What was measured of one contestant."""

    name: str
    #: Of the mean step.
    seconds: float
    cpu_seconds: float
    #: Peak bytes of tensors during a step, model and optimizer included.
    peak_bytes: int
    #: Samples per second relative to plain training (by wall time and by CPU time) and to the floor.
    relative: float = 0.0
    relative_cpu: float = 0.0
    of_floor: float = 0.0
    of_floor_cpu: float = 0.0
    #: What it is relative to: plain training, as it is or under the same condition.
    against: str = "plain"
    #: How many steps were timed.
    steps: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def keep_freed_memory() -> None:
    """Ask glibc neither to map large blocks afresh nor to give memory back; elsewhere do nothing."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _peak_of_step(step: Callable[[], None], device: str) -> int:
    """Return the most bytes allocated above the start during one step."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return int(torch.cuda.max_memory_allocated(device) - before)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    level = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def measure(
    shape: Shape,
    contestants: list[Entry],
    rounds: int,
    slow_rounds: int,
    tell: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Result]:
    """Measure all contestants.

    Args:
        shape: Model and batch.
        contestants: The first must be plain training, the second the floor.
        rounds: Rounds for fast contestants.
        slow_rounds: Rounds in which the slow ones take part.
        tell: Called with the contestant's name and progress, anew for each time that they are made.
    """
    shape.check()
    keep_freed_memory()
    times = max(1, min(INSTANCES, rounds // ROUNDS_EACH))
    found: dict[str, Result] = {}
    for instance in range(times):
        # Rounds are shared out, the first instances have one more.
        fast, slow = ((count + times - 1 - instance) // times for count in (rounds, slow_rounds))
        here = [entry for entry in contestants if slow or not entry.slow]
        # In another order every time, so that tensors come to lie elsewhere.
        made = {entry.name: (entry, *entry.make(shape)) for entry in here[instance:] + here[:instance]}
        for r in measure_made([made[entry.name] for entry in here], shape.device, fast, slow, tell, memory=instance == 0):
            found[r.name] = pooled(found[r.name], r) if r.name in found else r
        del made
        gc.collect()
    return compared([found[entry.name] for entry in contestants if entry.name in found])


def measure_made(
    made: list[Made],
    device: str,
    rounds: int,
    slow_rounds: int,
    tell: Callable[[str, int, int], None] = lambda name, done, total: None,
    memory: bool = True,
) -> list[Result]:
    """Measure contestants that are made already, whatever they train; see :func:`measure`.

    Args:
        made: Each with its step and the bytes it holds between steps; plain training first, then the floor.
        device: Where they run.
        rounds: Rounds for fast contestants.
        slow_rounds: Rounds in which the slow ones take part.
        tell: Called with the contestant's name and progress.
        memory: Measure the peak memory of a step, too; if not, it is 0.
    """
    total = len(made) * (rounds + memory)
    done = 0
    for entry, step, _ in made:
        tell(f"warming up {entry.name}", done, total)
        for number in range(entry.warm_up):
            step(number)
    wall = {entry.name: 0.0 for entry, _, _ in made}
    cpu, steps = dict(wall), dict.fromkeys(wall, 0)
    for number in range(rounds):
        turn = number % len(made)
        for entry, step, _ in made[turn:] + made[:turn]:
            tell(f"round {number + 1}/{rounds} {entry.name}", done, total)
            done += 1
            if entry.slow and number >= slow_rounds:
                continue
            _synchronise(device)
            gc.disable()
            began, began_cpu = time.perf_counter(), time.process_time()
            step(entry.warm_up + number)
            _synchronise(device)
            ended, ended_cpu = time.perf_counter(), time.process_time()
            gc.enable()
            wall[entry.name] += ended - began
            cpu[entry.name] += ended_cpu - began_cpu
            steps[entry.name] += 1
    results = []
    for entry, step, held in made:
        peak = 0
        if memory:
            tell(f"memory of {entry.name}", done, total)
            done += 1
            last = entry.warm_up + rounds
            peak = held() + _peak_of_step(lambda step=step, last=last: step(last), device)  # type: ignore[misc]
        n = steps[entry.name]
        results.append(Result(entry.name, wall[entry.name] / n, cpu[entry.name] / n, peak, against=entry.against, steps=n))
    return compared(results)


def pooled(a: Result, b: Result) -> Result:
    """Return the mean over the steps of both, and the memory of the first."""
    steps = a.steps + b.steps
    seconds = (a.seconds * a.steps + b.seconds * b.steps) / steps
    cpu_seconds = (a.cpu_seconds * a.steps + b.cpu_seconds * b.steps) / steps
    return replace(a, seconds=seconds, cpu_seconds=cpu_seconds, steps=steps)


def compared(results: list[Result]) -> list[Result]:
    """Put throughput relative to that of plain training and of the floor, which are the first two."""
    named, floor = {r.name: r for r in results}, results[1]
    for r in results:
        first = named[r.against]
        r.relative, r.relative_cpu = first.seconds / r.seconds, first.cpu_seconds / r.cpu_seconds
        r.of_floor, r.of_floor_cpu = floor.seconds / r.seconds, floor.cpu_seconds / r.cpu_seconds
    return results
