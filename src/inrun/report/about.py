"""What the page says about the run itself: its state, how it was scored, how to cite it, what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from inrun.ledger import SIGN, UNIT, method_of
from inrun.ledger.lock import holders
from inrun.methods import METHODS
from inrun.report.text import one_line

#: Keys of run.json that the page shows in its own words, or not at all.
_TOLD = {"schema", "run_id", "sign", "unit", "method", "update", "model", "software", "validation", "coverage", "credit"}
#: Lines of run.json that are shown.
MOST_FACTS = 30

PAPER = """@inproceedings{wang2025data,
  title     = {Data Shapley in One Training Run},
  author    = {Wang, Jiachen T. and Mittal, Prateek and Song, Dawn and Jia, Ruoxi},
  booktitle = {International Conference on Learning Representations},
  year      = {2025}
}"""


def writer_at_work(run: Path) -> bool | None:
    """Say whether a process of this machine is writing to the run; None if it was not closed by one that is not here."""
    named = holders(run)
    if any(holder.is_alive for holder in named):
        return True
    return None if named else False


def facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what ``run.json`` says, as rows of name and text."""
    method = method_of(about)
    rows = [
        ("Method", f"{method}: {METHODS[method]}" if method in METHODS else method),
        ("Sign", str(about.get("sign", SIGN))),
        ("Unit", str(about.get("unit", UNIT))),
        ("Model", str(about.get("model", "not recorded"))),
    ]
    if "coverage" in about:
        rows.append(("Parameters scored", _value(about["coverage"])))
    rows += [(key.replace("_", " ").capitalize(), _value(value)) for key, value in about.items() if key not in _TOLD]
    rows.append(("Software", _value(about.get("software", "not recorded"))))
    rows.append(("Run", str(about.get("run_id", "not recorded"))))
    return [(one_line(name, 60), one_line(text, 300)) for name, text in rows[:MOST_FACTS]]


def _value(value: Any) -> str:
    """Return a value of run.json for people."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value[:12]) + (f" and {len(value) - 12} more" if len(value) > 12 else "")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def citation(about: dict[str, Any]) -> str:
    """Return BibTeX for the software that scored the run."""
    software = about.get("software")
    version = one_line(software.get("inrun", "?"), 40) if isinstance(software, dict) else "?"
    return f"""@software{{inrun,
  title   = {{inrun: what every training sample was worth, while you train}},
  version = {{{version}}},
  note    = {{In-Run Data Shapley, method {one_line(method_of(about), 40)}}}
}}"""


def drop_command(run: str, name: str, sets: int, folds: int) -> tuple[str, str]:
    """Return the command that drops what is below zero for a validation set, with what it does."""
    chosen = f" -v {shlex.quote(name)}" if sets > 1 else ""
    clear = (
        "clearly below zero (by more than two standard errors)"
        if folds > 1
        else "below zero (without folds, whether clear of it or not)"
    )
    told = f"write what to keep and what to drop, whole documents where the run knows them, with a card; dropped is what is {clear}"
    return f"inrun curate {shlex.quote(run)} --out curated{chosen}", told


def next_commands(run: str, columns: list[str], sets: list[str]) -> list[tuple[str, str]]:
    """Return commands that go on from here, each with what it does."""
    path = shlex.quote(run)
    found = []
    if columns:
        found.append((f"inrun groups {path} --by {shlex.quote(columns[0])} --stages 20 --csv", "these tables, as CSV"))
    owner = next((c for c in ("owner", "source") if c in columns), None)
    if owner and sets:
        chosen = f" -v {shlex.quote(sets[0])}" if len(sets) > 1 else ""
        found.append((f"inrun shares {path} --by {owner} --pool 10000{chosen}", "split a pool of money by contribution"))
    found.append((f"inrun scores {path} --all --csv", "every score"))
    found.append((f"inrun audit {path}", "the books in full"))
    found.append((f"inrun verify {path}", "check every file against its checksum"))
    return found
