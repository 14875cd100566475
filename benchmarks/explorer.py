"""What the explorer costs on a large run: CPU and wall time of its questions, memory, and how soon new steps are seen.

python benchmarks/explorer.py [--rows 10000000] [--samples 1000000] [--whole] [--folder DIR] [--json]
python benchmarks/explorer.py --write DIR/run, and later --ask DIR/run (once: steps are added to it)

CPU time is that of the whole process, all threads of DuckDB together. The run is written first, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from inrun.explorer import pages, pictures
from inrun.explorer.server import opened
from inrun.ledger import Ledger, SettledCredits, StepRecord

BATCH, SETS, WINDOW = 1000, ("docs", "code"), 50
WORDS = ("the", "of", "a", "loss", "value", "token", "model", "gradient", "river", "market", "protein", "theorem", "orbit")


def texts(count: int, length: int, rng: np.random.Generator) -> pa.Array:
    """Return texts of so many characters, cut from one long text of random words; one in 100,000 has a rare word."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = [*WORDS, *("".join(rng.choice(letters, n)) for n in rng.integers(2, 11, 20_000))]
    whole = " ".join(np.array(words)[rng.zipf(1.3, 4_000_000) % len(words)])
    starts = rng.integers(0, len(whole) - length, count)
    found = [whole[s : s + length] for s in starts]
    for place in range(0, count, 100_000):
        found[place] = f"heffalump {found[place][10:]}"
    return pa.array(found)


def samples(count: int, length: int = 200) -> pa.Table:
    """Return metadata of samples: ids, domains, owners, a number, previews."""
    rng = np.random.default_rng(0)
    domains = np.array([f"domain-{k}" for k in range(24)])[rng.integers(0, 24, count)]
    owners = np.array([f"owner-{k}" for k in range(50_000)])[rng.integers(0, 50_000, count)]
    columns = {"sample_id": np.arange(count), "id": [f"doc-{i:07d}" for i in range(count)], "domain": domains, "owner": owners}
    return pa.table({**columns, "tokens": rng.integers(10, 2000, count), "preview": texts(count, length, rng)})


def record(step: int, ids: Any, rng: np.random.Generator, whole: bool, used: dict[int, Any]) -> StepRecord:
    """Return a step as the engine writes it; under whole credit the step whose window has passed is settled."""
    values = {name: rng.normal(1e-5, 1e-3, len(ids)).astype(np.float32) for name in SETS}
    accounts = [{"step": step, "validation": name, "loss_before": 5 * 0.9997**step, "lr": 1e-3, "skipped": None} for name in SETS]
    used[step] = ids
    settled: tuple[SettledCredits, ...] = ()
    if whole and step >= WINDOW:
        old = used.pop(step - WINDOW)
        credits = {name: rng.normal(1e-4, 1e-3, len(old)).astype(np.float32) for name in SETS}
        errors = {name: np.full(len(old), 1e-4, np.float32) for name in SETS}
        settled = (SettledCredits(step - WINDOW, old, credits, errors, np.full(len(old), 0.995, np.float32)),)
    return StepRecord(step, ids, values, accounts, settled)


def write(folder: Path, rows: int, count: int, whole: bool) -> None:
    """Write the run: shuffled epochs over all samples, two validation sets."""
    rng = np.random.default_rng(1)
    about = {"method": "whole" if whole else "step", "model": "made up"}
    steps = rows // (BATCH * len(SETS))
    order = np.concatenate([rng.permutation(count) for _ in range(-(-(steps * BATCH) // count))])
    used: dict[int, Any] = {}
    with Ledger(folder, about=about, flush_every=500_000) as ledger:
        ledger.register_samples(samples(count))
        for step in range(steps):
            ledger.write(record(step, order[step * BATCH : (step + 1) * BATCH], rng, whole, used))
        (folder.parent / "mark.json").write_text(json.dumps(ledger.mark()))


def measured(act: Callable[[], Any], times: int = 3) -> dict[str, Any]:
    """Return the CPU and wall seconds of a question: the first time, and the best of some more."""
    found = []
    for _ in range(times):
        began, cpu = time.perf_counter(), time.process_time()
        answer = act()
        found.append((time.process_time() - cpu, time.perf_counter() - began))
    best = min(found)
    size = len(json.dumps(answer, default=str))
    return {
        "first_cpu_s": round(found[0][0], 3),
        "cpu_s": round(best[0], 3),
        "wall_s": round(min(w for _, w in found), 3),
        "answer_kb": round(size / 1000, 1),
    }


def ask(folder: Path) -> dict[str, Any]:
    """Open the run and ask everything."""
    before = _memory()
    began, cpu = time.perf_counter(), time.process_time()
    with opened([folder], every=3600.0) as found:
        (snapshot,) = found.snapshots
        first = {"cpu_s": round(time.process_time() - cpu, 1), "wall_s": round(time.perf_counter() - began, 1)}
        loaded = _memory()
        size = sum(f.stat().st_size for f in snapshot.store.folder.iterdir() if f.is_file())
        asked: dict[str, dict[str, str]] = {
            "sorted page": {"sort": "s:score"},
            "sorted page, other way": {"sort": "s:score", "order": "up"},
            "page 10,000": {"sort": "s:score", "offset": "500000"},
            "sorted by a text column": {"sort": "c:owner"},
            "search, rare word": {"search": "heffalump"},
            "search, common word": {"search": "protein theorem"},
            "search, nothing found": {"search": "zzzzzz"},
            "search by id": {"search": "doc-0123456"},
            "filter by domain and score": {"filters": json.dumps([["c:domain", "is", "domain-3"], ["s:score", "lt", "0"]])},
            "search and filter": {"search": "river", "filters": json.dumps([["c:tokens", "gt", "1000"]])},
        }
        lines = {name: measured(lambda q=q: pages.page(snapshot, q, {})) for name, q in asked.items()}
        lines["one sample over time"] = measured(lambda: pages.sample(snapshot, 1234, {}))
        lines["values of a column"] = measured(lambda: pages.values(snapshot, {"column": "c:domain"}))
        lines["two sets, binned"] = measured(lambda: pictures.scatter(snapshot, {"x": "docs", "y": "code"}, {}))
        lines["groups over stages"] = measured(lambda: pictures.groups(snapshot, {"by": "c:domain"}), 1)
        lines["losses"] = measured(lambda: pictures.curves(snapshot))
        peak = _memory()
        lines["new steps"] = _follow(folder, snapshot)
        counted = {"samples": snapshot.view.samples, "steps": snapshot.view.steps, "whole": snapshot.view.whole}
    memory = {"before_mb": before, "after_reading_mb": loaded, "peak_mb": peak, "peak_with_new_steps_mb": _memory()}
    return {**counted, "reading": first, **memory, "file_mb": round(size / 1e6), "questions": lines}


def _follow(folder: Path, snapshot: Any) -> dict[str, Any]:
    """Write 20 more steps as a resumed run does, and time how long the snapshot takes to have them."""
    mark = json.loads((folder.parent / "mark.json").read_text())
    rng, was = np.random.default_rng(2), snapshot.view.last_step
    with Ledger.resume(folder, mark) as ledger:
        for step in range(was + 1, was + 21):
            ledger.write(record(step, rng.integers(0, 1000, BATCH), rng, False, {}))
    found = measured(snapshot.refresh, 1)
    assert snapshot.view.last_step == was + 20
    return found


def _memory() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="contribution rows")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--whole", action="store_true", help="with whole credit")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="RUN", help="only write the run")
    parser.add_argument("--ask", type=Path, metavar="RUN", help="only ask a run that was written")
    given = parser.parse_args()
    if given.write:
        write(given.write, given.rows, given.samples, given.whole)
        return
    if given.ask:
        found = ask(given.ask)
    else:
        with tempfile.TemporaryDirectory(dir=given.folder) as place:
            run = Path(place) / "run"
            size = ["--rows", str(given.rows), "--samples", str(given.samples), *(["--whole"] if given.whole else [])]
            subprocess.run([sys.executable, __file__, "--write", str(run), *size], check=True)  # noqa: S603
            found = ask(run)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    questions = found.pop("questions")
    print(json.dumps(found))
    for name, line in questions.items():
        print(f"{name:28}" + "".join(f"  {k} {v:>8}" for k, v in line.items()))


if __name__ == "__main__":
    main()
