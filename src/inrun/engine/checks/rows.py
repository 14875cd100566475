"""Whose row is it? Verified, not assumed.

Σ_n g_n = G holds for any assignment of rows to samples, so no sum can tell a tensor that is sequence-first, gathered
or partitioned from one that is batch-first. Instead the forward is run again, without gradient, with one sample's
inputs exchanged: only that sample's rows may move at every observed module. That happens before the user's own forward,
under the very random state that it will start from, so that a model that mixes rows now and then is seen when it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inrun.engine.checks.exchange import exchange_sample
from inrun.engine.checks.movement import classify, entry_of, moves_only, only_block
from inrun.engine.checks.recorder import Entry, Pattern, Recorder, fingerprint, moved_rows, pattern_of
from inrun.engine.quiet import Arguments
from inrun.engine.sites import Site
from inrun.errors import CoverageError, IdsError, RowOwnershipError
from inrun.layers import Layout, unused_parameters
from inrun.layers.layout import SHARED
from inrun.layers.reads import UnreadableError, sample_dim
from inrun.layers.trees import float_tensors, tensors_of

log = logging.getLogger("inrun")
#: Steps between two looks at rows that were verified before (audited steps look anyway).
LOOK_AGAIN = 100


#: Runs the model without gradient or trace under a recorder and returns its output.
RunRecorded = Callable[[Arguments, Recorder], Any]


def check_batch(arguments: Arguments, n: int) -> None:
    """Raise unless some tensor the model was called with has one row per id."""
    sizes = [x.shape[0] for x in tensors_of(arguments) if x.dim() > 0]
    if sizes and n not in sizes:
        raise IdsError(
            f"got {n} sample ids, but the model was called with tensors whose leading sizes are {sorted(set(sizes))}; "
            "give one id per batch row (repeat an id for rows of the same sample)"
        )


class RowCheck:
    """Finds and remembers the layout of every observed call; looks again now and then."""

    def __init__(self, sites: list[Site], run: RunRecorded, enabled: bool) -> None:
        """``enabled=False`` takes the user's word that the leading dimension is the sample."""
        self.sites, self.run, self.enabled = sites, run, enabled
        self._known: dict[tuple[Site, Pattern, int], Layout] = {}
        self._by_shape: dict[tuple[Site, torch.Size, int], Layout] = {}
        #: Patterns of calls of the model that were verified.
        self._verified: set[Pattern] = set()
        #: The step of the last look.
        self._looked: int | None = None
        #: Calls in the running forward whose layout was guessed, since no look had shown them.
        self._guessed: list[tuple[Site, torch.Size, Layout]] = []
        self._examined: set[Site] = set()
        self._told_coupling = False
        #: Calls without samples whose outputs are worked on before they meet the samples.
        self._apart: frozenset[tuple[Site, Pattern]] = frozenset()

    # Before and after the user's forward

    def before_forward(self, arguments: Arguments, n: int, step: int, audited: bool) -> None:
        """Verify the forward that is about to run, if its shapes are new or it is time to look again."""
        check_batch(arguments, n)
        self._guessed = []
        if n == 1 or not self.enabled:
            if not self.enabled and any(self._may_be_unused(site) and site not in self._examined for site in self.sites):
                self._examine_unused(self._record(arguments, Recorder())[0])
            return
        pattern = tuple(pattern_of(x.shape, n) for x in tensors_of(arguments))
        early = step < 4 or step & (step - 1) == 0
        again = self._looked is None or (self._looked != step and (audited or early or step - self._looked >= LOOK_AGAIN))
        if pattern in self._verified and not again:
            return
        if pattern in self._verified:
            found, certain = self._examine(n, arguments, [step % n], again=True)
        else:
            found, certain = self._examine(n, arguments, sorted({0, n // 2, n - 1}))
        if certain:
            self._learn(found)
            self._verified.add(pattern)
            self._looked = step

    def after_forward(self, arguments: Arguments, n: int) -> None:
        """Verify what was guessed in the forward that has just run: it went a way that no look had shown."""
        guessed, self._guessed = self._guessed, []
        if not guessed:
            return
        found, certain = self._examine(n, arguments, sorted({0, n // 2, n - 1}))
        for site, shape, layout in guessed:
            true = found.get((site, pattern_of(shape, n), min(n, 2)))
            if true is None and not found:
                continue
            if true is None:
                raise RowOwnershipError(
                    f"{site.name} was called with shape {tuple(shape)}, which the same forward did not show when it was "
                    "run again to verify the rows; its calls must depend on shapes only"
                )
            if true != layout and certain:
                self._learn(found)
                raise RowOwnershipError(
                    f"{site.name} was called with shape {tuple(shape)} for the first time, and its rows are laid out in another "
                    "way than it seemed; nothing was scored. The layout is known now: run this step again."
                )
        if certain:
            self._learn(found)

    def _learn(self, found: dict[tuple[Site, Pattern, int], Layout]) -> None:
        changed = next((key for key, layout in found.items() if self._known.get(key, layout) != layout), None)
        if changed is not None:
            raise RowOwnershipError(
                f"rows at {changed[0].name} are laid out as {found[changed]!r} now and were {self._known[changed]!r} before, with "
                "the same shapes; rows cannot be assigned to samples"
            )
        self._known |= found

    # Inside the user's forward

    def layout(self, site: Site, shape: torch.Size, n: int) -> Layout:
        """Return the layout of a call; where no look has shown it, a guess that is verified after the forward."""
        if n == 1:
            return "rows"
        exact = (site, shape, n)
        if exact not in self._by_shape:
            known = self._known.get((site, pattern_of(shape, n), min(n, 2)))
            if known is None:
                guess = by_shape(shape, n)
                if self.enabled:
                    self._guessed.append((site, shape, guess))
                return guess
            self._by_shape[exact] = known
        return self._by_shape[exact]

    # The look itself

    def _recorder(self, n: int, **options: Any) -> Recorder:
        """Return a recorder; where parameters are read, of a run with gradient.

        Forwards of autograd functions, which run without, can be told then. All runs of a look are alike in that: without
        gradient some products are done in another order, which rounds in another way.
        """
        with_grad = bool(self._apart) or any(site.rule.reads for site in self.sites)
        return Recorder(apart=self._apart, samples=n, with_grad=with_grad, **options)

    def _record(self, arguments: Arguments, recorder: Recorder) -> tuple[Recorder, list[Tensor]]:
        """Run the model and return the recorder and the model's outputs."""
        return recorder, [x.detach() for x in float_tensors(self.run(arguments, recorder))]

    def _moved_constants(self, before: Recorder, after: Recorder) -> bool:
        """Whether a sample moved what was taken for the same for all; then the modules concerned go through the fallback."""
        for was, now in zip(before.constants, after.constants, strict=False):
            if bool(moved_rows(was.print, now.print).any()):
                reading = [site for site in was.problem.sites if site.rule.reads]
                if not reading:
                    raise _unreadable(was.problem, before.samples)
                _fall_back(reading, str(was.problem))
                return True
        # Rows that are gathered by what a sample is (experts) change the calls themselves.
        reads = [[(e.site, e.shape) for e in r.entries if e.site is not None and e.site.rule.reads] for r in (before, after)]
        if reads[0] != reads[1]:
            _fall_back(list({site for site, _ in (*reads[0], *reads[1])}), "its calls change with the samples")
            return True
        return False

    def _perhaps_constants(self, recorder: Recorder, n: int) -> bool:
        """Whether what no exchange could move may still be the samples'; then the modules concerned go through the fallback."""
        for constant in recorder.constants:
            reading = [site for site in constant.problem.sites if site.rule.reads]
            if n > 1 and reading and sample_dim(constant.shape, n) is not None:
                _fall_back(reading, str(constant.problem))
                return True
        return False

    def _check_spread(self, sites: set[Site], n: int, arguments: Arguments, plain: tuple[list[Entry], list[Tensor]]) -> bool:
        """See that one sample's copy of parameters that are read moves that sample alone; if not, they go through the fallback."""
        base, outputs = plain
        for row in (0, n - 1):
            recorder, disturbed = self._record(arguments, self._recorder(n, disturb_spread=row))
            entries = recorder.entries
            pairs = [(b, a) for b, a in zip(base, entries, strict=False) if b.argument is None and b.shape == a.shape]
            pairs += [(entry_of(b), entry_of(a)) for b, a in zip(outputs, disturbed, strict=True) if b.dim()]
            if len(entries) != len(base) or not all(moves_only(b, a, n, row) for b, a in pairs):
                reading = [site for site in sites if site.rule.reads]
                if not reading:
                    raise RowOwnershipError(_free_message(", ".join(sorted({site.name for site in sites})), n))
                _fall_back(reading, "a parameter that is read reaches other samples than its own copy")
                return False
        return True

    def _record_exchanged(self, arguments: Arguments, n: int) -> tuple[Recorder, list[Tensor]]:
        """Run the model with one sample exchanged; it may not take such a batch."""
        try:
            return self._record(arguments, self._recorder(n))
        except (RowOwnershipError, UnreadableError):
            raise
        except Exception as error:
            raise RowOwnershipError(
                "the model failed when one sample was exchanged for another, so that its rows cannot be verified "
                f"({type(error).__name__}: {str(error).strip()}). Usual causes: offsets or lengths that fit the batch as a whole. "
                "Give it one row per sample, or pass check_rows=False to vouch that the leading dimension of every module's input "
                "is the sample."
            ) from error

    def _may_be_unused(self, site: Site) -> bool:
        return site.rule.replays and any(len(s.uses) > 1 for s in site.scored.values())

    def _examine_unused(self, recorder: Recorder) -> None:
        """Leave parameters that a module only registers, for a child to use, to that child (BERT's head bias)."""
        for site, call in recorder.replayable.items():
            if self._may_be_unused(site):
                shared = [name for name, s in site.scored.items() if len(s.uses) > 1]
                site.leave_to_others(set(unused_parameters(call, shared)))
                self._examined.add(site)

    def _examine(
        self, n: int, arguments: Arguments, samples: list[int], again: bool = False
    ) -> tuple[dict[tuple[Site, Pattern, int], Layout], bool]:
        """Classify every call of one forward; modules that read parameters in ways not known go through the fallback first."""
        while True:
            try:
                return self._examine_once(n, arguments, samples, again)
            except UnreadableError as problem:
                reading = [site for site in problem.sites if site.rule.reads]
                if not reading:
                    raise _unreadable(problem, n) from problem
                _fall_back(reading, str(problem))

    def _examine_once(
        self, n: int, arguments: Arguments, samples: list[int], again: bool = False
    ) -> tuple[dict[tuple[Site, Pattern, int], Layout], bool]:
        """Classify every call of one forward; the flag tells whether the exchange of a sample could be seen.

        ``again`` leaves calls that no sample moves at what is known of them.
        """
        if not any(x.dim() > 0 and x.shape[0] == n for x in tensors_of(arguments)):
            given = ", ".join(type(x).__name__ for x in (*arguments[0], *arguments[1].values())) or "nothing"
            raise RowOwnershipError(
                f"the model was called with {given}, in which no tensor with {n} rows could be found, so that its rows cannot be "
                "verified. Pass the batch as tensors (also inside lists, mappings, dataclasses or objects with attributes), or "
                "pass check_rows=False to vouch that the leading dimension of every module's input is the sample."
            )
        recorder, outputs = self._record(arguments, self._recorder(n))
        base = recorder.entries
        self._examine_unused(recorder)
        broken = next((e for e in base if not bool(torch.isfinite(e.rows).all())), None)
        if broken is not None and self._looked is not None:
            return {}, False  # a run that diverges was verified while it had not; such steps are skipped anyway
        if broken is not None:
            name = broken.site.name if broken.site is not None and broken.site.name else "the model itself"
            raise RowOwnershipError(
                f"activations at {name} are not finite, so that it cannot be told which rows belong to which sample: the weights "
                "or the inputs of this step have infinities or NaN. Begin from weights that are finite."
            )
        if recorder.spreading and not again and not self._check_spread(recorder.spreading, n, arguments, (base, outputs)):
            return self._examine(n, arguments, samples, again)
        layouts: list[Layout | None] = [None] * len(base)
        seen = False
        for sample in samples:
            other = exchange_sample(arguments, n, sample)
            if other is None:
                continue
            seen = True
            exchanged, exchanged_outputs = self._record_exchanged(other, n)
            if self._moved_constants(recorder, exchanged):
                return self._examine(n, arguments, samples, again)
            moved_entries = exchanged.entries
            self._look_for_coupling(outputs, exchanged_outputs, n, sample)
            if [(e.site, e.shape) for e in base] != [(e.site, e.shape) for e in moved_entries]:
                raise RowOwnershipError(
                    "the modules the forward calls change when one sample is exchanged; rows cannot be assigned to samples"
                )
            for i, (before, after) in enumerate(zip(base, moved_entries, strict=True)):
                moved = moved_rows(before.rows, after.rows)
                if before.argument is not None:
                    _note_argument(before, moved)
                else:
                    try:
                        layouts[i] = classify(before, moved, n, sample, after) or layouts[i]
                    except RowOwnershipError as problem:
                        if before.site is None or not before.site.rule.reads:
                            raise
                        _fall_back([before.site], str(problem).partition(":")[0])
                        return self._examine(n, arguments, samples, again)
        if not seen and not again and self._perhaps_constants(recorder, n):
            return self._examine(n, arguments, samples, again)
        if not seen:
            log.info("inrun: all samples of this batch are equal, rows will be verified at a later step")
        if again:
            known = [self._known.get((e.site, pattern_of(e.shape, n), min(n, 2))) for e in base if e.site is not None]
            layouts = [x if x is not None or e.argument is not None else k for x, k, e in zip(layouts, known, base, strict=True)]
        found = self._gather(n, arguments, (base, outputs), layouts, seen, check_free=not again)
        return self._examine(n, arguments, samples, again) if found is None else (found, seen)

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

    def _gather(
        self,
        n: int,
        arguments: Arguments,
        plain: tuple[list[Entry], list[Tensor]],
        layouts: list[Layout | None],
        seen: bool,
        check_free: bool,
    ) -> dict[tuple[Site, Pattern, int], Layout] | None:
        """Decide about the calls that no sample moved, and collect all layouts; None where a look must be taken again."""
        base, outputs = plain
        known_rows = [i for i, x in enumerate(layouts) if x is not None]
        for i, entry in enumerate(base):
            if layouts[i] is None and entry.argument is None:
                layouts[i] = self._constant_layout(i, entry, n, arguments, plain, known_rows, seen)
        free = {i for i, x in enumerate(layouts) if x in SHARED and x != "apart"}
        if free and check_free:
            try:
                for i in self._find_bare(free, n, arguments, base, outputs):
                    layouts[i] = "bare"
            except RowOwnershipError:
                # Copies of the output cannot take its place: follow what is made of it, and copy where that meets the samples.
                self._apart |= {(site, pattern_of(base[i].shape, n)) for i in free if (site := base[i].site) is not None}
                return None
        found: dict[tuple[Site, Pattern, int], Layout] = {}
        for entry, layout in zip(base, layouts, strict=True):
            if layout is None:
                continue
            assert entry.site is not None
            key = (entry.site, pattern_of(entry.shape, n), min(n, 2))
            if found.setdefault(key, layout) != layout:
                raise RowOwnershipError(f"{entry.site.name} is called with rows laid out in two ways in one forward")
        return found

    def _constant_layout(
        self,
        index: int,
        entry: Entry,
        n: int,
        arguments: Arguments,
        plain: tuple[list[Entry], list[Tensor]],
        known: list[int],
        seen: bool,
    ) -> Layout:
        """Decide about an input that no sample moves: disturb one row of the output and see whose rows move.

        Position indices of shape [t] with t = n look like one row per sample; a disturbed position moves all samples.
        """
        assert entry.site is not None
        if (entry.site, pattern_of(entry.shape, n)) in self._apart:
            return "apart"
        if entry.output is not None:
            if seen:  # refused when gradient comes through it
                entry.site.note_shared_output(entry.output)
            return "rows"
        if entry.shape[0] != n:
            return "free"
        if not seen:
            return "rows"
        base, outputs = plain
        for row in (0, n - 1):  # the first position of a causal model may show nothing
            recorder, after_outputs = self._record(arguments, self._recorder(n, disturb=index, row=row))
            after = recorder.entries
            pairs = [(base[i], after[i]) for i in known if i < len(after)]
            rows = [(b, a) for b, a in zip(outputs, after_outputs, strict=True) if b.dim() and b.shape[0] % n == 0]
            pairs += [(Entry(None, b.shape, fingerprint(b)), Entry(None, a.shape, fingerprint(a))) for b, a in rows]
            moved = [moved_rows(b.rows, a.rows) for b, a in pairs if a.shape == b.shape]
            moved = [m for m in moved if bool(m.any())]
            if moved:
                return "rows" if all(only_block(m, n, row) for m in moved) else "free"
        raise RowOwnershipError(
            f"{entry.site.name} gets an input of shape {tuple(entry.shape)} that no sample changes, and nothing shows whether "
            f"its {n} rows are samples; call it with another leading size than the batch, or let the model return its logits"
        )

    def _find_bare(self, free: set[int], n: int, arguments: Arguments, base: list[Entry], outputs: list[Tensor]) -> frozenset[int]:
        """Return those of the calls without samples whose leading dimension of 1 is no batch of one."""
        maybe = frozenset(i for i in free if base[i].shape[0] == 1)
        try:
            self._check_expansion(free, frozenset(), n, arguments, base, outputs)
        except RowOwnershipError:
            if not maybe:
                raise
            self._check_expansion(free, maybe, n, arguments, base, outputs)
            return maybe
        return frozenset()

    def _check_expansion(
        self, free: set[int], bare: frozenset[int], n: int, arguments: Arguments, base: list[Entry], outputs: list[Tensor]
    ) -> None:
        """See that giving batch-free outputs one copy per sample changes no shape elsewhere."""
        names = ", ".join(sorted({site.name for i in free if (site := base[i].site) is not None}))
        try:
            recorder, after_outputs = self._record(arguments, self._recorder(n, expand=(free, n), bare=bare))
        except Exception as error:
            raise RowOwnershipError(_free_message(names, n) + f" (the expanded forward failed: {error})") from error
        after = recorder.entries
        same = len(after) == len(base) and all(
            a.site is b.site and a.shape == b.shape and not bool(moved_rows(b.rows, a.rows).any())
            for a, b in zip(after, base, strict=True)
        )
        if not same or [x.shape for x in after_outputs] != [x.shape for x in outputs]:
            raise RowOwnershipError(_free_message(names, n))
        # Equal copies hide whose copy is used: change one sample's, and only its rows may move.
        for row in (0, n - 1):
            changed = self._recorder(n, expand=(free, n), bare=bare, disturb_copy=True, row=row)
            recorder, disturbed = self._record(arguments, changed)
            pairs = [(b, a) for b, a in zip(base, recorder.entries, strict=False) if b.argument is None and b.shape == a.shape]
            pairs += [(entry_of(b), entry_of(a)) for b, a in zip(outputs, disturbed, strict=True) if b.dim()]
            telling = [(b, a) for b, a in pairs if b.shape[0] % n == 0]
            if len(recorder.entries) != len(base) or not all(moves_only(b, a, n, row) for b, a in telling):
                raise RowOwnershipError(_free_message(names, n))


def _unreadable(problem: UnreadableError, n: int) -> Exception:
    """Return what to raise where no module can be run again instead: what is read belongs to a layer with a rule."""
    names = ", ".join(sorted({site.name for site in problem.sites}))
    if all(site.read_outside for site in problem.sites):
        return CoverageError(
            f"{names} cannot be scored: the module around it reads its parameters instead of calling it, and {problem}, which no "
            "rule describes. Call the layer itself, or freeze it."
        )
    return RowOwnershipError(f"{_free_message(names, n)} ({problem})")


def _free_message(names: str, n: int) -> str:
    return (
        f"{names} runs once for the whole batch instead of once per sample, and its output cannot be given one copy per "
        f"sample without changing the model; call it with inputs of leading size {n} (for example position ids [n, t])"
    )


def _note_argument(entry: Entry, moved: Tensor) -> None:
    """Tell a module without a rule that one of its arguments has rows of samples."""
    if bool(moved.any()):
        assert entry.site is not None
        assert entry.argument is not None
        entry.site.rule.note_rows(entry.argument)


def by_shape(shape: torch.Size, n: int) -> Layout:
    """Guess the layout from the shape alone (rows not verified)."""
    if shape[0] == n:
        return "rows"
    return "flat" if shape[0] % n == 0 and shape[0] > n else "free"


def _fall_back(sites: list[Site], why: str) -> None:
    """Let modules go through the fallback, and say so."""
    for site in sites:
        site.fall_back()
    if sites:
        titles = ", ".join(sorted(site.title for site in sites))
        log.warning("inrun: no rule for %s (%s); each runs its forward once more per backward (see coverage)", titles, why)
