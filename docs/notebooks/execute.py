"""Execute the notebooks beside this file, and check or save what they show.

    python docs/notebooks/execute.py            # executes all of them and says how long each took
    python docs/notebooks/execute.py --save     # writes their outputs back

Needs nbclient and ipykernel (the extra ``dev``). Saved outputs hold no times, no ids of a run and no paths of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NAMES = ("first_scores", "curate_and_retrain")
#: Bytes that a saved notebook may have, outputs included.
MOST_BYTES = 300_000
#: What a saved notebook must not tell of the machine it was executed on.
PRIVATE = re.compile(r"(/home/|/root/|/tmp/|/work/|/Users/|[A-Z]:\\\\)")


def execute(path: Path, timeout: int = 300) -> Any:
    """Return the notebook, executed in a new kernel in a folder of its own; the first error of a cell is raised."""
    import tempfile

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Leave out what changes from one execution to the next."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for place, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{place}"
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
    return notebook


def complaints(text: str) -> list[str]:
    """Return what is wrong with a saved notebook."""
    found = [] if len(text.encode()) <= MOST_BYTES else [f"{len(text.encode()):,} bytes, more than {MOST_BYTES:,}"]
    private = PRIVATE.search(re.sub(r'"image/png": "[^"]*"', "", text))
    return found + ([f"holds a path of this machine: {private.group()}"] if private else [])


def main() -> None:
    """Execute, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the outputs back")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in NAMES:
        began = time.monotonic()
        text = nbformat.writes(cleaned(execute(HERE / f"{name}.ipynb"))) + "\n"
        wrong = complaints(text)
        if wrong:
            raise SystemExit(f"{name}: {'; '.join(wrong)}")
        if asked.save:
            (HERE / f"{name}.ipynb").write_text(text, encoding="utf-8")
        print(f"{name}: {time.monotonic() - began:.0f} s, {len(text):,} characters{', saved' if asked.save else ''}")


if __name__ == "__main__":
    main()
