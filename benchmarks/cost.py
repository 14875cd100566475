"""What scores cost: the mean steady-state step of plain, floor and scored training, interleaved in one process.

    python benchmarks/cost.py --case gpt256 --threads 1
    python benchmarks/cost.py --case digits --case gpt08m --engine old --engine new --json
    python benchmarks/cost.py --case gpt256 --memory

"Floor" is plain training that also takes the gradient of the validation loss at every step: the least that anything of this kind
can cost. ``--engine paper`` is the paper's own algorithms (``inrun.paper``), whose batch also holds the validation rows.

Scored training warms up until whole credit's window is full, plain training and the floor for a few steps. After that all take
turns of some consecutive steps each, in rotating order, so that noise hits all alike. No step is left out: settlement and audits
are part of the mean. A ratio's standard error comes from the spread over turns.

``--memory`` instead trains every contestant in a process of its own and compares peak resident memory.

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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from launches import ENGINES, GPT, merged_step, next_token_loss, next_token_losses, pairs
from torch import Tensor, nn

# ---- Cases


@dataclass
class Task:
    """What is trained: a model, its data, its loss."""

    model: nn.Module
    #: Draws so many rows.
    draw: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    #: The same for every row, ``[n]``, which the paper's algorithms need.
    losses: Callable[[nn.Module, Any], Tensor]
    batch: int
    validation_rows: int
    clip: float | None = None
    trainer: bool = False

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make AdamW with torch's defaults."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def gpt(width: int, layers: int, batch: int) -> Task:
    """A GPT with 256 positions and a vocabulary of 4,096, one validation row, clipped."""
    model = GPT(4096, width, layers, heads=width // 64, context=256)
    return Task(model, lambda n: torch.randint(0, 4096, (n, 257)), next_token_loss, next_token_losses, batch, 1, clip=1.0)


def small_gpt2(trainer: bool) -> Task:
    """GPT-2 of transformers with 0.8M parameters, 64 positions, batch 16, 16 validation rows."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss

    def losses(model: nn.Module, rows: Tensor) -> Tensor:
        logits = model(input_ids=rows).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)

    return Task(model, lambda n: torch.randint(0, 256, (n, 64)), loss, losses, 16, 16, clip=1.0, trainer=trainer)


def image_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of labels."""
    return F.cross_entropy(model(rows[0]), rows[1])


def image_losses(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of every label."""
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def digits() -> Task:
    """A CNN for digits of 8 x 8, batch 32, 32 validation rows."""
    stage_1 = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    stage_2 = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*stage_1, *stage_2, nn.Flatten(), nn.Linear(128, 10))
    return Task(model, lambda n: (torch.rand(n, 1, 8, 8), torch.randint(0, 10, (n,))), image_loss, image_losses, 32, 32)


def resnet() -> Task:
    """ResNet-18 with group norms for images of 32 x 32, batch 32, one validation row."""
    import other_models

    model, draw, batch = other_models.resnet()
    return Task(model, draw, image_loss, image_losses, batch, 1, clip=1.0)


CASES: dict[str, Callable[[], Task]] = {
    "gpt256": lambda: gpt(256, layers=4, batch=16),
    "gpt768": lambda: gpt(768, layers=2, batch=8),
    "gpt08m": lambda: small_gpt2(trainer=False),
    "gpt08m-trainer": lambda: small_gpt2(trainer=True),
    "digits": digits,
    "resnet": resnet,
}


CASES_WITH_TRAINER = {"gpt08m-trainer"}


# ---- Contestants


@dataclass(frozen=True)
class Contestant:
    """Plain training, the floor, or a method of an engine."""

    name: str
    engine: str | None = None
    method: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def contestants(engines: list[str], methods: list[str], sketch: int | None) -> list[Contestant]:
    """Return plain training, the floor, and every method of every engine."""
    scored = []
    for engine, method in pairs(engines, methods):
        options = {"sketch": sketch} if sketch is not None and method == "whole" else {}
        scored.append(Contestant(f"{engine} {method}", engine, method, options))
    return [Contestant("plain"), Contestant("floor"), *scored]


class Loop:
    """A training loop that can be run some steps at a time."""

    def __init__(self, task: Task, who: Contestant) -> None:
        """Make the optimizer and attach the engine."""
        self.task, self.who, self.number = task, who, 0
        self.optimizer = task.make_optimizer()
        self.parameters = list(task.model.parameters())
        self.held = task.draw(task.validation_rows)
        self.accountant: Any = None
        if who.engine is not None:
            self.accountant = ENGINES[who.engine](task.model, self.optimizer, self.validation, who.method, **who.options)

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
        if self.who.engine == "paper":
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

        who, validation, batch = self.who, self.validation, self.task.batch
        if who.engine == "old":
            from inrun.integrations.transformers import attach

            chosen = {"credit": "whole"} if who.method == "whole" else {"method": who.method, "credit": "step"}
            attach(self.trainer, validation, **chosen, **who.options)
        elif who.engine is not None:
            attach_engine = ENGINES[who.engine]

            class Scores(TrainerCallback):
                """Attach without an integration: a step from the trainer's step begin to its step end."""

                def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                    optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
                    self.accountant = attach_engine(given["model"], optimizer, validation, who.method, **who.options)

                def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                    number = state.global_step
                    self.step = self.accountant.step(range(number * batch, (number + 1) * batch))
                    self.step.__enter__()

                def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                    self.step.__exit__(None, None, None)

                def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                    self.accountant.close()

            self.trainer.add_callback(Scores())
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


def make(case: str, who: Contestant, steps: int) -> Loop | TrainerLoop:
    """Make a contestant that will train so many steps; all of a case begin with the same weights."""
    torch.manual_seed(0)
    task = CASES[case]()
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
    if CASES_WITH_TRAINER & {case}:
        who = [x for x in who if x.engine != "paper"]  # a Trainer's batch holds training rows only
    loops = [make(case, x, options.warm_up + rounds * options.block) for x in who]
    timed = [Timed(x.name, options.block) for x in who]
    for x, loop in zip(who, loops, strict=True):
        tell(f"{case}: warm-up, {x.name}")
        loop.run(options.warm_up if x.engine is not None else min(options.warm_up, PLAIN_WARM_UP))
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


def resident(what: str) -> int:
    """Return the resident bytes of this process: "VmRSS" now, or "VmHWM" at most so far (not the parent's, unlike getrusage)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return 1024 * int(line.split()[1])


def be_measured(case: str, who: Contestant, engines: list[str], options: argparse.Namespace) -> None:
    """Train one contestant in this process and print what it took."""
    before = resident("VmRSS")
    import inrun

    # Everybody imports all engines, so that the difference is what training takes.
    _ = inrun.Accountant, inrun.MemoryLedger
    if "new" in engines:
        import inrun.engine
    imported = resident("VmRSS") - before
    steps = options.warm_up + options.block
    loop = make(case, who, steps)
    loop.run(steps)
    print(json.dumps({"name": who.name, "steps": steps, "peak": resident("VmHWM"), "imported": imported}))
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
    Console().print(table)
    Console().print(f"Importing inrun takes {rows[0]['imported'] / 1e6:.0f} MB more, which every process has.", highlight=False)


# ---- The command


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable; all by default")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="repeatable; old by default")
    parser.add_argument("--method", action="append", help="repeatable; first and whole by default")
    parser.add_argument("--steps", type=int, default=88, help="timed steps of each; 50 at least for a figure to be quoted")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before; whole credit's window is 44 steps at β₁ = 0.9")
    parser.add_argument("--block", type=int, default=4, help="consecutive steps of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sketch", type=int, help="numbers per sample of whole credit; by default what the engine takes")
    parser.add_argument("--memory", action="store_true", help="instead: peak resident memory, a process for each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, and print tables or JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    engines = options.engine or ["old"]
    who = contestants(engines, options.method or ["first", "whole"], options.sketch)
    if options.child:
        be_measured(options.case[-1], next(x for x in who if x.name == options.child), engines, options)
    found = {}
    for case in options.case or CASES:
        if options.memory:
            rows = memory_rows(case, who, [x for x in sys.argv[1:] if x not in ("--memory", "--json")])
        else:
            rows = timed_rows(time_case(case, who, options))
        tell("")
        found[case] = rows
        if not options.json:
            print_memory(case, rows) if options.memory else print_times(case, rows, options)
    if options.json:
        settings = {name: getattr(options, name) for name in ("steps", "warm_up", "block", "threads", "sketch", "memory")}
        print(
            json.dumps({**settings, "torch": torch.__version__, "contestants": [asdict(x) for x in who], "cases": found}, indent=1)
        )


if __name__ == "__main__":
    main()
