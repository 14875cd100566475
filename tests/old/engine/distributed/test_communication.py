"""What a step exchanges, in bytes that a rank sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inrun.old.engine import processes
from inrun.old.engine.processes import GATHERED, HANDED, Communication


def test_bytes_that_a_rank_sends() -> None:
    """Rings: sums go round twice in parts of 1/W, what is gathered is sent to all others, what rank 0 gets once."""
    payload = {"validation gradient": 800, "directions": 100, "meetings": 10, "messages": 1000, "parts for rank 0": 7}
    assert Communication(4, payload).bytes == 1917
    assert Communication(4, payload).wire == 800 * 2 * 3 / 4 + (100 + 10 + 1000) * 3 + 7
    assert Communication(1, payload).wire == 0
    assert Communication(2, {"messages": 64}).wire == Communication(2, {"meetings": 64}).wire == 64


@pytest.mark.parametrize(
    ("call", "kinds"), [(r"_all_gather\(\s*\"([^\"]+)\"", GATHERED), (r"_call\(\s*\"([^\"]+)\"[^\n]*\.gather\(", HANDED)]
)
def test_everything_gathered_is_known_to_be(call: str, kinds: tuple[str, ...]) -> None:
    source = "".join(path.read_text() for path in Path(processes.__file__).parent.glob("*.py"))
    found = set(re.findall(call, source))
    assert found and found <= set(kinds)
