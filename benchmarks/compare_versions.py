"""Time the methods of two source trees of inrun in one interleaved run: one process each, one step at a time, in turns.

    python benchmarks/compare_versions.py ../old/src src --rounds 60 --only whole

Prints, per method, the mean step of each tree in wall and CPU time (after a warm-up), their ratio, and peak memory;
``plain`` shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

WORKER = """
import gc, json, sys, time
import torch
from inrun.bench.contestants import entries
from inrun.bench.measure import keep_freed_memory, _peak_of_step
from inrun.bench.shape import Shape

options, only, keep = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "keep"
torch.set_num_threads(options.pop("threads"))
if keep:
    keep_freed_memory()
shape = Shape(clip=1.0, **options)
found = {e.name: e for e in entries(shape) if not e.slow and (e.name == "plain" or not only or any(o in e.name for o in only))}
made, number = {}, {}
print(json.dumps(list(found)), flush=True)
for line in sys.stdin:
    what, name = json.loads(line)
    if name not in made:
        torch.manual_seed(0)
        made[name], number[name] = found[name].make(shape), 0
    step, held = made[name]
    number[name] += 1
    if what == "peak":
        gc.collect()
        print(json.dumps(_peak_of_step(lambda: step(number[name]), "cpu") + held()), flush=True)
        continue
    wall, cpu = time.perf_counter(), time.process_time()
    step(number[name])
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
"""


class Tree:
    """One source tree in a process of its own."""

    def __init__(self, path: str, options: dict, only: list[str], keep: bool) -> None:
        """Start the process."""
        command = [sys.executable, "-W", "ignore", "-c", WORKER, json.dumps(options), json.dumps(only), "keep" if keep else "free"]
        environment = {**os.environ, "PYTHONPATH": os.path.abspath(path)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
        self.names: list[str] = json.loads(self.process.stdout.readline())

    def ask(self, what: str, name: str):
        """Let the process take one step of a method, and return what it measured."""
        self.process.stdin.write(json.dumps([what, name]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=48, help="steps before; whole credit's window is 44 steps at β₁ = 0.9")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--default-malloc", action="store_true", help="let glibc give freed memory back, as it does by default")
    for name, default in (("width", 256), ("layers", 4), ("heads", 4), ("context", 256), ("vocab", 4096), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw")
    given = vars(parser.parse_args())
    old, new, rounds, only = given.pop("old"), given.pop("new"), given.pop("rounds"), given.pop("only")
    keep, warm_up = not given.pop("default_malloc"), given.pop("warm_up")
    trees = [Tree(path, dict(given), only, keep) for path in (old, new)]
    names = [n for n in trees[0].names if n in trees[1].names]
    mean = {(i, n): [0.0, 0.0] for i in (0, 1) for n in names}
    for turn in range(rounds + warm_up):
        for name in names:
            for i in (0, 1) if turn % 2 else (1, 0):
                took = trees[i].ask("time", name)
                if turn >= warm_up:
                    mean[i, name] = [a + b / rounds for a, b in zip(mean[i, name], took, strict=True)]
    print(f"{'':<24}{'old ms':>9}{'new ms':>9}{'new/old':>9}{'CPU':>8}{'old MB':>9}{'new MB':>9}")
    for name in names:
        (wall, cpu), (wall_new, cpu_new) = mean[0, name], mean[1, name]
        peaks = [tree.ask("peak", name) / 1e6 for tree in trees]
        print(
            f"{name:<24}{1e3 * wall:>9.1f}{1e3 * wall_new:>9.1f}{wall_new / wall:>9.3f}{cpu_new / cpu:>8.3f}"
            f"{peaks[0]:>9.0f}{peaks[1]:>9.0f}"
        )


if __name__ == "__main__":
    main()
