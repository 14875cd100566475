"""What a run of an experiment leaves in its folder: results.json, timings.json, table.md and figure.png."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from inrun.experiments.recipes import RECIPES, Findings, Work, finite
from inrun.files import Files, write_durably


def save(findings: Findings, work: Work, folder: Path, wall_seconds: float) -> list[Path]:
    """Write everything; return the paths. ``results.json`` is the same for the same seeds, times are kept apart."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def put(name: str, text: str) -> None:
        written.append(folder / name)
        write_durably(Files(), written[-1], text.encode())

    put("results.json", json.dumps(findings.data, indent=1, sort_keys=True) + "\n")
    put("timings.json", json.dumps(finite(_timings(findings, work, wall_seconds)), indent=1) + "\n")
    put("table.md", page(findings, work))
    if findings.draw is not None:
        written.append(folder / "figure.png")
        findings.draw(written[-1])
    return written


def page(findings: Findings, work: Work) -> str:
    """Return the tables and notes as Markdown."""
    recipe = RECIPES[work.name]
    size, seeds = findings.data.get("size", ""), ", ".join(map(str, work.seeds))
    head = f"## `{work.name}`: {recipe.question}\n\nPaper: {recipe.paper}. Size: {size}; seeds {seeds}.\n"
    notes = "".join(f"- {note}\n" for note in findings.notes)
    return "\n".join([head, *(table.markdown() for table in findings.tables), *([notes] if notes else [])])


def _timings(findings: Findings, work: Work, wall_seconds: float) -> dict[str, Any]:
    import torch

    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "wall_seconds": wall_seconds,
        "cpu_seconds": work.seconds,
        "machine": machine,
        **versions,
        "measured": findings.measured,
    }
