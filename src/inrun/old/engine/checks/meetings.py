"""Parameters that are read: was what shapes said about them right?

A shape says in which dimension a parameter meets the samples, and that other tensors beside it have none. Both are seen here: what
was taken for the same for all may not move with a sample; what a parameter met must move in the exchanged sample's entries, or else
a disturbed copy must be seen to move that sample's and nothing else.
"""

from __future__ import annotations

from inrun.errors import CoverageError, RowOwnershipError
from inrun.old.engine.checks.look import Look, UnfollowedError, free_message, unreadable
from inrun.old.engine.checks.movement import only_block
from inrun.old.engine.checks.recorder import Recorder, moved_rows
from inrun.old.engine.sites import Site
from inrun.old.layers.reads import sample_dim


def note_exchange(look: Look, exchanged: Recorder, sample: int) -> None:
    """See what the exchange of a sample moved beside parameters; raise if it moved what was taken for the same for all."""
    before, n = look.recorder, look.n
    for was, now in zip(before.constants, exchanged.constants, strict=False):
        if bool(moved_rows(was.print, now.print).any()):
            raise UnfollowedError(was.problem.sites, str(was.problem), unreadable(was.problem, n))
    # Rows that are gathered by what a sample is (experts) change the calls themselves.
    reads = [[(e.site, e.shape) for e in r.entries if e.site is not None and e.site.rule.reads] for r in (before, exchanged)]
    if reads[0] != reads[1]:
        sites = list({site for site, _ in (*reads[0], *reads[1])})
        raise UnfollowedError(sites, "its calls change with the samples", _changing(sites))
    if len(before.meetings) != len(exchanged.meetings):
        sites = [site for r in (before, exchanged) for meeting in r.meetings for site in meeting.sites]
        raise UnfollowedError(sites, "its calls change with the samples", _changing(sites))
    for i, (met, after) in enumerate(zip(before.meetings, exchanged.meetings, strict=True)):
        if met.rows is None or after.rows is None or not bool((moved := moved_rows(met.rows, after.rows)).any()):
            continue
        if only_block(moved, n, sample):
            look.shown.add(i)
            continue
        look.doubtful.add(i)
        if met.others is not None and after.others is not None and only_block(moved_rows(met.others, after.others), n, sample):
            raise _reaches_others(met.sites, n)


def check_written(look: Look) -> None:
    """Raise if the forward writes to what stood beside a parameter: a backward makes what is read from it once more."""
    for constant in look.recorder.constants:
        if constant.written:
            problem = constant.problem
            why = f"a tensor of shape {tuple(constant.shape)} is used beside {problem.names} and written to in place afterwards"
            raise UnfollowedError(problem.sites, why, CoverageError(f"{why}, which no rule describes; write to a copy of it"))


def check_followed(look: Look) -> None:
    """Raise if a parameter reaches the outputs in a way that no operation told of (sparse tensors, kernels of others)."""
    if look.recorder.unfollowed:
        names = ", ".join(sorted(f"{site.name}.{name}".lstrip(".") for site, name in look.recorder.unfollowed))
        why = f"{names} is used in an operation that cannot be followed"
        raise UnfollowedError([site for site, _ in look.recorder.unfollowed], why, CoverageError(f"{why}; freeze it"))


def check_constants(look: Look) -> None:
    """Raise if what no exchange could move may still be the samples'."""
    for constant in look.recorder.constants:
        if any(site.rule.reads for site in constant.problem.sites) and sample_dim(constant.shape, look.n) is not None:
            raise UnfollowedError(constant.problem.sites, str(constant.problem), unreadable(constant.problem, look.n))


def check_copies(look: Look, samples: list[int], thoroughly: bool) -> None:
    """See that one sample's copies of what is read move that sample alone, and (``thoroughly``) that every copy moves something."""
    meetings, n = look.recorder.meetings, look.n
    if not meetings:
        return
    sites = {site for meeting in meetings for site in meeting.sites}
    for row in samples:
        recorder, outputs = look.repeat(disturb_spread=row)
        if not look.moves(recorder, outputs, row)[1]:
            raise _reaches_others(sites, n)
        look.note_copies(recorder, row)
    if not thoroughly:
        return
    # What was met has not shown whose rows they are: the model must.
    for i, meeting in enumerate(meetings):
        if i in look.shown - look.doubtful:
            continue
        if not any(look.moves(*look.repeat(disturb_spread=row, only=i), row)[0] for row in samples):
            names = ", ".join(sorted({site.title for site in meeting.sites}))
            refusal = RowOwnershipError(
                f"{names} reads a parameter, and nothing behind it shows which of {n} samples gets which of its copies; let the "
                "model return what it has computed with one row per sample (its logits) beside the loss"
            )
            raise UnfollowedError(list(meeting.sites), "nothing shows which samples a parameter that is read reaches", refusal)


def _reaches_others(sites: set[Site], n: int) -> UnfollowedError:
    refusal = RowOwnershipError(free_message(", ".join(sorted({site.name for site in sites})), n))
    return UnfollowedError(list(sites), "a parameter that is read reaches other samples than its own copy", refusal)


def _changing(sites: list[Site]) -> RowOwnershipError:
    names = ", ".join(sorted({site.title for site in sites}))
    return RowOwnershipError(f"what is read of {names} changes when one sample is exchanged; rows cannot be assigned to samples")
