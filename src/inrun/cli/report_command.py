"""The command that writes the report."""

from __future__ import annotations

import click

from inrun.cli.options import JSON, RUN
from inrun.cli.text import printable


@click.command(
    epilog="""\b
Examples:
  inrun report runs/mine                        writes runs/mine/report.html
  inrun report runs/mine --out page.html --by source --top 100
  inrun report runs/mine --no-text              for people who may not see the documents
"""
)
@RUN
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="The page to write (default: report.html in RUN).")
@click.option("--title", metavar="TEXT", help="Heading of the page (default: the name of the folder).")
@click.option("--by", metavar="COLUMN", help="Group samples by this column first (default: domain, source, owner ...).")
@click.option(
    "--top", default=50, show_default=True, type=click.IntRange(1, 1000), metavar="N", help="Samples at either end of every set."
)
@click.option("--text/--no-text", default=True, help="Whether the texts of samples go into the page (default: yes).")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@JSON
def report(run: str, out: str | None, title: str | None, by: str | None, top: int, text: bool, show: bool, as_json: bool) -> None:
    """Write one self-contained HTML page about RUN: what helped, what hurt, and how sure that is.

    The page needs no network, and can be built while training writes.
    """
    import json

    from inrun.report import build_report

    path = build_report(run, out, title=title, by=by, top=top, text=text)
    size = path.stat().st_size
    if as_json:
        click.echo(json.dumps({"report": str(path), "bytes": size}, indent=2))
    else:
        click.echo(f"written: {printable(str(path), 4096)} ({size / 1e6:.1f} MB)")
    if show:
        click.launch(path.resolve().as_uri())
