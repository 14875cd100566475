"""The walls between rooms, read from the imports; and how large the rooms that score may be."""

from __future__ import annotations

import ast
import functools
import shutil
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


#: Lines when formatted at 100 columns: of a file, of the engine with its layers and optimizers, and of the paper's method.
COLUMNS, LONGEST, ENGINE, PAPER, MOST_ATTRIBUTES = 100, 400, 13_000, 1_500, 12
ENGINE_ROOMS = ("engine", "layers", "optimizers")


def narrow(folder: Path) -> None:
    """Format the files of a folder as if lines had 100 columns."""
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", "--line-length", str(COLUMNS), str(folder)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def narrow_rooms(tmp_path_factory) -> Path:
    copy: Path = tmp_path_factory.mktemp("rooms")
    for room in (*ENGINE_ROOMS, "paper"):
        shutil.copytree(SOURCE / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    narrow(copy)
    return copy


def lines_of(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): len(p.read_text().splitlines()) for p in folder.rglob("*.py")}


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Return the fields of a class, and what its methods set on self."""
    fields = [n for n in cls.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)]
    names = {n.target.id for n in fields if isinstance(n.target, ast.Name)}
    for n in ast.walk(cls):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id == "self":
            names.add(n.attr)
    return names


def wide_classes(text: str) -> list[str]:
    classes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)]
    return [c.name for c in classes if len(attributes_of(c)) > MOST_ATTRIBUTES]


def test_rooms_that_score_stay_small(narrow_rooms: Path) -> None:
    lines = lines_of(narrow_rooms)
    assert not {name: n for name, n in lines.items() if n > LONGEST}
    assert sum(n for name, n in lines.items() if Path(name).parts[0] in ENGINE_ROOMS) <= ENGINE
    assert sum(n for name, n in lines.items() if Path(name).parts[0] == "paper") <= PAPER
    assert {Path(name).parts[0] for name in lines} == {*ENGINE_ROOMS, "paper"}


def test_classes_that_score_stay_narrow(narrow_rooms: Path) -> None:
    wide = {str(p.relative_to(narrow_rooms)): found for p in narrow_rooms.rglob("*.py") if (found := wide_classes(p.read_text()))}
    assert not wide


def test_long_files_and_wide_classes_are_seen(tmp_path: Path) -> None:
    """The control: lines are counted after they are broken, and attributes however they are set."""
    (tmp_path / "dense.py").write_text(f"x = [{', '.join(map(str, range(LONGEST + 1)))}]\n")
    narrow(tmp_path)
    assert lines_of(tmp_path)["dense.py"] > LONGEST
    fields = "".join(f"    a{i}: int = {i}\n" for i in range(MOST_ATTRIBUTES - 2))
    method = "    def f(self) -> None:\n        self.b, (self.c, _) = 1, (2, 3)\n"
    assert wide_classes(f"class A:\n{fields}    n: ClassVar[int] = 0\n{method}") == []
    assert wide_classes(f"class A:\n{fields}{method}        self.d += 1\n") == ["A"]
