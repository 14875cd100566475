"""The notebooks of the docs run in a kernel without ipywidgets, and are saved as they should be."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kernels import Kernel, check_clean, cpu_seconds

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.filterwarnings("ignore")

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
#: Texts that an executed notebook must show, by its name.
SHOWN = {
    "first_scores": ("of the 20 lowest points have a wrong label", "Accountant of Sequential", "Fidelity at step 80", "Coverage"),
    "curate_and_retrain": ("of the 400 samples with a score", "as many dropped at random", "Scores by group"),
}
FIGURES = {"first_scores": 5, "curate_and_retrain": 2}


def script() -> Any:
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def check_shown(name: str, outputs: list[Any]) -> None:
    whole = json.dumps(outputs, ensure_ascii=False)
    assert all(words in whole for words in SHOWN[name])
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES[name]


def test_no_notebook_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWN) == set(script().NAMES)


@pytest.mark.parametrize("name", SHOWN)
def test_saved_outputs_are_whole_small_and_tell_nothing_of_a_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert script().complaints(text) == []
    notebook = json.loads(text)
    assert all(output["output_type"] != "error" for output in outputs_of(notebook))
    check_shown(name, outputs_of(notebook))


@pytest.mark.parametrize("text", ["x" * 300_001, '{"text": "/home/me/run"}', '{"text": "saved to /tmp/abc"}'])
def test_control_what_must_not_be_saved_is_found(text: str) -> None:
    assert script().complaints(text)


@pytest.mark.parametrize("name", ["first_scores", pytest.param("curate_and_retrain", marks=pytest.mark.slow)])
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(tmp_path, monkeypatch)
    before = cpu_seconds()
    notebook = script().execute(FOLDER / f"{name}.ipynb")
    assert cpu_seconds() - before < 20
    check_clean(outputs_of(notebook))
    check_shown(name, outputs_of(notebook))


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (FOLDER.parent / "notebooks.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "notebooks.md", "exec"), names)  # noqa: S102 - our own docs
    assert names["books"].scores(by="domain").num_rows == 4


def test_control_an_error_in_a_cell_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="nothing here"):
        Kernel(tmp_path, monkeypatch).run(["raise ValueError('nothing here')"], tmp_path)
