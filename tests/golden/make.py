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
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.record import (
    FOLDER,
    Record,
    disagreements,
    is_old_engine,
    measure,
    plain_weights,
    store,
    whole,
)
from golden.runs import RUNS, Run


def unspread(run: Run, record: Record) -> Record:
    """Measure again with an old engine that spreads nothing; return what differs.

    See ``golden.record.expected``. The engine that replaces it spreads nothing anyway.
    """
    if not is_old_engine():
        return {}
    from inrun.old.engine.credit.keeper import WholeCredit

    def no_rest(_: Any, data: Tensor, parts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(data), parts.new_zeros(len(sizes), len(data))

    with mock.patch.object(WholeCredit, "_with_rest", no_rest):
        other = whole(run, bitwise=True)
    found = disagreements({key: record[key] for key in other}, other)
    return {f"unspread.{line.split()[0]}": other[line.split()[0]] for line in found}


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
        record |= unspread(RUNS[name], record)
        path = store(name, record, given.to)
        points = next(v for k, v in record.items() if k.endswith(".points")).int().tolist()
        size = path.stat().st_size / 1000
        print(f"{name:15} {size:6.1f} kB {seconds:5.1f} s  uses {len(record['paid'])}  {points}")


if __name__ == "__main__":
    main()
