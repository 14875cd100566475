"""The frame of experiments: cells that are kept, tables, and what a run leaves behind."""

from __future__ import annotations

import json
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
