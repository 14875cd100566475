"""The example of docs/packed.md runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "packed.md"


def test_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/packed.md", "exec"), names)  # noqa: S102 - our own page
    scores = names["accountant"].scores().to_pydict()
    assert dict(zip(scores["sample_id"], scores["times_used"], strict=True)) == {2: 3, 4: 3, 5: 3, 7: 3, 9: 3}
