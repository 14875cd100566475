"""verify, repair and merge as commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from inrun.ledger import Ledger, StepRecord


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from inrun.cli.main import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(ledger: Ledger, steps: range) -> None:
    for step in steps:
        account = {"step": step, "validation": "v", "data": 1.0, "n_samples": 2}
        ledger.write(StepRecord(step, np.array([1, 2]), {"v": np.array([0.5, step], np.float32)}, [account]))


def test_verify_repair_and_merge(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ledger = Ledger(here, flush_every=4)
    write(ledger, range(4))
    mark = ledger.mark()
    ledger.close()
    shutil.copytree(here, there)  # continued on another machine
    with Ledger.resume(there, mark, flush_every=4) as other:
        write(other, range(4, 8))
    good = run("verify", str(there))
    assert good.returncode == 0, good.stderr
    assert "whole" in good.stdout
    joined = run("merge", str(here), str(there), "--out", str(tmp_path / "joined"))
    assert joined.returncode == 0, joined.stderr
    assert Ledger.open(tmp_path / "joined").contributions().num_rows == 16
    told = json.loads(run("merge", str(here), str(there), "--out", str(tmp_path / "again"), "--json").stdout)
    assert told == {"runs": [str(here), str(there)], "out": str(tmp_path / "again")}
    victim = sorted((there / "contributions").glob("*.parquet"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(bytes(data))
    bad = run("verify", str(there), "--json")
    assert bad.returncode == 1
    assert victim.name in bad.stdout
    assert json.loads(bad.stdout)["good"] is False
    mended = run("repair", str(there))
    assert mended.returncode == 0, mended.stderr
    assert "steps 2 to 3" in mended.stdout
    assert run("verify", str(there)).returncode == 0
    assert sorted(set(Ledger.open(there).contributions()["step"].to_pylist())) == [0, 1, 4, 5, 6, 7]
    missing = run("verify", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    nothing = run("verify", str(tmp_path))
    assert nothing.returncode == 1
    assert "holds no run" in nothing.stderr
