"""The registry of methods: whatever names methods reads it, and nothing else keeps a list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import inrun
from inrun.analysis.summary import advice
from inrun.bench.contestants import entries
from inrun.bench.shape import Shape
from inrun.cli.main import cli
from inrun.errors import ConfigurationError
from inrun.experiments.fidelity import FidelityConfig
from inrun.fidelity import usual_choices
from inrun.old.methods import METHODS, UPDATES, Look, Method, find_method, resolve_update
from inrun.report.about import facts
from inrun.training.config import make_config
from tiny import batch, tiny, train_step, validation

SOURCE = Path(inrun.__file__).parent


class Throwaway(Method):
    """``first`` under another name."""

    name = "throwaway"
    summary = "a method that a test made up"
    benchmarked_with = ("real",)

    def before(self, look: Look) -> object:
        return look.here()

    def advice(self, update: str) -> str:
        return f"Take anything but this, and not {update}."


@pytest.fixture
def throwaway(monkeypatch: pytest.MonkeyPatch) -> Method:
    monkeypatch.setitem(METHODS, "throwaway", Throwaway())
    return METHODS["throwaway"]


def config(**scoring: str) -> dict:
    return {"data": {"paths": ["here.jsonl"]}, "validation": {"v": {"split": "held_out"}}, "scoring": scoring}


def test_a_registered_method_appears_everywhere(throwaway: Method, tmp_path: Path) -> None:
    help_text = " ".join(CliRunner().invoke(cli, ["replay", "--help"]).output.split())
    assert f"[{'|'.join(METHODS)}]" in help_text and "|throwaway]" in help_text
    assert f"[{'|'.join(UPDATES)}]" in help_text
    refused = CliRunner().invoke(cli, ["replay", str(tmp_path), "--method", "nonsense"])
    assert refused.exit_code == 2
    assert "throwaway" in refused.output
    assert make_config(config(method="throwaway")).scoring.method == "throwaway"
    with pytest.raises(ConfigurationError, match="accepted are first, .*, throwaway"):
        make_config(config(method="nonsense"))
    assert "throwaway+secant" in [e.name for e in entries(Shape())]
    assert "throwaway+sgd" in [e.name for e in entries(Shape(optimizer="sgd"))]
    assert ("throwaway", "secant") in usual_choices()
    assert ("throwaway", "sgd") in FidelityConfig(proxy=True).resolved_choices()
    assert advice("throwaway", "secant") == "Take anything but this, and not secant."
    assert ("Method", "throwaway: a method that a test made up") in facts({"method": "throwaway"})


def test_a_registered_method_scores(throwaway: Method) -> None:
    found = {}
    for name in ("first", "throwaway"):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with inrun.Accountant(model, optimizer, validation(), method=name) as accountant:
            found[name] = train_step(accountant, model, optimizer, batch(4, 1)).contributions["validation"]
    assert torch.equal(found["first"], found["throwaway"])


def test_without_it_nothing_knows_the_name() -> None:
    assert "throwaway" not in CliRunner().invoke(cli, ["replay", "--help"]).output
    assert "throwaway" not in advice("throwaway", "secant")
    assert ", ".join(METHODS) in advice("a method of an old ledger", "frozen")
    assert ("Method", "throwaway") in facts({"method": "throwaway"})
    with pytest.raises(ConfigurationError, match="available: first"):
        find_method("throwaway")


def test_the_usual_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `inrun bench` and `inrun fidelity` print of the four in the docs; a change here changes published tables."""
    for name in METHODS.keys() - {"first", "lookahead", "second", "midpoint"}:
        monkeypatch.delitem(METHODS, name)
    ours = [e.name for e in entries(Shape())][2:-2]
    forms = [f"first+{update} {form}" for update in ("frozen", "sgd") for form in ("shared", "project")]
    merged = ["first+sgd merged", "first+sgd merged gram"]
    assert ours == [*forms, "lookahead+frozen", "second+secant", "midpoint+secant", *merged, "first+frozen merged", "whole credit"]
    with_sgd = [e.name for e in entries(Shape(optimizer="sgd"))][2:-2]
    assert with_sgd == ["first+sgd shared", "first+sgd project", "second+sgd", "midpoint+sgd", *merged, "whole credit"]
    named = [f"{method}+{update}" for method, update in usual_choices()]
    assert named[:4] == ["first+sgd", "first+frozen", "lookahead+frozen", "first+secant"]
    assert named[4:] == ["second+secant", "midpoint+secant", "midpoint:gauss2+secant"]
    assert usual_choices(sgd=True) == (("first", "sgd"), ("second", "sgd"), ("midpoint", "sgd"))


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_describe_themselves(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert method.summary
    assert method.refuses.keys() <= UPDATES.keys()
    assert set(method.benchmarked_with) <= {"real", *UPDATES}
    assert set(method.studied_with) <= UPDATES.keys() - method.refuses.keys()
    for update in UPDATES.keys() - method.refuses.keys():
        assert method.advice(update)
        assert resolve_update(update, method) in UPDATES.keys() - {"auto"}


def lists_of(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield every literal list, tuple, set and dict with the strings it holds: a dict's keys, and what is nested."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            parts = [key for key in node.keys if key] if isinstance(node, ast.Dict) else node.elts
            inside = (inner for part in parts for inner in ast.walk(part))
            yield node.lineno, {x.value for x in inside if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def test_no_other_room_lists_methods_or_updates() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "methods":
            continue
        for line, words in lists_of(ast.parse(path.read_text(encoding="utf-8"))):
            for known in (METHODS, UPDATES):
                named = words & known.keys()
                assert len(named) < 2, f"{path.relative_to(SOURCE)}:{line} lists {sorted(named)}; read inrun.old.methods instead"


def test_the_search_finds_lists() -> None:
    for text in ('x = ["first", "second"]', 'x = {"frozen": 1, "secant": 2}', 'x = (("first", "sgd"), ("midpoint", "sgd"))'):
        assert any(len(words & known.keys()) > 1 for _, words in lists_of(ast.parse(text)) for known in (METHODS, UPDATES))
