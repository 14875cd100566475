"""docs/evidence.md is what the committed results say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from inrun.experiments.recipes import RECIPES

ROOT = Path(__file__).parents[2]


def page() -> str:
    spec = importlib.util.spec_from_file_location("evidence_page", ROOT / "benchmarks" / "evidence_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_is_that_of_the_results() -> None:
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == page(), "run python benchmarks/evidence_page.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "evidence").glob("*.json")), ids=lambda p: p.stem)
def test_results_are_of_known_experiments(path: Path) -> None:
    if path.stem.endswith("-timings"):
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["experiment"] in RECIPES and found["size"] in ("quick", "full") and path.stat().st_size < 500_000
