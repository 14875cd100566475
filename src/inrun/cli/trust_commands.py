"""Commands that check, mend and join ledgers."""

from __future__ import annotations

import json
import sys

import click

from inrun.cli.options import JSON, RUN
from inrun.cli.text import printable


def _show(page: str) -> None:
    click.echo("\n".join(printable(line, 400) for line in page.split("\n")))


@click.command(epilog="\b\nExample:\n  inrun verify runs/mine\n")
@RUN
@JSON
def verify(run: str, as_json: bool) -> None:
    """Re-read all of RUN against checksums and hash chain; exits with 1 if anything is damaged."""
    from inrun.ledger.verify import verify as check

    found = check(run)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(str(found))
    if not found.good:
        sys.exit(1)


@click.command(epilog="\b\nExample:\n  inrun repair runs/mine\n")
@RUN
@JSON
def repair(run: str, as_json: bool) -> None:
    """Set damaged parts of RUN aside, so that the rest can be read, and say exactly which steps are lost."""
    from inrun.ledger.repair import repair as mend

    done = mend(run)
    if as_json:
        click.echo(json.dumps(done.as_dict(), indent=2))
    else:
        _show(str(done))


@click.command(epilog="\b\nExample:\n  inrun merge runs/here runs/there --out runs/joined\n")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(), help="A new folder.")
@JSON
def merge(runs: tuple[str, ...], out: str, as_json: bool) -> None:
    """Join RUNS, ledgers of one run that was continued elsewhere; steps in two of them are refused."""
    from inrun.ledger.merge import merge as join

    joined = join(list(runs), out)
    if as_json:
        click.echo(json.dumps({"runs": list(runs), "out": str(joined)}, indent=2))
    else:
        _show(f"written: {joined}")
