"""What an experiment is: a function from a configuration to findings, with three sizes, and cells that are kept as they are done.

    SIZES = {"smoke": MineConfig(steps=5), "quick": MineConfig(steps=100), "full": MineConfig()}

    def run(config: MineConfig, work: Work) -> Findings:
        cells = [work.cell({"seed": s}, lambda s=s: train_once(config, s)) for s in work.seeds]
        return Findings(data={"cells": cells}, tables=[Table("Mine", ["seed", "loss"], ...)], draw=lambda path: ...)

``RECIPES`` names the module of each; a module has ``SIZES`` and ``run``, and is imported when it is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from inrun.errors import ConfigurationError
from inrun.files import Files, write_durably

Tell = Callable[[str, int, int], None]
#: The file in the folder of cells that says which data they were made from.
STAMP = "data.json"


@dataclass(frozen=True)
class Recipe:
    """One of the paper's tables or figures."""

    name: str
    #: What it asks, in one line.
    question: str
    #: Where the paper has it.
    paper: str

    @property
    def module(self) -> ModuleType:
        """Import and return the module that runs it."""
        return import_module(f"inrun.experiments.{self.name}")


#: In the order of the docs page.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("efficiency", "what does scoring cost, by every way to do it?", "Table 1"),
        Recipe("fidelity", "how close are scores to the true Shapley values of a step?", "Figures 1, 6 and 7"),
        Recipe("utility", "how close is a Taylor expansion to what a step really does?", "Figure 8"),
        Recipe("mislabel", "do scores find samples whose label was changed?", "Table 4"),
        Recipe("selection", "how well does a model train on the samples with the highest scores?", "Table 5"),
        Recipe("curation", "does a run without the samples that hurt get there sooner?", "Figures 2 and 10"),
        Recipe("stages", "which domains feed a skill, and when?", "Figures 3 and 11"),
        Recipe("paraphrase", "does a document still count for text that says the same in other words?", "Table 2, Figure 12"),
        Recipe("domains", "do the highest scores belong to the domain of the validation text?", "Table 3"),
        Recipe("groups", "do scores of groups tell what leaving them out does?", "none; the field's linear datamodeling score"),
        Recipe("stability", "do scores agree from seed to seed?", "Section 2 and appendix B"),
    )
}


@dataclass(frozen=True)
class Table:
    """A table with the paper's numbers beside ours. Numbers are rounded for reading; ``Findings.data`` has them whole."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"### {_harmless(self.title)}", "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line([shown(x) for x in row]) for row in self.rows]
        return "\n".join([*lines, *(["", self.caption] if self.caption else [])]) + "\n"


#: A backslash before the one that escapes a bar would free the bar.
_ENTITIES = str.maketrans({"<": "&lt;", "[": "&#91;", "\\": "&#92;"})


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_harmless(cell).replace("|", "\\|") for cell in cells) + " |"


def _harmless(text: str) -> str:
    """Return text of one line that opens no tag and no link, and escapes nothing: names of domains come from files."""
    return " ".join(text.translate(_ENTITIES).splitlines())


def shown(value: object) -> str:
    """Return a value as it stands in a table; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)


@dataclass
class Findings:
    """What came of an experiment."""

    #: All numbers, as plain data: the same for the same seeds, so without times.
    data: dict[str, Any]
    tables: list[Table]
    #: What a reader must know: scale, data, what differs from the paper.
    notes: list[str] = field(default_factory=list)
    #: Times and memory, which no two runs share.
    measured: dict[str, Any] = field(default_factory=dict)
    #: Draws the figure into a PNG file.
    draw: Callable[[Path], None] | None = None


@dataclass
class Work:
    """What a run of an experiment is given: where data lies, which seeds, and a place to keep what is done."""

    name: str
    seeds: tuple[int, ...] = (0, 1, 2)
    #: Folder with data sets in their usual formats; None: what is installed serves instead, and the notes say so.
    data: Path | None = None
    #: Finished cells are kept here, so that a run that was interrupted goes on; None keeps nothing.
    cells: Path | None = None
    #: Processes for what is independent (retraining).
    jobs: int = 1
    tell: Tell = lambda what, done, total: None
    #: CPU seconds by cell, of those computed now.
    seconds: dict[str, float] = field(default_factory=dict)

    def cell(self, key: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """Return plain data of one independent part: as it was found before, or computed and kept.

        Args:
            key: All that the result depends on, as plain data: configuration, seed, which arm.
            compute: Makes it; what it returns passes through JSON, so that a kept cell equals a fresh one.
        """
        text = json.dumps({"experiment": self.name, **key}, sort_keys=True, default=plain)
        label = ", ".join(f"{k} {v}" for k, v in key.items() if isinstance(v, str | int | float))
        place = None if self.cells is None else self.cells / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        kept = None if place is None else _kept(place)
        if kept is not None and kept["key"] == json.loads(text):
            return kept["found"]
        began = time.process_time()
        found = json.loads(json.dumps(compute(), default=plain))
        self.seconds[label or text] = time.process_time() - began
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            body = json.dumps({"key": json.loads(text), "found": found}, indent=1) + "\n"
            write_durably(Files(), place, body.encode(), shared=True)
        return found

    def made_from(self, name: str, digest: str) -> None:
        """Note what data cells are made from; an error where those that are kept were made from other data of the same name.

        Args:
            name: What cells know the data by.
            digest: Of its content.
        """
        if self.cells is None:
            return
        place = self.cells / STAMP
        stamp = _read_json(place)
        known = stamp if isinstance(stamp, dict) else {}
        # Where nothing was found yet, for the data was not what it should be, say, it may be mended.
        if known.get(name, digest) != digest and any(kept != place for kept in self.cells.rglob("*.json")):
            raise ConfigurationError(
                f"{self.cells} keeps results made from another {name} than this one; give another --out, or --fresh to compute "
                "everything again"
            )
        if known.get(name) != digest:
            place.parent.mkdir(parents=True, exist_ok=True)
            body = json.dumps({**known, name: digest}, indent=1, sort_keys=True) + "\n"
            write_durably(Files(), place, body.encode(), shared=True)

    def need(self, *names: str) -> Path | None:
        """Return the folder of data if it has all of these files; None without ``--data``; an error that names what is missing."""
        if self.data is None:
            return None
        missing = [name for name in names if not (self.data / name).exists()]
        if missing:
            raise ConfigurationError(
                f"{self.data} has no {', '.join(missing)}, which {self.name} reads; give --data a folder that has them, "
                "or leave --data out: what is installed serves instead"
            )
        return self.data


def _read_json(path: Path) -> Any:
    """Return what a file holds; None where there is none, or it is broken."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _kept(path: Path) -> dict[str, Any] | None:
    kept = _read_json(path)
    return kept if isinstance(kept, dict) and {"key", "found"} <= kept.keys() else None


def finite(value: Any) -> Any:
    """Return plain data with None for numbers that are not finite, such as the correlation of a constant: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """Turn configurations, arrays and paths into plain data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return value.name
    raise TypeError(f"a {type(value).__name__} is no plain data")


def run(name: str, size: str, work: Work) -> Findings:
    """Run an experiment at one of its sizes."""
    if name not in RECIPES:
        raise ConfigurationError(f"unknown experiment {name!r}; available: {', '.join(RECIPES)}")
    module = RECIPES[name].module
    config = module.SIZES[size]
    found: Findings = module.run(config, work)
    found.data = {"experiment": name, "size": size, "seeds": list(work.seeds), "config": config, **found.data}
    found.data = finite(json.loads(json.dumps(found.data, default=plain)))
    return found
