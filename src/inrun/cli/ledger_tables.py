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

from inrun.analysis.curate import Curation
from inrun.analysis.queries import NO_VALUE, Agreement, Info
from inrun.analysis.shares import Shares, money
from inrun.cli.grid import Grid, Heading
from inrun.cli.text import printable
from inrun.ledger import SIGN, method_of
from inrun.report.text import counted

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


def _text(value: Any, width: int = 40) -> str:
    return printable(NO_VALUE if value is None else " ".join(str(value).split()), width)


def _number(value: float | None, form: str = "+.5g") -> str:
    return "" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def say(line: str) -> None:
    """Print a line of our own that may hold untrusted names."""
    click.echo(printable(line, 2000))


def _show(*grids: Grid) -> None:
    """Print tables, and which columns found no room."""
    missing = list(dict.fromkeys(name for grid in grids for name in grid.print()))
    if missing:
        say(f"no room here for {', '.join(missing)}; a wider terminal shows more, --json all")


def print_scores(found: pa.Table, title: str) -> None:
    """Print the rows of ``extremes``, one table per validation set."""
    shown = [c for c in ("id", "domain", "owner") if c in found.column_names]
    text = next((c for c in ("preview", "text") if c in found.column_names), None)
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in found.to_pylist():
        by_set.setdefault(row["validation"], []).append(row)
    grids = []
    for name, rows in by_set.items():
        errors = any(r["standard_error"] is not None for r in rows)
        estimates = any(r["estimate_error"] is not None for r in rows)
        pending = any(r["pending"] for r in rows)
        columns = [Heading("sample"), Heading("score"), *([Heading("± error", 1)] if errors else [])]
        columns += [
            *([Heading("± estimate", 9)] if estimates else []),
            Heading("uses", 5),
            *([Heading("pending", 4)] if pending else []),
        ]
        columns += [Heading("steps", 8), *(Heading(c, {"id": 6, "domain": 3, "owner": 7}[c], 8) for c in shown)]
        grid = Grid(f"{name}: {title}", [*columns, *([Heading(text, 2, 16)] if text else [])])
        for row in rows:
            cells = [str(row["sample_id"]), _number(row["score"])]
            cells += [_number(row["standard_error"], ".2g")] if errors else []
            cells += [_number(row["estimate_error"], ".2g")] if estimates else []
            cells += [str(row["times_used"]), *([str(row["pending"])] if pending else [])]
            cells += [f"{row['first_step']}-{row['last_step']}"]
            cells += [_text(row[c] or "", 24) for c in shown] + ([_text(row[text] or "", 60)] if text else [])
            grid.add(*cells)
        grids.append(grid)
    _show(*grids)


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
        columns = [Heading(by, 0, 12), *([Heading("steps")] if staged else []), Heading("total"), Heading("per sample", 1)]
        columns += [Heading("per use", 6), Heading("samples", 2), Heading("uses", 5), Heading("negative", 3)]
        grid = Grid(f"{name}, view {view}", [*columns, *([Heading("clear of error", 4)] if errors else [])])
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row)
        for group, lines in list(groups.items())[:MOST_GROUPS]:
            for row in lines:
                grid.add(*_group_cells(group, row, staged, errors))
            if staged:
                grid.end_section()
        _show(grid)
        if len(groups) > MOST_GROUPS:
            click.echo(f"... and {len(groups) - MOST_GROUPS:,} more groups; --json and --csv show all")


def _group_cells(group: Any, row: dict[str, Any], staged: bool, errors: bool) -> list[str]:
    cells = [_text(group)] + ([f"{row['first_step']}-{row['last_step']}"] if staged else [])
    cells += [_number(row["total"]), _number(row["mean_per_sample"]), _number(row["mean_per_use"])]
    cells += [f"{row['samples']:,}", f"{row['uses']:,}", _share(row["negative_share"])]
    return cells + ([_share(row["clear_share"])] if errors else [])


def print_info(i: Info) -> None:
    """Print a run at a glance."""
    say(f"run        {i.path}")
    say(f"scored by  method {method_of(i.about)}; {SIGN}")
    steps = "none yet" if i.first_step is None else f"{i.steps:,} ({i.first_step} to {i.last_step})"
    say(f"steps      {steps}; {sum(i.skipped.values()):,} not scored")
    for reason, count in list(i.skipped.items())[:10]:
        say(f"             {count:,}: {printable(reason, 200)}")
    say(f"rows       {i.rows:,} contributions, {i.nbytes:,} bytes in all")
    if i.credit == "whole":
        say(f"credit     whole: {counted(i.settled, 'step')} settled, {i.pending:,} pending; {i.credit_rows:,} credits")
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
    columns = [Heading("samples", 3), Heading("uses", 4), Heading("total", 2), Heading("share", 1), Heading("amount")]
    grid = Grid(title, [Heading(s.by, 0, 12), *columns])
    for r in s.rows:
        who = "(no owner)" if r.group is None else _text(r.group, 60)
        grid.add(who, f"{r.samples:,}", f"{r.uses:,}", _number(r.total), _share(r.cents / s.pool_cents), f"{money(r.cents)}{unit}")
    _show(grid)
    say(f"Rule: {s.rule}.")
    if s.unowned_samples:
        took = "share as one group" if s.include_unowned else "get nothing (--include-unowned lets them share)"
        say(f"{s.unowned_samples:,} used samples have no {s.by!r}; they {took}.")
    say(f"Coverage: {s.coverage()}.")


def print_curation(c: Curation, at_work: bool = False) -> None:
    """Print what was written, and what may still change about it."""
    say(c.share())
    say(f"rule: {c.rule}")
    if at_work:
        say("training is still writing this run: these are its scores so far; curate again when it is done")
    if c.pending:
        say(f"credit is still coming in for {counted(c.pending, 'step')}: their uses count with the part of their own step so far")
    if c.unused:
        kept = {0: "kept; --drop-unused drops them", c.unused: "dropped"}.get(c.unused_dropped, f"{c.unused_dropped:,} dropped")
        say(f"{counted(c.unused, c.unit[:-1])} {'was' if c.unused == 1 else 'were'} never used, without a score ({kept})")
    if c.withheld:
        were = "was" if c.withheld == 1 else "were"
        say(f"{counted(c.withheld, c.unit[:-1])} {were} not there to train on, as those of validation sets")
    if c.without_metadata:
        say(f"{c.without_metadata:,} samples were used and have no metadata; they are in neither file")
    if c.groups and c.by is not None:
        grid = Grid("", [Heading(c.by, 0, 12), Heading(f"scored {c.unit}"), Heading("dropped"), Heading("share")])
        for group, (n, d) in list(c.groups.items())[:MOST_GROUPS]:
            grid.add(_text(group), f"{n:,}", f"{d:,}", f"{d / n:.1%}")
        _show(grid)
    say(f"written: {', '.join(c.files)} in {c.out}")
