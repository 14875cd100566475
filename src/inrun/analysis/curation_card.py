"""The card of a curation: what was chosen, how, and by which run. Markdown with the front matter of a dataset."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

from inrun.analysis.queries import NO_VALUE, Info
from inrun.ledger import method_of

if TYPE_CHECKING:
    from inrun.analysis.curate import Curation


def card_of(c: Curation, found: Info, fmt: str) -> str:
    """Return the card of what was written in a format."""
    about = found.about
    splits = [(name, n) for name, n in (("kept", c.kept), ("dropped", c.dropped)) if n]
    front = "".join(f"  - split: {name}\n    path: {name}.{fmt}\n" for name, _ in splits)
    front = f"---\nconfigs:\n- config_name: default\n  data_files:\n{front}---\n\n"
    lines = [
        "# A curated training set\n",
        f"{c.share()}.\n",
        f"- Rule: {_shown_words(c.rule)}",
        f"- Scored by inrun (In-Run Data Shapley) with method {_shown(method_of(about))}, "
        f"model {_shown(about.get('model', 'not named'))}; "
        f"run {_shown(about.get('run_id', '?'))}",
        *_credit_line(found),
        f"- Sign and unit: {_shown(about.get('sign', '?'))}; {_shown(about.get('unit', '?'))}",
        f"- Steps covered: {found.first_step} to {found.last_step} ({_steps(found.steps)}, {found.rows:,} contributions, "
        f"{sum(found.skipped.values()):,} steps not scored)",
        f"- {c.unused:,} {c.unit} were never used in training and have no score: {_unused(c)}",
    ]
    if c.withheld:
        lines.append(f"- {c.withheld:,} {c.unit} were not there to train on, as those of validation sets")
    if c.without_metadata:
        lines.append(f"- {c.without_metadata:,} samples were used and have no metadata: they are in neither file")
    lines.append(
        "\nA score is what the sample did to the validation loss in this one run; a negative score without a standard error"
    )
    if c.unit == "documents":
        lines.append("may be noise. A document's score is the sum over its pieces. Kept and dropped files hold all documents of")
        lines.append("the original files, each once, whole and in order; those of validation sets are kept unless marked.")
    else:
        lines.append("may be noise. Kept and dropped files hold all registered samples, each once, in the order of registration.")
    if c.groups:
        lines += [
            f"\n## Dropped by {_shown(c.by)}\n",
            f"| value | {c.unit} with a score | dropped | share |",
            "|---|---:|---:|---:|",
        ]
        lines += [f"| {_shown(g)} | {n:,} | {d:,} | {d / n:.1%} |" for g, (n, d) in list(c.groups.items())[:200]]
        if len(c.groups) > 200:
            lines.append(f"\nand {len(c.groups) - 200:,} more values")
    return front + "\n".join(lines) + "\n"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _unused(c: Curation) -> str:
    if c.unused_dropped in (0, c.unused):
        return "they are dropped" if c.unused_dropped else "they are kept"
    return f"{c.unused_dropped:,} of them are dropped"


def _credit_line(found: Info) -> list[str]:
    """Say that scores are whole credit; other methods need no line."""
    if found.credit != "whole":
        return []
    still = f"; the uses of {found.pending:,} steps are pending and count with the part of their own step" if found.pending else ""
    return [f"- Scores are whole credit: what each use earned over all later steps, through the optimizer's momentum{still}"]


def _shown(value: Any) -> str:
    """Return untrusted text for a table of the card: one line, nothing that Markdown or HTML would act on."""
    if value is None:
        return NO_VALUE
    text = "".join("·" if unicodedata.category(c)[0] in "CZ" and c != " " else c for c in str(value)[:80])
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _shown_words(text: str) -> str:
    return "".join("·" if unicodedata.category(c)[0] == "C" else c for c in text).replace("<", "&lt;").replace("|", "\\|")
