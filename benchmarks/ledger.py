"""What the ledger costs: time to write a step, bytes per row, time and memory to add up the scores.

python benchmarks/ledger.py [--large] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from inrun.ledger import Ledger, StepRecord

#: Milliseconds of the training step that writing is compared with.
TRAINING_STEP = 100.0


def account(step: int, label: str) -> dict[str, Any]:
    """Return an account as the engine writes it."""
    figures = {"loss_before": 3.1 + 1e-4 * step, "data": 1e-3, "spread": 2e-3, "lr": 1e-3, "clip": 1.0}
    return {"step": step, "validation": label, **figures, "n_samples": 16, "skipped": None}


def write_cost(folder: Path, steps: int, flush_every: int | str) -> dict[str, Any]:
    """Write steps of 16 samples and two validation sets; return microseconds per step, flushes included."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**40, (steps, 16))
    values = rng.normal(0, 1e-3, (2, steps, 16)).astype(np.float32)
    began, worst = time.perf_counter(), 0.0
    with Ledger(folder, flush_every=flush_every) as ledger:
        for n in range(steps):
            start = time.perf_counter()
            columns = {"general": values[0, n], "code": values[1, n]}
            ledger.write(StepRecord(n, ids[n], columns, [account(n, label) for label in columns]))
            worst = max(worst, time.perf_counter() - start)
    each = (time.perf_counter() - began) / steps
    size = sum(f.stat().st_size for f in (folder / "contributions").iterdir())
    return {
        "flush_every": flush_every,
        "steps": steps,
        "us_per_step": round(1e6 * each, 1),
        "percent_of_training_step": round(100 * 1e3 * each / TRAINING_STEP, 4),
        "slowest_write_ms": round(1e3 * worst, 2),
        "parts": len(list((folder / "contributions").iterdir())),
        "bytes_per_row": round(size / (32 * steps), 2),
    }


def generate(folder: Path, rows: int, samples: int) -> dict[str, Any]:
    """Write a large ledger in parts of about a million rows: batches of 16 over shuffled epochs, one validation set."""
    rng = np.random.default_rng(1)
    began, step, block = time.perf_counter(), 0, 62_500
    with Ledger(folder, flush_every=1_000_000) as ledger:
        left = rows // 16
        while left:
            n = min(block, left)
            ids = rng.integers(0, samples, (n, 16))
            values = rng.normal(0, 1e-3, (n, 16)).astype(np.float32)
            for k in range(n):
                ledger.write(
                    StepRecord(step, ids[k], {"general": values[k]}, [account(step, "general")] if step % 100 == 0 else [])
                )
                step += 1
            left -= n
    size = sum(f.stat().st_size for f in (folder / "contributions").iterdir())
    return {"write_s": round(time.perf_counter() - began, 1), "bytes_per_row": round(size / rows, 2)}


def score(folder: Path) -> None:
    """Add up all scores twice in this process; print time, peak memory and the number of samples."""
    reader = Ledger.open(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    table = reader.scores()
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    same = table.equals(reader.scores())
    found = {"scores_s": round(took, 2), "peak_mb": round(peak / 1024), "before_mb": round(before / 1024)}
    print(json.dumps({**found, "samples": table.num_rows, "same_bits_twice": same}))


def score_elsewhere(folder: Path) -> dict[str, Any]:
    """Run ``score`` in a process of its own, so that its memory is counted alone."""
    done = subprocess.run([sys.executable, __file__, "--score", str(folder)], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout))


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as columns of text."""
    names = list(dict.fromkeys(k for r in rows for k in r))
    cells = [names, *([f"{r.get(n, '')}" for n in names] for r in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 100 million rows (about 1 GB on disk)")
    parser.add_argument("--quick", action="store_true", help="only 100,000 and 1 million rows")
    parser.add_argument("--samples", type=int, default=1_000_000, help="different samples in the large ledgers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.score:
        score(given.score)
        return
    sizes = [10**5, 10**6] if given.quick else [10**6, 10**7] + [10**8] * given.large
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        steps = 500 if given.quick else 5000
        written = [write_cost(folder / str(e), steps, e) for e in ("60s", "1s", 3200, 320)]
        scored = []
        for rows in sizes:
            run = folder / f"rows-{rows}"
            made = generate(run, rows, given.samples)
            scored.append({"rows": rows, **made, **score_elsewhere(run)})
    if given.json:
        print(json.dumps({"training_step_ms": TRAINING_STEP, "write": written, "scores": scored}, indent=2))
        return
    print(f"Writing a step: 16 samples, 2 validation sets, flushes included; against a training step of {TRAINING_STEP:.0f} ms")
    print(table(written))
    print("\nScores of all samples, in a process of its own")
    print(table(scored))


if __name__ == "__main__":
    main()
