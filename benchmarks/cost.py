"""What scores cost: the mean steady-state step of plain, floor and scored training, interleaved in one process.

    python benchmarks/cost.py --case gpt256 --threads 1
    python benchmarks/cost.py --case digits --case gpt08m --method whole --method "paper first" --json
    python benchmarks/cost.py --case gpt256 --only memory

"Floor" is plain training that also takes the gradient of the validation loss at every step: the least that anything of this kind
can cost. "paper first" and "paper second" are the paper's own algorithms (``inrun.paper``), whose batch also holds the validation
rows.

Scored training warms up until whole credit's window is full, plain training and the floor for a few steps. After that all take
turns of some consecutive steps each, in rotating order, so that noise hits all alike. No step is left out: settlement and audits
are part of the mean. A ratio's standard error comes from the spread over turns.

Peak resident memory is compared, too: every contestant trains in a process of its own.

The Trainer cases run each trainer in a thread of its own; only one of them runs at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from launches import METHODS, PAPER, attach, merged_step
from torch import Tensor, nn

import inrun
from cases import CASES, USUAL, WITH_TRAINER, Task

# ---- Contestants


@dataclass(frozen=True)
class Contestant:
    """Plain training, the floor, or a method."""

    name: str
    method: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def contestants(methods: Iterable[str], sketch: int | None) -> list[Contestant]:
    """Return plain training, the floor, and every method."""
    scored = [Contestant(m, m, {"sketch": sketch} if sketch is not None and m == "whole" else {}) for m in methods]
    return [Contestant("plain"), Contestant("floor"), *scored]


class Loop:
    """A training loop that can be run some steps at a time."""

    def __init__(self, task: Task, who: Contestant) -> None:
        """Make the optimizer and attach what scores."""
        self.task, self.who, self.number = task, who, 0
        self.optimizer = task.make_optimizer()
        self.parameters = list(task.model.parameters())
        self.held = task.draw(task.validation_rows)
        self.accountant: Any = None
        if who.method is not None:
            self.accountant = attach(task.model, self.optimizer, self.validation, who.method, **who.options)

    def validation(self, model: nn.Module) -> Tensor:
        """Return the validation loss."""
        return self.task.loss(model, self.held)

    def run(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        task, n = self.task, self.task.batch
        rows = task.draw(n)
        ids = range(self.number * n, (self.number + 1) * n)
        self.number += 1
        if self.who.method in PAPER:
            merged_step(self.accountant, lambda both: task.losses(task.model, both), rows, self.held, ids, self._update)
            return
        with nullcontext() if self.accountant is None else self.accountant.step(ids):
            task.loss(task.model, rows).backward()
            self._update()
        if self.who.name == "floor":
            torch.autograd.grad(self.validation(task.model), self.parameters)

    def _update(self) -> None:
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Detach."""
        if self.accountant is not None:
            self.accountant.close()


class TrainerLoop:
    """A ``transformers.Trainer`` in a thread of its own, which waits between blocks of steps."""

    def __init__(self, task: Task, who: Contestant, steps: int) -> None:
        """Make the trainer; ``steps`` is how many it will train at most, so that no sample comes twice."""
        from transformers import PrinterCallback, Trainer, TrainingArguments

        self.task, self.who = task, who
        self.held = task.draw(task.validation_rows)
        rows = task.draw((steps + 1) * task.batch)
        data = [{"input_ids": row, "labels": row} for row in rows]
        self.folder = tempfile.TemporaryDirectory()
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 10**6}
        arguments = TrainingArguments(
            self.folder.name,
            max_steps=steps + 1,
            per_device_train_batch_size=task.batch,
            learning_rate=1e-3,
            max_grad_norm=task.clip,
            use_cpu=True,
            dataloader_pin_memory=False,
            **quiet,
        )
        self.trainer = Trainer(task.model, arguments, train_dataset=data)
        self.trainer.remove_callback(PrinterCallback)
        self._attach()
        self.trainer.add_callback(_turns(self))  # last, so that a step is over when others take their turn
        self.left, self.over, self.threads = 0, False, torch.get_num_threads()
        self.error: BaseException | None = None
        self.begin, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def validation(self, model: nn.Module) -> Tensor:
        """Return the validation loss."""
        return self.task.loss(model, self.held)

    def _attach(self) -> None:
        from transformers import TrainerCallback

        who, validation = self.who, self.validation
        if who.method is not None:
            from inrun.integrations.transformers import attach

            attach(self.trainer, validation, method=who.method, **who.options)
        elif who.name == "floor":

            class Floor(TrainerCallback):
                """Take the gradient of the validation loss after every step."""

                def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                    torch.autograd.grad(validation(given["model"]), list(given["model"].parameters()))

            self.trainer.add_callback(Floor())

    def _train(self) -> None:
        self.begin.acquire()
        torch.set_num_threads(self.threads)
        try:
            self.trainer.train()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.done.release()

    def run(self, steps: int) -> None:
        """Train so many steps."""
        self.left = steps
        self._take_turn()

    def _take_turn(self) -> None:
        self.begin.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop."""
        self.over = True
        self._take_turn()
        self.thread.join()
        self.folder.cleanup()


def _turns(loop: TrainerLoop) -> Any:
    """Return a callback that waits when a block has ended."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        """Hand over to the thread that measures."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            loop.left -= 1
            if loop.left == 0:
                loop.done.release()
                loop.begin.acquire()
            control.should_training_stop = loop.over

    return Turns()


def make(case: str, who: Contestant, steps: int, batch: int | None = None) -> Loop | TrainerLoop:
    """Make a contestant that will train so many steps; all of a case begin with the same weights."""
    torch.manual_seed(0)
    task = CASES[case]()
    task.batch = batch or task.batch
    return TrainerLoop(task, who, steps) if task.trainer else Loop(task, who)


# ---- Time

#: Steps before the first that is timed, for plain training and the floor.
PLAIN_WARM_UP = 8


@dataclass
class Timed:
    """Seconds of every block of steps."""

    name: str
    block: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def mean(self, clock: str) -> float:
        """Return the mean seconds of a step, "wall" or "cpu"."""
        return statistics.fmean(getattr(self, clock)) / self.block

    def over(self, other: Timed, clock: str) -> tuple[float, float]:
        """Return the ratio of mean steps and its standard error; blocks of one round are paired."""
        own, others = getattr(self, clock), getattr(other, clock)
        ratio = sum(own) / sum(others)
        off = [a - ratio * b for a, b in zip(own, others, strict=True)]
        n = len(own)
        error = math.sqrt(sum(x * x for x in off) / (n * (n - 1))) / statistics.fmean(others) if n > 1 else math.nan
        return ratio, error


def time_case(case: str, who: list[Contestant], options: argparse.Namespace) -> list[Timed]:
    """Time the contestants of a case, plain training and the floor first."""
    rounds = math.ceil(options.steps / options.block)
    loops = [make(case, x, options.warm_up + rounds * options.block, options.batch) for x in who]
    timed = [Timed(x.name, options.block) for x in who]
    for x, loop in zip(who, loops, strict=True):
        tell(f"{case}: warm-up, {x.name}")
        loop.run(options.warm_up if x.method is not None else min(options.warm_up, PLAIN_WARM_UP))
    pairs = list(zip(loops, timed, strict=True))
    for number in range(rounds):
        tell(f"{case}: round {number + 1} of {rounds}")
        turn = number % len(pairs)
        for loop, found in pairs[turn:] + pairs[:turn]:
            began, began_cpu = time.perf_counter(), time.process_time()
            loop.run(options.block)
            found.wall.append(time.perf_counter() - began)
            found.cpu.append(time.process_time() - began_cpu)
    for loop in loops:
        loop.close()
    return timed


def tell(what: str) -> None:
    """Show progress on the terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def timed_rows(timed: list[Timed]) -> list[dict[str, Any]]:
    """Return milliseconds and ratios as plain data."""
    plain, floor = timed[:2]
    rows = []
    for x in timed:
        row: dict[str, Any] = {"name": x.name, "steps": x.block * len(x.wall)}
        for clock in ("wall", "cpu"):
            ratio, error = x.over(floor, clock)
            times = {"ms": 1e3 * x.mean(clock), "of_plain": x.over(plain, clock)[0], "of_floor": ratio, "of_floor_error": error}
            row[clock] = {**times, "blocks": getattr(x, clock)}
        rows.append(row)
    return rows


def print_times(case: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print one row per contestant."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{case}: mean of {rows[0]['steps']} steps after {options.warm_up}, blocks of {options.block}, {options.threads} thread(s)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for clock in ("wall", "CPU"):
        for name in (f"{clock} time", "of plain", "of floor"):
            table.add_column(name, justify="right")
    for row in rows:
        cells = []
        for clock in ("wall", "cpu"):
            x = row[clock]
            error = f" ± {x['of_floor_error']:.3f}" if row["name"] != "floor" else ""
            cells += [f"{x['ms']:.1f} ms", f"{x['of_plain']:.3f}", f"{x['of_floor']:.3f}{error}"]
        table.add_row(row["name"], *cells)
    console = Console(width=max(Console().width, 120))
    console.print(table)
    stretch = rows[0]["wall"]["ms"] / rows[0]["cpu"]["ms"] * options.threads
    if stretch > 1.2:
        console.print(
            f"Plain training took {stretch:.1f} times its CPU time: other jobs shared the cores, so read the CPU columns."
        )


# ---- Memory


def peak_resident() -> int:
    """Return the most bytes that were resident in this process so far (not in the parent, unlike getrusage)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def be_measured(case: str, who: Contestant, options: argparse.Namespace) -> None:
    """Train one contestant in this process and print what it took."""
    # Everybody imports all of inrun, so that the difference is what training takes.
    _ = inrun.Accountant, inrun.MemoryLedger, inrun.paper
    steps = options.warm_up + options.block
    loop = make(case, who, steps, options.batch)
    loop.run(steps)
    print(json.dumps({"name": who.name, "steps": steps, "peak": peak_resident()}))
    sys.stdout.flush()
    os._exit(0)


def memory_rows(case: str, who: list[Contestant], arguments: list[str]) -> list[dict[str, Any]]:
    """Measure every contestant in a process of its own."""
    rows = []
    for x in who:
        tell(f"{case}: memory of {x.name}")
        command = [sys.executable, __file__, *arguments, "--case", case, "--child", x.name]
        found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this file
        if found.returncode:
            raise SystemExit(f"{x.name} failed:\n{found.stderr}")
        rows.append(json.loads(found.stdout.splitlines()[-1]))
    for row in rows:
        row["over_plain"] = row["peak"] - rows[0]["peak"]
    return rows


def print_memory(case: str, rows: list[dict[str, Any]]) -> None:
    """Print one row per contestant."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{case}: peak resident memory, {rows[0]['steps']} steps", title_justify="left")
    table.add_column("")
    table.add_column("peak", justify="right")
    table.add_column("over plain", justify="right")
    for row in rows:
        table.add_row(row["name"], f"{row['peak'] / 1e6:.0f} MB", f"{row['over_plain'] / 1e6:+.0f} MB")
    Console(width=max(Console().width, 120)).print(table)


# ---- The command


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help=f"repeatable; by default {', '.join(USUAL)}")
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable; first and whole by default")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each, 50 at least: every 50th is audited")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before; whole credit's window is 44 steps at β₁ = 0.9")
    parser.add_argument("--block", type=int, default=4, help="consecutive steps of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, help="training rows of a step; by default the case's own")
    parser.add_argument("--sketch", type=int, help="numbers per sample of whole credit; by default chosen by model size")
    parser.add_argument("--only", choices=["time", "memory"], help="measure one of the two")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 50:
        parser.error("--steps: 50 at least, or the mean is not that of a run")
    return options


def main() -> None:
    """Measure, and print tables or JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    who = contestants(options.method or ("first", "whole"), options.sketch)
    if options.child:
        be_measured(options.case[-1], next(x for x in who if x.name == options.child), options)
    found: dict[str, dict[str, Any]] = {}
    for case in options.case or USUAL:
        # A Trainer's batch holds training rows only.
        some = [x for x in who if x.method not in PAPER] if case in WITH_TRAINER else who
        found[case] = {}
        if options.only != "memory":
            found[case]["time"] = timed_rows(time_case(case, some, options))
        if options.only != "time":
            found[case]["memory"] = memory_rows(case, some, [x for x in sys.argv[1:] if x != "--json"])
        tell("")
        if not options.json:
            if "time" in found[case]:
                print_times(case, found[case]["time"], options)
            if "memory" in found[case]:
                print_memory(case, found[case]["memory"])
    if options.json:
        settings = {name: getattr(options, name) for name in ("steps", "warm_up", "block", "threads", "batch", "sketch")}
        print(
            json.dumps({**settings, "torch": torch.__version__, "contestants": [asdict(x) for x in who], "cases": found}, indent=1)
        )


if __name__ == "__main__":
    main()
