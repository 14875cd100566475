"""Measure golden runs with the installed engine and write their files again.

    python tests/golden/make.py [NAME ...] [--to FOLDER]

Without names, all runs; without a folder, ``tests/golden/stored``.

The stored numbers judge the engine, so the engine must not rewrite them. Write a file again only

- for a run that is new, with an engine that passes all others, or
- after an intended change of what a number *means*, listed in the changelog with its reason, after
  looking at every difference that ``tests/engine/test_golden.py`` prints.

Never write files again because a test fails, because another engine takes other points of the
quadrature, or because of a new torch or CPU: bit-for-bit comparisons of weights apply only in the
environment that a file names, and the others allow for rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.record import FOLDER, measure, plain_weights, store
from golden.runs import RUNS


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder to write to")
    given = parser.parse_args()
    for name in given.names or RUNS:
        begin = time.perf_counter()
        record = measure(RUNS[name])
        seconds = time.perf_counter() - begin
        for key, weight in plain_weights(RUNS[name]).items():
            if not torch.equal(record[key], weight):
                sys.exit(f"{name}: {key} is not what training without inrun gives")
        if not all(bool(x.isfinite().all()) for x in record.values()):
            sys.exit(f"{name}: some numbers are not finite, or some uses are not settled")
        path = store(name, record, given.to)
        points = next(v for k, v in record.items() if k.endswith(".points")).int().tolist()
        size = path.stat().st_size / 1000
        print(f"{name:15} {size:6.1f} kB {seconds:5.1f} s  uses {len(record['paid'])}  {points}")


if __name__ == "__main__":
    main()
