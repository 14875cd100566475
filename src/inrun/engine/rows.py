"""Which rows of a tapped tensor belong to which sample, read from the graph of the user's own forward.

The outputs are seeded with random numbers s, then with s · 2^code(sample), and both are taken backwards through the retained
graph. Backward is linear, and scaling by a power of two is exact in floating point. So an entry that only sample j reaches is
multiplied by exactly 2^code(j): the ratio of the two gradients *is* the sample, and any other ratio means that samples meet.

No forward is repeated, no random number is drawn from the global generator, and no parameter's gradient is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.layers.layout import UNREAD, Layout, index_of
from inrun.layers.tap import Tap
from inrun.torch_private import metadata_of

#: Entries that no gradient reaches, and entries in which samples meet.
SILENT, MIXED = -1, -2
#: Powers of two run from −HALF to HALF − 1.
HALF = 32
#: Ratios may be off by this much: float32 arithmetic keeps a power of two exact, but sums over rows are taken first.
SLACK = 1e-5


@dataclass(frozen=True)
class Samples:
    """The samples of a microbatch: its n rows, or documents packed into rows by ``documents`` ``[rows, t]`` (−1: padding)."""

    n: int
    documents: Tensor | None = None

    def layouts(self, shape: Sequence[int]) -> Iterator[tuple[str, Layout, Tensor]]:
        """Yield the ways in which samples may lie in a tensor: name, layout, and the sample of every entry (broadcasts)."""
        dims, n = len(shape), self.n
        if n == 1 and self.documents is None:
            yield "first", Layout("all", 1), torch.zeros([1] * max(1, dims), dtype=torch.long)
            return
        if self.documents is not None:
            yield from self._packed(shape)
            return
        kinds = [
            ("first", "first", 0, shape[:1] == (n,)),
            ("folded", "first", 0, dims > 0 and shape[0] > n and shape[0] % n == 0),
            ("folded, samples inside", "inside", 0, dims > 0 and shape[0] > n and shape[0] % n == 0),
            ("second", "second", 1, tuple(shape[1:2]) == (n,)),
        ]
        for name, kind, _, fits in kinds:
            if fits:
                layout = Layout(kind, n)
                yield name, layout, layout.owners(torch.Size(shape))
        for name, dim in (("second, folded", 1), ("last", dims - 1)):
            if dims > max(dim, 1) and dim > 0 and shape[dim] % n == 0 and shape[dim] > (n if dim == 1 and dims > 2 else n - 1):
                who = (torch.arange(shape[dim]) // (shape[dim] // n)).view([-1 if i == dim else 1 for i in range(dims)])
                yield name, Layout("index", n, None, dims), who

    def _packed(self, shape: Sequence[int]) -> Iterator[tuple[str, Layout, Tensor]]:
        assert self.documents is not None
        rows, t = self.documents.shape
        index = index_of(self.documents.reshape(-1), self.n)
        if tuple(shape[:2]) == (rows, t):
            yield "first", Layout("index", self.n, index, 2), self.documents.view(rows, t, *[1] * (len(shape) - 2))
        if shape[:1] == (rows * t,):
            yield "folded", Layout("index", self.n, index, 1), self.documents.view(-1, *[1] * (len(shape) - 1))


class RowProbe:
    """Reads the layouts of the taps of one forward."""

    def __init__(self, samples: Samples, taps: list[Tap], probing: Callable[[], Any]) -> None:
        """``probing`` is a context in which tapped backwards only pass gradients on."""
        self.samples, self.taps, self.probing = samples, taps, probing
        self.signs = False
        self.passes = 0
        #: The sample of every entry of a tap's output that a seed has reached.
        self.who: dict[Tap, Tensor | None] = {}
        #: What checkpoints draw when they are run again must be the same in all passes.
        self._random = torch.get_rng_state()

    def read(self, outputs: list[Tensor]) -> dict[Tap, str]:
        """Set the layout of every tap, and return its name.

        Args:
            outputs: What the model returned, as far as it requires gradient.

        Raises:
            RowOwnershipError: Samples meet, or rows cannot be told.
        """
        shapes = [(t, t.shape) for t in outputs if any(name == "first" for name, *_ in self.samples.layouts(t.shape))]
        seeds = [(torch.autograd.graph.get_gradient_edge(t), shape) for t, shape in shapes]
        half = any(metadata_of(t.edge).dtype == torch.float16 for t in self.taps if t.edge)
        found: dict[Tap, str] = {}
        disagree = False
        with self.probing():
            for self.signs in [True] if half else [False, True]:
                self.who = {}
                disagree = bool(seeds) and self._seed(seeds, from_outputs=True) is False
                for tap in reversed(self.taps):  # losses without outputs, side outputs: begin at the last tap nothing reached
                    if self._unread(tap) and self._seed([(tap.edge, tap.shape)]) is False:
                        self.who[tap] = torch.full(tuple(tap.shape), MIXED)
                found = {tap: self._classify(tap) for tap in self.taps}
                if not disagree and not any(verdict in ("mixed", "unknown") for verdict in found.values()):
                    break  # else once more with signs, which survive half precision and odd functions in hooks
        for tap, verdict in found.items():
            if verdict == "mixed":
                raise RowOwnershipError(
                    f"{tap.name} mixes samples: the gradient at its output, {tuple(tap.shape)}, has entries that several samples "
                    "reach. Scores would go to the wrong samples. Keep the samples apart above it, or leave its parameters out "
                    "with parameters=."
                )
            if verdict == "unknown":
                raise RowOwnershipError(
                    f"{tap.name} returns {tuple(tap.shape)} for {self.samples.n} samples, and its rows cannot be assigned to them. "
                    "Give one id per row, samples in the first dimension."
                )
        for tap in self.taps:
            who = self.who.get(tap)
            if tap.moved is not None and who is not None:
                own = tap.moved.view(-1, *[1] * (who.ndim - 1))
                if not bool(((who == own) | (who == SILENT)).all()):
                    raise RowOwnershipError(
                        f"{tap.name} reads rows of the batch that the model has mixed or put into another order, and its outputs "
                        "do not have them back in place. Scores would go to the wrong samples. Do this before the model is "
                        "called, and give the ids in the order of the rows."
                    )
        if disagree:
            raise RowOwnershipError(
                "The rows of the model's outputs are not those of its inputs: samples meet or change places in between. Scores "
                "would go to the wrong samples. Keep samples apart, in the first dimension."
            )
        return found

    # Tracing

    def _seed(self, seeds: list[tuple[Any, Any]], from_outputs: bool = False) -> bool | None:
        """Trace with the samples in one place after the other; keep what the known layers confirm.

        Returns:
            Whether a trace was kept; None if nothing could confirm one.
        """
        proven = False
        for order in ("first", "folded", "second", "last"):
            maps = []
            for edge, shape in seeds:
                who = next((w for name, _, w in self.samples.layouts(shape) if name == order), None)
                if who is not None:
                    maps.append((edge, shape, who))
            if not maps:
                continue
            asked = [t for t in self.taps if self._unread(t) or t.reads_inputs or bool((self.who[t] >= 0).any())]  # type: ignore[operator,union-attr]
            traced = self._trace(asked, maps)
            proven = from_outputs or any(
                w is not None and bool((w != SILENT).any()) and (t.reads_inputs or not self._unread(t))
                for t, w in zip(asked, traced, strict=True)
            )
            if proven and all(w is None or self._agrees(t, w) for t, w in zip(asked, traced, strict=True)):
                for t, w in zip(asked, traced, strict=True):
                    if self._unread(t):
                        self.who[t] = w
                return True
        return False if proven else None

    def _unread(self, tap: Tap) -> bool:
        """Return whether nothing has reached a tap (activations of zero let nothing through either)."""
        who = self.who.get(tap)
        return who is None or bool((who == SILENT).all())

    def _agrees(self, tap: Tap, who: Tensor) -> bool:
        """Return whether a trace says of a tap what is known of it."""
        before = self.who.get(tap)
        if before is not None and not self._unread(tap):
            dims = max(who.ndim, before.ndim)
            old, new = (x.reshape(*x.shape, *[1] * (dims - x.ndim)) for x in (before, who))
            return bool(((new == old) | (new == SILENT) | (old == SILENT)).all())
        if not tap.reads_inputs:
            return True
        own = next((w for name, _, w in self.samples.layouts(tap.shape) if name == "first"), None)
        if own is None:
            return True
        own = first_of(own.expand(tuple(tap.shape)), who.ndim)
        return bool(((who == own) | (who == SILENT)).all())

    def _trace(self, taps: list[Tap], seeds: list[Any]) -> list[Tensor | None]:
        """Return the sample whose seed reaches each entry; one digit per pass, a power of two or a sign."""
        digits, base = [1], 2 if self.signs else 2 * HALF
        while base * digits[-1] < self.samples.n:
            digits.append(base * digits[-1])
        passes = [self._backward(taps, seeds, digit, base, _fold) for digit in [None, *digits]]
        found = [_ratios([x[t] for x in passes], digits, base, self.samples.n) if t in passes[0] else None for t in taps]
        # Where a row is not one sample's, its entries are looked at one by one.
        mixed = [t for t, w in zip(taps, found, strict=True) if w is not None and len(t.shape) > 1 and bool((w == MIXED).any())]
        if not mixed:
            return found
        passes = [self._backward(mixed, seeds, digit, base, torch.clone) for digit in [None, *digits]]
        again = {t: _ratios([x[t] for x in passes], digits, base, self.samples.n) for t in mixed}
        return [again.get(t, w) for t, w in zip(taps, found, strict=True)]

    def _backward(
        self, taps: list[Tap], seeds: list[Any], digit: int | None, base: int, keep: Callable[[Tensor], Tensor]
    ) -> dict[Tap, Tensor]:
        """Take seeds, scaled by a digit of their sample, backwards; return what is kept of the gradients that arrive at taps."""
        generator, gradients, arrived = torch.Generator().manual_seed(7), [], dict[Tap, Tensor]()
        for edge, shape, who in seeds:
            code = who.clamp_min(0) // (digit or 1) % base
            exponent = code.double() - HALF if digit is not None else torch.zeros_like(code, dtype=torch.float64)
            scale = 1.0 - 2.0 * code * (digit is not None) if base == 2 else torch.exp2(exponent)
            meta = metadata_of(edge)
            # Rounded to the precision of the graph first, so that scaling stays exact.
            seed = torch.randn(tuple(shape), generator=generator).to(meta.device, meta.dtype)
            gradients.append(seed.mul_(scale.to(meta.device, meta.dtype)).masked_fill_((who < 0).to(meta.device), 0.0))

        def watch(tap: Tap) -> Any:
            def arrive(given: tuple[Tensor | None, ...]) -> None:
                g = given[tap.edge.output_nr]  # type: ignore[union-attr]
                if g is not None:
                    arrived[tap] = keep(g)

            return tap.edge.node.register_prehook(arrive)  # type: ignore[union-attr]

        # What is kept is taken where gradients arrive: all of them at once would be as large as all activations.
        watched = [t for t in taps if t.probes()]
        handles, others = [watch(t) for t in watched], [t for t in taps if not t.probes()]
        probes = dict.fromkeys(p for t in watched for p in t.probes())
        ends: list[Any] = [torch.autograd.graph.get_gradient_edge(p) for p in probes] + [t.edge for t in others]
        torch.set_rng_state(self._random)
        try:
            found = torch.autograd.grad([e for e, _, _ in seeds], ends, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        arrived |= {t: keep(g) for t, g in zip(others, found[len(probes) :], strict=True) if g is not None}
        self.passes += 1
        return arrived

    # Verdicts

    def _classify(self, tap: Tap) -> str:
        """Name the layout of a tap, and set it."""
        who = self.who.get(tap)
        if who is None or not bool((who != SILENT).any()):
            # Where a trace arrived without gradient there is nothing to score: the first layout that fits will do. Where none did,
            # nothing that is known confirms a layout, and it is an error if gradient arrives.
            fitting = (layout for _, layout, _ in self.samples.layouts(tap.shape))
            tap.layout = next(fitting, UNREAD) if who is not None or self.samples.n == 1 else UNREAD
            return "unread"
        live = who != SILENT
        if bool((who == MIXED).any()):
            return "mixed"
        for name, layout, every in self.samples.layouts(tap.shape):
            every = every.expand(tuple(tap.shape))
            own = first_of(every, who.ndim)
            if bool(((who == own) | ~live).all()):
                if layout.kind == "index" and layout.index is None:
                    lead = 2 if name == "second, folded" else len(tap.shape)
                    rows = first_of(every, lead).reshape(-1)
                    layout = Layout("index", self.samples.n, index_of(rows, self.samples.n), lead)
                tap.layout = layout
                return name
        n = self.samples.n
        low = torch.where(live, who, n).flatten(1).amin(1) if who.ndim > 1 else who
        high = who.flatten(1).amax(1) if who.ndim > 1 else who
        if bool(((low == high) | (high == SILENT)).all()):
            tap.layout = Layout("index", n, index_of(high, n), 1)
            return "routed"
        if who.ndim > 1:
            low = torch.where(live, who, n).flatten(2).amin(2) if who.ndim > 2 else who
            high = who.flatten(2).amax(2) if who.ndim > 2 else who
            if bool(((low == high) | (high == SILENT)).all()):
                tap.layout = Layout("index", n, index_of(high.reshape(-1), n), 2)
                return "routed"
        return "unknown"


def _ratios(values: list[Tensor], digits: list[int], base: int, n: int) -> Tensor:
    """Return the sample of every entry from the ratios of the passes."""
    u, *scaled = [g.double() for g in values]
    floor = 0.0 if base == 2 else max(1e-23, float(u.abs().max()) * 1e-25) if u.numel() else 0.0
    live, who, bad = u.abs() > floor, torch.zeros_like(u, dtype=torch.long), torch.zeros_like(u, dtype=torch.bool)
    for g, power in zip(scaled, digits, strict=True):
        ratio = torch.where(live, g / torch.where(live, u, 1.0), 1.0)
        size = ratio.abs().clamp_min(1e-300).log2().round()
        sign = ratio.sign() if base == 2 else torch.ones_like(ratio)
        bad |= ((ratio / torch.exp2(size) * sign - 1).abs() > SLACK) | ((size != 0) & (base == 2))
        bad |= ~live & (g.abs() > floor * 2.0**HALF)
        who += ((sign < 0).long() if base == 2 else (size.long() + HALF)) * power
    bad |= live & ((who < 0) | (who >= n))
    return torch.where(bad, MIXED, torch.where(live, who, SILENT)).cpu()


def _fold(g: Tensor) -> Tensor:
    """Return a random sum over all but the first two dimensions (the first, of a matrix): scaling stays exact."""
    g = g.flatten(2) if g.ndim > 2 else g
    if g.ndim < 2 or g.numel() == 0:
        return g
    r = torch.rand(g.shape[-1], generator=torch.Generator().manual_seed(g.shape[-1])) + 0.5
    return g.float() @ r.to(g.device) if g.dtype != torch.float64 else g @ r.to(g.device, g.dtype)


def first_of(x: Tensor, dims: int) -> Tensor:
    """Return the first entry along all dimensions but the first ``dims``."""
    while x.dim() > dims:
        x = x.select(-1, 0)
    return x
