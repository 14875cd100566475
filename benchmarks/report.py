"""How large the report is, and what it costs, by the number of samples.

python benchmarks/report.py [--samples 1000 10000 100000 1000000] [--folder DIR] [--json]

Made-up runs: two validation sets, ids, 24 domains, owners, previews of 200 characters, every sample used five times in about a
thousand steps. A run is written in a process of its own, and its report is built in another: seconds are CPU time of building, and
memory is that process's peak.
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

import numpy as np

from explorer import record, samples
from inrun.ledger import Ledger
from inrun.report import build_report

USES, STEPS = 5, 1000


def write(folder: Path, count: int, whole: bool) -> None:
    """Write a run that uses every sample five times, in about a thousand steps."""
    rng = np.random.default_rng(1)
    batch = max(count * USES // STEPS, 1)
    order = np.concatenate([rng.permutation(count) for _ in range(USES)])
    about = {"method": "whole" if whole else "step", "model": "made up"}
    with Ledger(folder, about=about, flush_every=500_000) as ledger:
        ledger.register_samples(samples(count))
        used: dict[int, np.ndarray] = {}
        for step in range(len(order) // batch):
            ledger.write(record(step, order[step * batch : (step + 1) * batch], rng, whole, used))


def build(folder: Path) -> None:
    """Build a report and print what it took."""
    began = time.process_time()
    page = Path(build_report(folder, out=folder.parent / "report.html"))
    cpu = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"bytes": page.stat().st_size, "cpu_s": round(cpu, 2), "peak_mb": round(peak)}))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--whole", action="store_true", help="with whole credit")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.samples[0], given.whole)
        return
    if given.build:
        build(given.build)
        return
    for count in given.samples:
        with tempfile.TemporaryDirectory(dir=given.folder) as place:
            run = str(Path(place) / "run")
            more = ["--samples", str(count), *(["--whole"] if given.whole else [])]
            subprocess.run([sys.executable, __file__, "--write", run, *more], check=True)  # noqa: S603
            done = subprocess.run([sys.executable, __file__, "--build", run], check=True, capture_output=True, text=True)  # noqa: S603
        found = {"samples": count, "rows": 2 * USES * count, **json.loads(done.stdout)}
        print(json.dumps(found) if given.json else "  ".join(f"{k} {v:>12,}" for k, v in found.items()))


if __name__ == "__main__":
    main()
