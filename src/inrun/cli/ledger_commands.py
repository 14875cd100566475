"""Commands that ask the ledger, and use its answers."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import click

from inrun.cli.options import JSON, RUN
from inrun.errors import ConfigurationError

VIEWS = ("plain", "rank", "per_lr", "standardised", "specific")
CSV = click.option("--csv", "as_csv", is_flag=True, help="Print CSV; control characters are spelt out, formulas disarmed.")
VIEW = click.option(
    "--view",
    default="plain",
    show_default=True,
    type=click.Choice(VIEWS),
    help="How a contribution is seen: as it is; as its rank within the step; per learning rate; per mean size of its step; less "
    "what its worth to the other validation sets predicts.",
)
SETS = click.option("--validation", "-v", multiple=True, metavar="NAME", help="Only this validation set (repeatable).")


def _one_output(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise ConfigurationError("--json and --csv are two different outputs; give one of them")


def _head(run: str, view: str, out: int) -> dict[str, Any]:
    from inrun.ledger import SIGN, UNIT, Ledger, method_of

    method = method_of(Ledger.open(run).about)
    return {"sign": SIGN, "unit": UNIT, "view": view, "method": method, "contributions_left_out": out}


def _said_view(run: str, view: str) -> str:
    """Say how uses are seen and, where it is not the step's own part that counts, what they earn."""
    from inrun.ledger import Ledger, credit_of

    return f"{view}, whole credit" if credit_of(Ledger.open(run).about) == "whole" else view


def _say_left_out(out: int) -> None:
    if out:
        click.echo(f"{out:,} contributions are left out: their steps have no learning rate, or 0")


@click.command(
    epilog="""\b
Examples:
  inrun scores runs/mine                           the ten best and the ten worst samples
  inrun scores runs/mine --bottom 50 --view rank
  inrun scores runs/mine --all --csv > scores.csv
  inrun scores runs/mine --agreement math code     do two validation sets rank alike?
  inrun scores runs/mine -v math --view specific   what helped math in particular, and not everything?
"""
)
@RUN
@SETS
@VIEW
@click.option("--top", type=click.IntRange(1), metavar="N", help="The N highest scores.")
@click.option("--bottom", type=click.IntRange(1), metavar="N", help="The N lowest scores.")
@click.option("--all", "every", is_flag=True, help="All samples, in order of their ids (the default with --json and --csv).")
@click.option("--agreement", nargs=2, metavar="A B", help="Only the rank agreement (Spearman) of two validation sets.")
@JSON
@CSV
def scores(
    run: str,
    validation: tuple[str, ...],
    view: str,
    top: int | None,
    bottom: int | None,
    every: bool,
    agreement: tuple[str, str] | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Print what samples were worth: the sum over their uses. Positive = the sample lowered the validation loss."""
    from inrun.analysis import queries
    from inrun.cli import ledger_tables as show
    from inrun.ledger.schema import SCORES

    _one_output(as_json, as_csv)
    if sum([top is not None, bottom is not None, every, bool(agreement)]) > 1:
        raise ConfigurationError("--top, --bottom, --all and --agreement are different questions; give one of them")
    names = list(validation) or None
    if agreement:
        alike = queries.agreement(run, *agreement, view=view)
        if as_json:
            click.echo(show.to_json(vars(alike)))
        elif as_csv:
            show.echo_csv(list(vars(alike)), [vars(alike)])
        else:
            show.print_agreement([alike])
        return
    out = queries.left_out(run, view, names)
    if every or ((as_json or as_csv) and top is None and bottom is None):
        _check_rows(run, names)
        rows = show.rows_of(queries.score_batches(run, names, view))
        if as_json:
            show.echo_json_rows(_head(run, view, out), rows)
        else:
            show.echo_csv(SCORES.names, rows)
        return
    wanted = [(top, True)] if top else [(bottom, False)] if bottom else [(10, True), (10, False)]
    found = [(queries.extremes(run, n or 10, names, largest, view), largest) for n, largest in wanted]
    if as_json:
        show.echo_json_rows(_head(run, view, out), show.rows_of(t for t, _ in found))
    elif as_csv:
        show.echo_csv(found[0][0].column_names, show.rows_of(t for t, _ in found))
    else:
        for table, largest in found:
            show.print_scores(table, f"{'highest' if largest else 'lowest'} scores, view {_said_view(run, view)}")
        if len(wanted) > 1:
            sets = sorted(set(found[0][0]["validation"].to_pylist()))
            show.print_agreement([queries.agreement(run, a, b, view) for a, b in list(combinations(sets[:4], 2))])
        _say_left_out(out)


def _check_rows(run: str, names: list[str] | None) -> None:
    """Fail before the first line is printed."""
    from inrun.ledger import Ledger

    with Ledger.open(run).tables() as tables:
        tables.check_rows()
        tables.choose(names)


@click.command(
    epilog="""\b
Examples:
  inrun groups runs/mine --by domain
  inrun groups runs/mine --by source --stages 20 --csv > stages.csv
  inrun groups runs/mine --by domain --stages 10 --cumulative --view standardised
"""
)
@RUN
@click.option("--by", default="domain", show_default=True, metavar="COLUMN", help="A column of the registered samples.")
@SETS
@VIEW
@click.option("--stages", type=click.IntRange(1), metavar="K", help="The same over K equal ranges of steps.")
@click.option("--cumulative", is_flag=True, help="A stage counts everything up to its end.")
@JSON
@CSV
def groups(
    run: str,
    by: str,
    validation: tuple[str, ...],
    view: str,
    stages: int | None,
    cumulative: bool,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Add up the scores of RUN by a metadata column: totals, means, and the share of negative samples.

    "clear of error" is the share of samples that are negative by more than two standard errors (validation sets in folds only).
    """
    from inrun.analysis import queries
    from inrun.cli import ledger_tables as show

    _one_output(as_json, as_csv)
    found = queries.groups(run, by, list(validation) or None, stages, cumulative, view)
    out = queries.left_out(run, view, list(validation) or None)
    if as_json:
        show.echo_json_rows({"by": by, **_head(run, view, out)}, show.rows_of([found]))
    elif as_csv:
        show.echo_csv(found.column_names, show.rows_of([found]))
    else:
        show.print_groups(found, by, _said_view(run, view))
        _say_left_out(out)
        unknown = queries.info(run).used_without_metadata
        if unknown:
            click.echo(f"{unknown:,} used samples have no metadata; they are the group {queries.NO_VALUE}")


@click.command(epilog="\b\nExamples:\n  inrun info runs/mine\n  inrun info runs/mine --json\n")
@RUN
@JSON
def info(run: str, as_json: bool) -> None:
    """Print what RUN holds: steps, rows, samples, validation sets, learning rates."""
    from inrun.analysis import queries
    from inrun.cli import ledger_tables as show

    found = queries.info(run)
    if as_json:
        click.echo(show.to_json(found.as_dict()))
    else:
        show.print_info(found)


@click.command(epilog="\b\nExamples:\n  inrun audit runs/mine\n  inrun audit runs/mine --json\n")
@RUN
@JSON
def audit(run: str, as_json: bool) -> None:
    """Print the books of RUN: what samples, momentum and decay did to the validation loss, and what that is worth.

    How far the method is off, how much of it was audited, which steps and samples hold an outsized part and why, and what to do.
    """
    from inrun.analysis import summarise_run
    from inrun.cli.ledger_tables import to_json
    from inrun.cli.text import printable

    summary = summarise_run(run)
    if as_json:
        click.echo(to_json(summary.as_dict()))
    else:
        click.echo("\n".join(printable(line, 400) for line in str(summary).split("\n")))


@click.command(
    epilog="""\b
Rules (one of them):
  (none)                          dropped is what is negative by more than 2 standard errors; without folds, what is negative;
                                  never what is within the error of its own estimate (whole credit by sketches)
  --keep "score > 0 and times_used >= 2"      columns: score, standard_error, estimate_error, times_used,
                                  score.NAME
  --top-fraction 0.8              the best 80 % of the scored samples
  --quota domain=0.9              the best 90 % of every domain; --quota domain:web=0.5 of one
  --marks marks.jsonl             what was marked in `inrun serve`; alone, or above one of the other rules
\b
Examples:
  inrun curate runs/mine --out curated                    whole documents; prints the command that trains on the kept ones
  inrun train runs/mine/config.yaml 'data.paths=[curated]' run=runs/curated
  inrun train runs/mine/config.yaml data.pieces=curated/chunks.parquet run=runs/pieces      leaves out parts of documents
  inrun curate runs/mine --out curated -v math -v code --combine all --view rank
  python -c "import datasets; print(datasets.load_dataset('curated'))"
"""
)
@RUN
@click.option("--out", required=True, type=click.Path(), help="A new or empty folder.")
@click.option("--keep", metavar="RULE", help="Keep what fulfils a rule.")
@click.option("--top-fraction", type=click.FloatRange(0, 1), metavar="F", help="Keep the best share of the scored samples.")
@click.option("--quota", multiple=True, metavar="COLUMN=F", help="Keep the best share of every value of a column (repeatable).")
@click.option(
    "--marks", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Drop what is marked as drop (inrun serve)."
)
@SETS
@click.option(
    "--combine",
    default="mean",
    show_default=True,
    type=click.Choice(["mean", "any", "all"]),
    help="Several validation sets: judge their mean, drop what any of them drops, or only what all of them drop.",
)
@VIEW
@click.option("--z", default=2.0, show_default=True, type=click.FloatRange(0), help="Standard errors of the default rule.")
@click.option("--drop-unused", is_flag=True, help="Drop samples that were never used (they are kept otherwise).")
@click.option("--by", metavar="COLUMN", help="Tell shares by this column (default: domain, if there is one).")
@click.option("--format", "fmt", default="jsonl", show_default=True, type=click.Choice(["jsonl", "parquet"]))
@click.option("--force", is_flag=True, help="Replace an earlier curation in the folder.")
@click.option(
    "--unit",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "documents", "samples"]),
    help="Judge and write whole documents (runs of `inrun train`), or samples as they were registered.",
)
@JSON
def curate(run: str, out: str, validation: tuple[str, ...], unit: str, as_json: bool, **options: Any) -> None:
    """Write what to keep of RUN and what to drop, with scores and a card that says how it was chosen.

    Of a run of `inrun train` these are whole documents with all their columns, judged by the sum over their pieces: the folder is
    data for `inrun train`, which reads the kept ones alone. Of other runs they are the samples as they were registered.
    """
    from pathlib import Path

    from inrun.analysis.curate import curate as split
    from inrun.cli import ledger_tables as show
    from inrun.report.about import writer_at_work

    documents = _documents(run, unit, options["fmt"])
    done = split(run, out, validation=list(validation) or None, documents=documents, **options)
    command = None if documents is None else documents.command(out)
    writing = writer_at_work(Path(run))
    if as_json:
        click.echo(show.to_json({**done.as_dict(), "at_work": writing, "command": command}))
        return
    show.print_curation(done, writing is True)
    if command is not None:
        click.echo(f"train on the kept ones:\n  {command}")


def _documents(run: str, unit: str, fmt: str) -> Any:
    """Return the documents of a run of `inrun train`, if they are wanted."""
    from pathlib import Path

    if unit == "samples" or (unit == "auto" and fmt != "jsonl"):
        return None
    from inrun.training.curated import RunDocuments, trained_run

    trained = trained_run(Path(run))
    if trained is not None:
        return RunDocuments(trained)
    if unit == "documents":
        raise ConfigurationError(f"{run} is not a run of `inrun train`, so its documents are not known; leave out --unit documents")
    return None


@click.command(
    epilog="""\b
Examples:
  inrun shares runs/mine --by owner --pool 10000 --currency EUR
  inrun shares runs/mine --by source --pool 99.95 --validation math --csv
"""
)
@RUN
@click.option("--by", default="owner", show_default=True, metavar="COLUMN", help="A column of the registered samples.")
@click.option("--pool", required=True, metavar="AMOUNT", help="What is split, with at most two decimals.")
@click.option("--currency", default="", metavar="NAME", help="Shown with the amounts.")
@click.option("--validation", "-v", metavar="NAME", help="The validation set that decides, where there are several.")
@VIEW
@click.option("--include-unowned", is_flag=True, help="Samples without an owner share as one group.")
@JSON
@CSV
def shares(
    run: str,
    by: str,
    pool: str,
    currency: str,
    validation: str | None,
    view: str,
    include_unowned: bool,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Split a pool of money by contribution: shares sum to the pool to the cent, negative totals get nothing."""
    from inrun.analysis import shares as money
    from inrun.cli import ledger_tables as show

    _one_output(as_json, as_csv)
    found = money.shares(run, money.parse_pool(pool), by, validation, view, include_unowned)
    if as_json:
        click.echo(show.to_json({"currency": currency, **found.as_dict()}))
    elif as_csv:
        rows = [{**r, "currency": currency} for r in found.as_dict()["rows"]]
        show.echo_csv(["group", "samples", "uses", "total", "cents", "amount", "currency"], rows)
        click.echo(f"rule: {found.rule}\ncoverage: {found.coverage()}", err=True)
    else:
        show.print_shares(found, currency)
