"""Ranks that write side by side, in processes of their own: what counts, what a reader sees, kills, other numbers of ranks."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from faulty_files import QuickFiles
from inrun.errors import LedgerError
from inrun.ledger import Ledger, SettledCredits, StepRecord
from inrun.ledger.manifest import chain_path
from inrun.ledger.merge import merge
from inrun.ledger.repair import repair
from inrun.ledger.verify import verify
from long import LONG

#: Samples of a step, over all ranks; steps between marks; steps after which a use is settled.
BATCH, EVERY, WINDOW = 8, 7, 5
PATIENCE = 60.0


def ids_of(step: int) -> np.ndarray:
    """The samples of a step: sample 99 is in every one twice, on different ranks where there are several."""
    ids = (step * BATCH + np.arange(BATCH)) % 40
    ids[[0, -1]] = 99
    return ids


def value(step: int, rows: np.ndarray) -> np.ndarray:
    return (step + 0.125 * rows).astype(np.float32)


def settlement(step: int, mine: np.ndarray) -> SettledCredits:
    credit = {"v": value(step, mine) * 2}
    return SettledCredits(step, ids_of(step)[mine], credit, {"v": credit["v"] * 0}, np.ones(len(mine), np.float32), rows=mine)


def record(step: int, rank: int, world: int, settle: bool = True) -> StepRecord:
    """A rank's part of a step; every tenth step is skipped, so that ranks above 0 have nothing to write at all."""
    mine = np.array_split(np.arange(BATCH), world)[rank]
    skipped = step % 10 == 9
    accounts = [{"step": step, "validation": "v", "lr": 0.1, "n_samples": BATCH, "skipped": "overflow" if skipped else None}]
    values = {} if skipped else {"v": value(step, mine)}
    old = step - WINDOW
    settled = (settlement(old, mine),) if settle and old >= 0 and old % 10 != 9 else ()
    return StepRecord(step, ids_of(step)[mine], values, accounts, settled)


def expected(steps: int) -> tuple[list, list, list]:
    """Contributions and credits in order of step and row, and accounts, of a run of so many steps on any number of ranks."""
    rows = np.arange(BATCH)
    told = [(s, int(i), float(x)) for s in range(steps) if s % 10 != 9 for i, x in zip(ids_of(s), value(s, rows), strict=True)]
    settled = [s for s in range(steps - WINDOW) if s % 10 != 9]
    credits = [(s, r, int(ids_of(s)[r]), float(value(s, rows)[r] * 2)) for s in settled for r in range(BATCH)]
    return sorted(told), credits, list(range(steps))


def books(run: Path) -> tuple[list, list, list]:
    reader = Ledger.open(run)
    rows, credits = reader.contributions().to_pylist(), reader.credits().to_pylist()
    told = sorted((r["step"], r["sample_id"], r["contribution"]) for r in rows)
    return told, sorted((c["step"], c["row"], c["sample_id"], c["credit"]) for c in credits), reader.accounts()["step"].to_pylist()


# Ranks in processes of their own. A checkpoint is a file with the step and the mark, written when all ranks have theirs.


class Meeting:
    """A barrier without a lock, which a killed process would keep: every rank counts how often it came."""

    def __init__(self, world: int) -> None:
        self.counts, self.over = multiprocessing.RawArray("q", world), multiprocessing.RawValue("b", 0)

    def wait(self, rank: int) -> None:
        self.counts[rank] += 1
        until = time.monotonic() + PATIENCE
        while min(self.counts) < self.counts[rank]:
            if self.over.value or time.monotonic() > until:
                os._exit(3)  # as a collective fails when another rank is gone
            time.sleep(0.0005)


def write_rank(folder: Path, rank: int, world: int, steps: int, meeting: Meeting, pause: float) -> None:
    """Go on from the last checkpoint, or begin, until all steps are done."""
    checkpoint, run = folder / "checkpoint.json", folder / "run"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    meeting.wait(rank)  # all have read the same checkpoint
    if state is not None:
        ledger = Ledger.resume(run, state["mark"], rank=rank, world=world, flush_every=5 + 3 * rank)
    elif (run / "run.json").exists():
        ledger = Ledger.resume(run, None, rank=rank, world=world, flush_every=5 + 3 * rank)
    else:
        meeting.wait(rank)  # all have seen that there is no run
        ledger = Ledger(run, rank=rank, world=world, flush_every=5 + 3 * rank, about={"method": "whole"})
    for step in range(0 if state is None else state["step"], steps):
        meeting.wait(rank)  # as a reduction of gradients does
        ledger.write(record(step, rank, world))
        time.sleep(pause)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            mark = ledger.mark()
            meeting.wait(rank)
            if rank == 0:
                aside = checkpoint.with_suffix(".tmp")
                aside.write_text(json.dumps({"step": step + 1, "mark": mark}))
                os.replace(aside, checkpoint)
    ledger.close()


class Job:
    """Processes that write one run; leaving ends them all."""

    def __init__(self, folder: Path, world: int, steps: int, pause: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        context = multiprocessing.get_context("fork")
        self.meeting = Meeting(world)
        more = (world, steps, self.meeting, pause)
        self.children = [context.Process(target=write_rank, args=(folder, rank, *more), daemon=True) for rank in range(world)]

    def __enter__(self) -> Job:
        for child in self.children:
            child.start()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
            child.join()

    def finish(self) -> None:
        for child in self.children:
            child.join(PATIENCE)
        assert [child.exitcode for child in self.children] == [0] * len(self.children)

    def kill(self, rank: int) -> bool:
        """Kill -9 one rank; the others end as soon as they miss it, as a launcher sees to. Whether it was killed in time."""
        os.kill(self.children[rank].pid, signal.SIGKILL)
        self.children[rank].join()
        self.meeting.over.value = 1
        for child in self.children:
            child.join(2 * PATIENCE)  # a rank that waits for rank 0 to open the books does so for as long as PATIENCE
        assert not any(child.is_alive() for child in self.children)
        return self.children[rank].exitcode != 0


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_leave_the_books_of_one_process(tmp_path, world: int, capfd) -> None:
    with Job(tmp_path / "job", world, 33) as job:
        job.finish()
    run = tmp_path / "job" / "run"
    assert books(run) == expected(33)
    assert verify(run).good and not verify(run).notes
    with Ledger(tmp_path / "alone", about={"method": "whole"}, files=QuickFiles()) as alone:
        for step in range(33):
            alone.write(record(step, 0, 1))
    assert Ledger.open(run).scores().equals(Ledger.open(tmp_path / "alone").scores())
    assert {row["sample_id"]: row["times_used"] for row in Ledger.open(run).scores().to_pylist()}[99] == 2 * 30
    assert {f.name.split("-")[0] for f in (run / "contributions").iterdir()} == {f"r{rank}" for rank in range(world)}
    assert {f.name.split("-")[0] for f in (run / "accounts").iterdir()} == {"r0"}


def kill_until_done(folder: Path, kills: int, seed: int, steps: int = 40) -> int:
    """Kill a random rank of a job of 2, 3 or 4 at random moments, go on with another number; return how often it was killed."""
    rng, count = random.Random(seed), 0
    for world in itertools.cycle([2, 4, 3]):
        if count == kills:
            break
        with Job(folder, world, steps, pause=0.004) as job:
            time.sleep(rng.uniform(0.02, 0.6))
            count += job.kill(rng.randrange(world))
        run, checkpoint = folder / "run", folder / "checkpoint.json"
        if (run / "run.json").exists():
            check_whole_steps(run)
            assert verify(run).good
        done = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
        if done == steps:
            checkpoint.unlink()  # start over in the same folder
    with Job(folder, 2, steps) as job:
        job.finish()
    return count


def check_whole_steps(run: Path) -> None:
    """Whatever is read are the first steps of the run, each with all its rows."""
    told, credits, accounts = books(run)
    wanted = expected(60)
    assert told == wanted[0][: len(told)] and accounts == wanted[2][: len(accounts)]
    assert {s for s, _, _ in told} <= set(accounts) and len(told) == BATCH * len({s for s, _, _ in told})
    assert set(credits) <= set(wanted[1])


@pytest.mark.parametrize(("kills", "seed"), [(2, 5), pytest.param(20 if LONG else 8, 1, marks=pytest.mark.slow)])
def test_killed_ranks_lose_nothing_and_count_nothing_twice(tmp_path, kills: int, seed: int, capfd) -> None:
    assert kill_until_done(tmp_path / "job", kills, seed) == kills
    assert books(tmp_path / "job" / "run") == expected(40)
    assert verify(tmp_path / "job" / "run").good


def test_readers_see_whole_steps_while_ranks_write(tmp_path) -> None:
    run, seen = tmp_path / "job" / "run", set()
    with Job(tmp_path / "job", 2, 40, pause=0.06) as job:
        while any(child.is_alive() for child in job.children):
            if chain_path(run, 0).exists():
                check_whole_steps(run)
                reader = Ledger.open(run)
                uses = {row["times_used"] for row in reader.scores().to_pylist() if row["sample_id"] == 99}
                assert not uses or uses.pop() % 2 == 0  # it is twice in every step, once on each rank
                seen.add(reader.accounts().num_rows)
        job.finish()
    assert len(seen) > 3, "nothing was seen on the way"


# What counts, step by step.


def new(run: Path, rank: int, world: int = 2, **options) -> Ledger:
    return Ledger(run, rank=rank, world=world, flush_every=10**6, files=QuickFiles(), **options)


def resume(run: Path, mark, rank: int, world: int = 2) -> Ledger:
    return Ledger.resume(run, mark, rank=rank, world=world, flush_every=10**6, files=QuickFiles())


def test_a_step_waits_for_every_rank(tmp_path) -> None:
    run = tmp_path / "run"
    ledgers = [new(run, rank) for rank in range(2)]
    for step in range(6):
        ledgers[0].write(record(step, 0, 2, settle=False))
        if step < 4:
            ledgers[1].write(record(step, 1, 2, settle=False))
    ledgers[0].flush()
    assert books(run) == ([], [], [])
    assert "steps from 0 on do not count yet: rank 1 has not written them" in str(verify(run))
    ledgers[1].flush()
    assert books(run)[::2] == expected(4)[::2]
    with Ledger.open(run).tables() as tables:
        assert [tables.row(f"SELECT max(step) FROM {name}") for name in ("contributions", "accounts", "uses")] == [(3,)] * 3  # noqa: S608
    assert merge([run, run], tmp_path / "merged") and books(tmp_path / "merged")[::2] == expected(4)[::2]
    for step in (4, 5):
        ledgers[1].write(record(step, 1, 2, settle=False))
    ledgers[1].close()
    assert books(run)[::2] == expected(6)[::2] and not verify(run).notes


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (4, 2, 3), (2, 4, 1, 2)])
def test_other_numbers_of_ranks_leave_the_same_books(tmp_path, worlds: tuple[int, ...]) -> None:
    run, mark, step = tmp_path / "run", None, 0
    for n, world in enumerate(worlds):
        ledgers = [new(run, r, world) if n == 0 else resume(run, mark, r, world) for r in range(world)]
        for _ in range(6):
            for ledger in ledgers:
                ledger.write(record(step, ledger.rank, world))
            step += 1
        mark = [ledger.mark() for ledger in ledgers][-1]
        for ledger in ledgers:
            for late in range(ledger.rank + 1):  # what the checkpoint does not know, more of it on some ranks
                ledger.write(StepRecord(step + late, np.array([0]), {"v": np.float32([-9])}, []))
            ledger.close()
    for rank in range(world):
        resume(run, mark, rank, world).close()
    assert books(run) == expected(step)
    assert verify(run).good


def test_a_checkpoint_that_one_rank_did_not_reach_is_refused(tmp_path) -> None:
    """Rank 0 marked, rank 1 died before it did: its last steps are nowhere."""
    ledgers = [new(tmp_path / "run", rank) for rank in range(2)]
    for step in range(4):
        for ledger in ledgers:
            ledger.write(record(step, ledger.rank, 2))
        if step == 1:
            good = [ledger.mark() for ledger in ledgers]
    bad = ledgers[0].mark()
    for ledger in ledgers:
        ledger._lock._let_go()
    for rank in range(2):
        with pytest.raises(LedgerError, match="rank 1 .* did not flush at step 4.*end at step 2.*on every rank"):
            resume(tmp_path / "run", bad, rank)
    for rank in range(2):
        resume(tmp_path / "run", good[rank], rank).close()
    assert books(tmp_path / "run")[2] == [0, 1]


def test_another_training_into_the_folder_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("inrun.ledger.ranks.PATIENCE", 0.2)
    monkeypatch.setattr("inrun.ledger.ranks.LOCK_PATIENCE", 0.2)
    monkeypatch.setattr("inrun.ledger.writer.LOCK_PATIENCE", 0.2)
    run = tmp_path / "run"
    ledgers = [new(run, rank) for rank in range(2)]
    for ledger in ledgers:
        ledger.write(record(0, ledger.rank, 2))
    mark = [ledger.mark() for ledger in ledgers][-1]
    for ledger in ledgers:
        ledger.write(record(1, ledger.rank, 2))
        ledger.flush()
    refused = {
        "holds a run already": lambda: new(run, 0),
        "being written by process": lambda: new(run, 1),
        "written by 2 ranks, and this is rank 2 of 3": lambda: new(run, 2, 3),
        "is being written": lambda: resume(run, mark, 0),
        "did not go on": lambda: resume(run, mark, 1, 2),
        "as one of 3 ranks": lambda: resume(run, mark, 2, 3),
    }
    for message, attempt in refused.items():
        with pytest.raises(LedgerError, match=message):
            attempt()
    ledgers[0].close()
    with pytest.raises(LedgerError, match="being written by process"):  # rank 1 lives, and rank 0 would cut its books
        resume(run, mark, 0)
    ledgers[1].close()
    assert books(run)[2] == [0, 1]


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (-1, 2), (True, 2), (0, 0), (2, 2), (0, None), ("0", 1)])
def test_ranks_that_cannot_be(tmp_path, rank, world) -> None:
    with pytest.raises(LedgerError, match="rank is"):
        Ledger(tmp_path / "run", rank=rank, world=world)


def test_one_process_writes_what_it_always_wrote(tmp_path) -> None:
    with new(tmp_path / "run", 0, 1) as ledger:
        ledger.write(record(0, 0, 1))
        mark = ledger.mark()
        ledger.write(record(1, 0, 1))
    resume(tmp_path / "run", mark, 0, 1).close()
    assert "world" not in mark and b"world" not in chain_path(tmp_path / "run", 0).read_bytes()
    assert Ledger.open(tmp_path / "run").complete_steps() is None


def test_rank_0_lost_its_manifest(tmp_path) -> None:
    """What the others wrote is still read after a repair, which says what is lost."""
    run = tmp_path / "run"
    ledgers = [new(run, rank) for rank in range(2)]
    for step in range(3):
        for ledger in ledgers:
            ledger.write(record(step, ledger.rank, 2))
    for ledger in ledgers:
        ledger.close()
    for ending in ("jsonl", "head"):
        (run / "manifest" / f"r0.{ending}").unlink()
    done = repair(run, QuickFiles())
    assert ("contributions", 0, 2) in done.lost and ("accounts", 0, 2) in done.lost
    assert len(books(run)[0]) == 3 * BATCH // 2


def test_rows_of_credits_must_be_different(tmp_path) -> None:
    from dataclasses import replace

    with new(tmp_path / "run", 0, 1) as ledger:
        ledger.write(record(0, 0, 1))
        for rows in ([0, 0], [1], [-1, 2], [0.5, 1.0], [0, 2**31]):
            with pytest.raises(LedgerError, match="different numbers"):
                ledger.settle([replace(settlement(0, np.arange(2)), rows=np.array(rows))])
