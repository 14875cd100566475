"""Is the forward a function of its inputs? Asked when a look at the rows has failed, since then nothing can be told from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inrun.errors import RowOwnershipError
from inrun.old.engine.checks.recorder import Recorder, moved_rows
from inrun.old.engine.quiet import Arguments


def explained(problem: RowOwnershipError, arguments: Arguments, run: Callable[[Arguments, Recorder], Any]) -> RowOwnershipError:
    """Return what to raise instead of ``problem``: the same, or that two runs of the same batch differ.

    Args:
        problem: What the look has found.
        arguments: The batch.
        run: Runs the model without gradient or trace, from the random state as it stands.
    """
    runs = (Recorder(), Recorder())
    try:
        for recorder in runs:
            run(arguments, recorder)
    except Exception:  # noqa: BLE001 - a forward that fails has shown its error, or what is wrong with its rows, before
        return problem
    first, second = (recorder.entries for recorder in runs)
    same = [(a.site, a.shape) for a in first] == [(b.site, b.shape) for b in second]
    where = next((a.site for a, b in zip(first, second, strict=False) if same and bool(moved_rows(a.rows, b.rows).any())), None)
    if same and where is None:
        return problem
    how = "call other modules" if where is None else f"differ at {where.title}"
    return RowOwnershipError(
        "the model's forward is not a function of its inputs: two runs on the same batch, with the same weights, buffers and "
        f"random state, {how}, so that rows cannot be assigned to samples, and extra forwards may change training. Usual causes: "
        "state that it keeps outside of buffers, attributes and lists (in an object of another package, an iterator, a file), or "
        f"random numbers of its own making. Register what it keeps as buffers. (Seen as: {problem})"
    )
