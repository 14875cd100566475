"""How a step is scored: what is read of its backward, and what its move pays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.engine.move import Moved, Mover
from inrun.engine.parameters import Parameters
from inrun.engine.readers import Request
from inrun.engine.reading import Reading, clip_from_entries, clip_from_products, correct, joined
from inrun.engine.sketch import SketchedDirection, Sketcher
from inrun.engine.validation import Gradients, Validation
from inrun.engine.window import Entering, Settled, Window
from inrun.errors import ConfigurationError, ValidationError
from inrun.layers.gradients import LookUp
from inrun.ledger.labels import Label
from inrun.optimizers import NO_MEMORY, Memory, UpdateRule

log = logging.getLogger("inrun")
#: Steps after which sketches get new weights and signs; later every 22.
REFRESH_AT, REFRESH = (1, 3, 10, 22), 22
Points = Sequence[tuple[float, float]]
MIDPOINT: Points = ((0.5, 1.0),)


@dataclass
class Books:
    """The accounts of one step, ``[k]`` each in float64, on the device; losses where they were measured."""

    data: Tensor
    spread: Tensor
    decay: Tensor | None = None
    inherited: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    points: int | None = None

    @property
    def whole(self) -> Tensor:
        """Return all that the move is said to be worth."""
        return sum((x for x in (self.decay, self.inherited) if x is not None), self.data)


@dataclass
class Outcome:
    """What a step gave: contributions ``[n, k]``, its books, and the uses that were settled by it."""

    labels: list[Label]
    losses: Tensor
    contributions: Tensor
    books: Books
    settled: list[Settled] = field(default_factory=list)


class Scorer:
    """One method. Created once per run; a step calls :meth:`begin`, :meth:`request`, :meth:`clip` and :meth:`score`."""

    #: Whether more points of the move may be taken.
    refines = False

    def __init__(self, parameters: Parameters, validation: Validation, rules: Sequence[UpdateRule]) -> None:
        self.parameters, self.validation, self.rules = parameters, validation, list(rules)

    def begin(self, step: int) -> None:
        """Work out what must be known before the forward."""

    def request(self, n: int, longest: int | None) -> Request:
        """Return what a microbatch of n samples reads."""
        raise NotImplementedError

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Return the factor between an optimizer's gradients and the samples', as a tensor of no dimensions."""
        raise NotImplementedError

    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Score a step whose optimizers have stepped."""
        raise NotImplementedError

    def before_move(self, step: int, clips: dict[int, Tensor]) -> None:
        """Work out what needs the weights before the move and the gradients that the optimizer is about to use."""

    def again(self, step: int, mover: Mover, points: Points) -> Books:
        """Score the same step at other points of its move."""
        raise NotImplementedError

    def own_credits(self) -> Tensor:
        """Return the contributions of the step that is not final yet, ``[n, k]``."""
        raise NotImplementedError

    def spread(self) -> Tensor:
        """Return Σ|c| of all that the step pays, ``[k]``."""
        raise NotImplementedError

    def slope(self, step: int, mover: Mover, place: float) -> Tensor:
        """Return −dℓ/ds at a place s of the move, ``[k]``."""
        raise NotImplementedError

    def forgo(self, remember: bool) -> list[Settled]:
        """The step pays nobody; ``remember`` tells whether its uses may earn by later ones."""
        return []

    def commit(self) -> list[Settled]:
        """Make the step's score final; return the uses that it settles."""
        return []

    def settle_all(self) -> list[Settled]:
        """Settle all uses that are open."""
        return []

    def nbytes(self) -> int:
        """Return the memory that is held between steps."""
        return 0


class FirstScorer(Scorer):
    """Theorems 1 and 2 of the paper, with the SGD proxy: η c ⟨g_n, ∇ℓ(w)⟩, or η c ⟨g_n, ∇ℓ(w) − (η/2) H Σ g⟩."""

    def __init__(self, parameters: Parameters, validation: Validation, rules: Sequence[UpdateRule], second: bool = False) -> None:
        super().__init__(parameters, validation, rules)
        self.second = second
        self._found: Gradients

    def begin(self, step: int) -> None:
        """Take the validation gradient at the weights before the step."""
        self._step = step
        if not self.second:
            self._found = self.validation.gradients(self.parameters.tensors(), step)

    def request(self, n: int, longest: int | None) -> Request:
        """Contract with the validation gradient, or keep the gradients until it is known."""
        dtype = self.parameters.dtype
        if self.second:
            return Request(n, dtype, keeps=True, longest=longest)
        directions = {i: g.to(dtype) for i, g in enumerate(self._found.raw) if g is not None}
        return Request(n, dtype, directions=directions, k=len(self._found.labels), longest=longest)

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Compare with the samples' gradients; `second` takes its gradient here, where the batch's is known."""
        some = self.parameters.of(optimizer)
        if not self.second:
            return clip_from_products(readings, some, readings and {i: g for i, g in enumerate(self._found.raw) if g is not None})
        known, now = [], []
        for s in some:
            totals = [g.total() for r in readings for i, g in r.kept if i == s.place]
            if totals and s.parameter.grad is not None:
                known.append(torch.stack(totals).sum(0).reshape(-1).to(self.parameters.dtype))
                now.append(s.parameter.grad.reshape(-1).to(self.parameters.dtype))
        from inrun.engine.reading import ratio

        return ratio(torch.cat(known), torch.cat(now)) if known else torch.ones((), dtype=self.parameters.dtype)

    def rates(self, clips: dict[int, Tensor]) -> list[Tensor | None]:
        """Return ±η c by place, None for parameters whose optimizer has not stepped."""
        found: list[Tensor | None] = []
        for s in self.parameters.scored:
            clip = clips.get(s.optimizer)
            sign = -1.0 if s.group.get("maximize") else 1.0
            lr = s.group["lr"]
            rate = None if clip is None else clip * (lr if isinstance(lr, Tensor) else float(lr)) * sign
            found.append(rate)
        return found

    def before_move(self, step: int, clips: dict[int, Tensor]) -> None:
        """Take ∇ℓ − (η/2) H Σg, with the gradient that the optimizer is about to use; the weights have not moved yet."""
        if not self.second:
            return
        rates = self.rates({i: torch.ones((), dtype=self.parameters.dtype) for i in range(len(self.rules))})
        move = [
            None if s.parameter.grad is None or r is None else s.parameter.grad * -r
            for s, r in zip(self.parameters.scored, rates, strict=True)
        ]
        self._found = self.validation.gradients(self.parameters.tensors(), step, move)

    @torch.no_grad()
    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Add up over parameters."""
        found, dtype = self._found, self.parameters.dtype
        rates, k = self.rates(clips), len(found.labels)
        parts = [self._contributions(r, rates, k) for r in readings]
        contributions = torch.cat(parts) if parts else torch.zeros(0, k, dtype=dtype)
        books = Books(contributions.double().sum(0), contributions.double().abs().sum(0), points=1)
        return Outcome(found.labels, found.losses, contributions, books)

    def _contributions(self, reading: Reading, rates: list[Tensor | None], k: int) -> Tensor:
        dtype, device = self.parameters.dtype, self.parameters.device
        total = torch.zeros(reading.n, k, dtype=dtype, device=device)
        if self.second:
            for i, g in reading.kept:
                v, rate = self._found.raw[i], rates[i]
                if v is None or rate is None:
                    continue
                if isinstance(g, LookUp):
                    from inrun.engine.readers import contract_rows

                    total += contract_rows(g, v).to(dtype) * rate
                    continue
                flat = v.reshape(k, -1)
                for low, high, part in g.chunks():
                    total[low:high] += (part.reshape(len(part), -1) @ flat.t().to(part.dtype)).to(dtype) * rate
            return total
        some = [(x, r) for i, x in reading.products.items() if (r := rates[i]) is not None]
        if some:
            weights = torch.stack([r for _, r in some]).to(dtype)
            total = torch.einsum("pnk,p->nk", torch.stack([x for x, _ in some]), weights)
        return total


class WholeScorer(Scorer):
    """Credit through the optimizer's memory, or (``own_step``) only the share of a step's own move."""

    refines = True

    def __init__(
        self,
        parameters: Parameters,
        validation: Validation,
        rules: Sequence[UpdateRule],
        sketcher: Sketcher,
        tables: Sequence[int],
        own_step: bool = False,
    ) -> None:
        super().__init__(parameters, validation, rules)
        self.sketcher, self.tables, self.own_step = sketcher, [i for i in tables if sketcher.plans[i].fine], own_step
        self.window: Window | None = None
        self.steps = 0
        #: The last direction, by place, and its sketch.
        self.known: dict[int, Tensor] = {}
        self._sketched: SketchedDirection | None = None
        #: Memory of coupled weight decay and of what was there before scoring began, by place.
        self.decays: dict[int, Tensor] = {}
        self.inherited: dict[int, Tensor] = {}
        self._entering: Entering | None = None
        self._epoch = sketcher.epoch(0, {})
        self._pending: Any = None
        #: S v of the direction that was known at the step's backward, and Σ|c| of all uses over that of a step's own, as it was last.
        self._previous: Tensor | None = None
        self._to_all: Tensor | float = 1.0
        self.low_precision = False

    def inherit(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note what the optimizers remember from before scoring began."""
        if self.own_step:
            return
        for s in self.parameters.scored:
            held = self.rules[s.optimizer].remembered(optimizers[s.optimizer].state.get(s.parameter, {}))
            if held is not None:
                self.inherited[s.place] = held.detach().clone()

    def request(self, n: int, longest: int | None) -> Request:
        """Sketch gradients, and contract them with the last direction."""
        known = {i: d for i, d in self.known.items() if not self.sketcher.plans[i].lossless}
        k = len(next(iter(known.values()))) if known else 0
        return Request(n, self.sketcher.dtype, self.sketcher, self._epoch, known, k, longest)

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Compare entries of small tensors with the samples'."""
        if self._entering is None:
            self._entering = joined(self.sketcher, readings)
            if self._sketched is not None:
                correct(self.sketcher, self._entering, readings, self._sketched.flat, self._sketched.tables)
        return clip_from_entries(self.sketcher, self._entering.rows, self.parameters.of(optimizer), self._epoch)

    @torch.no_grad()
    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Take the validation gradient in the middle of the move and work out what it pays; nothing is final yet."""
        entering = self._entering or joined(self.sketcher, readings)
        self._entering = None
        self._scale(entering, mover, clips)
        books, found = self._books(step, mover, MIDPOINT)
        if self.window is None:
            self.window = Window(self.sketcher, len(found.labels), self.tables)
            self.window.begin_epoch(self._epoch)
        elif self.window.sets != len(found.labels):
            raise ValidationError(
                f"there are {len(found.labels)} validation losses at step {step}, and there were {self.window.sets} before. Uses are "
                "paid over many steps, so the number of points and folds must stay the same."
            )
        self._pending = (step, mover, entering)
        own = self._own_credits(entering, mover)
        books.spread = own.double().abs().sum(0) * self._to_all
        return Outcome(found.labels, found.losses, own, books)

    def again(self, step: int, mover: Mover, points: Points) -> Books:
        """Take the gradient at other points."""
        books, _ = self._books(step, mover, points)
        own = self.own_credits().double().abs().sum(0)
        books.spread = self.spread()
        self._to_all = books.spread / own.clamp_min(1e-300)
        return books

    def spread(self) -> Tensor:
        """Return Σ|c| over all open uses and the step's own."""
        assert self.window is not None and self._sketched is not None
        _, mover, _ = self._pending
        by_epoch = self._by_epoch()
        return self.own_credits().double().abs().sum(0) + self.window.spread_of(self._memories(mover), by_epoch)

    def _by_epoch(self) -> dict[int, SketchedDirection]:
        """Return the direction as it is sketched in every epoch that has open uses."""
        assert self.window is not None and self._sketched is not None
        d = [self.known.get(i) for i in range(len(self.sketcher.plans))]
        found = {id(self._epoch): self._sketched}
        for e in self.window.epochs:
            if id(e) not in found:
                found[id(e)] = self.sketcher.of_directions(d, self.k, e, self.tables)
        return found

    @torch.no_grad()
    def slope(self, step: int, mover: Mover, place: float) -> Tensor:
        """Return what the whole move is worth by the gradient at one place."""
        with mover.at(place):
            raw = self.validation.gradients(self.parameters.tensors(), step).raw
        total = torch.zeros(self.k, dtype=torch.float64, device=self.sketcher.device)
        for i, m in mover.moved.items():
            g = raw[i]
            if g is not None:
                total += dots(g, mover.before_of(i).double() - m.scored.parameter.detach().double())
        return total

    def forgo(self, remember: bool) -> list[Settled]:
        """Pay nobody. The uses join the window, unless what the optimizers remember is no longer finite."""
        _step, _mover, _entering = self._pending
        assert self.window is not None
        if not remember:
            self._pending, self.known, self._sketched, self._previous = None, {}, None, None
            settled = self.settle_all()
            self.window = None
            return settled
        self.known, self._sketched = (
            {},
            self.sketcher.of_directions([None] * len(self.sketcher.plans), self.k, self._epoch, self.tables),
        )
        return self.commit()

    def own_credits(self) -> Tensor:
        """Return the contributions of the step that is not final yet."""
        _, mover, entering = self._pending
        return self._own_credits(entering, mover)

    def _memories(self, mover: Mover) -> list[Memory | None]:
        found: list[Memory | None] = [None] * len(self.parameters.scored)
        for i, m in mover.moved.items():
            found[i] = NO_MEMORY if self.own_step else m.memory
        return found

    def _scale(self, entering: Entering, mover: Mover, clips: dict[int, Tensor]) -> None:
        """Multiply rows by the factor of their gradients, and by what RMSprop divides a gradient by before it remembers it."""
        some = list(clips.items())
        # The direction of a step's own share has the sign already.
        signs = [-1.0 if s.group.get("maximize") and not self.own_step else 1.0 for s in self.parameters.scored]
        if len(some) == 1 and len(set(signs)) == 1:
            factor: Tensor = some[0][1] * signs[0]
            entering.rows.mul_(factor)
            for _, _, _, _, values in entering.tables:
                values.mul_(factor)
        else:
            one = torch.zeros((), dtype=self.sketcher.dtype, device=self.sketcher.device)
            by_tensor = torch.stack(
                [clips.get(s.optimizer, one) * sign for s, sign in zip(self.parameters.scored, signs, strict=True)]
            )
            order = torch.tensor(self.sketcher.order, device=self.sketcher.device)
            entering.rows.mul_(by_tensor[order][self.sketcher.owner])
            for i, _, _, _, values in entering.tables:
                values.mul_(by_tensor[i])
        for i, m in mover.moved.items():
            if m.entry is not None and not self.own_step:
                if not self.sketcher.plans[i].lossless:
                    raise ConfigurationError(
                        'RMSprop with momentum needs sketch="exact": a gradient is divided before it is remembered.'
                    )
                entering.rows[:, self.sketcher.columns[i]] *= m.entry.reshape(-1).to(entering.rows.dtype)

    def _directions(self, raw: list[Tensor | None], mover: Mover) -> dict[int, Tensor]:
        if not self.own_step:
            return mover.directions(raw)
        return mover.own_directions(raw)

    def _books(self, step: int, mover: Mover, points: Points) -> tuple[Books, Gradients]:
        """Average the validation gradient over points of the move; set the direction, and account for the move."""
        total: list[Tensor | None] = []
        found: Gradients | None = None
        tensors = self.parameters.tensors()
        for place, weight in points:
            with mover.at(place):
                found = self.validation.gradients(tensors, step)
            if len(points) == 1:
                total = found.raw
            elif not total:
                total = [None if g is None else g * weight for g in found.raw]
            else:
                for i, g in enumerate(found.raw):
                    if g is not None:
                        before = total[i]
                        total[i] = g * weight if before is None else before.add_(g, alpha=weight)
        assert found is not None
        k = len(found.labels)
        self.k = k
        directions = self._directions(total, mover)
        device = self.sketcher.device
        data = torch.zeros(k, dtype=torch.float64, device=device)
        decay, inherited = torch.zeros_like(data), torch.zeros_like(data)
        for i, m in mover.moved.items():
            g, d = total[i], directions.get(i)
            if g is None:
                continue
            if not (isinstance(m.shrink, float) and m.shrink == 0.0):
                decay += m.shrink * dots(g, mover.before_of(i))
            if d is None:
                continue
            if self.own_step:
                continue
            data += dots(d, m.q)
            through = self._decay_through(i, m, mover)
            if through is not None:
                part = dots(d, through)
                decay += part
                data -= part
            if i in self.inherited and m.memory is not None:
                part = m.memory.read * m.memory.keep * dots(d, self.inherited[i])
                inherited += part
                data -= part
        self.known = dict(directions.items())
        return Books(
            data, data.abs(), None if self.own_step else decay, None if self.own_step else inherited, points=len(points)
        ), found

    def _decay_through(self, i: int, m: Moved, mover: Mover) -> Tensor | None:
        """Return the part of q that is coupled weight decay."""
        if m.memory is None or (m.coupled == 0.0 and i not in self.decays):
            return None
        weight = mover.before_of(i).to(m.q.dtype) * m.coupled
        if m.entry is not None:
            weight = weight * m.entry
        before = self.decays.get(i)
        after = weight * m.memory.enter if before is None else before * m.memory.keep + weight * m.memory.enter
        return after * m.memory.read + weight * m.memory.direct

    def _own_credits(self, entering: Entering, mover: Mover) -> Tensor:
        """Return κ_{t,t} ⟨S g_n, S D⟩ of the step's rows, ``[n, k]``."""
        memories = self._memories(mover)
        sketched = self.sketcher.of_directions(
            [self.known.get(i) for i in range(len(self.sketcher.plans))], self.k, self._epoch, self.tables
        )
        self._sketched = sketched
        own = torch.tensor([m.own if m else 0.0 for m in memories], dtype=self.sketcher.dtype)
        if len(set(own[own != 0].tolist())) <= 1:
            factor = float(own.max()) if len(own) else 0.0
            found = entering.rows @ (sketched.flat * factor).t()
        else:
            by = own[torch.tensor(self.sketcher.order)].to(self.sketcher.device)[self.sketcher.owner]
            found = entering.rows @ (sketched.flat * by).t()
        from inrun.engine.window import contract

        for i, _, first, numbers, values in entering.tables:
            if i in sketched.tables:
                found[first : first + len(numbers)] += float(own[i]) * contract(numbers, values, sketched.tables[i])
        return found

    @torch.no_grad()
    def commit(self) -> list[Settled]:
        """Let the step's uses in, pay, and settle those whose window has ended."""
        step, mover, entering = self._pending
        self._pending = None
        assert self.window is not None
        memories = self._memories(mover)
        by_epoch = self._by_epoch()
        if not self.own_step:
            for i, m in mover.moved.items():
                if m.memory is None:
                    continue
                if m.coupled != 0.0 or i in self.decays:
                    weight = mover.before_of(i).to(m.q.dtype) * m.coupled
                    weight = weight if m.entry is None else weight * m.entry
                    before = self.decays.get(i)
                    self.decays[i] = (
                        weight * m.memory.enter if before is None else before.mul_(m.memory.keep).add_(weight, alpha=m.memory.enter)
                    )
                if i in self.inherited:
                    self.inherited[i].mul_(m.memory.keep)
        self.window.pay(step, memories, entering, by_epoch, self._previous)
        self._previous = None if self._sketched is None else self._sketched.flat
        settled = self.window.settle_passed()
        self.steps += 1
        if self.steps in REFRESH_AT or self.steps % REFRESH == 0:
            self._refresh(mover)
        return settled

    def _refresh(self, mover: Mover) -> None:
        """Sketch with new weights and signs from now on, and begin the sums anew."""
        assert self.window is not None
        if self.sketcher.lossy:
            moves = {i: (m.factor, m.q) for i, m in mover.moved.items() if isinstance(m.factor, Tensor)}
            self._epoch = self.sketcher.epoch(self._epoch.number + 1, moves)
            self.window.rebase()
            self.window.begin_epoch(self._epoch)
            d = [self.known.get(i) for i in range(len(self.sketcher.plans))]
            self._sketched = self.sketcher.of_directions(d, self.k, self._epoch, self.tables)
            self._previous = self._sketched.flat
        else:
            self.window.rebase()

    def settle_all(self) -> list[Settled]:
        """Settle all that is open."""
        return [] if self.window is None else self.window.settle_all()

    def nbytes(self) -> int:
        """Return the memory of the ring, the known direction and what decay left."""
        held = [*self.known.values(), *self.decays.values(), *self.inherited.values()]
        return sum(x.nbytes for x in held) + (0 if self.window is None else self.window.nbytes())


def dots(d: Tensor, x: Tensor) -> Tensor:
    """Return ⟨d_k, x⟩ in float64, ``[k]``."""
    return (d.reshape(len(d), -1) @ x.reshape(-1).to(d.dtype)).double()
