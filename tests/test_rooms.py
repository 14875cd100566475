"""The walls between rooms, read from the imports."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "inrun"
#: What whoever shows something in a notebook may import: HTML and figures.
NOTEBOOKS = {"notebook", "figures"}
ALLOWED = {
    "layers": {"layers", "errors", "torch_private"},
    "optimizers": {"optimizers", "errors"},
    # The accountant offers figures and the fidelity study as attributes, and imports them when asked.
    "engine": {"engine", "layers", "optimizers", "ledger", "analysis", "errors", "fidelity", "torch_private"} | NOTEBOOKS,
    "paper": {"paper", "ledger", "errors", "torch_private"},
    "truth": {"truth", "errors", "statistics", "torch_private", "notebook"},
    "fidelity": {"fidelity", "engine", "truth", "errors", "notebook"},
    # A reader offers its figures as an attribute, and imports them when asked.
    "ledger": {"ledger", "errors", "files"} | NOTEBOOKS,
    "analysis": {"analysis", "ledger", "errors", "statistics", "files", "notebook"},
    "notebook": {"notebook"},
    "figures": {"figures", "analysis", "ledger", "notebook", "errors", "statistics"},
    "report": {"report", "analysis", "ledger", "errors", "statistics", "files"},
    "explorer": {"explorer", "report", "analysis", "ledger", "errors", "files"},
    "corpus": {"corpus", "ledger", "files", "errors"},
    "training": {"training", "corpus", "engine", "ledger", "analysis", "files", "statistics", "errors"},
    "replay": {"replay", "training", "corpus", "engine", "ledger", "files", "statistics", "errors"},
    "demo": {"demo", "training", "corpus", "ledger", "analysis", "errors"},
    "experiments": {
        "experiments",
        "fidelity",
        "truth",
        "training",
        "corpus",
        "engine",
        "ledger",
        "analysis",
        "baselines",
        "bench",
        "paper",
        "methods",
        "statistics",
        "files",
        "errors",
    },
    "integrations": {"integrations", "engine", "ledger", "files", "errors"},
    "baselines": {"baselines", "errors", "statistics", "ledger", "files"},
    "bench": {"bench", "engine", "layers", "paper", "training", "errors", "torch_private"},
}
NO_TORCH = {"ledger", "analysis", "report", "notebook", "figures", "explorer"}
#: Files that every room may import, and that import none.
SHARED = ("errors", "statistics", "files", "methods")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_only_what_they_may(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "inrun" and len(parts) > 1:
                assert parts[1] in ALLOWED[room] | {"methods"}, f"{path.relative_to(SOURCE)} imports {name}"
            if room in NO_TORCH:
                assert parts[0] != "torch", f"{path.relative_to(SOURCE)} imports torch"


@pytest.mark.parametrize("name", SHARED)
def test_shared_files_stand_alone(name: str) -> None:
    assert not {n for n in imports_of(SOURCE / f"{name}.py") if n.split(".")[0] in ("inrun", "torch", "scipy")}


def test_nobody_imports_cli() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "cli" and path.name != "__main__.py":
            assert not any(n.startswith("inrun.cli") for n in imports_of(path)), path


def test_unsafe_calls_are_absent() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
        assert not {"pickle", "requests", "urllib.request", "socket"} & imports_of(path), path


def test_import_is_light() -> None:
    code = "import sys, inrun; assert not {'torch', 'pyarrow', 'rich', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for room in sorted(NO_TORCH):
        code = f"import sys, inrun.{room}; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)
