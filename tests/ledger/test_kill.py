"""kill -9 at random moments of a real training run, resume, until done: the books are those of the unbroken run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from inrun.ledger import Ledger
from inrun.ledger.verify import verify
from killable import EVERY, STEPS, train
from long import LONG


def run_in_fork(folder: Path, naive: bool, after: float | None) -> bool:
    """Train in a forked process; kill it after so many seconds. Return whether it was killed before the end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(folder, naive)
            status = 0
        finally:
            os._exit(status)
    killed = False
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0
    return killed


def kill_until_done(folder: Path, kills: int, whole: float, seed: int) -> int:
    """Kill the run again and again, then let it finish; return how often it was really killed."""
    rng = random.Random(seed)
    count, reached = 0, set()
    while count < kills or (len(reached) < 4 and count < 10 * kills):  # under load kills may fall into one place
        count += run_in_fork(folder, False, rng.uniform(0.0, 0.6) * whole)
        if (folder / "checkpoint.pt").exists():
            reached.add(torch.load(folder / "checkpoint.pt", weights_only=True)["accountant"]["steps_done"])
        if (folder / "done").exists():  # finished before enough kills: start over in the same folder
            (folder / "done").unlink()
            (folder / "checkpoint.pt").unlink()
    run_in_fork(folder, False, None)
    assert len(reached) >= 4, "the kills fell into the same place: nothing was tested"
    return count


def books(folder: Path) -> tuple[list, list, list]:
    reader = Ledger.open(folder / "run")
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return reader.contributions().to_pylist(), reader.accounts().to_pylist(), [v.numpy().tobytes() for v in state["model"].values()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, float]:
    train(tmp_path_factory.mktemp("warm"))  # imports and first-use costs happen before the forks, not in each of them
    folder = tmp_path_factory.mktemp("unbroken")
    began = time.monotonic()
    run_in_fork(folder, False, None)
    return folder, time.monotonic() - began


@pytest.mark.parametrize("kills", [4, pytest.param(200 if LONG else 20, marks=pytest.mark.slow)])
def test_killed_runs_end_in_the_books_of_an_unbroken_one(tmp_path, unbroken, kills: int) -> None:
    folder, whole = unbroken
    assert kill_until_done(tmp_path, kills, whole, seed=kills) >= kills
    assert verify(tmp_path / "run").good
    (rows, accounts, weights), (rows_0, accounts_0, weights_0) = books(tmp_path), books(folder)
    assert weights == weights_0
    assert rows == rows_0
    assert accounts == accounts_0
    assert len(accounts) == STEPS
    assert Ledger.open(tmp_path / "run").scores().equals(Ledger.open(folder / "run").scores())


def test_control_a_naive_writer_does_not(tmp_path, unbroken) -> None:
    """A writer that knows nothing of checkpoints, killed two steps after one: rows are counted twice."""
    folder, _ = unbroken
    child = os.fork()
    if child == 0:
        try:
            train(tmp_path, naive=True)
        finally:
            os._exit(1)
    written = tmp_path / "naive.jsonl"
    while not written.exists() or written.read_bytes().count(b"\n") < 4 * (EVERY + 2):
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run_in_fork(tmp_path, True, None)
    rows = [json.loads(line) for line in written.read_text().splitlines() if line.endswith("}")]
    expected = [(r["step"], r["sample_id"], r["contribution"]) for r in Ledger.open(folder / "run").contributions().to_pylist()]
    assert sorted((r["step"], r["id"], r["c"]) for r in rows) != sorted(expected)
