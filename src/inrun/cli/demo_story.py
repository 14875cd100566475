"""What the demo found, told from its ledger: everything here is computed, nothing is written beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    console.print(f"\n[bold]{told['steps']} steps in {told['seconds']:.0f} s.[/bold] {SIGN[0].upper()}{SIGN[1:]}; unit: nats.\n")
    for name in sets:
        _tell_set(console, told, name)
    _tell_planted(console, told)
    _tell_books(console, told)
    if report is not None:
        console.print(f"report   {escape(str(report))}", soft_wrap=True, highlight=False)
    run = escape(told["run"])
    console.print(f"ledger   {run}", soft_wrap=True, highlight=False)
    command = f"inrun curate {run} --out {run}-curated --view {VIEW}"
    console.print(f"next     {command}     drops what hurts", soft_wrap=True, highlight=False)
    console.print(f"         inrun scores {run} --bottom 20", soft_wrap=True, highlight=False)


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
            f"{1e6 * r['mean_per_sample']:+.1f}e-6",
            f"{r['negative_share']:.0%}",
        )
        table.add_row(escape(printable(str(r["group"]), 24)), *numbers)
    console.print(table)
    console.print(f"  carried most, sample for sample, by [bold]{escape(printable(str(best['group']), 24))}[/bold]")
    for label, key in (("helped most", "helped"), ("hurt most", "hurt")):
        for row in [r for r in told[key] if r["validation"] == name][:2]:
            text = " ".join(printable(row["text"] or "", 200).replace("·", " ").split())
            error, domain = row["standard_error"] or 0.0, printable(str(row["domain"]), 10)
            words = f"  {label:11}  {row['score']:+.5f} ± {error:.5f}  {domain:10} {text[:64]}"
            console.print(escape(words), highlight=False, soft_wrap=True)
    console.print()


def _tell_books(console: Console, told: dict[str, Any]) -> None:
    whole = told["books"]["credit"] == "whole"
    console.print("[bold]The books[/bold], over the audited steps:", highlight=False)
    for s in told["books"]["validation_sets"]:
        if s["residual"] is None or s["fall"] <= 0:
            continue
        accounts = ("data", "momentum", "decay", "inherited", "residual")
        shares = ", ".join(f"{name} {s[name] / s['fall']:.0%}" for name in accounts if s[name] is not None)
        words = f"  {printable(s['validation'], 40)}: the loss fell by {s['fall']:.4f}: {shares}. {s['verdict']}"
        console.print(escape(words), highlight=False, soft_wrap=True)
        for o in s["outsized"][:2]:
            console.print(
                f"    step {o['step']} holds {o['share']:.0%} of Σ|c|: {'; '.join(o['why'])}", highlight=False, soft_wrap=True
            )
    told_step = (
        "Data is what samples did in their own step. Momentum is earlier samples' push that is still at work; it is not\n"
        "  credited to samples, so scores add up to the data's part only."
    )
    console.print(f"  {WHOLE_STORY[0].upper() + WHOLE_STORY[1:] + '.' if whole else told_step}\n", highlight=False)


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
