"""The ledger's writer: what it takes and refuses, marks and resumes, locks, several processes and ranks."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from faulty_files import QuickFiles
from inrun.errors import LedgerError
from inrun.ledger import Ledger, LedgerReader, MemoryLedger, StepRecord
from inrun.ledger.lock import lock_rank
from inrun.ledger.manifest import chain_path, read_chain
from inrun.ledger.verify import verify


def step(number: int, scale: float = 1.0, n: int = 2) -> StepRecord:
    values = np.arange(n, dtype=np.float32) + np.float32(scale * number)
    return StepRecord(number, np.arange(n), {"v": values}, [{"step": number, "validation": "v", "lr": 0.1, "n_samples": n}])


def steps_in(path) -> list[int]:
    return Ledger.open(path).accounts()["step"].to_pylist()


def new(path: Path, **options) -> Ledger:
    return Ledger(path, **{"flush_every": 10**6, "files": QuickFiles(), **options})


def resume(path: Path, mark, **options) -> Ledger:
    return Ledger.resume(path, mark, **{"flush_every": 10**6, "files": QuickFiles(), **options})


# What is written can be read.


def test_books_are_those_of_memory(tmp_path) -> None:
    """The same records give the same rows and accounts as the ledger in memory."""
    memory, records = MemoryLedger(), [step(n, 0.3) for n in range(20)]
    with Ledger(tmp_path / "run", flush_every=7) as ledger:
        for r in records:
            ledger.write(r)
            memory.write(r)
        assert ledger.contributions().equals(memory.contributions())  # flushes first
    assert Ledger.open(tmp_path / "run").contributions().equals(memory.contributions())
    assert Ledger.open(tmp_path / "run").accounts().equals(memory.accounts())
    assert verify(tmp_path / "run").good


@pytest.mark.parametrize("name", ["Übung – 数据 🚀", "with space", "a'b", "per%cent", "new\nline"])
def test_odd_paths(tmp_path, name: str) -> None:
    with new(tmp_path / name / "deeper") as ledger:
        ledger.write(step(0))
        mark = ledger.mark()
    resume(tmp_path / name / "deeper", mark).close()
    assert steps_in(tmp_path / name / "deeper") == [0]


def test_text_paths_and_relative_ones(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Ledger("run", flush_every="5min") as ledger:
        ledger.write(step(0))
    assert steps_in("run") == [0]


def test_arrays_may_be_used_again_after_write(tmp_path) -> None:
    ids, values = np.array([1, 2]), np.float32([0.5, 0.25])
    account = {"step": 0, "validation": "v", "lr": 0.1}
    with new(tmp_path / "run") as ledger:
        ledger.write(StepRecord(0, ids, {"v": values}, [account]))
        ids[:], values[:] = 9, 9
        account["lr"] = 9.0
    reader = Ledger.open(tmp_path / "run")
    assert reader.contributions()["sample_id"].to_pylist() == [1, 2]
    assert reader.contributions()["contribution"].to_pylist() == [0.5, 0.25]
    assert reader.accounts()["lr"].to_pylist() == [0.1]


def test_numbers_of_numpy_are_fine(tmp_path) -> None:
    with new(tmp_path / "run") as ledger:
        ledger.write(StepRecord(np.int64(3), np.uint8([1]), {"v": np.float64([0.5])}, [{"step": np.int64(3), "validation": "v"}]))
        assert json.loads(json.dumps(ledger.mark()))["step"] == 4
    assert steps_in(tmp_path / "run") == [3]


ACCOUNT = [{"step": 1, "validation": "v"}]
BAD = {
    "not finite": (StepRecord(1, np.arange(2), {"v": np.float32([1, np.nan])}, ACCOUNT), "not finite"),
    "too large for its type": (StepRecord(1, np.arange(1), {"v": np.float64([1e300])}, ACCOUNT), "not finite"),
    "too few": (StepRecord(1, np.arange(2), {"v": np.float32([1])}, ACCOUNT), "1 contributions to 'v' for 2"),
    "a table": (StepRecord(1, np.arange(2), {"v": np.ones((2, 2), np.float32)}, ACCOUNT), "contributions"),
    "ids too large": (StepRecord(1, np.array([2**63], np.uint64), {"v": np.float32([1])}, ACCOUNT), "below 2"),
    "ids not whole": (StepRecord(1, np.array([0.5]), {"v": np.float32([1])}, ACCOUNT), "row of integers"),
    "ids of text": (StepRecord(1, np.array(["a"]), {"v": np.float32([1])}, ACCOUNT), "row of integers"),
    "a step before the first": (StepRecord(-1, np.arange(1), {"v": np.float32([1])}, []), "step is -1"),
    "half a step": (StepRecord(0.5, np.arange(1), {"v": np.float32([1])}, []), "step is 0.5"),
    "an account of another step": (StepRecord(1, np.arange(1), {"v": np.float32([1])}, [{"step": 7}]), "speaks of step 7"),
    "a step again": (StepRecord(0, np.arange(1), {"v": np.float32([1])}, [{"step": 0, "validation": "v"}]), "written already"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_refused_and_change_nothing(tmp_path, name: str) -> None:
    """The step can be written afterwards, for instance as skipped."""
    record, message = BAD[name]
    with new(tmp_path / "run") as ledger:
        ledger.write(step(0))
        with pytest.raises(LedgerError, match=message):
            ledger.write(record)
        ledger.write(StepRecord(1, np.arange(0), {}, [{"step": 1, "validation": "v", "skipped": "not finite"}]))
    assert steps_in(tmp_path / "run") == [0, 1]
    assert Ledger.open(tmp_path / "run").contributions()["step"].to_pylist() == [0, 0]


@pytest.mark.parametrize("bad", [{"validation": 3}, {"lr": "fast"}, {"n_samples": 2**70}, {"validation": "\ud800"}])
def test_accounts_that_do_not_fit(tmp_path, bad: dict) -> None:
    ledger = new(tmp_path / "run")
    ledger.write(StepRecord(0, np.arange(0), {}, [{"step": 0, "validation": "v", **bad}]))
    with pytest.raises(LedgerError, match="do not fit"):
        ledger.flush()
    with pytest.raises(LedgerError, match="no more writes"):
        ledger.flush()
    ledger.close()
    assert steps_in(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flush_every": 0}, "flush_every"),
        ({"flush_every": "soon"}, "flush_every"),
        ({"flush_every": True}, "flush_every"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": True}, "rank is True"),
        ({"about": {"x": object()}}, "JSON"),
    ],
)
def test_bad_options(tmp_path, options: dict, message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger(tmp_path / "run", **options)
    new(tmp_path / "run").close()  # nothing is left that would be in the way


def test_flush_by_rows_and_by_time(tmp_path) -> None:
    with new(tmp_path / "rows", flush_every=5) as ledger:
        for n in range(6):
            ledger.write(step(n))
        assert steps_in(tmp_path / "rows") == [0, 1, 2, 3, 4, 5]
        ledger.write(step(6))
        assert steps_in(tmp_path / "rows") == [0, 1, 2, 3, 4, 5]
    with new(tmp_path / "time", flush_every="0.05s") as ledger:
        ledger.write(step(0))
        time.sleep(0.06)
        ledger.write(step(1))
        assert steps_in(tmp_path / "time") == [0, 1]
    assert steps_in(tmp_path / "rows") == list(range(7))


# Where there is no run, or another one.


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("x")])
def test_no_run(tmp_path, make) -> None:
    make(tmp_path / "run")
    for action in (Ledger.open, lambda p: Ledger.resume(p, None), verify):
        with pytest.raises(LedgerError, match="holds no run"):
            action(tmp_path / "run")


def test_a_file_in_the_way(tmp_path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(LedgerError, match="cannot be opened for writing"):
        new(tmp_path / "run")
    with pytest.raises(LedgerError, match="cannot be opened for writing"):
        new(tmp_path / "run" / "deeper")


def test_a_folder_with_a_run_is_not_begun_again(tmp_path) -> None:
    new(tmp_path / "run").close()
    with pytest.raises(LedgerError, match="holds a run already.*resume"):
        new(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(LedgerError, match=r"no run\.json"):  # damage: a new run.json would cover it up
        new(tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_newer_schema_is_refused(tmp_path) -> None:
    new(tmp_path / "run").close()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**about, "schema": 99}))
    for action in (Ledger.open, lambda p: Ledger.resume(p, None)):
        with pytest.raises(LedgerError, match="schema 99.*newer"):
            action(tmp_path / "run")


def test_erasing_removes_the_ledger_and_nothing_else(tmp_path) -> None:
    ledger = new(tmp_path / "run")
    ledger.register_samples([{"sample_id": 1}])
    ledger.write(step(0))
    ledger.flush()
    for name in ("config.yaml", "contributions/notes.txt"):
        (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(LedgerError, match="being written"):
        Ledger.erase(tmp_path / "run")
    assert steps_in(tmp_path / "run") == [0]
    ledger.close()
    Ledger.erase(tmp_path / "run")
    left = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert left == {"config.yaml", "contributions/notes.txt", "lock-r0"}
    Ledger.erase(tmp_path / "run")  # none there is fine
    with new(tmp_path / "run") as again:
        again.write(step(5))
    assert steps_in(tmp_path / "run") == [5]


# Marks and resumes.


def test_late_rows_before_and_after_a_mark(tmp_path) -> None:
    """Rows that speak of an earlier step belong to the moment they are written in, on every rank."""

    def late(n: int) -> StepRecord:
        return StepRecord(n, np.array([77]), {"v": np.float32([n])}, [])

    ledgers = [new(tmp_path / "run", rank=r, world=2) for r in range(2)]
    for ledger in ledgers:
        for n in range(4):
            ledger.write(step(n))
        ledger.write(late(2))
    marks = [ledger.mark() for ledger in ledgers]
    for ledger in ledgers:
        ledger.write(late(3))  # after the mark, and flushed without a new step
        ledger.flush()
        ledger.write(step(4))
        ledger.close()
    for mark in marks:
        for rank in range(2):
            resume(tmp_path / "run", mark, rank=rank, world=2).close()
        rows = Ledger.open(tmp_path / "run").contributions()
        assert rows["step"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3, 2] * 2


def test_resume_drops_what_came_after(tmp_path) -> None:
    ledger = new(tmp_path / "run", flush_every=1)
    marks = []
    for n in range(6):
        marks.append(ledger.mark())
        ledger.write(step(n))
    ledger.close()
    for n in (6, 5, 2, 0):
        ledger = resume(tmp_path / "run", marks[n] if n < 6 else {**marks[5], **_last(tmp_path / "run", 6)})
        assert steps_in(tmp_path / "run") == list(range(n))
        ledger.close()
    with resume(tmp_path / "run", None) as ledger:
        ledger.write(step(0))
    assert steps_in(tmp_path / "run") == [0]
    assert len(list((tmp_path / "run").rglob("*.parquet"))) == 2  # dropped parts are removed
    assert verify(tmp_path / "run").good


def _last(run: Path, step_: int) -> dict:
    record = read_chain(run, 0).entries[-1]
    return {"record": record.number, "hash": record.hash, "step": step_}


def test_a_step_that_was_dropped_can_be_written_again(tmp_path) -> None:
    ledger = new(tmp_path / "run")
    ledger.write(step(0))
    mark = ledger.mark()
    ledger.write(step(1))
    ledger.close()
    with resume(tmp_path / "run", mark) as ledger:
        with pytest.raises(LedgerError, match="written already"):
            ledger.write(step(0))
        ledger.write(step(1, 5.0))
        assert ledger.contributions()["contribution"].to_pylist() == [0, 1, 5, 6]


def test_a_mark_of_a_dropped_branch_is_refused(tmp_path) -> None:
    ledger = new(tmp_path / "run")
    ledger.write(step(0))
    first = ledger.mark()
    ledger.write(step(1))
    second = ledger.mark()
    ledger.close()
    resume(tmp_path / "run", first).close()
    for rank in (0, 1):  # no rank can be led astray by it
        with pytest.raises(LedgerError, match="branch that a resume .* dropped"):
            resume(tmp_path / "run", second, rank=rank, world=2)
    resume(tmp_path / "run", first).close()
    assert steps_in(tmp_path / "run") == [0]


@pytest.mark.parametrize(
    "change",
    [{"record": 99}, {"record": -1}, {"hash": "x"}, {"run_id": "x"}, {"step": "1"}, {"rank": 5}, {"record": None}, "text", 3, []],
)
def test_marks_that_do_not_fit(tmp_path, change) -> None:
    with new(tmp_path / "run") as ledger:
        ledger.write(step(0))
        mark = ledger.mark()
    with pytest.raises(LedgerError, match=r"mark"):
        resume(tmp_path / "run", {**mark, **change} if isinstance(change, dict) else change)
    resume(tmp_path / "run", mark).close()
    assert steps_in(tmp_path / "run") == [0]


# Locks and processes.


def test_one_writer_at_a_time(tmp_path, caplog) -> None:
    ledger = new(tmp_path / "run")
    with pytest.raises(LedgerError, match=f"being written by process {os.getpid()} on"):
        resume(tmp_path / "run", None)
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.write(step(0))
    ledger.close()  # twice is fine
    with caplog.at_level(logging.WARNING):
        resume(tmp_path / "run", None).close()
    assert not caplog.records


def test_a_lost_object_does_not_keep_the_lock(tmp_path) -> None:
    ledger = new(tmp_path / "run")
    del ledger
    resume(tmp_path / "run", None).close()


def test_the_lock_of_another_machine(tmp_path) -> None:
    new(tmp_path / "run").close()
    (tmp_path / "run" / "lock-r0").write_text('{"pid": 1, "host": "elsewhere"}')
    with pytest.raises(LedgerError, match="process 1 on elsewhere, on another machine.*remove"):
        resume(tmp_path / "run", None)
    (tmp_path / "run" / "lock-r0").unlink()
    resume(tmp_path / "run", None).close()


def in_child(code: str, *args: object) -> subprocess.Popen:
    start = "import sys, time, os, numpy as np\nfrom inrun.ledger import Ledger, StepRecord\nfrom inrun.errors import LedgerError\n"
    start += (
        "def step(n, scale=1.0):\n    v = np.arange(2, dtype=np.float32) + np.float32(scale * n)\n"
        "    return StepRecord(n, np.arange(2), {'v': v}, [{'step': n, 'validation': 'v', 'lr': 0.1, 'n_samples': 2}])\n"
    )
    command = [sys.executable, "-c", start + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_and_takes_over_after_a_kill(tmp_path, caplog) -> None:
    code = """
    ledger = Ledger(sys.argv[1], flush_every=1)
    ledger.write(step(0))
    print("ready", flush=True)
    time.sleep(60)
    """
    with in_child(code, tmp_path / "run") as child:
        try:
            assert child.stdout.readline() == "ready\n"
            with pytest.raises(LedgerError, match=f"being written by process {child.pid} on"):
                resume(tmp_path / "run", None)
            assert steps_in(tmp_path / "run") == [0]
        finally:
            child.kill()
    with caplog.at_level(logging.WARNING):
        ledger = resume(tmp_path / "run", None)
    assert f"left locked by process {child.pid}" in caplog.text and "taking over" in caplog.text
    ledger.close()


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path) -> None:
    """Loader workers outlive a killed trainer for some seconds; the run must be free at once."""
    code = """
    ledger = Ledger(sys.argv[1], flush_every=10**6)
    ledger.write(step(0))
    mark = ledger.mark()
    ledger.write(step(1))
    if os.fork() == 0:
        try:
            ledger.write(step(2))
        except LedgerError as error:
            print(error, flush=True)
        assert ledger.accounts().num_rows == 1
        ledger.close()
        time.sleep(8)
        os._exit(0)
    time.sleep(60)
    """
    with in_child(code, tmp_path / "run") as child:
        try:
            assert "forked" in child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            child.wait()
            resume(tmp_path / "run", None).close()
        finally:
            child.kill()
            child.stdout.close()


def test_a_reader_sees_only_committed_steps_while_a_process_writes(tmp_path) -> None:
    code = """
    ledger = Ledger(sys.argv[1], flush_every=3)
    n, end = 0, time.monotonic() + 60
    while time.monotonic() < end and not os.path.exists(sys.argv[2]):
        ledger.write(step(n))
        n += 1
        if n % 40 == 0:
            mark = ledger.mark()
        if n % 97 == 0:
            ledger.close()
            ledger = Ledger.resume(sys.argv[1], mark, flush_every=3)
            n = mark["step"]
    ledger.close()
    """
    with in_child(code, tmp_path / "run", tmp_path / "enough") as child:
        seen, began = set(), time.monotonic()
        while child.poll() is None:
            if len(seen) > 5 and time.monotonic() > began + 2:  # a machine that is busy sees as much, later
                (tmp_path / "enough").touch()
            if not (tmp_path / "run" / "run.json").exists():
                continue
            reader = Ledger.open(tmp_path / "run")
            rows = reader.contributions()["step"].to_pylist()
            assert rows == sorted([*range(len(rows) // 2)] * 2), rows[-10:]
            steps = reader.accounts()["step"].to_pylist()
            assert steps == list(range(len(steps)))
            found = verify(tmp_path / "run")
            assert found.good, found
            seen.add(len(steps))
    assert child.returncode == 0
    assert len(seen) > 5


def test_two_processes_begin_the_same_run(tmp_path) -> None:
    """One wins; the other is told; the books are those of the winner."""
    code = """
    time.sleep(max(0, float(sys.argv[2]) - time.time()))
    try:
        ledger = Ledger(sys.argv[1], flush_every=1)
        ledger.write(step(0))
        time.sleep(0.5)
        ledger.close()
        print("won")
    except LedgerError as error:
        print("lost", error)
    """
    at = time.time() + 2.0
    children = [in_child(code, tmp_path / "run", at) for _ in range(3)]
    said = sorted(child.communicate(timeout=60)[0][:4] for child in children)
    assert said == ["lost", "lost", "won\n"]
    assert verify(tmp_path / "run").good
    assert steps_in(tmp_path / "run") == [0]


# Ranks.


def write_ranks(run: Path, ranks: int, steps: range, mark=None, begin: bool = False) -> list[dict]:
    """Write steps on all ranks side by side; returns their marks."""
    if begin:
        ledgers = [new(run, rank=r, world=ranks) for r in range(ranks)]
    else:
        ledgers = [resume(run, mark, rank=r, world=ranks) for r in range(ranks)]
    for n in steps:
        for ledger in ledgers:
            ledger.write(step(n, scale=1.0 + ledger.rank))
            if (n + ledger.rank) % 3 == 0:
                ledger.flush()
    marks = [ledger.mark() for ledger in ledgers]
    for n in range(steps.stop, steps.stop + 2):  # and some more, which the checkpoint does not know
        for ledger in ledgers:
            ledger.write(step(n, scale=50.0))
    for ledger in ledgers:
        ledger.close()
    return marks


@pytest.mark.parametrize("which", [0, 1])
def test_the_number_of_ranks_may_change(tmp_path, which: int) -> None:
    """4, then 2, then 3, each from a mark of any rank: every step counts once for each rank it ran on."""
    run = tmp_path / "run"
    marks = write_ranks(run, 4, range(5), begin=True)
    marks = write_ranks(run, 2, range(5, 9), marks[3 * which])
    marks = write_ranks(run, 3, range(9, 12), marks[which])
    for rank in range(3):
        resume(run, marks[2 * which], rank=rank, world=3).close()
    found = Ledger.open(run).contributions().to_pylist()
    expected = [
        {"step": n, "sample_id": i, "validation": "v", "contribution": (1.0 + r) * n + i}
        for r in range(4)
        for n in [*range(5), *(range(5, 9) if r < 2 else []), *(range(9, 12) if r < 3 else [])]
        for i in range(2)
    ]
    assert found == expected
    assert verify(run).good


def test_a_rank_that_did_not_flush_at_the_mark_is_refused(tmp_path) -> None:
    run = tmp_path / "run"
    ledgers = [new(run, rank=r, world=2) for r in range(2)]
    for n in range(6):
        for ledger in ledgers:
            ledger.write(step(n))
        if n == 3:
            mark = ledgers[0].mark()
    for ledger in ledgers:
        ledger.close()
    with pytest.raises(LedgerError, match=r"rank 1 .* did not flush at step 4.*mark\(\) on every rank"):
        resume(run, mark, rank=1, world=2)
    with pytest.raises(LedgerError, match="rank 1 .* did not flush"):  # rank 0 closes its books
        resume(run, mark, rank=0, world=1)
    for rank in range(2):
        resume(run, None, rank=rank, world=2).close()
    with pytest.raises(LedgerError):  # not even then
        resume(run, mark, rank=0, world=1)
    assert steps_in(run) == []


def test_a_rank_with_nothing_to_say_at_the_mark(tmp_path) -> None:
    """Its mark still knows the step, also after a resume."""
    run = tmp_path / "run"
    one, two = new(run, world=2), new(run, rank=1, world=2)
    for n in range(4):
        one.write(step(n))
    two.write(step(0))
    two.write(StepRecord(3, np.arange(0), {}, []))
    marks = [one.mark(), two.mark()]
    one.close(), two.close()
    again = [resume(run, marks[1], rank=r, world=2) for r in range(2)]
    assert [ledger.mark()["step"] for ledger in again] == [4, 4]
    for ledger in again:
        ledger.close()
    assert steps_in(run) == [0, 1, 2, 3]
    assert Ledger.open(run).contributions()["step"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_a_rank_waits_for_rank_0(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("inrun.ledger.ranks.PATIENCE", 0.1)
    with pytest.raises(LedgerError, match="was not begun by rank 0"):
        new(tmp_path / "run", rank=1, world=2)


def test_rank_0_cannot_close_a_rank_that_lives(tmp_path) -> None:
    one, two = new(tmp_path / "run", world=2), new(tmp_path / "run", rank=1, world=2)
    one.close()
    with pytest.raises(LedgerError, match="being written"):
        resume(tmp_path / "run", None, world=1)
    two.close()
    resume(tmp_path / "run", None, world=1).close()
    lock_rank(tmp_path / "run", 0).release()


# Long runs.


def test_many_records_are_read_in_proportion(tmp_path) -> None:
    """20,000 records, written as lines: reading stays well under a second per 10,000."""
    from inrun.ledger.manifest import ManifestEntry, head_line, head_path

    new(tmp_path / "run").close()
    chain = read_chain(tmp_path / "run", 0)
    lines, last = [], chain.entries[-1]
    for n in range(1, 20_001):
        last = ManifestEntry(n, "flush", 0, n, last.hash, (), {"from_step": n - 1, "marked": -1})
        lines.append(last.line())
    with open(chain_path(tmp_path / "run", 0), "ab") as f:
        f.write(b"".join(lines))
    head_path(tmp_path / "run", 0).write_bytes(head_line(last.number, last.hash))
    began = time.process_time()
    assert len(LedgerReader(tmp_path / "run").chains()[0].live()) == 20_000
    assert time.process_time() - began < 6.0


def test_samples_come_in_pieces(tmp_path):
    pieces = [pa.table({"sample_id": range(n, n + 3), "text": [f"text {i}" for i in range(n, n + 3)]}) for n in (10, 0, 20, 23)]
    with Ledger(tmp_path / "pieces") as ledger:
        assert ledger.register_sample_pieces(iter(pieces)) == 12
        assert ledger.samples().num_rows == 12
        with pytest.raises(LedgerError, match="already"):
            ledger.register_sample_pieces(iter(pieces))
        ledger.register_samples([{"sample_id": 99, "text": "one more"}])
    with Ledger(tmp_path / "whole") as ledger:
        ledger.register_samples(pa.concat_tables(pieces))
        whole = ledger.samples()
    assert whole.to_pylist() == Ledger.open(tmp_path / "pieces").samples().slice(0, 12).to_pylist()


@pytest.mark.parametrize("more", [[10], [12, 50], [-5, 11]])
def test_a_sample_in_two_pieces_is_refused(tmp_path, more):
    pieces = [pa.table({"sample_id": [10, 11, 12]}), pa.table({"sample_id": [0, 1]}), pa.table({"sample_id": more})]
    with Ledger(tmp_path / "run") as ledger, pytest.raises(LedgerError, match="more than once"):
        ledger.register_sample_pieces(pieces)
    with Ledger(tmp_path / "texts") as ledger, pytest.raises(LedgerError, match="texts"):
        ledger.register_sample_pieces([pa.table({"id": ["a"]})])
