"""Kernels without ipywidgets, for the tests of notebooks."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import inrun

SOURCE = Path(inrun.__file__).parent.parent


class Kernel:
    """Executes notebooks in new kernels in which ipywidgets cannot be imported, whether it is installed or not."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        absent = folder / "absent" / "ipywidgets"
        absent.mkdir(parents=True)
        (absent / "__init__.py").write_text("raise ImportError('ipywidgets is not here')\n")
        path = os.pathsep.join([str(absent.parent), str(SOURCE)])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    @staticmethod
    def run(cells: list[str], folder: Path) -> list[list[Any]]:
        """Execute cells; return the outputs of each."""
        import nbclient
        import nbformat

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
        return [cell.outputs for cell in notebook.cells]


def cpu_seconds() -> float:
    """CPU time of processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check_clean(outputs: list[Any]) -> None:
    """AssertionError if a cell failed, warned, or wrote to standard error."""
    for output in outputs:
        assert output.output_type != "error", output.get("evalue")
        assert output.get("name") != "stderr", output.get("text")
        assert "ipywidgets" not in str(output)
