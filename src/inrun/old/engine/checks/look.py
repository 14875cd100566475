"""One forward as it is, and what it became when one sample was exchanged or disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from inrun.errors import CoverageError, RowOwnershipError
from inrun.old.engine.checks.movement import entry_of, inseparable, possible_layouts
from inrun.old.engine.checks.recorder import Entry, Recorder, moved_rows
from inrun.old.engine.quiet import Arguments
from inrun.old.engine.sites import Site
from inrun.old.layers import Layout
from inrun.old.layers.layout import Pattern, pattern_of
from inrun.old.layers.reads import UnreadableError
from inrun.old.layers.trees import float_tensors

#: Runs the model without gradient or trace under a recorder and returns its output.
RunRecorded = Callable[[Arguments, Recorder], Any]
#: A call: the module, the pattern of its leading tensor, and whether there were several samples.
Key = tuple[Site, Pattern, int]
#: A module, and the patterns of its calls in one forward: two that are alike now may have been told apart by their patterns.
Way = tuple[Site, tuple[Pattern, ...]]


def key_of(site: Site, shape: Any, n: int) -> Key:
    """Return under which key the layout of a call is known."""
    return (site, pattern_of(shape, n), min(n, 2))


def ways_of(calls: Iterable[tuple[Site, Any]], n: int) -> set[Way]:
    """Return for every module the patterns of all its calls in one forward, given site and shape of each."""
    found: dict[Site, list[Pattern]] = {}
    for site, shape in calls:
        found.setdefault(site, []).append(pattern_of(shape, n))
    return {(site, tuple(patterns)) for site, patterns in found.items()}


class UnfollowedError(Exception):
    """What modules read is not what it seemed: they go through the fallback; where none can, ``refusal`` is raised."""

    def __init__(self, sites: list[Site], why: str, refusal: Exception) -> None:
        """Name the modules and the reason."""
        super().__init__(why)
        self.sites, self.refusal = sites, refusal


class TakenApartError(Exception):
    """Copies cannot take the place of some outputs: the look must be taken again, with these followed."""


class Passes:
    """Runs the model for a look."""

    def __init__(self, sites: list[Site], run: RunRecorded) -> None:
        """``run`` runs it under a recorder."""
        self.sites, self.run = sites, run
        #: Calls without samples whose outputs are worked on before they meet the samples.
        self.apart: frozenset[tuple[Site, Pattern]] = frozenset()

    def follow(self, apart: frozenset[tuple[Site, Pattern]]) -> None:
        """Hand the outputs of these calls out as what is read is."""
        self.apart = apart

    @property
    def follows(self) -> bool:
        """Whether anything that is read is followed, so that shapes decide beside the layouts of calls."""
        return bool(self.apart) or any(site.rule.reads or site.read_outside for site in self.sites)

    def recorder(self, n: int, **options: Any) -> Recorder:
        """Return a recorder; where parameters are read, of a run with gradient.

        Forwards of autograd functions, which run without, can be told then. All runs of a look are alike in that: without
        gradient some products are done in another order, which rounds in another way.
        """
        with_grad = bool(self.apart) or any(site.rule.reads for site in self.sites)
        return Recorder(apart=self.apart, samples=n, with_grad=with_grad, **options)

    def record(self, arguments: Arguments, recorder: Recorder) -> tuple[Recorder, list[Tensor]]:
        """Run the model and return the recorder and the model's outputs."""
        outputs = float_tensors(self.run(arguments, recorder))
        recorder.note_reached(outputs)
        return recorder, [x.detach() for x in outputs]

    def record_exchanged(self, arguments: Arguments, n: int) -> tuple[Recorder, list[Tensor]]:
        """Run the model with one sample exchanged; it may not take such a batch."""
        try:
            return self.record(arguments, self.recorder(n))
        except (RowOwnershipError, UnreadableError):
            raise
        except Exception as error:
            raise RowOwnershipError(
                "the model failed when one sample was exchanged for another, so that its rows cannot be verified "
                f"({type(error).__name__}: {str(error).strip()}). Usual causes: offsets or lengths that fit the batch as a whole. "
                "Give it one row per sample, or pass check_rows=False to vouch that the leading dimension of every module's input "
                "is the sample."
            ) from error


class Look:
    """One forward of ``n`` samples, and the layouts that are possible for its calls and its outputs after every exchange."""

    def __init__(self, passes: Passes, arguments: Arguments, n: int) -> None:
        """Run the forward as it is."""
        self.passes, self.arguments, self.n = passes, arguments, n
        self.recorder, self.outputs = passes.record(arguments, passes.recorder(n))
        self.base: list[Entry] = self.recorder.entries
        #: By call and by output; None as long as nothing moved.
        self.possible: list[set[Layout] | None] = [None] * len(self.base)
        self.possible_outputs: list[set[Layout] | None] = [None] * len(self.outputs)
        #: The same by call, as far as copies of parameters that are read tell.
        self.by_copies: list[set[Layout] | None] = [None] * len(self.base)
        #: Meetings of parameters with a tensor in which the exchanged samples' entries alone moved, and those where others did.
        self.shown: set[int] = set()
        self.doubtful: set[int] = set()
        #: Whether some sample could be exchanged.
        self.seen = False

    def repeat(self, **options: Any) -> tuple[Recorder, list[Tensor]]:
        """Run the same forward with something disturbed."""
        return self.passes.record(self.arguments, self.passes.recorder(self.n, **options))

    def got_shorter(self, exchanged: Recorder) -> bool:
        """Whether an exchange changed sizes of calls behind the leading one, and nothing else: another sample is the longest."""
        pairs = list(zip(self.base, exchanged.entries, strict=False))
        same = len(self.base) == len(exchanged.entries) and all(
            b.site is a.site and len(b.shape) == len(a.shape) and b.shape[:1] == a.shape[:1] for b, a in pairs
        )
        return same and any(b.shape != a.shape for b, a in pairs)

    def note_exchange(self, exchanged: Recorder, outputs: list[Tensor], sample: int) -> None:
        """Keep of the possible layouts those that this exchange allows, too; raise where none is left."""
        self.seen = True
        moved = exchanged.entries
        if [(e.site, e.shape) for e in self.base] != [(e.site, e.shape) for e in moved]:
            raise RowOwnershipError(
                "the modules the forward calls change when one sample is exchanged; rows cannot be assigned to samples"
            )
        for i, (before, after) in enumerate(zip(self.base, moved, strict=True)):
            if before.argument is not None:
                _note_argument(before, moved_rows(before.rows, after.rows))
                continue
            self.possible[i] = _both(self.possible[i], possible_layouts(before, after, self.n, sample))
            if self.possible[i] is not None and not self.possible[i]:
                problem = inseparable(before, moved_rows(before.rows, after.rows), self.n)
                assert before.site is not None
                raise UnfollowedError([before.site], str(problem).partition(":")[0], problem)
        for i, (x, y) in enumerate(zip(self.outputs, outputs, strict=False)):
            if x.dim() and x.shape == y.shape:
                found = possible_layouts(entry_of(x), entry_of(y), self.n, sample, anywhere=True)
                self.possible_outputs[i] = _both(self.possible_outputs[i], found)

    def moves(self, recorder: Recorder, outputs: list[Tensor], sample: int, calls: bool = True) -> tuple[bool, bool]:
        """Tell whether a disturbance of one sample moved anything, and whether that sample's entries alone.

        Where exchanges have told how a tensor is laid out, its entries must have moved in that layout. ``calls=False`` looks
        at calls that the samples moved, and outputs, alone.
        """
        if len(recorder.entries) != len(self.base):
            return True, False
        pairs = [
            (b, a, p)
            for b, a, p in zip(self.base, recorder.entries, self.possible, strict=True)
            if b.argument is None and b.shape == a.shape and (calls or p is not None)
        ]
        results = [(b, a, p) for b, a, p in zip(self.outputs, outputs, self.possible_outputs, strict=True) if b.dim()]
        results = [(b, a, p) for b, a, p in results if b.shape == a.shape and (calls or p or b.shape[0] % self.n == 0)]
        pairs += [(entry_of(b), entry_of(a), p) for b, a, p in results]
        any_moved = False
        for before, after, possible in pairs:
            now = possible_layouts(before, after, self.n, sample, anywhere=True)
            if now is not None:
                any_moved = True
                if not now or (possible and not now & possible):
                    return True, False
        return any_moved, True

    def note_copies(self, recorder: Recorder, sample: int) -> None:
        """Keep how calls may be laid out in which a disturbed copy of what is read moved one sample's entries."""
        for i, (before, after) in enumerate(zip(self.base, recorder.entries, strict=True)):
            if before.argument is None and before.shape == after.shape:
                self.by_copies[i] = _both(self.by_copies[i], possible_layouts(before, after, self.n, sample))


def _both(before: set[Layout] | None, now: set[Layout] | None) -> set[Layout] | None:
    return now if before is None else before if now is None else before & now


def _note_argument(entry: Entry, moved: Tensor) -> None:
    """Tell a module without a rule that one of its arguments has rows of samples."""
    if bool(moved.any()):
        assert entry.site is not None
        assert entry.argument is not None
        entry.site.rule.note_rows(entry.argument)


def free_message(names: str, n: int) -> str:
    """Say that a call without samples cannot be scored."""
    return (
        f"{names} runs once for the whole batch instead of once per sample, and its output cannot be given one copy per "
        f"sample without changing the model; call it with inputs of leading size {n} (for example position ids [n, t])"
    )


def unreadable(problem: UnreadableError, n: int) -> Exception:
    """Return what to raise where no module can be run again instead: what is read belongs to a layer with a rule."""
    names = ", ".join(sorted({site.name for site in problem.sites}))
    if all(site.read_outside for site in problem.sites):
        return CoverageError(
            f"{names} cannot be scored: the module around it reads its parameters instead of calling it, and {problem}, which no "
            "rule describes. Call the layer itself, or freeze it."
        )
    return RowOwnershipError(f"{free_message(names, n)} ({problem})")
