"""The frame of experiments: cells that are kept, tables, and what a run leaves behind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inrun.errors import ConfigurationError
from inrun.experiments import recipes
from inrun.experiments.outputs import page, save
from inrun.experiments.recipes import RECIPES, Findings, Table, Work, run


@dataclass(frozen=True)
class Config:
    steps: int = 3


def test_cells_are_kept_and_found_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute(seed: int) -> dict[str, object]:
        calls.append(seed)
        return {"scores": np.arange(3) / 3 + seed}

    first = [Work("mine", cells=tmp_path).cell({"seed": s, "config": Config()}, lambda s=s: compute(s)) for s in (0, 1)]
    again = [Work("mine", cells=tmp_path).cell({"seed": s, "config": Config()}, lambda s=s: compute(s)) for s in (0, 1)]
    assert first == again and calls == [0, 1]
    Work("mine", cells=tmp_path).cell({"seed": 0, "config": Config(steps=4)}, lambda: compute(0))
    Work("other", cells=tmp_path).cell({"seed": 0, "config": Config()}, lambda: compute(0))
    assert calls == [0, 1, 0, 0]  # the control: another configuration or experiment is another cell


def test_a_fresh_cell_equals_a_kept_one() -> None:
    assert Work("mine").cell({}, lambda: {"a": (1, np.float32(0.5))}) == {"a": [1, 0.5]}


def test_table_escapes_and_rounds() -> None:
    text = Table("T", ["a|b", "c"], [["x\ny", 0.123456], [None, float("nan")], ["0.678 (0.045)", 1e-5]]).markdown()
    assert "a\\|b" in text and "x y | 0.123 |" in text and "|  | – |" in text and "1e-05" in text


def test_runs_and_leaves_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(config: Config, work: Work) -> Findings:
        return Findings({"found": list(work.seeds)}, [Table("T", ["a"], [[config.steps]])], ["small"], {"ms": 1.0})

    module = SimpleNamespace(SIZES={"smoke": Config(5)}, run=compute)
    monkeypatch.setattr(recipes, "import_module", lambda name: module)
    work = Work("mislabel", seeds=(0, 1))
    found = run("mislabel", "smoke", work)
    assert found.data["config"] == {"steps": 5} and found.data["found"] == [0, 1]
    written = save(found, work, tmp_path, 2.0)
    assert [p.name for p in written] == ["results.json", "timings.json", "table.md"]
    assert "ms" not in written[0].read_text() and json.loads(written[1].read_text())["measured"] == {"ms": 1.0}
    assert "- small" in page(found, work) and "| 5 |" in written[2].read_text()


def test_wrong_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown experiment 'x'; available: efficiency, fidelity"):
        run("x", "smoke", Work("x"))
    with pytest.raises(ConfigurationError, match="has no cifar10_subset.npz, which mislabel reads"):
        Work("mislabel", data=tmp_path).need("cifar10_subset.npz")
    assert Work("mislabel").need("cifar10_subset.npz") is None
    assert next(iter(RECIPES)) == "efficiency"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"key": 1}', b'{"found": 1}', b"\xff\x00"])
def test_a_broken_cell_is_computed_again(body: bytes, tmp_path: Path) -> None:
    work = Work("mine", cells=tmp_path)
    assert work.cell({"seed": 0}, lambda: 1) == 1
    (place,) = tmp_path.iterdir()
    assert work.cell({"seed": 0}, lambda: 2) == 1  # the control: a whole one is taken
    place.write_bytes(body)
    assert work.cell({"seed": 0}, lambda: 2) == 2 and work.cell({"seed": 0}, lambda: 3) == 2


def test_cells_of_other_data_of_the_same_name_are_not_taken(tmp_path: Path) -> None:
    work = Work("mine", cells=tmp_path / "cells")
    for name, digest in (("corpus.jsonl", "00"), ("images", "bb"), ("corpus.jsonl", "aa")):
        work.made_from(name, digest)  # nothing is kept yet: the file was mended meanwhile
    work.cell({}, lambda: 1)
    work.made_from("corpus.jsonl", "aa")
    with pytest.raises(
        ConfigurationError, match=r"keeps results made from another corpus.jsonl than this one; .*--out, or --fresh"
    ):
        work.made_from("corpus.jsonl", "cc")
    Work("mine", cells=tmp_path / "cells").made_from("corpus.jsonl", "aa")
    Work("mine", cells=tmp_path / "other").made_from("corpus.jsonl", "cc")
    Work("mine").made_from("corpus.jsonl", "cc")  # keeps nothing


def test_numbers_that_are_none_are_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correlation of a constant, say: results.json must be JSON for readers that are not Python."""

    def compute(config: Config, work: Work) -> Findings:
        return Findings({"a": [np.nan, 1.5], "b": {"c": float("inf")}}, [Table("T", ["a"], [[np.nan]])], measured={"d": np.nan})

    monkeypatch.setattr(recipes, "import_module", lambda name: SimpleNamespace(SIZES={"smoke": Config()}, run=compute))
    found = run("mislabel", "smoke", Work("mislabel"))
    assert found.data["a"] == [None, 1.5] and found.data["b"] == {"c": None}
    for path in save(found, Work("mislabel"), tmp_path, 1.0)[:2]:
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    with pytest.raises(pytest.fail.Exception):
        json.loads("[NaN]", parse_constant=lambda name: pytest.fail(name))  # the control


def cells_of(line: str) -> list[str]:
    """Split a row as renderers do: a backslash takes the next character with it, whatever it is."""
    return re.findall(r"((?:\\.|[^\\|])*)\|", line.removeprefix("|"))


HOSTILE = ("a|b", "a\\|b", "a\\\\|b", "x\r\ny", "x\u2028y", "<script>alert(1)</script>", "![x](http://x/y.png)", "\\", "")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_a_table(name: str) -> None:
    lines = Table(f"about {name}", [name, "c"], [[name, 1.0], ["d", name]]).markdown().splitlines()
    assert len(lines) == 6 and lines[0].startswith("### about") and cells_of(lines[2])[1] == " c "
    for line in lines[2:]:
        assert len(cells_of(line)) == 2 and not {"<", "["} & set(line)
    assert len(cells_of("| a\\\\| b |")) == 2 and len(cells_of("| a\\| b |")) == 1  # the control
