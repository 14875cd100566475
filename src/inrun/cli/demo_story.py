"""What the demo found, told from its ledger: everything here is computed, nothing is written beforehand."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from inrun.analysis import summarise_run
from inrun.analysis.queries import extremes, groups
from inrun.analysis.verdict import WHOLE_STORY
from inrun.cli.text import printable
from inrun.demo.planted import VIEW, Found, find_planted
from inrun.demo.texts import COPY, NOISE, SCRAMBLED
from inrun.ledger import SIGN, Ledger, LedgerReader
from inrun.training.loop import Result


def findings(run: str | Path, result: Result, first: dict[str, float]) -> dict[str, Any]:
    """Return what there is to tell, as plain data."""
    reader = Ledger.open(run)
    found = {"noise": NOISE, "scrambled": SCRAMBLED}
    return {
        "run": str(run),
        "steps": result.status.step,
        "seconds": round(result.seconds, 1),
        "losses": {name: [first.get(name), last] for name, last in result.status.validation.items()},
        "domains": groups(reader, "domain").to_pylist(),
        "helped": _extremes(reader, largest=True),
        "hurt": _extremes(reader, largest=False),
        "planted": _as_dict(find_planted(reader)),
        "by_kind": {name: _as_dict(find_planted(reader, (source,))) for name, source in found.items()},
        "copies": _as_dict(find_planted(reader, (COPY,))),
        "books": summarise_run(reader).as_dict(),
    }


def _as_dict(found: Found) -> dict[str, float]:
    return {**vars(found), "precision": found.precision, "recall": found.recall}


def _extremes(reader: LedgerReader, largest: bool, n: int = 3) -> list[dict[str, Any]]:
    keys = ("validation", "score", "standard_error", "domain", "document", "text")
    return [{k: row.get(k) for k in keys} for row in extremes(reader, n, largest=largest).to_pylist()]


def tell_story(told: dict[str, Any], report: Path | None) -> None:
    """Print the story."""
    console = Console()
    sets = list(told["losses"])
    steps = f"{told['steps']} step{'s' * (told['steps'] != 1)}"
    console.print(f"\n[bold]{steps} in {told['seconds']:.0f} s.[/bold] {SIGN[0].upper()}{SIGN[1:]}; unit: nats.\n")
    for name in sets:
        _tell_set(console, told, name)
    _tell_planted(console, told)
    _tell_books(console, told)
    run, place = told["run"], shlex.quote(told["run"])
    ends = [("the report", str(report))] if report is not None else []
    ends += [("the books", run), ("see what hurts", f"inrun scores {place} --bottom 20")]
    ends += [("drop it", f"inrun curate {place} --out {shlex.quote(f'{run}-curated')} --view {VIEW}")]
    for what, words in ends:  # not wrapped: to be copied
        console.print(f"{what:14}  {escape(words)}", soft_wrap=True, highlight=False)


def _tell_set(console: Console, told: dict[str, Any], name: str) -> None:
    first, last = told["losses"][name]
    rows = [r for r in told["domains"] if r["validation"] == name]
    total = sum(r["total"] for r in rows if r["total"] > 0)
    best = max(rows, key=lambda r: r["mean_per_sample"])
    table = Table(title=f"validation set '{escape(printable(name, 40))}': loss {first:.2f} to {last:.2f}", title_justify="left")
    table.add_column("domain")
    for column in ("samples", "total", "share", "per sample", "negative"):
        table.add_column(column, justify="right")
    for r in sorted(rows, key=lambda r: -r["mean_per_sample"]):
        share = f"{r['total'] / total:.0%}" if r["total"] > 0 else "-"
        numbers = (
            f"{r['samples']:,}",
            f"{r['total']:+.4f}",
            share,
            f"{r['mean_per_sample']:+.5f}",
            f"{r['negative_share']:.0%}",
        )
        table.add_row(escape(printable(str(r["group"]), 24)), *numbers)
    console.print(table)
    console.print(f"  carried most, sample for sample, by [bold]{escape(printable(str(best['group']), 24))}[/bold]")
    for label, key in (("helped most", "helped"), ("hurt most", "hurt")):
        for row in [r for r in told[key] if r["validation"] == name][:2]:
            text = " ".join(printable(row["text"] or "", 200).replace("·", " ").split())
            error, domain = row["standard_error"] or 0.0, printable(str(row["domain"]), 10)
            words = f"  {label:11}  {row['score']:+.5f} ± {error:.5f}  {domain:10} {text}"
            console.print(Text(words), no_wrap=True, overflow="ellipsis")
    console.print()


def _tell_books(console: Console, told: dict[str, Any]) -> None:
    whole = told["books"]["method"] == "whole"
    console.print("[bold]The books[/bold], over the audited steps:", highlight=False)
    for s in told["books"]["validation_sets"]:
        if s["residual"] is None or s["fall"] <= 0:
            continue
        accounts = ("data", "momentum", "decay", "inherited", "rounding", "residual")
        shares = ", ".join(f"{name} {s[name] / s['fall']:z.0%}" for name in accounts if s[name] is not None)
        words = f"{printable(s['validation'], 40)}: the loss fell by {s['fall']:.4f}: {shares}. {s['verdict']}"
        _indented(console, words, 2)
        for o in s["outsized"][:2]:
            _indented(console, f"step {o['step']} holds {o['share']:.0%} of Σ|c|: {'; '.join(o['why'])}", 4)
    told_step = (
        "Data is what samples did in their own step. Momentum is earlier samples' push that is still at work; it is not "
        "credited to samples, so scores add up to the data's part only."
    )
    _indented(console, f"{WHOLE_STORY[0].upper()}{WHOLE_STORY[1:]}." if whole else told_step, 2)
    console.print()


def _indented(console: Console, words: str, by: int) -> None:
    """Print a paragraph, whole words to the line, each line so far from the edge."""
    console.print(Padding(Text(words), (0, 0, 0, by), expand=False))


def _tell_planted(console: Console, told: dict[str, Any]) -> None:
    p, kinds = told["planted"], told["by_kind"]
    console.print(
        f"[bold]Planted rubbish[/bold]: {p['planted']} of {p['samples']:,} samples are random or scrambled characters. "
        f"{p['flagged']} samples score below zero by more than two standard errors, {p['hits']} of them planted: "
        f"precision {p['precision']:.0%}, recall {p['recall']:.0%}. Of the {p['planted']} lowest, {p['among_lowest']} are planted. "
        "(Seen so that every step counts the same: --view standardised.)",
        highlight=False,
    )
    for name, k in kinds.items():
        console.print(f"  {name:10} scores below a real sample in {k['separation']:.0%} of pairs", highlight=False)
    copies = told["copies"]
    console.print(f"  copies     score below a sample that is no copy in {copies['separation']:.0%} of pairs\n", highlight=False)
