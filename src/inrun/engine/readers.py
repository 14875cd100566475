"""What a step reads of the per-sample gradients of each parameter, and how it leaves the backward.

Probes are leaves that hold nothing (``zeros(()).expand(shape)``). What a tap returns as their gradients is added up by autograd:
all taps of a parameter share its probes, since everything read is linear in the gradient. Rows of tables have probes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.engine.sketch import Epoch, Sketcher
from inrun.layers.gradients import Formed, LookUp, PerSample
from inrun.layers.tap import Leaf, Tap


def empty_probe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a leaf of a shape that takes no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape).detach().requires_grad_()


@dataclass(eq=False)
class Rows:
    """Rows of a table that one tap touched, ``[n, r]``, and their values ``[n, r, per_row]`` as gradients of probes."""

    tensor: int
    values: Tensor
    #: The rows' numbers: read of the data in a look-up, the gradient of a probe where they are the heaviest rows.
    numbers: Tensor | None = None
    heaviest: Tensor | None = None

    def result(self) -> tuple[Tensor, Tensor] | None:
        """Return numbers and values, or None where nothing arrived."""
        if self.values.grad is None:
            return None
        numbers = self.numbers if self.heaviest is None else self.heaviest.grad
        assert numbers is not None
        return numbers.long(), self.values.grad


@dataclass(eq=False)
class Request:
    """What one microbatch reads."""

    n: int
    dtype: torch.dtype
    #: How gradients are sketched, if they are.
    sketcher: Sketcher | None = None
    epoch: Epoch | None = None
    #: Directions to contract with, ``[k, *shape]`` by place; missing ones are 0.
    directions: Mapping[int, Tensor] = field(default_factory=dict)
    k: int = 0
    #: Places with one direction more, of random signs.
    signed: frozenset[int] = frozenset()
    #: Whether Σ|terms| of every entry is wanted, of tensors of which every entry is kept.
    sizes: bool = False
    #: Positions of the longest document where documents are packed.
    longest: int | None = None
    #: Whether gradients are kept as they are, to be read when the direction is known; and what was kept.
    keeps: bool = False
    kept: list[tuple[int, PerSample]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)


class LeafReader:
    """Reads one parameter; :meth:`begin` tells what for."""

    def __init__(self, leaf: Leaf, place: int) -> None:
        self.leaf, self.place = leaf, place
        self.request: Request
        self.sketch: Tensor | None = None
        self.products: Tensor | None = None
        self.sizes: Tensor | None = None
        #: The lowest precision in which the gradient was computed; None where none was.
        self.precision: torch.dtype | None = None

    def begin(self, request: Request) -> None:
        """Make the probes of a microbatch, or clear those of the last one if they fit."""
        self.request = request
        wide = request.sketcher.plans[self.place].buckets if request.sketcher else 0
        self.sketch = self._probe(self.sketch, (request.n, wide))
        self.products = self._probe(
            self.products, (request.n, request.k + (self.place in request.signed) if self._contracts else 0)
        )
        wants = request.sizes and request.sketcher is not None and request.sketcher.plans[self.place].lossless
        self.sizes = empty_probe(tuple(self.leaf.parameter.shape), request.dtype, self.leaf.parameter.device) if wants else None

    def _probe(self, before: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        if shape[1] == 0:
            return None
        if before is None or before.shape != shape or before.dtype != self.request.dtype:
            return empty_probe(shape, self.request.dtype, self.leaf.parameter.device)
        before.grad = None
        return before

    @property
    def _contracts(self) -> bool:
        """Whether inner products are wanted: a sketch that keeps every entry has them."""
        r = self.request
        return self.place in r.directions and (r.sketcher is None or not r.sketcher.plans[self.place].lossless)

    def probes(self, tap: Tap) -> list[Tensor]:
        """Return the probes of a tap: products, sketch, rows of a table."""
        found = [p for p in (self.sizes, self.products, self.sketch) if p is not None]
        rows = self._rows(tap)
        if rows is not None:
            found += [rows.values] if rows.heaviest is None else [rows.values, rows.heaviest]
        return found

    def _rows(self, tap: Tap) -> Rows | None:
        r, place = self.request, self.place
        if r.sketcher is None or r.sketcher.plans[place].fine == 0:
            return None
        if place not in tap.rows:
            plan, device = r.sketcher.plans[place], self.leaf.parameter.device
            rows: Rows | None = None
            if self._looks_up(tap):
                t = r.longest or tap.shape[:-1].numel() // r.n
                rows = Rows(place, empty_probe((r.n, t, plan.per_row), r.dtype, device))
            elif plan.heavy:
                heaviest = empty_probe((r.n, plan.heavy), torch.float64, device)
                rows = Rows(place, empty_probe((r.n, plan.heavy, plan.per_row), r.dtype, device), heaviest=heaviest)
            tap.rows[place] = rows
            if rows is not None:
                r.rows.append(rows)
        return tap.rows[place]  # type: ignore[no-any-return]

    @staticmethod
    def _looks_up(tap: Tap) -> bool:
        return tap.function == "embedding" and tap.targets[0].is_leaf

    # In the backward

    def note(self, dtype: torch.dtype) -> None:
        """Note in which precision a tap computes: under autocast it is not that of the parameter."""
        before = self.precision or self.leaf.parameter.dtype
        self.precision = dtype if dtype.itemsize < before.itemsize else before

    def keep(self, gradient: PerSample, tap: Tap) -> bool:
        """Keep gradients until the step's direction is known."""
        if self.request.keeps:
            self.request.kept.append((self.place, own(gradient, tap)))
        return self.request.keeps

    def look_up(self, gradient: LookUp, tap: Tap) -> list[Tensor | None] | None:
        """Return what is read of a look-up without forming its gradient; None where it is small enough to form."""
        r = self.request
        if r.keeps:
            r.kept.append((self.place, own(gradient, tap)))
            return [None for _ in self.probes(tap)]
        products = None
        if self.products is not None:
            products = contract_rows(gradient, r.directions[self.place]).to(r.dtype)
        if r.sketcher is None:
            return [products] if self.products is not None else []
        rows = self._rows(tap)
        if rows is None or r.sketcher.plans[self.place].lossless:
            return None
        assert r.epoch is not None
        found: list[Tensor | None] = [] if self.products is None else [products]
        if self.sketch is not None:
            found.append(None)
        rows.numbers = gradient.tokens
        return [*found, r.sketcher.of_rows(self.place, gradient.b, gradient.tokens, r.epoch)]

    def collect(self, n: int, tap: Tap) -> Collected:
        """Return a collector for a tap that fires."""
        return Collected(self, self._rows(tap))


def contract_rows(gradient: LookUp, v: Tensor) -> Tensor:
    """Return ⟨g_n, v⟩ for look-ups, ``[n, k]``, given directions ``[k, rows, d]``."""
    found = [torch.einsum("ntd,ntd->n", gradient.b, one[gradient.tokens].to(gradient.b.dtype)) for one in v]
    return torch.stack(found, 1)


def products(flat: Tensor, v: Tensor, k: int) -> Tensor:
    """Return inner products of gradients ``[n, entries]`` with directions, the first k apart: others change no bit of them."""
    first = torch.mv(flat, v[0]).unsqueeze(1) if k == 1 else flat @ v[:k].t()
    return first if len(v) == k else torch.cat([first, flat @ v[k:].t()], 1)


class Collected:
    """Takes the per-sample gradients of one tap, chunk by chunk."""

    def __init__(self, reader: LeafReader, rows: Rows | None) -> None:
        self.reader, self.rows = reader, rows
        r = reader.request
        v = r.directions[reader.place] if reader.products is not None else None
        self._directions = None if v is None else v.reshape(len(v), -1)
        self._sizes: Tensor | None = None
        #: Gradients of tensors made of the parameter, pulled back, where they are kept.
        self._kept: list[Tensor] = []
        self._parts: list[list[Tensor]] = [[] for p in (reader.products, reader.sketch) if p is not None]
        if rows is not None and rows.heaviest is not None:
            self._parts += [[], []]

    def take_sizes(self, gradient: PerSample) -> None:
        """Take Σ|terms| of every entry."""
        if self.reader.sizes is not None:
            found = gradient.sizes()
            self._sizes = None if found is None else found.to(self.reader.request.dtype).view(self.reader.sizes.shape)

    def add(self, low: int, high: int, g: Tensor) -> None:
        """Read some samples."""
        r, place, made = self.reader.request, self.reader.place, []
        if r.keeps:
            self._kept.append(g)
            return
        flat = g.reshape(len(g), -1)
        if self._directions is not None:
            made.append(products(flat, self._directions.to(flat.dtype), r.k).to(r.dtype))
        if self.reader.sketch is not None:
            assert r.sketcher is not None and r.epoch is not None
            if self.rows is not None and self.rows.heaviest is not None:
                buckets, numbers, values = r.sketcher.heavy_rows(place, g, r.epoch)
                made += [buckets, values, numbers.double()]
            else:
                made.append(r.sketcher.of_gradients(place, g, r.epoch))
        for parts, x in zip(self._parts, made, strict=True):
            parts.append(x)

    def result(self) -> list[Tensor | None]:
        """Return the gradients of the probes."""
        if self._kept:
            self.reader.request.kept.append((self.reader.place, Formed(torch.cat(self._kept))))
        found: list[Tensor | None] = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._parts]
        missing = self.rows is not None and self.rows.heaviest is None
        sizes = [] if self.reader.sizes is None else [self._sizes]
        return [*sizes, *found, None] if missing else [*sizes, *found]


def own(gradient: PerSample, tap: Tap) -> PerSample:
    """Let a gradient that outlives its microbatch have its own copy of the batch, which the loop may overwrite."""
    for name in ("a", "tokens") if tap.reads_inputs else ():
        if isinstance(x := getattr(gradient, name, None), Tensor):
            setattr(gradient, name, x.clone())
    return gradient
