"""Put docs/evidence.md together from what `inrun reproduce` left in docs/evidence, with our reading of each.

    python benchmarks/evidence_page.py

Tables and figures are those of the runs, word for word. The readings are in docs/evidence/readings.md and belong to them: whoever
commits new results reads them again. An experiment without results is named as such.
"""

from __future__ import annotations

import re
from pathlib import Path

from inrun.experiments.recipes import RECIPES

DOCS = Path(__file__).parent.parent / "docs"


def readings() -> dict[str, str]:
    """Return the readings by experiment; ``head`` begins the page."""
    parts = re.split(r"^## (\w+)\n", (DOCS / "evidence" / "readings.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def section(name: str, reading: str) -> str:
    """Return one experiment: our reading, its figure, its tables and notes."""
    found = DOCS / "evidence" / f"{name}.md"
    if not found.exists():
        recipe = RECIPES[name]
        return f"## `{name}`: {recipe.question}\n\nPaper: {recipe.paper}. No results yet beyond the smoke size.\n"
    title, size, tables = found.read_text(encoding="utf-8").split("\n\n", 2)
    figure = f"![{name}](evidence/{name}.png)" if (DOCS / "evidence" / f"{name}.png").exists() else ""
    return "\n\n".join(part for part in (title, size, reading and f"**Reading.** {reading}", figure, tables.strip()) if part) + "\n"


def page() -> str:
    """Return the whole page."""
    told = readings()
    head = f"# The evidence: the paper's experiments, ours beside its\n\n{told['head']}\n"
    return "\n".join([head, *(section(name, told[name]) for name in RECIPES)])


if __name__ == "__main__":
    (DOCS / "evidence.md").write_text(page(), encoding="utf-8")
