"""`inrun reproduce` from the command line: what it prints and leaves, that it goes on, and what it says of wrong calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from inrun.cli.main import cli
from inrun.experiments.recipes import RECIPES

SMALL = ("stages", "--smoke", "--seeds", "1")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["reproduce", *arguments])


def strict(text: str) -> object:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    result = call(*SMALL, "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert strict(result.stdout) == strict((tmp_path / "results.json").read_text())
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "timings.json", "table.md", "figure.png", "cells"}
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    shown = call(*SMALL, "--out", str(tmp_path))  # from the cells, as Markdown
    assert shown.stdout.startswith((tmp_path / "table.md").read_text()) and "| domain |" in shown.stdout
    assert kept == {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    again = call(*SMALL, "--json", "--fresh", "--out", str(tmp_path))
    assert again.stdout == result.stdout
    assert not set(kept.values()) & {p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}  # the control


@pytest.mark.slow
def test_killed_and_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inrun", "reproduce", "stages", "--smoke", "--seeds", "2", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    with subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stderr=subprocess.PIPE) as killed:
        while killed.poll() is None and len(list((tmp_path / "killed").glob("cells/*.json"))) < 3:  # one of them is the data's
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "results.json").exists()
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "killed" / "cells").iterdir()}
    subprocess.run([*command, str(tmp_path / "killed")], env=environment, check=True, capture_output=True)
    whole, killed_ = ((tmp_path / name / "results.json").read_bytes() for name in ("whole", "killed"))
    assert whole == killed_
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "killed" / "cells").iterdir()}
    assert before.items() <= after.items() and len(after) > len(before)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("x")
    (tmp_path / "data").mkdir()
    for arguments, words in (
        (("nonsense",), "nonsense"),
        ((*SMALL, "--seeds", "0"), "0 is not in the range"),
        ((*SMALL, "--data", str(tmp_path / "nowhere")), "does not exist"),
        ((*SMALL, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")), "has none of minipile.jsonl.gz"),
        ((*SMALL, "--out", str(tmp_path / "a file" / "below")), "cannot write to"),
    ):
        result = call(*arguments)
        assert result.exit_code, arguments
        assert words in result.output + str(result.exception), arguments
        assert not result.stdout or "Usage" in result.stdout


def test_lists_what_there_is() -> None:
    listed = strict(call("--list", "--json").stdout)
    assert [r["name"] for r in listed] == list(RECIPES)
    assert all(name in call().stdout for name in RECIPES)
