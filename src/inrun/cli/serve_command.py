"""The command that serves the explorer."""

from __future__ import annotations

from pathlib import Path

import click

from inrun.cli.text import printable


@click.command(
    epilog="""\b
Examples:
  inrun serve runs/mine                          open the address it prints, token included
  inrun serve runs/first runs/second             also sets runs against each other
  inrun serve runs/mine --marks-file marks.jsonl; inrun curate runs/mine --marks marks.jsonl --out curated
  ssh -L 8765:127.0.0.1:8765 gpu inrun serve runs/mine --port 8765      a run on another machine
"""
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False), metavar="RUN...")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen: this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="The port (default: 8765 or one that is free; 0: any).")
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="A name by which browsers reach this machine (repeatable)."
)
@click.option(
    "--marks-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep marks in a file, outside of the runs.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def serve(runs: tuple[str, ...], host: str, port: int | None, names: tuple[str, ...], marks_file: Path | None, show: bool) -> None:
    """Explore all samples of RUNs in a browser: search, filter, sort, compare, mark; also while training writes.

    The page is served to this machine only, to whoever has the token in the printed address. Runs are only read.
    """
    from inrun.explorer.guard import LOOPBACK
    from inrun.explorer.server import serve as serve_runs

    def ready(address: str) -> None:
        click.echo(f"explorer: {address}\nCtrl-C ends it", err=False)
        if show:
            click.launch(address)

    shown = ", ".join(printable(run, 200) for run in runs)
    click.echo(f"reading {shown} ...", err=True)
    if host not in LOOPBACK:
        click.echo("whoever reaches this address and has the token sees the runs, unencrypted; ssh -L is safer", err=True)
    serve_runs(runs, host=host, port=port, names=names, marks_file=marks_file, ready=ready)
