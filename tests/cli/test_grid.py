"""Tables that fit: one line a row, columns that go from the least important on."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from inrun.cli.grid import Grid, Heading
from inrun.cli.main import cli
from inrun.ledger import Ledger, StepRecord

TEXT = "def f(x):\n\n        return   x\t+ 1  # " + "a long line that goes on and on " * 4


@pytest.fixture
def run(tmp_path) -> str:
    with Ledger(tmp_path / "run") as ledger:
        labels = ("v#0", "v#1")
        for step in range(3):
            values = {label: [0.123456 * (i - 4) + 0.01 * k for i in range(10)] for k, label in enumerate(labels)}
            ledger.write(StepRecord(step, list(range(1000, 1010)), values, [{"step": step, "validation": x} for x in labels]))
        rows = [
            {
                "sample_id": 1000 + i,
                "id": f"document-number-{i}",
                "domain": "a domain of some length",
                "owner": "someone",
                "text": TEXT,
            }
            for i in range(10)
        ]
        ledger.register_samples(rows)
    return str(tmp_path / "run")


def lines_at(width: int | None, monkeypatch: pytest.MonkeyPatch, *command: str) -> list[str]:
    """What a command prints on a terminal of that width; None: into a file."""
    if width is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to be told of a terminal
        monkeypatch.setenv("COLUMNS", str(width))
    done = CliRunner().invoke(cli, list(command))
    assert done.exit_code == 0, done.exception
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in done.output.splitlines()]


COMMANDS = [["scores", "--top", "10"], ["groups"], ["groups", "--stages", "3"], ["shares", "--by", "domain", "--pool", "100"]]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [44, 60, 80, 100, 200])
def test_a_row_is_one_line_that_fits(run, monkeypatch, width, command) -> None:
    found = lines_at(width, monkeypatch, command[0], run, *command[1:])
    table = [line for line in found if line.startswith("  ")]
    assert table and all(cell_len(line) <= width for line in table)
    rows = [line for line in table if re.search(r"\d", line)]
    assert len(rows) == {"scores": 10, "groups": 3 if "--stages" in command else 1, "shares": 1}[command[0]]
    assert not any(re.search(r"\d…", line) for line in rows)  # figures are never cut


def test_what_matters_most_stays(run, monkeypatch) -> None:
    heads = {}
    for width in (44, 80, 200):
        found = lines_at(width, monkeypatch, "scores", run, "--top", "10")
        heads[width] = next(line.split() for line in found if "score" in line and line.startswith("  "))
        told = [line for line in found if line.startswith("no room here for ")]
        assert bool(told) == (width < 200)
    assert heads[200] == ["sample", "score", "±", "error", "uses", "steps", "id", "domain", "owner", "text"]
    assert {"sample", "score", "error", "domain", "text"} <= set(heads[80]) and "steps" not in heads[80]
    assert {"sample", "score"} <= set(heads[44]) and len(heads[44]) < len(heads[80])


def test_a_file_has_room(run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = lines_at(None, monkeypatch, "scores", run, "--top", "10")
    assert not any("no room" in line for line in found) and max(map(cell_len, found)) <= 120
    assert any("def f(x): return x" in line for line in found)


def test_wide_characters_count_twice(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    grid = Grid("", [Heading("name", 0, 10), Heading("figure")])
    grid.add("漢字" * 20, "1,234,567")
    assert grid.print() == []
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    (line,) = [line for line in out.splitlines() if "1,234,567" in line]
    assert "…" in line and cell_len(line.rstrip()) <= 40
