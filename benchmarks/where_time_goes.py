"""Where the time of a scored step goes, beside plain training: every millisecond, by phase and by what runs.

    pip install py-spy
    python benchmarks/where_time_goes.py --model lstm --seconds 20

A child process trains one of the models of ``other_models.py`` on the first core; py-spy looks at its stack from outside some
hundred times a second, so that nothing is slowed down by being measured. A sample belongs to the phase of the step that is on
its stack, and to the innermost function of inrun there; shares of all samples times the mean step are milliseconds, and they add
up to the step. Plain training is measured in the same way, in turns.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: A phase, and functions that tell it; the first that is on the stack counts, so that a validation pass is no forward.
PHASES = {
    "enter": ("Step.__enter__",),
    "settle": ("Step.before_optimizer",),
    "exit": ("Step.__exit__",),
    "backward": ("Tensor.backward",),
    "clip": ("clip_grad_norm_",),
    "optimizer": ("Optimizer.profile_hook_step",),
    "forward": ("loss_of",),
}
#: What runs, by function or file of inrun.
PARTS = {
    "validation pass": ("_gradient (inrun/old/engine/validation", "Validation"),
    "around the validation pass": ("inrun/old/engine/quiet", "inrun/old/engine/look", "inrun/old/engine/validation"),
    "directions": ("inrun/old/optimizers/", "inrun/old/engine/directions"),
    "products of weights, contractions": (
        "inrun/old/layers/running",
        "inrun/old/layers/shapes",
        "dot_each",
        "row_dots",
        "scratch_like",
    ),
    "gradient of the input": ("input_gradient",),
    "the layer itself": ("Owner.run",),
    "norms and biases": ("inrun/old/layers/norm", "sum_positions"),
    "recurrent loops": ("inrun/old/layers/cells", "inrun/old/layers/recurrent", "inrun/old/layers/lstm"),
    "experts": ("inrun/old/layers/experts", "inrun/old/layers/routed"),
    "seam: autograd functions": ("inrun/old/layers/seam", "inrun/old/layers/layout", "inrun/old/layers/linear"),
    "parameters that are read": (
        "inrun/old/layers/reads",
        "inrun/old/layers/read_gradients",
        "inrun/old/engine/reads",
        "inrun/old/layers/trees",
    ),
    "asking and routing": (
        "inrun/old/engine/microbatch",
        "inrun/old/engine/capture",
        "inrun/old/engine/attach",
        "inrun/old/engine/sites",
    ),
    "gradients watched, clip factor": ("inrun/old/engine/checks", "inrun/old/engine/factors", "inrun/torch_private"),
    "settling and records": ("inrun/old/engine", "inrun/ledger"),
}
RATE = 400


def train(name: str, way: str, seconds: float) -> None:
    """Train for some seconds; print the mean step."""
    import other_models
    import torch

    torch.set_num_threads(1)
    other_models.keep_freed_memory()
    step = other_models.make_step(name, way)
    for number in range(other_models.WARM_UP):
        step(number)
    print("ready", flush=True)
    times = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.process_time()
        step(100 + len(times))
        times.append(time.process_time() - start)
    print(1000 * sum(times) / len(times), flush=True)


def phase_of(stack: list[str]) -> str:
    """Return the phase of a stack."""
    for phase, names in PHASES.items():
        if any(frame.startswith(name) for name in names for frame in stack):
            return phase
    return "loop"


def part_of(stack: list[str]) -> str:
    """Return what runs: the innermost frame of inrun that is known, or torch and the model themselves."""
    ours = [i for i, frame in enumerate(stack) if "inrun/" in frame and "inrun/training" not in frame]
    if any("inrun/old/engine/validation" in stack[i] for i in ours):
        return "validation pass"
    for i in reversed(ours):
        part = next((part for part, marks in PARTS.items() if any(mark in stack[i] for mark in marks)), None)
        # Below the wrapper of an observed call, a forward is the model's own: attention, activations, what it adds up.
        if part == "asking and routing" and any("forward (" in frame for frame in stack[i + 1 :]):
            return "torch and the model"
        if part is not None:
            return part
    return "torch and the model"


def look(name: str, way: str, seconds: float) -> tuple[dict[tuple[str, str], float], float]:
    """Return milliseconds by phase and part, and the mean step."""
    command = [sys.executable, __file__, "--model", name, "--child", way, "--seconds", str(seconds + 4)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(  # noqa: S603 - this file
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        raw = Path(folder) / "raw"
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--nonblocking", "-f", "raw", "-r", str(RATE)]
        subprocess.run(  # noqa: S603 - py-spy of this environment
            [*spy, "-d", str(int(seconds)), "-o", str(raw), "-p", str(child.pid)], check=True, capture_output=True
        )
        mean = float(child.stdout.readline())
        lines = raw.read_text(encoding="utf-8").splitlines()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in lines:
        frames, count = line.rsplit(" ", 1)
        stack = frames.split(";")
        if not any("step (" in frame for frame in stack):
            continue  # a look that failed half-way
        counts[phase_of(stack), part_of(stack)] += int(count)
    total = counts.total()
    return {key: mean * count / total for key, count in counts.items()}, mean


def main() -> None:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--way", default="first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        os.sched_setaffinity(0, {0})
        train(options.model, options.child, options.seconds)
        return
    plain, mean = look(options.model, "plain", options.seconds)
    scored, scored_mean = look(options.model, options.way, options.seconds)
    print(f"{options.model}: plain {mean:.2f} ms, {options.way} {scored_mean:.2f}, {scored_mean / mean:.3f} times plain\n")
    print("| phase | plain | scored | of which |\n|---|---|---|---|")
    for phase in ("enter", "forward", "backward", "clip", "settle", "optimizer", "exit", "loop"):
        before = sum(ms for (p, _), ms in plain.items() if p == phase)
        parts = sorted(((ms, part) for (p, part), ms in scored.items() if p == phase), reverse=True)
        words = ", ".join(f"{part} {ms:.2f}" for ms, part in parts if ms >= 0.05)
        print(f"| {phase} | {before:.2f} | {sum(ms for ms, _ in parts):.2f} | {words} |")
    print(f"| all | {sum(plain.values()):.2f} | {sum(scored.values()):.2f} | |")


if __name__ == "__main__":
    main()
