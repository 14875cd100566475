"""The look at the rows: one sample exchanged after the other, and what is learned from what moved."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.old.engine.checks import meetings
from inrun.old.engine.checks.exchange import exchange_sample, has_blocks, has_lengths, shift_sample
from inrun.old.engine.checks.look import (
    Key,
    Look,
    Passes,
    RunRecorded,
    TakenApartError,
    UnfollowedError,
    Way,
    key_of,
    unreadable,
    ways_of,
)
from inrun.old.engine.checks.movement import chosen, only_block
from inrun.old.engine.checks.recorder import Entry, Recorder, fingerprint, moved_rows
from inrun.old.engine.checks.without_samples import constant_layout, find_bare
from inrun.old.engine.quiet import Arguments
from inrun.old.engine.sites import Site
from inrun.old.layers import Layout, unused_parameters
from inrun.old.layers.layout import Pattern, pattern_of
from inrun.old.layers.reads import Reading, UnreadableError
from inrun.old.layers.trees import tensors_of

log = logging.getLogger("inrun")


@dataclass(frozen=True)
class Found:
    """What a look has found."""

    layouts: dict[Key, Layout]
    #: Operations on what is read for which shapes were seen to decide rightly.
    readings: set[Reading]
    #: The calls of every module with a rule, in order.
    ways: set[Way]
    #: Whether the exchange of a sample could be seen.
    certain: bool


@dataclass(frozen=True)
class Question:
    """What a look is to find out."""

    n: int
    arguments: Arguments
    #: The samples to exchange.
    samples: list[int]
    #: What earlier looks have found, and whether there were any.
    known: Mapping[Key, Layout]
    verified: bool
    #: Calls that no sample moves stay what is known of them.
    again: bool = False


def pattern_of_batch(arguments: Arguments, n: int) -> Pattern:
    """Return the patterns of all tensors of a batch."""
    return tuple(pattern_of(x.shape, n) for x in tensors_of(arguments))


class Examiner:
    """Takes looks; modules that read parameters in ways not known go through the fallback."""

    def __init__(self, sites: list[Site], run: RunRecorded) -> None:
        """``run`` runs the model under a recorder."""
        self.sites, self.passes = sites, Passes(sites, run)
        self._examined: set[Site] = set()
        self._told_coupling = False
        #: Batches in which tensors of several rows per sample had to be exchanged, too.
        self._in_blocks: set[Pattern] = set()

    # Parameters that a module registers and does not use

    def _may_be_unused(self, site: Site) -> bool:
        return site.rule.replays and any(len(s.uses) > 1 for s in site.scored.values())

    def examine_unused(self, arguments: Arguments) -> None:
        """See which parameters modules only register, if that is not known and no look will be taken."""
        if any(self._may_be_unused(site) and site not in self._examined for site in self.sites):
            self._note_unused(self.passes.record(arguments, Recorder())[0])

    def _note_unused(self, recorder: Recorder) -> None:
        """Leave parameters that a module only registers, for a child to use, to that child (BERT's head bias)."""
        for site, call in recorder.replayable.items():
            if self._may_be_unused(site):
                shared = [name for name, s in site.scored.items() if len(s.uses) > 1]
                site.leave_to_others(set(unused_parameters(call, shared)))
                self._examined.add(site)

    # Looks

    def glance(self, arguments: Arguments, n: int) -> tuple[set[Key], set[Way], set[Reading]] | None:
        """Run the forward once and return its calls and what it does with what it reads; None where that is not followed."""
        try:
            recorder, _ = self.passes.record(arguments, self.passes.recorder(n))
        except UnreadableError:
            return None
        calls = {key_of(e.site, e.shape, n) for e in recorder.entries if e.site is not None and e.argument is None}
        return calls, _ways(recorder.entries, n), recorder.readings

    def examine(self, question: Question) -> Found:
        """Classify every call of one forward."""
        n, arguments = question.n, question.arguments
        pattern = pattern_of_batch(arguments, n)
        if pattern in self._in_blocks:
            return self._follow(question, blocks=True)
        apart = self.passes.apart
        try:
            return self._follow(question, blocks=False)
        except RowOwnershipError:
            if question.again or not has_blocks(arguments, n):
                raise
            # Several rows per sample in some tensors (documents of a query)? Then all of a sample's must go together.
            self.passes.follow(apart)
            found = None
            with contextlib.suppress(RowOwnershipError):
                found = self._follow(question, blocks=True)
            if found is None:
                raise
            self._in_blocks.add(pattern)
            return found

    def _follow(self, question: Question, blocks: bool) -> Found:
        """Look until all that is read is followed, or goes through the fallback."""
        while True:
            try:
                return self._once(question, blocks)
            except UnreadableError as problem:
                give_up(problem.sites, str(problem), unreadable(problem, question.n))
            except UnfollowedError as problem:
                give_up(problem.sites, str(problem), problem.refusal)
            except TakenApartError:
                continue

    def _once(self, question: Question, blocks: bool) -> Found:
        n, arguments, samples, again = question.n, question.arguments, question.samples, question.again
        if not any(x.dim() > 0 and x.shape[0] == n for x in tensors_of(arguments)):
            given = ", ".join(type(x).__name__ for x in (*arguments[0], *arguments[1].values())) or "nothing"
            raise RowOwnershipError(
                f"the model was called with {given}, in which no tensor with {n} rows could be found, so that its rows cannot be "
                "verified. Pass the batch as tensors (also inside lists, mappings, dataclasses or objects with attributes), or "
                "pass check_rows=False to vouch that the leading dimension of every module's input is the sample."
            )
        look = Look(self.passes, arguments, n)
        self._note_unused(look.recorder)
        meetings.check_written(look)
        meetings.check_followed(look)
        broken = next((e for e in look.base if not bool(torch.isfinite(e.rows).all())), None)
        if broken is not None and question.verified:
            return Found(
                {}, set(), set(), False
            )  # a run that diverges was verified while it had not; such steps are skipped anyway
        if broken is not None:
            name = broken.site.name if broken.site is not None and broken.site.name else "the model itself"
            raise RowOwnershipError(
                f"activations at {name} are not finite, so that it cannot be told which rows belong to which sample: the weights "
                "or the inputs of this step have infinities or NaN. Begin from weights that are finite."
            )
        for sample in samples:
            other = exchange_sample(arguments, n, sample, blocks)
            if other is not None:
                self._exchange(look, other, sample, blocks)
        if not again:
            self._settle_doubt(look, question, blocks)
        if not look.seen and not again:
            meetings.check_constants(look)
        if not look.seen:
            log.info("inrun: all samples of this batch are equal, rows will be verified at a later step")
        meetings.check_copies(look, samples[:1] if again else [0, n - 1], thoroughly=not again)
        return Found(self._gather(look, question.known, again), look.recorder.readings, _ways(look.base, n), look.seen)

    def _exchange(self, look: Look, other: Arguments, sample: int, blocks: bool) -> None:
        exchanged, outputs = self.passes.record_exchanged(other, look.n)
        if look.got_shorter(exchanged) and has_lengths(look.arguments, look.n):
            # Rows are padded to the longest sample, which has gone: take another's content at the length that it has.
            kept = exchange_sample(look.arguments, look.n, sample, blocks, lengths=False)
            if kept is not None:
                exchanged, outputs = self.passes.record_exchanged(kept, look.n)
        meetings.note_exchange(look, exchanged, sample)
        self._look_for_coupling(look.outputs, outputs, look.n, sample)
        look.note_exchange(exchanged, outputs, sample)

    def _settle_doubt(self, look: Look, question: Question, blocks: bool) -> None:
        """Where samples differ in so little that several layouts are possible, move the entries of a sample instead."""

        def doubtful() -> Site | None:
            for entry, layouts in zip(look.base, look.possible, strict=True):
                if layouts is None or len(layouts) < 2 or entry.site is None:
                    continue
                if question.known.get(key_of(entry.site, entry.shape, look.n)) not in layouts:
                    return entry.site
            return None

        for sample in question.samples:
            if doubtful() is None:
                return
            other = shift_sample(look.arguments, look.n, sample, blocks)
            if other is not None:
                self._exchange(look, other, sample, blocks)
        site = doubtful()
        if site is not None:
            raise RowOwnershipError(
                f"the samples of this batch differ in so little that it cannot be told whether rows at {site.title} are samples or "
                "positions; begin with a batch of samples that differ more"
            )

    def _look_for_coupling(self, before: list[Tensor], after: list[Tensor], n: int, sample: int) -> None:
        """Say once that outputs of the model mix rows behind its last layer, as in-batch negatives do: every layer is separate."""
        pairs = [(a, b) for a, b in zip(before, after, strict=False) if a.shape == b.shape and a.dim() and len(a) == n]
        coupled = [a for a, b in pairs if not only_block(moved_rows(fingerprint(a), fingerprint(b)), n, sample)]
        if coupled and not self._told_coupling:
            self._told_coupling = True
            log.warning(
                "inrun: an output of the model, of shape %s, has in each row something of the other samples (in-batch negatives, "
                "similarities, statistics of the batch). Scores are row shares: a sample's contribution is what flows through its "
                "own rows; shares add up to the gradient, but what the others would have done without it is not told apart. The "
                "same holds, unseen, for a loss outside the model that couples rows.",
                tuple(coupled[0].shape),
            )

    def _gather(self, look: Look, known: Mapping[Key, Layout], again: bool) -> dict[Key, Layout]:
        """Decide about the calls that no sample moved, and collect all layouts."""
        n = look.n
        layouts: list[Layout | None] = []
        for i, (entry, possible) in enumerate(zip(look.base, look.possible, strict=True)):
            before = None if entry.site is None else known.get(key_of(entry.site, entry.shape, n))
            if entry.argument is not None:
                layouts.append(None)
            elif possible is not None:
                layouts.append(chosen(possible, before))
            else:
                layouts.append(before if again and before is not None else constant_layout(look, i, entry))
        if not again:
            try:
                for i in find_bare(look, layouts):
                    layouts[i] = "bare"
            except RowOwnershipError as error:
                # Copies of the output cannot take its place: follow what is made of it, and copy where that meets the samples.
                free = [look.base[i] for i, x in enumerate(layouts) if x in ("free", "bare")]
                self.passes.follow(self.passes.apart | {(e.site, pattern_of(e.shape, n)) for e in free if e.site is not None})
                raise TakenApartError from error
        found: dict[Key, Layout] = {}
        for entry, layout, possible in zip(look.base, layouts, look.possible, strict=True):
            if layout is None:
                continue
            assert entry.site is not None
            told = entry.output is None or possible is None or entry.site.rule.note_output(entry.output, layout)
            if found.setdefault(key_of(entry.site, entry.shape, n), layout) != layout or not told:
                raise RowOwnershipError(f"{entry.site.name} is called with rows laid out in two ways in one forward")
        return found


def _ways(entries: list[Entry], n: int) -> set[Way]:
    calls = [(e.site, e.shape) for e in entries if e.argument is None and e.output is None]
    return ways_of(((site, shape) for site, shape in calls if site is not None), n)


def give_up(sites: list[Site], why: str, refusal: Exception) -> None:
    """Let the modules that read parameters go through the fallback, and say so; raise where none of them does."""
    reading = {site for site in sites if site.rule.reads}
    if not reading:
        raise refusal
    for site in reading:
        site.fall_back()
    titles = ", ".join(sorted(site.title for site in reading))
    log.warning("inrun: no rule for %s (%s); each runs its forward once more per backward (see coverage)", titles, why)
