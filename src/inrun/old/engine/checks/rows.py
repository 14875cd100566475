"""Whose row is it? Verified, not assumed.

Σ_n g_n = G holds for any assignment of rows to samples, so no sum can tell a tensor that is sequence-first, gathered
or partitioned from one that is batch-first. Instead the forward is run again, without gradient, with one sample's
inputs exchanged: only that sample's rows may move at every observed module. That happens before the user's own forward,
under the very random state that it will start from, so that a model that mixes rows now and then is seen when it does.

What a look has found holds for *patterns* of shapes. A forward of sizes that are new may show others: where shapes decide beside
the layouts of calls (parameters that are read), or the number of samples is new, it is run once before, and looked at if it does.
What only the user's own forward shows is guessed and verified right after it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from inrun.errors import IdsError, RowOwnershipError
from inrun.old.engine.checks.examine import Examiner, Found, Question, pattern_of_batch
from inrun.old.engine.checks.look import Key, RunRecorded, Way, key_of, ways_of
from inrun.old.engine.quiet import Arguments
from inrun.old.engine.sites import Site
from inrun.old.layers import Layout
from inrun.old.layers.layout import Pattern
from inrun.old.layers.reads import Reading, Track, reading_of, roots_of
from inrun.old.layers.trees import tensors_of

#: Steps between two looks at rows that were verified before (audited steps look anyway).
LOOK_AGAIN = 100
#: For how many sizes of batches it is remembered with how many rows modules were called.
SIZES_KEPT = 4096


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
        self.enabled = enabled
        self._examiner = Examiner(sites, run)
        self._known: dict[Key, Layout] = {}
        self._by_shape: dict[tuple[Site, torch.Size, int], Layout] = {}
        #: Operations on what is read that were verified, and the same with their shapes as they were.
        self._read: set[Reading] = set()
        self._read_by_shape: set[Reading] = set()
        #: Ways that modules were called in a forward that was verified.
        self._ways: set[Way] = set()
        #: Patterns of calls of the model that were verified, and numbers of samples.
        self._verified: set[Pattern] = set()
        self._counts: set[int] = set()
        #: By sizes of the batch: the modules that were called with other leading sizes than n, and these.
        self._sizes: dict[Any, set[tuple[Site, int]]] = {}
        #: The running forward's entry (None where none runs), and whether a forward of these sizes ran before.
        self._here: set[tuple[Site, int]] | None = None
        self._ran = False
        #: Its calls, if its sizes are new and it was not run before; and how many operations on what is read it had so far.
        self._calls: list[tuple[Site, torch.Size, Layout]] | None = None
        self._reads_so_far: Counter[Any] = Counter()
        #: The step of the last look.
        self._looked: int | None = None
        #: Calls in the running forward whose layout was guessed, and operations on what is read, since no look had shown them.
        self._guessed: list[tuple[Site, torch.Size, Layout]] = []
        self._guessed_reads: list[Reading] = []

    # Before and after the user's forward

    def before_forward(self, arguments: Arguments, n: int, step: int, audited: bool) -> None:
        """Verify the forward that is about to run, if its shapes are new or it is time to look again."""
        check_batch(arguments, n)
        self._guessed, self._guessed_reads, self._calls = [], [], None
        self._reads_so_far = Counter()
        if n == 1 or not self.enabled:
            if not self.enabled:
                self._examiner.examine_unused(arguments)
            return
        pattern = pattern_of_batch(arguments, n)
        sizes = (n, tuple(x.shape for x in tensors_of(arguments)))
        early = step < 4 or step & (step - 1) == 0
        again = self._looked is None or (self._looked != step and (audited or early or step - self._looked >= LOOK_AGAIN))
        new = pattern not in self._verified
        if not new and sizes not in self._sizes:
            if n in self._counts and not self._examiner.passes.follows:
                self._calls = []  # what is called in a new way is verified after the forward
            else:
                new = self._shows_news(arguments, n)
        if new or again:
            samples = sorted({0, n // 2, n - 1}) if new else [step % n]
            found = self._examine(n, arguments, samples, again=not new)
            if found.certain:
                self._learn(found)
                self._verified.add(pattern)
                self._looked = step
        self._open(sizes, n)

    def _examine(self, n: int, arguments: Arguments, samples: list[int], again: bool = False) -> Found:
        verified = self._looked is not None
        return self._examiner.examine(Question(n, arguments, samples, self._known, verified, again))

    def _shows_news(self, arguments: Arguments, n: int) -> bool:
        """Run a forward of new sizes once; tell whether it shows what no look has verified."""
        glance = self._examiner.glance(arguments, n)
        if glance is None:
            return True
        calls, ways, readings = glance
        return not (calls <= self._known.keys() and ways <= self._ways and readings <= self._read)

    def _open(self, sizes: Any, n: int) -> None:
        """Begin a forward of some sizes."""
        self._ran = sizes in self._sizes
        self._here = self._sizes.setdefault(sizes, set())
        self._counts.add(n)
        if len(self._sizes) > SIZES_KEPT:
            del self._sizes[next(iter(self._sizes))]

    def after_forward(self, arguments: Arguments, n: int) -> None:
        """Verify what was guessed in the forward that has just run: it went a way that no look had shown."""
        guessed, self._guessed = self._guessed, []
        guessed_reads, self._guessed_reads = self._guessed_reads, []
        here, self._here = self._here, None
        calls, self._calls = self._calls, None
        if calls:
            new = {site for site, _ in ways_of(((site, shape) for site, shape, _ in calls), n) - self._ways}
            guessed += [call for call in calls if call[0] in new and call not in guessed]
        if n == 1 or (not guessed and not guessed_reads):
            return
        samples = sorted({0, n // 2, n - 1})
        found = self._examine(n, arguments, samples)
        if not found.layouts:
            return
        for site, shape, layout in guessed:
            true = found.layouts.get(key_of(site, shape, n))
            if true is None:
                raise RowOwnershipError(
                    f"{site.name} was called with shape {tuple(shape)}, which the same forward did not show when it was "
                    "run again to verify the rows; its calls must depend on shapes only"
                )
            if true != layout and found.certain:
                self._learn(found)
                raise RowOwnershipError(
                    f"{site.name} was called with shape {tuple(shape)} for the first time, and its rows are laid out in another "
                    "way than it seemed; nothing was scored. The layout is known now: run this step again."
                )
        # Places in a forward may depend on chance (layers that are dropped); a forward that does not shows them again.
        shown = {reading[:-1] for reading in found.readings}
        for operation, roots, *_ in (r for r in guessed_reads if r not in found.readings and r[:-1] not in shown):
            if found.certain:
                self._learn(found)
            names = ", ".join(sorted({f"{site.name}.{name}".lstrip(".") for site, name in roots}))
            raise RowOwnershipError(
                f"{names} was read in {getattr(operation, '__name__', operation)} with shapes that are new, and reaches the "
                "samples in another way than it seemed; nothing was scored. How is known now: run this step again."
            )
        if found.certain:
            self._learn(found)
            if here is not None:
                here |= {(site, shape[0]) for site, shape, _ in guessed}

    def _learn(self, found: Found) -> None:
        layouts = found.layouts
        changed = next((key for key, layout in layouts.items() if self._known.get(key, layout) != layout), None)
        if changed is not None:
            raise RowOwnershipError(
                f"rows at {changed[0].name} are laid out as {layouts[changed]!r} now and were {self._known[changed]!r} before, "
                "with the same shapes; rows cannot be assigned to samples"
            )
        self._known |= layouts
        self._read |= found.readings
        self._ways |= found.ways

    # Inside the user's forward

    def layout(self, site: Site, shape: torch.Size, n: int) -> Layout:
        """Return the layout of a call; where no look has shown it, a guess that is verified after the forward."""
        if n == 1:
            return "rows"
        exact = (site, shape, n)
        found = self._by_shape.get(exact)
        if found is None:
            found = self._known.get(key_of(site, shape, n))
            if found is None:
                found = self._guess(site, shape, n)
                if self.enabled:
                    self._guessed.append((site, shape, found))
                return found
            self._by_shape[exact] = found
        if self._here is None:  # a backward that runs a segment again
            return found
        if self._calls is not None:
            self._calls.append((site, shape, found))
        if shape[0] != n and self.enabled and (site, shape[0]) not in self._here:
            # In a batch of the same sizes there were other rows before: they depend on what the samples are (padding left out).
            if self._ran:
                self._guessed.append((site, shape, found))
            else:
                self._here.add((site, shape[0]))
        return found

    def _guess(self, site: Site, shape: torch.Size, n: int) -> Layout:
        """Guess the layout of a call: what the module's other calls are, if that is one and it can be; else by shape alone."""
        if not self.enabled:
            return by_shape(shape, n)
        fits = {"rows": shape[0] == n, "flat": shape[0] % n == 0 and shape[0] > n, "second": len(shape) > 1 and shape[1] == n}
        fits |= {"cycled": fits["flat"], "free": True, "apart": True, "bare": shape[0] == 1}
        others = {layout for (known, _, _), layout in self._known.items() if known is site}
        return next(iter(others)) if len(others) == 1 and fits[next(iter(others))] else by_shape(shape, n)

    def reads(self, operation: Any, tracks: list[Track], shapes: tuple[Any, ...], n: int) -> None:
        """Take note of an operation on what is read; one that no look has shown is verified after the forward."""
        if self._here is None:  # a backward that runs a segment again
            return
        roots = roots_of(tracks)
        place = self._reads_so_far[roots]
        self._reads_so_far[roots] += 1
        exact = (operation, n, shapes, roots, place)
        if exact in self._read_by_shape:
            return
        reading = reading_of(operation, roots, shapes, n, place)
        if reading in self._read:
            self._read_by_shape.add(exact)
        else:
            self._guessed_reads.append(reading)


def by_shape(shape: torch.Size, n: int) -> Layout:
    """Guess the layout from the shape alone (rows not verified)."""
    if shape[0] == n:
        return "rows"
    return "flat" if shape[0] % n == 0 and shape[0] > n else "free"
