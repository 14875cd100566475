"""What is kept of every open use until its window has passed: a sketch of its gradients.

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

from inrun.old.engine.credit.direction import Direction, Epoch
from inrun.old.engine.credit.memory import Numbers
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.engine.microbatch import Microbatch, Replayed
from inrun.old.engine.processes import Processes
from inrun.old.layers import Formed, add_up, from_bits
from inrun.old.layers.layout import row_dots, scratch_like

#: One column in so many stands for all where the error of an estimate is estimated.
EVERY = 4
#: Estimates of errors are multiplied by this: in the runs of docs/whole-credit.md they were wider than errors by a tenth or more,
#: whatever the rate, the corpus and the validation rows, since the spreads of rows apart are added up as if they were one.
CALIBRATION = 0.9


@dataclass(frozen=True)
class RowsApart:
    """Rows of a parameter that samples touched, or touched most, with their sketched segments."""

    parameter: int
    #: The first of the step's rows that these belong to.
    first: int
    #: Row numbers ``[n, r]``, or ``[r]`` where all samples touched the same (positions); values ``[n, r, J]``.
    numbers: Tensor
    values: Tensor
    #: In packed documents n above are chunks of them: the document of each, ``[n]``, in order.
    owner: Tensor | None = None

    @classmethod
    def of(cls, parameter: int, first: int, numbers: Tensor, values: Tensor, owner: Tensor | None = None) -> RowsApart:
        """See whether all samples touched the same rows."""
        same = len(numbers) > 0 and bool((numbers == numbers[:1]).all())
        return cls(parameter, first, numbers[0].clone() if same else numbers, values, owner)

    @functools.cached_property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.values) if self.owner is None else int(self.owner[-1]) + 1

    def _by_sample(self, x: Tensor) -> Tensor:
        return x if self.owner is None else add_up(x, self.owner, self.n)

    def contract(self, table: Tensor) -> Tensor:
        """Return Σ_r ⟨values_nr, table[row_nr]⟩, ``[n, k]``, for a table ``[k, rows, J]``."""
        flat = self.values.flatten(1)
        if self.numbers.dim() == 1:
            return self._by_sample(torch.stack([flat @ t[self.numbers].reshape(-1) for t in table], dim=1))
        index = self.numbers.reshape(-1)
        picked = scratch_like(table, (len(index), table.shape[-1]), "rows apart")
        dots = [row_dots(torch.index_select(t, 0, index, out=picked).view(flat.shape), flat) for t in table]
        return self._by_sample(torch.stack(dots, dim=1))

    def energies(self) -> Tensor:
        """Return Σ_r ‖values_nr‖², ``[n]``."""
        return self._by_sample(self.values.square().flatten(1).sum(1))

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
    #: Σ_n S g_n of all processes by parameter, ``[buckets]``; of the coming step only.
    entering: list[Tensor] = field(default_factory=list)

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

    def begin_epoch(self, moves: dict[int, tuple[Tensor | float, Tensor]], early: bool) -> None:
        """Sketch with new weights from now on; open steps keep theirs."""
        changed, self.early = early != self.early, early
        self.epoch += 1
        sketcher = self.sketchers[early]
        self.epochs[self.epoch] = Epoch(sketcher, sketcher.weights_from(moves), early)
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
                found = [RowsApart.of(place[kept.scored], first, r, v.to(sk.dtype), kept.owner) for r, v in kept.rows()]
                rows += found
                of_exact += [] if kept.lookup else found
            for replayed in micro.replays:
                self._replay(replayed, micro.n, first, quietly, sketch, exact, rows)
            first += micro.n
        entry_known = torch.zeros(k, sk.columns, dtype=sk.dtype, device=sk.device)
        beyond = torch.zeros_like(exact)
        if self.known is not None:
            entry_known = self.epochs[self.epoch].joined(self.known)
            inside = torch.stack([sk.by_parameter(sketch * v) for v in entry_known], dim=1)
            for r in of_exact:
                table = self.epochs[self.epoch].table(r.parameter, self.known[r.parameter])
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

    def parts(self, some: list[SketchEntry], kappa: Numbers, direction: Direction) -> Tensor:
        """Return what the rows of some steps get, ``[rows, k]``, in double precision; ``kappa`` ``[steps, parameters]``."""
        found: list[Tensor] = []
        for number, group in self._by_epoch(some):
            epoch, mine, of = self.epochs[number], some[group], kappa[group]
            sk, segments, sums = epoch.sketcher, direction.sums(epoch.sketcher), direction.joined(epoch)
            counts = torch.tensor(of, dtype=sk.dtype, device=sk.device)
            fitted = self.fits(mine, sums, sk) * counts.unsqueeze(1)
            tables = {i: epoch.table(i, segments[i]) for i in {r.parameter for e in mine for r in e.rows}}
            common = _common(of)
            if common is not None:
                sums = sums * sk.spread_out(torch.tensor(common, dtype=sk.dtype, device=sk.device))
            for j, e in enumerate(mine):
                if common is not None:
                    part = (e.sketch @ sums.t()) * float(np.abs(of[j]).max() * np.sign(of[j].sum()))
                else:
                    part = e.sketch @ (sums * sk.spread_out(counts[j])).t()
                part += torch.einsum("nkl,kl->nk", e.beyond, fitted[j])
                for r in e.rows:
                    count = float(of[j, r.parameter])
                    if count != 0.0:
                        part[r.first : r.first + r.n] += r.contract(tables[r.parameter]) * count
                found.append(part.double())
        return torch.cat(found)

    def measure_rows(self, entry: SketchEntry, direction: Direction) -> None:
        """Estimate the spread of what rows apart get, per unit of κ, by the direction of their own step."""
        epoch = self.epochs[entry.epoch]
        for r in entry.rows:
            if epoch.sketcher.plans[r.parameter].row_segment > 1:
                table = epoch.table(r.parameter, direction.sums(epoch.sketcher)[r.parameter])
                entry.spread_rows[r.first : r.first + r.n] += r.squared(table)
        entry.spread_rows.sqrt_()

    def note(self, some: list[SketchEntry], kappa: Numbers, direction: Direction, sizes: Numbers) -> None:
        """Remember what steps were paid, as far as the errors need it: Σ_t κ (SD_t − f Sv⁰) over some columns, and Σ|κ|."""
        for number, group in self._by_epoch(some):
            epoch, mine = self.epochs[number], some[group]
            sk, sums = epoch.sketcher, direction.joined(epoch)
            f = self.fits(mine, sums, sk)
            counts = torch.tensor(kappa[group], dtype=sk.dtype, device=sk.device)
            for j, e in enumerate(mine):
                missed = sums[:, ::EVERY] - sk.spread_out(f[j], EVERY) * e.known[:, ::EVERY]
                e.rest.addcmul_(missed, sk.spread_out(counts[j], EVERY))
                e.rest_rows += e.spread_rows * float(sizes[group][j])

    def sketchers_of(self, some: list[SketchEntry]) -> set[Sketcher]:
        """Return the ways in which some steps were sketched."""
        return {self.epochs[e.epoch].sketcher for e in some}

    @staticmethod
    def weights(some: list[SketchEntry]) -> Tensor:
        """Return the norm of every row's sketch, by which a rest is spread, ``[rows]``."""
        return torch.cat([e.norms for e in some])

    def push(self, entry: SketchEntry) -> None:
        """Keep the coming step's rows."""
        entry.entering = []
        self.entries.append(entry)

    def errors(self, count: int, columns: int, processes: Processes | None) -> list[Tensor]:
        """Return the estimated errors of the oldest steps' rows, ``[n, k]`` each.

        The variance of ⟨Sg, SV⟩ is about Σ_b (Sg)_b² (SV)_b² over the buckets that hold more than one entry; it is mixed with the
        step's mean (on all processes, if they are asked), since single estimates of a variance are rough.
        """
        found = []
        for e in self.entries[:count]:
            lossy = self.epochs[e.epoch].sketcher.lossy[::EVERY]
            found.append((e.sketch[:, ::EVERY].square() * lossy) @ e.rest.square().t() * EVERY + e.rest_rows.square())
        means = [own.mean(0) for own in found]
        if processes is not None and processes.several and found:
            sums = torch.stack([torch.cat([own.double().sum(0).cpu(), torch.tensor([float(len(own))])]) for own in found])
            sums = processes.summed("whole credit", sums)
            means = [(x[:-1] / x[-1].clamp_min(1.0)).to(own) for x, own in zip(sums, found, strict=True)]
        return [(0.5 * own + 0.5 * mean).sqrt().double() * CALIBRATION for own, mean in zip(found, means, strict=True)]

    def drop(self, count: int) -> None:
        """Let the oldest steps go."""
        self.entries = self.entries[count:]
        self._forget_epochs()

    def nbytes(self) -> int:
        """Return the memory of what is kept: sketches, and what directions and gradients are sketched by."""
        held = [*self.known_whole.values(), *(self.known or [])]
        held += [w for epoch in self.epochs.values() for w in (*epoch.weights, *epoch.inverse, *epoch.inverse_apart.values())]
        held += [x for e in self.epochs.values() for x in e.sketcher.signs]
        different = {x.data_ptr(): x.nbytes for x in held}  # signs are shared
        return sum(self.nbytes_of(e) for e in self.entries) + sum(different.values())

    def expected_bytes(self, entry: SketchEntry, steps: int, early: int, refresh: int) -> int:
        """Return the most that windows of so many steps will take, given one of the ``early`` ones, whose sketches are finer."""
        mine, usual = self.sketchers[True], self.sketchers[False]
        rows = sum(x.nbytes for r in entry.rows for x in (r.numbers, r.values)) + entry.beyond.nbytes
        first = self.nbytes_of(entry)
        later = rows + (first - rows) * usual.columns // max(mine.columns, 1)
        k, size = len(entry.known), entry.sketch.element_size()
        segments, fine = sum(p.segments for p in usual.plans), sum(p.rows * p.per_row_apart for p in usual.plans)
        apart = sum(p.rows * p.per_row_apart for p in usual.plans if p.fine)
        epochs = min(steps // refresh + 2, 3 + steps)
        entries = sum(len(x) for x in mine.signs) + k * sum(s.parameter.numel() for s in usual.scored)
        always = size * (entries + epochs * (2 * segments + apart) + 2 * k * fine)
        return min(steps, early) * first + max(0, steps - early) * later + always

    @staticmethod
    def nbytes_of(entry: SketchEntry) -> int:
        """Return the memory of one step's rows."""
        kept = sum(x.nbytes for x in (entry.sketch, entry.beyond, entry.known, entry.rest))
        return kept + sum(x.nbytes for r in entry.rows for x in (r.numbers, r.values))


def _norms(e: SketchEntry) -> Tensor:
    squares = e.sketch.square().sum(1)
    for r in e.rows:
        squares[r.first : r.first + r.n] += r.energies()
    return squares.sqrt().double()


def _common(kappa: Numbers) -> Numbers | None:
    """Return which parameters step, as ones, where all that do have the same κ at every open step; else None."""
    stepping = kappa.any(0)
    moving = kappa[:, stepping]
    return stepping.astype(float) if moving.size == 0 or bool((moving == moving[:, :1]).all()) else None
