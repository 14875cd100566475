"""What is kept of every open use until its window has passed: its gradients themselves, or a sketch of them.

A store answers one question: given what each open step's pushes count for now (κ, by parameter) and the direction D of the step
that is paid, what does every open row get? Rows are in the order of their steps, those of the coming step last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine.credit.memory import Numbers
from inrun.engine.credit.sketcher import Sketcher
from inrun.engine.microbatch import Microbatch, Replayed
from inrun.engine.sites import Scored
from inrun.layers import Formed, GradientShape, from_bits
from inrun.layers.layout import row_dots

#: One column in so many stands for all where the error of an estimate is estimated.
EVERY = 4


@dataclass
class Direction:
    """What one step is paid by: D per parameter, ``[k, *shape]`` per unit of pace, and what it was when steps were sketched."""

    whole: dict[int, Tensor]
    k: int
    _sums: dict[int, list[Tensor]] = field(default_factory=dict)
    _joined: dict[int, Tensor] = field(default_factory=dict)

    def joined(self, epoch: Epoch) -> Tensor:
        """Return SD in the columns of an epoch, ``[k, columns]``; made once."""
        if id(epoch) not in self._joined:
            self._joined[id(epoch)] = epoch.sketcher.joined(self.sums(epoch.sketcher), epoch.weights, divide=True)
        return self._joined[id(epoch)]

    def sums(self, sketcher: Sketcher) -> list[Tensor]:
        """Return the segment sums by parameter, ``[k, segments]``, as a sketcher takes them; made once."""
        if id(sketcher) not in self._sums:
            self._sums[id(sketcher)] = sketcher.all_sums(self.whole, self.k)
        return self._sums[id(sketcher)]


class ExactStore:
    """Per-sample gradients of all open steps, in host memory."""

    def __init__(self, scored: list[Scored]) -> None:
        """Nothing is kept yet."""
        self.scored = scored
        self.entries: list[ExactEntry] = []

    def capture(self, microbatches: list[Microbatch], quietly: Any) -> ExactEntry:
        """Copy what a backward left of every sample."""
        place = {s: i for i, s in enumerate(self.scored)}
        held: list[tuple[int, int, GradientShape]] = []
        first = 0
        for micro in microbatches:
            for kept in micro.kept:
                for shape in kept.shapes():
                    parts = tuple(part.detach().to("cpu", copy=True) for part in shape.parts())
                    held.append((place[kept.scored], first, kept.rule.restore(kept.constants, kept.kind, parts)))
            for replayed in micro.replays:
                for name, s in replayed.scored.items():
                    for shape in replayed.shapes(name, micro.n, quietly).values():
                        held.append((place[s], first, Formed(shape.form().detach().to("cpu", copy=True))))
            first += micro.n
        return ExactEntry(first, held)

    def parts(self, entry: ExactEntry, kappa: Numbers, direction: Direction) -> Tensor:
        """Return what every open row gets, ``[rows, k]``, in double precision."""
        found = []
        columns = direction.k
        host = {i: d.to("cpu") for i, d in direction.whole.items()}
        for row, open_ in zip(kappa, [*self.entries, entry], strict=True):
            part = torch.zeros(open_.n, columns, dtype=torch.float64)
            for i, first, shape in open_.held:
                if i in host and row[i] != 0.0:
                    v = host[i] if i not in open_.factors else host[i] * open_.factors[i]
                    c = shape.contract(v).double()
                    part[first : first + len(c)] += c * row[i]
            found.append(part)
        return torch.cat(found)

    def weights(self, entry: ExactEntry) -> Tensor:
        """Return the norm of every row's gradient, by which a rest is spread, ``[rows]``."""
        return torch.cat([open_.norms() for open_ in [*self.entries, entry]])

    def push(self, entry: ExactEntry) -> None:
        """Keep the coming step's rows."""
        self.entries.append(entry)

    def errors(self, count: int, columns: int) -> list[Tensor]:
        """Return the errors of the oldest steps' rows, ``[n, k]`` each."""
        return [torch.zeros(e.n, columns, dtype=torch.float64) for e in self.entries[:count]]

    def drop(self, count: int) -> None:
        """Let the oldest steps go."""
        self.entries = self.entries[count:]

    def nbytes(self) -> int:
        """Return the memory of what is kept."""
        return sum(self.nbytes_of(e) for e in self.entries)

    @staticmethod
    def nbytes_of(entry: ExactEntry) -> int:
        """Return the memory of one step's rows."""
        return sum(shape.nbytes for _, _, shape in entry.held) + sum(x.nbytes for x in entry.factors.values())


@dataclass
class ExactEntry:
    """The gradients of one step: parameter, first row, shape."""

    n: int
    held: list[tuple[int, int, GradientShape]]
    #: What the step's gradient was multiplied by when it entered the optimizer's memory, by parameter.
    factors: dict[int, Tensor] = field(default_factory=dict)
    _norms: Tensor | None = None

    def norms(self) -> Tensor:
        """Return the norm of every row's gradient."""
        if self._norms is None:
            squares = torch.zeros(self.n, dtype=torch.float64)
            for _, first, shape in self.held:
                g = shape.form().double()
                g = g.reshape(len(g), -1)
                squares[first : first + len(g)] += g.square().sum(1)
            self._norms = squares.sqrt()
        return self._norms


@dataclass(frozen=True)
class Epoch:
    """A time in which gradients are sketched in one way."""

    sketcher: Sketcher
    #: ρ by segment, per parameter.
    weights: list[Tensor]
    early: bool


@dataclass(frozen=True)
class RowsApart:
    """Rows of a parameter that samples touched, or touched most, with their sketched segments."""

    parameter: int
    #: The first of the step's rows that these belong to.
    first: int
    #: Row numbers ``[n, r]``, or ``[r]`` where all samples touched the same (positions); values ``[n, r, J]``.
    numbers: Tensor
    values: Tensor

    @classmethod
    def of(cls, parameter: int, first: int, numbers: Tensor, values: Tensor) -> RowsApart:
        """See whether all samples touched the same rows."""
        same = len(numbers) > 0 and bool((numbers == numbers[:1]).all())
        return cls(parameter, first, numbers[0].clone() if same else numbers, values)

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.values)

    def contract(self, table: Tensor) -> Tensor:
        """Return Σ_r ⟨values_nr, table[row_nr]⟩, ``[n, k]``, for a table ``[k, rows, J]``."""
        flat = self.values.flatten(1)
        if self.numbers.dim() == 1:
            return torch.stack([flat @ t[self.numbers].reshape(-1) for t in table], dim=1)
        return torch.stack([row_dots(t[self.numbers].flatten(1), flat) for t in table], dim=1)

    def squared(self, table: Tensor) -> Tensor:
        """Return Σ_r Σ_j values² · table²: the variance of :meth:`contract`."""
        return replace(self, values=self.values.square()).contract(table.square())

    def by_segment(self, rows: int) -> Tensor:
        """Return the sum over samples as a table ``[rows, J]``, in double precision."""
        values = self.values.double()
        found = torch.zeros(rows, values.shape[-1], dtype=torch.float64, device=values.device)
        if self.numbers.dim() == 1:
            return found.index_add_(0, self.numbers, values.sum(0))
        return found.index_add_(0, self.numbers.reshape(-1), values.reshape(-1, values.shape[-1]))


@dataclass
class SketchEntry:
    """The sketches of one step's rows."""

    epoch: int
    #: ``[n, columns]``; what is known exactly beyond the sketch, ⟨g_n, v⁰⟩ − ⟨Sg_n, Sv⁰⟩ per parameter, ``[n, k, parameters]``.
    sketch: Tensor
    beyond: Tensor
    #: Sv⁰ ``[k, columns]`` and its squared norm per parameter ``[k, parameters]``.
    known: Tensor
    known_square: Tensor
    #: Rows that are kept apart.
    rows: list[RowsApart]
    #: Σ_t κ (SD_t − f Sv⁰) over some columns, ``[k, columns / EVERY]``; the spread of what the rows apart get, per unit of κ and
    #: in all, ``[n, k]``.
    rest: Tensor
    spread_rows: Tensor
    rest_rows: Tensor

    @property
    def n(self) -> int:
        """Return the number of rows."""
        return len(self.sketch)

    @functools.cached_property
    def norms(self) -> Tensor:
        """Return the norm of every row's sketch."""
        return _norms(self)


class SketchStore:
    """Sketches of all open steps."""

    def __init__(self, early: Sketcher, usual: Sketcher) -> None:
        """Begin with weights of 1; ``early`` serves the first steps, which differ most from what comes later."""
        self.sketchers = {True: early, False: usual}
        self.early = True
        self.entries: list[SketchEntry] = []
        #: Sketcher and weights by epoch.
        self.epochs: dict[int, Epoch] = {0: Epoch(early, early.ones, True)}
        self.epoch = 0
        #: Segment sums of the direction that is known before the next backward.
        self.known: list[Tensor] | None = None
        #: That direction itself, by parameter.
        self.known_whole: dict[int, Tensor] = {}

    def restore(self, entries: list[SketchEntry], epochs: dict[int, Epoch], epoch: int, known: dict[int, Tensor]) -> None:
        """Go on from a saved state."""
        self.entries, self.epochs, self.epoch, self.known_whole = entries, epochs, epoch, known
        self.early = epochs[epoch].early
        self._know_again()

    def _know_again(self) -> None:
        if self.known_whole:
            self.known = self.sketcher.all_sums(self.known_whole, len(next(iter(self.known_whole.values()))))

    @property
    def sketcher(self) -> Sketcher:
        """Return the sketcher of the present epoch."""
        return self.epochs[self.epoch].sketcher

    @property
    def weights_now(self) -> list[Tensor]:
        """Return the weights of the present epoch."""
        return self.epochs[self.epoch].weights

    def begin_epoch(self, gains: dict[int, Tensor | float], early: bool) -> None:
        """Sketch with new weights from now on; open steps keep theirs."""
        changed, self.early = early != self.early, early
        self.epoch += 1
        sketcher = self.sketchers[early]
        self.epochs[self.epoch] = Epoch(sketcher, sketcher.weights_from(gains), early)
        self._forget_epochs()
        if changed:
            self._know_again()

    def _forget_epochs(self) -> None:
        alive = {e.epoch for e in self.entries} | {self.epoch}
        self.epochs = {k: w for k, w in self.epochs.items() if k in alive}

    def capture(self, microbatches: list[Microbatch], k: int, quietly: Any) -> SketchEntry:
        """Collect what a backward left of every sample."""
        sk = self.sketcher
        place = {s: i for i, s in enumerate(sk.scored)}
        n = sum(m.n for m in microbatches)
        sketch = torch.zeros(n, sk.columns, dtype=sk.dtype, device=sk.device)
        exact = torch.zeros(n, k, len(sk.scored), dtype=sk.dtype, device=sk.device)
        rows: list[RowsApart] = []
        of_exact: list[RowsApart] = []  # rows that the exact products have a part in
        first = 0
        for micro in microbatches:
            mine = slice(first, first + micro.n)
            for s, leaf in micro.sketches.items():
                if leaf.grad is not None:
                    sketch[mine, sk.places[place[s]]] += leaf.grad.to(sk.dtype)
            for s, leaf in micro.sums.items():
                if leaf.grad is not None:
                    exact[mine, :, place[s]] += leaf.grad.to(sk.dtype)
            for kept in micro.kept_rows:
                found = [RowsApart.of(place[kept.scored], first, r, v.to(sk.dtype)) for r, v in kept.rows()]
                rows += found
                of_exact += [] if kept.lookup else found
            for replayed in micro.replays:
                self._replay(replayed, micro.n, first, quietly, sketch, exact, rows)
            first += micro.n
        entry_known = torch.zeros(k, sk.columns, dtype=sk.dtype, device=sk.device)
        beyond = torch.zeros_like(exact)
        if self.known is not None:
            entry_known = sk.joined(self.known, self.weights_now, divide=True)
            inside = torch.stack([sk.by_parameter(sketch * v) for v in entry_known], dim=1)
            for r in of_exact:
                table = sk.table(r.parameter, self.known[r.parameter], self.weights_now[r.parameter])
                inside[r.first : r.first + r.n, :, r.parameter] += r.contract(table)
            beyond = exact - inside
        square = sk.by_parameter(entry_known.square())
        some = (sk.columns + EVERY - 1) // EVERY
        rest = torch.zeros(k, some, dtype=sk.dtype, device=sk.device)
        rest_rows = torch.zeros(n, k, dtype=sk.dtype, device=sk.device)
        return SketchEntry(self.epoch, sketch, beyond, entry_known, square, rows, rest, torch.zeros_like(rest_rows), rest_rows)

    def _replay(self, replayed: Replayed, n: int, first: int, quietly: Any, sketch: Tensor, exact: Tensor, rows: list[Any]) -> None:
        """Sketch what a module without a rule left, which runs again for it."""
        sk = self.sketcher
        for name, s in replayed.scored.items():
            i = sk.scored.index(s)
            for shape in replayed.shapes(name, n, quietly).values():
                g = Formed(shape.form().reshape(n, -1).to(sk.dtype))
                found = g.sketch(sk.signs[i], self.weights_now[i], sk.plans[i])
                sketch[first : first + n, sk.places[i]] += found[0]
                if len(found) == 3:
                    rows.append(RowsApart.of(i, first, from_bits(found[2]), found[1]))
                if self.known_whole.get(i) is not None:
                    exact[first : first + n, :, i] += g.contract(
                        self.known_whole[i].reshape(len(self.known_whole[i]), -1).to(sk.dtype)
                    )

    @staticmethod
    def fits(open_: list[SketchEntry], sums: Tensor, sketcher: Sketcher) -> Tensor:
        """Return f, ``[steps, k, parameters]``: how much of Sv⁰ is in SD, for steps of one epoch."""
        known = torch.stack([e.known for e in open_])
        square = torch.stack([e.known_square for e in open_])
        inner = sketcher.by_parameter(known * sums)
        return torch.where(square > 0, inner / torch.where(square > 0, square, 1.0), 0.0)

    def _by_epoch(self, all_: list[SketchEntry]) -> list[tuple[int, slice]]:
        found: list[tuple[int, slice]] = []
        start = 0
        for i in range(1, len(all_) + 1):
            if i == len(all_) or all_[i].epoch != all_[start].epoch:
                found.append((all_[start].epoch, slice(start, i)))
                start = i
        return found

    def parts(self, entry: SketchEntry, kappa: Numbers, direction: Direction) -> Tensor:
        """Return what every open row gets, ``[rows, k]``, in double precision."""
        all_ = [*self.entries, entry]
        found: list[Tensor] = []
        for epoch, group in self._by_epoch(all_):
            sk, weights, some = self.epochs[epoch].sketcher, self.epochs[epoch].weights, all_[group]
            segments, sums = direction.sums(sk), direction.joined(self.epochs[epoch])
            counts = torch.tensor(kappa[group], dtype=sk.dtype, device=sk.device)
            fitted = self.fits(some, sums, sk) * counts.unsqueeze(1)
            tables = {i: sk.table(i, segments[i], weights[i]) for i in {r.parameter for e in some for r in e.rows}}
            common = _common(kappa[group])
            if common is not None:
                sums = sums * sk.spread_out(torch.tensor(common, dtype=sk.dtype, device=sk.device))
            for j, e in enumerate(some):
                if common is not None:
                    part = (e.sketch @ sums.t()) * float(np.abs(kappa[group][j]).max() * np.sign(kappa[group][j].sum()))
                else:
                    part = e.sketch @ (sums * sk.spread_out(counts[j])).t()
                part += torch.einsum("nkl,kl->nk", e.beyond, fitted[j])
                for r in e.rows:
                    count = float(kappa[group][j, r.parameter])
                    if count != 0.0:
                        part[r.first : r.first + r.n] += r.contract(tables[r.parameter]) * count
                found.append(part.double())
        return torch.cat(found)

    def note(self, entry: SketchEntry, kappa: Numbers, direction: Direction, now: bool) -> None:
        """Remember what was paid, as far as the errors need it: Σ_t κ (SD_t − f Sv⁰) over some columns, if it is to be ``now``."""
        sk, weights, segments = self.sketcher, self.weights_now, direction.sums(self.sketcher)
        for r in entry.rows:
            if sk.plans[r.parameter].segment > 1:
                square = r.squared(sk.table(r.parameter, segments[r.parameter], weights[r.parameter]))
                entry.spread_rows[r.first : r.first + r.n] += square
        entry.spread_rows.sqrt_()
        all_ = [*self.entries, entry]
        for epoch, group in self._by_epoch(all_) if now else []:
            sk, some = self.epochs[epoch].sketcher, all_[group]
            sums = direction.joined(self.epochs[epoch])
            f = self.fits(some, sums, sk)
            counts = torch.tensor(kappa[group], dtype=sk.dtype, device=sk.device)
            for j, e in enumerate(some):
                missed = sums[:, ::EVERY] - sk.spread_out(f[j], EVERY) * e.known[:, ::EVERY]
                e.rest.addcmul_(missed, sk.spread_out(counts[j], EVERY))
                e.rest_rows += e.spread_rows * float(np.abs(kappa[group][j]).max())

    def weights(self, entry: SketchEntry) -> Tensor:
        """Return the norm of every row's sketch, by which a rest is spread, ``[rows]``."""
        return torch.cat([*(e.norms for e in self.entries), entry.norms])

    def push(self, entry: SketchEntry) -> None:
        """Keep the coming step's rows."""
        self.entries.append(entry)

    def errors(self, count: int, columns: int) -> list[Tensor]:
        """Return the estimated errors of the oldest steps' rows, ``[n, k]`` each.

        The variance of ⟨Sg, SV⟩ is about Σ_b (Sg)_b² (SV)_b² over the buckets that hold more than one entry; it is mixed with the
        step's mean, since single estimates of a variance are rough.
        """
        found = []
        for e in self.entries[:count]:
            lossy = self.epochs[e.epoch].sketcher.lossy[::EVERY]
            own = (e.sketch[:, ::EVERY].square() * lossy) @ e.rest.square().t() * EVERY + e.rest_rows.square()
            found.append((0.5 * own + 0.5 * own.mean(0)).sqrt().double())
        return found

    def drop(self, count: int) -> None:
        """Let the oldest steps go."""
        self.entries = self.entries[count:]
        self._forget_epochs()

    def nbytes(self) -> int:
        """Return the memory of what is kept."""
        return sum(self.nbytes_of(e) for e in self.entries)

    @staticmethod
    def nbytes_of(entry: SketchEntry) -> int:
        """Return the memory of one step's rows."""
        kept = sum(x.nbytes for x in (entry.sketch, entry.beyond, entry.known, entry.rest))
        return kept + sum(x.nbytes for r in entry.rows for x in (r.numbers, r.values))


def _norms(e: SketchEntry) -> Tensor:
    squares = e.sketch.square().sum(1)
    for r in e.rows:
        squares[r.first : r.first + r.n] += r.values.square().flatten(1).sum(1)
    return squares.sqrt().double()


def _common(kappa: Numbers) -> Numbers | None:
    """Return which parameters step, as ones, where all that do have the same κ at every open step; else None."""
    stepping = kappa.any(0)
    moving = kappa[:, stepping]
    return stepping.astype(float) if moving.size == 0 or bool((moving == moving[:, :1]).all()) else None
