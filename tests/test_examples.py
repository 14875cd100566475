"""Every example runs, and shows what it says."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def halves(scored: Any, first: int) -> bool:
    values = scored.with_format("numpy")["score"][:]
    return bool(np.nanmean(values[:first]) > np.nanmean(values[first:]))


def swapped_are_low(scored: Any) -> bool:
    values = scored.with_format("numpy")["score"][:]
    return bool(values[::6].mean() < 0 < np.delete(values, np.s_[::6]).mean())


#: File: packages that it needs, and whether its result is as it should be.
CASES: dict[str, tuple[tuple[str, ...], Any]] = {
    "mislabelled_images": ((), lambda found: found > 0.6),
    "nanogpt_windows": ((), lambda means: means[0] > 0 and means[0] > means[1]),
    "transformers_trainer": (("transformers", "accelerate", "datasets"), lambda scored: halves(scored, 24)),
    "accelerate_loop": (("accelerate",), lambda rows: rows == 32),
    "lightning_module": (("lightning",), lambda rows: rows == 64),
    "trl_sft": (("trl",), lambda scored: halves(scored, 28)),
    "trl_dpo": (("trl", "peft"), swapped_are_low),
}


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CASES)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.py`" in listed for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    needed, holds = CASES[name]
    for package in needed:
        pytest.importorskip(package)
    if "accelerate" in needed:
        importlib.import_module("accelerate").state.AcceleratorState._reset_state(True)
    monkeypatch.chdir(tmp_path)
    assert holds(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]())
