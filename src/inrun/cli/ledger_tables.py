"""Answers of the ledger for people (tables) and machines (JSON, CSV). Texts of samples are not to be trusted anywhere here."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import click
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inrun.analysis.curate import Curation
from inrun.analysis.queries import Agreement, Info
from inrun.analysis.shares import Shares, money
from inrun.cli.text import printable
from inrun.ledger import SIGN

NO_METADATA = "(no metadata)"
#: What spreadsheets take for the beginning of a formula, wide forms included.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
#: Groups shown on a terminal, per validation set.
MOST_GROUPS = 60


# Machines


def plain(value: Any) -> Any:
    """Return a value that JSON knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def to_json(data: Any) -> str:
    """Return JSON in ASCII without control characters, so that it is safe on a terminal, too."""
    return json.dumps(data, indent=2, default=plain).replace("\x7f", "\\u007f")


def echo_json_rows(head: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Print one JSON object whose ``rows`` are printed as they come, one per line."""
    start = to_json(head)[:-2]
    click.echo(f'{start},\n  "rows": [', nl=False)
    between = "\n    "
    for row in rows:
        line = json.dumps({k: plain(v) for k, v in row.items()}).replace("\x7f", "\\u007f")
        click.echo(between + line, nl=False)
        between = ",\n    "
    click.echo("\n  ]\n}")


def cell(value: Any) -> Any:
    """Return a CSV cell: numbers as they are; texts with control characters spelt out and formulas disarmed by an apostrophe."""
    value = plain(value)
    if not isinstance(value, str):
        return "" if value is None else value
    shown = "".join(_spelt(c) if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in value)
    return f"'{shown}" if value.lstrip(" ").startswith(FORMULA) else shown


def _spelt(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) != 0x7F else "\\u007f"


def echo_csv(names: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as CSV with a header."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([cell(n) for n in names])
    for row in rows:
        writer.writerow([cell(row[n]) for n in names])
        if buffer.tell() > 1 << 16:
            click.echo(buffer.getvalue(), nl=False)
            buffer.seek(0)
            buffer.truncate()
    click.echo(buffer.getvalue(), nl=False)


def rows_of(batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[dict[str, Any]]:
    """Give the rows of batches one by one."""
    for batch in batches:
        yield from batch.to_pylist()


# People


def _console() -> Console:
    return Console(width=max(Console().width, 120), highlight=False)


def _text(value: Any, width: int = 40) -> Text:
    return Text(printable(NO_METADATA if value is None else str(value), width))


def _number(value: float | None, form: str = "+.5g") -> str:
    return "" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def say(line: str) -> None:
    """Print a line of our own that may hold untrusted names."""
    click.echo(printable(line, 2000))


def _table(title: str, columns: Iterable[tuple[str, bool]]) -> Table:
    table = Table(title=Text(printable(title, 200)), title_justify="left", box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
    for name, right in columns:
        table.add_column(Text(printable(name, 40)), justify="right" if right else "left", no_wrap=right)
    return table


def print_scores(found: pa.Table, title: str) -> None:
    """Print the rows of ``extremes``, one table per validation set."""
    shown = [c for c in ("id", "domain", "owner") if c in found.column_names]
    text = next((c for c in ("preview", "text") if c in found.column_names), None)
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in found.to_pylist():
        by_set.setdefault(row["validation"], []).append(row)
    for name, rows in by_set.items():
        errors = any(r["standard_error"] is not None for r in rows)
        estimates = any(r["estimate_error"] is not None for r in rows)
        pending = any(r["pending"] for r in rows)
        columns = [("sample", True), ("score", True), *([("± error", True)] if errors else [])]
        columns += [*([("± estimate", True)] if estimates else []), ("uses", True), *([("pending", True)] if pending else [])]
        columns += [("steps", True)]
        table = _table(f"{name}: {title}", [*columns, *((c, False) for c in shown), *([(text, False)] if text else [])])
        for row in rows:
            cells: list[Any] = [str(row["sample_id"]), _number(row["score"])]
            cells += [_number(row["standard_error"], ".2g")] if errors else []
            cells += [_number(row["estimate_error"], ".2g")] if estimates else []
            cells += [str(row["times_used"]), *([str(row["pending"])] if pending else [])]
            cells += [f"{row['first_step']}-{row['last_step']}"]
            cells += [_text(row[c] or "", 24) for c in shown] + ([_text(row[text] or "", 60)] if text else [])
            table.add_row(*cells)
        _console().print(table)


def print_agreement(found: list[Agreement]) -> None:
    """Print rank correlations."""
    for a in found:
        value = "not defined" if a.spearman is None else f"{a.spearman:.3f}"
        say(f"rank agreement (Spearman) of {a.first!r} and {a.second!r} over {a.samples:,} samples: {value}")


def print_groups(found: pa.Table, by: str, view: str) -> None:
    """Print totals by group, one table per validation set; with stages one row per group and stage."""
    staged = "stage" in found.column_names
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in found.to_pylist():
        by_set.setdefault(row["validation"], []).append(row)
    for name, rows in by_set.items():
        errors = any(r["clear_share"] is not None for r in rows)
        columns = [(by, False), *([("steps", True)] if staged else []), ("total", True), ("per sample", True), ("per use", True)]
        columns += [("samples", True), ("uses", True), ("negative", True), *([("clear of error", True)] if errors else [])]
        table = _table(f"{name}, view {view}", columns)
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row)
        for group, lines in list(groups.items())[:MOST_GROUPS]:
            for row in lines:
                table.add_row(*_group_cells(group, row, staged, errors))
            if staged:
                table.add_section()
        _console().print(table)
        if len(groups) > MOST_GROUPS:
            click.echo(f"... and {len(groups) - MOST_GROUPS:,} more groups; --json and --csv show all")


def _group_cells(group: Any, row: dict[str, Any], staged: bool, errors: bool) -> list[Any]:
    cells: list[Any] = [_text(group)] + ([f"{row['first_step']}-{row['last_step']}"] if staged else [])
    cells += [_number(row["total"]), _number(row["mean_per_sample"]), _number(row["mean_per_use"])]
    cells += [f"{row['samples']:,}", f"{row['uses']:,}", _share(row["negative_share"])]
    return cells + ([_share(row["clear_share"])] if errors else [])


def print_info(i: Info) -> None:
    """Print a run at a glance."""
    say(f"run        {i.path}")
    say(f"scored by  method {i.about.get('method', '?')}, update {i.about.get('update', '?')}; {SIGN}")
    steps = "none yet" if i.first_step is None else f"{i.steps:,} ({i.first_step} to {i.last_step})"
    say(f"steps      {steps}; {sum(i.skipped.values()):,} not scored")
    for reason, count in list(i.skipped.items())[:10]:
        say(f"             {count:,}: {printable(reason, 200)}")
    say(f"rows       {i.rows:,} contributions, {i.nbytes:,} bytes in all")
    if i.credit == "whole":
        say(f"credit     whole: {i.settled:,} steps settled, {i.pending:,} pending; {i.credit_rows:,} credits")
    named = [printable(n, 60) + (f" ({k} folds)" if k > 1 else "") for n, k in i.validation.items()]
    more = f" and {len(named) - 12} more" if len(named) > 12 else ""
    say(f"validation {', '.join(named[:12]) or 'none yet'}{more}")
    say(f"samples    {i.samples_used:,} used, {i.samples_registered:,} registered, {i.used_without_metadata:,} without metadata")
    say(f"columns    {', '.join(printable(c, 40) for c in i.columns) or 'none'}")
    rates = "not recorded" if i.lr_low is None else f"{i.lr_low:g} to {i.lr_high:g}"
    say(f"lr         {rates}")


def print_shares(s: Shares, currency: str) -> None:
    """Print what every group gets, and by which rule."""
    unit = f" {printable(currency, 12)}" if currency else ""
    title = f"{money(s.pool_cents)}{unit} by {s.by}, validation set {s.validation}, view {s.view}"
    table = _table(title, [(s.by, False), ("samples", True), ("uses", True), ("total", True), ("share", True), ("amount", True)])
    for r in s.rows:
        who = Text("(no owner)") if r.group is None else _text(r.group, 60)
        table.add_row(
            who, f"{r.samples:,}", f"{r.uses:,}", _number(r.total), _share(r.cents / s.pool_cents), f"{money(r.cents)}{unit}"
        )
    _console().print(table)
    say(f"Rule: {s.rule}.")
    if s.unowned_samples:
        took = "share as one group" if s.include_unowned else "get nothing (--include-unowned lets them share)"
        say(f"{s.unowned_samples:,} used samples have no {s.by!r}; they {took}.")
    say(f"Coverage: {s.coverage()}.")


def print_curation(c: Curation) -> None:
    """Print what was written."""
    say(c.share())
    say(f"rule: {c.rule}")
    if c.unused:
        say(f"{c.unused:,} {c.unit} were never used and have no score (kept unless --drop-unused)")
    if c.without_metadata:
        say(f"{c.without_metadata:,} samples were used and have no metadata; they are in neither file")
    if c.groups and c.by is not None:
        table = _table("", [(c.by, False), (f"scored {c.unit}", True), ("dropped", True), ("share", True)])
        for group, (n, d) in list(c.groups.items())[:MOST_GROUPS]:
            table.add_row(_text(group), f"{n:,}", f"{d:,}", f"{d / n:.1%}")
        _console().print(table)
    say(f"written: {', '.join(c.files)} in {c.out}")
