"""The page on architecture: its calls exist, there are at most 25, and a step makes them in that order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import inrun

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
SOURCE = Path(__file__).parent.parent / "src" / "inrun"
MOST_CALLS, MOST_WORDS = 25, 900


def calls() -> list[tuple[str, str]]:
    """Return name and file of the calls that the page lists, in its order."""
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \| `([\w/]+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(name, file) for _, name, file in rows]


def function_of(name: str, file: str) -> Any:
    found: Any = importlib.import_module("inrun." + file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found)


def test_there_are_few_calls() -> None:
    assert 10 < len(calls()) <= MOST_CALLS


@pytest.mark.parametrize(("name", "file"), calls())
def test_a_call_exists_where_the_page_says(name: str, file: str) -> None:
    assert Path(function_of(name, file).__code__.co_filename) == SOURCE / file


def test_files_and_objects_that_the_page_names_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for file in re.findall(r"`((?:engine|layers|optimizers|ledger)/\w*(?:\.py)?)`", text):
        assert (SOURCE / file).exists(), file
    table = text.partition("## Parts")[2].partition("## Rules")[0]
    for names, files in re.findall(r"^\| (`.+?) \| (`.+?) \|", table, re.MULTILINE):
        defined = "".join((SOURCE / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", files))
        defined += (SOURCE / "optimizers" / "rule.py").read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", defined, re.MULTILINE), name


def test_it_is_one_page() -> None:
    words = [word for word in PAGE.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_a_step_makes_the_calls_in_this_order(tmp_path: Path) -> None:
    expected = {function_of(*call).__code__: call[0] for call in calls()}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum a window is one step
    x = torch.randn(8, 48)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(-x).square().mean(), sketch=256, ledger=str(tmp_path / "run"))
    seen: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = expected.get(frame.f_code)
        if event == "call" and name is not None and name not in seen:
            seen.append(name)

    for step in range(2):
        sys.setprofile(note if step == 1 else None)
        try:
            with accountant.step(range(8)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    accountant.close()
    assert seen == list(expected.values())
