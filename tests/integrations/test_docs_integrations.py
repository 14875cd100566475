"""The snippets of docs/integrations.md run, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "integrations.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_snippets_run(tmp_path: Path, monkeypatch: Any) -> None:
    for package in ("transformers", "datasets", "trl", "lightning"):
        pytest.importorskip(package)
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        if "Accelerator(" in block:
            accelerate.state.AcceleratorState._reset_state(True)
        exec(compile(block, "docs/integrations.md", "exec"), names)  # noqa: S102 - our own page
