"""Marks on their way from the explorer into a curation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from explorer_runs import finished
from explorer_serving import TOKEN
from inrun.analysis.curate import curate
from inrun.analysis.marked import Marked, read_marks
from inrun.cli.main import cli
from inrun.errors import ConfigurationError
from inrun.explorer.app import build_app
from inrun.explorer.server import opened

HERE = "http://localhost:8765"


@pytest.fixture
def run(tmp_path):
    return finished(tmp_path / "run", 9)


def exported(run: Path, out: Path) -> Path:
    """Mark in the explorer, and export."""
    with opened([run], every=3600) as found:
        client = TestClient(build_app(found.snapshots, found.marks, token=TOKEN), base_url=HERE)
        client.get(f"/?token={TOKEN}")
        for mark, ids in (("drop", ["3", "5", "8"]), ("keep", ["1"]), ("look", ["2"])):
            answer = client.post("/api/runs/0/marks", json={"mark": mark, "ids": ids}, headers={"origin": HERE})
            assert answer.status_code == 200
        out.write_bytes(client.get("/api/runs/0/marks.jsonl").content)
    return out


def ids_in(file: Path) -> list[int]:
    return [json.loads(line)["sample_id"] for line in file.read_text().splitlines()]


def test_what_is_marked_is_dropped(run, tmp_path):
    marks = exported(run, tmp_path / "marks.jsonl")
    done = CliRunner().invoke(cli, ["curate", str(run), "--out", str(tmp_path / "out"), "--marks", str(marks), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["kept"], told["dropped"]) == (9, 3) and "marked 'drop' (3 marks)" in told["rule"]
    assert ids_in(tmp_path / "out" / "dropped.jsonl") == [3, 5, 8]
    assert ids_in(tmp_path / "out" / "kept.jsonl") == [i for i in range(12) if i not in (3, 5, 8)]


def test_marks_stand_above_a_rule(run, tmp_path):
    marks = exported(run, tmp_path / "marks.jsonl")
    curate(run, tmp_path / "rule", keep="score > 0")
    curate(run, tmp_path / "both", keep="score > 0", marks=marks)
    by_rule = set(ids_in(tmp_path / "rule" / "dropped.jsonl"))
    assert set(ids_in(tmp_path / "both" / "dropped.jsonl")) == (by_rule | {3, 5, 8}) - {1}


def test_documents_go_with_a_piece_of_them():
    units = pa.table({"sample_id": [10, 11, 12, 13, 14], "unit": [0, 0, 1, 1, 2]})
    marked = Marked("marks.jsonl", np.array([11, 99]), np.array([10, 12]))
    kept, words = marked.apply(np.array([True, False, True]), np.array([0, 1, 2]), units)
    assert kept.tolist() == [False, True, True] and "a piece of it" in words and "1 marked samples have no metadata" in words


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"sample_id": 1}',
        '{"sample_id": "1", "mark": "drop"}',
        '{"sample_id": true, "mark": "drop"}',
        '{"sample_id": 1, "mark": "burn"}',
        '{"sample_id": 1, "mark": ["drop"]}',
        '{"sample_id": 1e3, "mark": "drop"}',
        '{"sample_id": 9223372036854775808, "mark": "drop"}',
        '{"sample_id": 1, "mark": "drop", "run_id": 3}',
        "[" * 100_000,
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    file = tmp_path / "marks.jsonl"
    file.write_text('{"sample_id": 7, "mark": "drop"}\n\n' + line + "\n")
    with pytest.raises(ConfigurationError, match="line 3 is no mark"):
        read_marks(file)


def test_files_of_other_runs_and_by_hand(run, tmp_path):
    file = tmp_path / "marks.jsonl"
    file.write_text('{"sample_id": 7, "mark": "drop", "run_id": "another"}\n')
    with pytest.raises(ConfigurationError, match="other runs only"):
        curate(run, tmp_path / "out", marks=file)
    file.write_text('{"sample_id": 7, "mark": "drop"}\n{"sample_id": 8, "mark": "drop"}\n{"sample_id": 8, "mark": "look"}\n')
    assert curate(run, tmp_path / "out", marks=file).dropped == 1
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_marks(file)
    file.write_text("")
    assert curate(run, tmp_path / "nothing", marks=file).dropped == 0
