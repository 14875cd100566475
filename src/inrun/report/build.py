"""Build the report of a run: gather, render, put in place."""

from __future__ import annotations

from pathlib import Path

from inrun.errors import ConfigurationError
from inrun.files import Files, write_durably
from inrun.ledger import LedgerReader
from inrun.report.gather import gather
from inrun.report.page import ReportError, render

NAME = "report.html"


def build_report(
    run: LedgerReader | str | Path,
    out: str | Path | None = None,
    *,
    title: str | None = None,
    by: str | None = None,
    top: int = 50,
    text: bool = True,
) -> Path:
    """Write one self-contained HTML page about a run and return its path.

    The page is complete or absent: it is written aside and renamed. The same ledger gives the same bytes. Its size is bounded
    (under 6 MB, most of it plotly.js), whatever the size of the run.

    Args:
        run: A reader, or the path of a run; one that is being written, or holds nothing yet, is fine.
        out: The file to write (default: ``report.html`` in the run).
        title: Heading of the page (default: the name of the run's folder).
        by: A metadata column to group samples by first (default: domain, source, owner, then others with few values).
        top: Samples to show at either end of every validation set, up to 1000.
        text: Whether the texts of samples go into the page.
    """
    found = gather(run, by=by, top=top, text=text)
    path = Path(out) if out is not None else Path(found.path) / NAME
    if path.is_dir():
        raise ConfigurationError(f"{str(path)!r} is a folder; give the name of a file, such as {str(path / NAME)!r}")
    page = render(found, title).encode("utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(Files(), path, page, shared=True)
    except OSError as error:
        raise ReportError(f"{str(path)!r} cannot be written: {error}") from error
    return path
