"""Whole credit, through the optimizer's memory; and with ``own_step`` only the share of a step's own move.

Credit of sample n, used at step s:  Σ_{t≥s} κ_{t,s} c_s ⟨g_n, D_t⟩,  D_t = A_t∘∇̄_t with ∇̄_t the validation gradient along the move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.accounts import account_for_pushes, account_for_step
from inrun.engine.carried import Carried
from inrun.engine.checks import check_entries, check_products, nothing
from inrun.engine.options import audit_due
from inrun.engine.parameters import Parameters
from inrun.engine.readers import Request
from inrun.engine.reading import Reading, clip_from_entries, clip_from_products, random_signs
from inrun.engine.rounding import Noise
from inrun.engine.scored_step import ScoredStep, enter
from inrun.engine.scorer import MIDPOINT, Accounts, Outcome, Points, RefiningScorer
from inrun.engine.sketch import Epoch, SketchedDirection, Sketcher
from inrun.engine.validation import Gradients, Validation
from inrun.engine.window import Settled, Window
from inrun.optimizers import UpdateRule

if TYPE_CHECKING:
    from inrun.engine.move import Mover

#: Steps after which sketches get new weights and signs; later every 22.
REFRESH_AT, REFRESH = (1, 3, 10, 22), 22


class WholeScorer(RefiningScorer):
    """The method ``whole``, and ``step`` with ``own_step``."""

    def __init__(
        self,
        parameters: Parameters,
        validation: Validation,
        rules: Sequence[UpdateRule],
        sketcher: Sketcher,
        tables: Sequence[int],
        own_step: bool = False,
    ) -> None:
        super().__init__(parameters, validation)
        self.sketcher, self.own_step = sketcher, own_step
        self.window = Window(sketcher, [i for i in tables if sketcher.plans[i].fine])
        self.steps = 0
        #: The last direction ``[k, size]``, and its sketch.
        self.direction: Tensor | None = None
        self.known: SketchedDirection | None = None
        #: What the optimizers remember: weight decay, momentum of before, rounding, and the samples' gradients of small tensors.
        self.carried = {name: Carried() for name in ("decay", "inherited", "rounding", "data")}
        self.noise = Noise([rules[s.optimizer].adaptive for s in parameters.scored])
        self.current: ScoredStep | None = None
        self._signs = random_signs(parameters, sketcher, len(rules))
        #: Σ|credit| of all uses over that of a step's own, as it was last measured.
        self._to_all: Tensor | float = 1.0

    def inherit(self, optimizers: Sequence[torch.optim.Optimizer], mover: Mover) -> None:
        """Note what the optimizers remember from before scoring began."""
        held = [mover.rules[s.optimizer].remembered(s.state_of(optimizers[s.optimizer])) for s in self.parameters.scored]
        if not self.own_step and any(h is not None for h in held):
            value = mover.flat.buffer()
            mover.flat.fill(value, held)
            self.carried["inherited"].begin(value)

    # The backward

    def request(self, n: int, longest: int | None, audited: bool) -> Request:
        """Sketch gradients, and contract them with the last direction."""
        sk, known = self.sketcher, dict(self._signs)
        k = 0 if self.direction is None else len(self.direction)
        if self.direction is not None:
            known = {i: sk.flat.view(self.direction, i) for i in sk.lossy}
            known |= {i: torch.cat([known[i], signs]) for i, signs in self._signs.items()}
        # Also without audits: noise must not be credited.
        self.noise.due = audited or audit_due(self.steps, None)
        return Request(
            n, sk.dtype, sk, self.window.epoch, self.parameters.gathered(known), k, frozenset(self._signs), self.noise.due, longest
        )

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Compare entries of small tensors with the samples', or products with random signs where no tensor is small."""
        sk = self.sketcher
        if self.current is None:
            self.current = enter(sk, self.parameters, self.noise, self.known, readings)
        some = self.parameters.of(optimizer)
        kept = [s for s in some if sk.plans[s.place].lossless]
        self.current.take_gradients(sk, self.parameters, kept)
        small, processes = [s.place for s in kept if s.grad is not None], self.parameters.processes
        if not small and self.direction is not None and not any(s.place in self._signs for s in some):
            return clip_from_products(readings, some, {i: sk.flat.view(self.direction, i) for i in sk.lossy}, processes)
        if not small:
            return clip_from_products([replace(r, products=r.signed) for r in readings], some, self._signs, processes)
        return clip_from_entries(sk, self.current.total, self.current.now, small, processes)

    def check(self, readings: Sequence[Reading], optimizer: int, clip: Tensor) -> None:
        """Audit: do the samples' gradients add up to the gradient that the optimizer is about to use?"""
        sk, current = self.sketcher, self.current
        assert current is not None
        if current.failures is None:
            current.failures = nothing(self.parameters)
        some = [s for s in self.parameters.of(optimizer) if s.grad is not None]
        kept = {s.place: sk.kept_columns(s.place) for s in some if sk.plans[s.place].lossless}
        now = current.now if current.cancelled is None else torch.where(current.cancelled, 0.0, current.now)
        check_entries(current.failures[:2], kept, current.entering.rows[:, sk.cut :], now, clip, self.parameters.processes)
        if self.direction is not None:
            v = {i: sk.flat.view(self.direction, i) for i in sk.lossy}
            check_products(current.failures[:2], some, readings, clip, v, self.parameters.processes)

    # The move

    @torch.no_grad()
    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Take the validation gradient in the middle of the move and work out what it pays; nothing is final yet."""
        current = self.current
        assert current is not None
        current.scale(self.sketcher, self.parameters, mover, clips, self.own_step)
        current.remember(mover, self.own_step)
        if not self.own_step:
            current.take_unpaid(self.sketcher, self.parameters, mover, self.carried)
        accounts, found = self._account(step, current, mover, MIDPOINT)
        self.window.check_labels(found.labels, step)
        contributions = self.own_credits()
        total, abs_sum = self._sums(contributions)
        self._finish_accounts(accounts, total)
        accounts.abs_sum = abs_sum * self._to_all
        assert current.valid is not None
        return Outcome(found.labels, found.losses, contributions, accounts, current.valid, current.failures)

    def again(self, step: int, mover: Mover, points: Points) -> Accounts:
        """Take the gradient at other points."""
        assert self.current is not None
        accounts, _ = self._account(step, self.current, mover, points)
        self._finish_accounts(accounts, self._sums(self.own_credits())[0])
        accounts.abs_sum = self.abs_sum()
        return accounts

    def _sums(self, contributions: Tensor) -> Tensor:
        """Return Σc and Σ|c| over the samples of all processes, ``[2, k]``."""
        sums = torch.stack([contributions.sum(0, dtype=torch.float64), contributions.abs().sum(0, dtype=torch.float64)])
        return self.parameters.processes.all_reduced("sums of contributions", sums)

    def _finish_accounts(self, accounts: Accounts, total: Tensor) -> None:
        """With ``own_step`` the data's part is what the step's samples are paid, and the rest of the move is earlier momentum."""
        if self.own_step:
            whole = accounts.data
            accounts.data = total
            accounts.momentum = whole - accounts.data if accounts.rounding is None else whole - accounts.data - accounts.rounding

    @torch.no_grad()
    def slope(self, step: int, mover: Mover, place: float) -> Tensor:
        """Return what the whole move is worth by the gradient at one place."""
        with mover.at(place):
            found = self.validation.gradients(self.parameters.tensors(), step)
        gradients = mover.flat.buffer(len(found.rows))
        for one, row in zip(gradients, found.rows, strict=True):
            mover.flat.fill(one, row)
        return self.parameters.processes.over_shards((gradients @ mover.moved()).double())

    def _account(self, step: int, current: ScoredStep, mover: Mover, points: Points) -> tuple[Accounts, Gradients]:
        """Average the validation gradient over points of the move; set the direction, and account for the move."""
        total, found = self._average(step, mover, points)
        inherited, processes, noise = None, self.parameters.processes, self.noise.tensors
        if self.own_step:
            data, decay, rounding = account_for_step(total, mover, noise, processes)
        else:
            data, decay, inherited, rounding = account_for_pushes(total, mover, current, noise, processes)
        self.sketcher.clip_(self.sketcher.flat.views(total))
        sketched = self.sketcher.of_flat(total, self.window.epoch, self.window.tables)
        current.keep_finite(found, total, sketched)
        current.sketched = sketched
        if current.rounding is not None:
            of_entries = (sketched.flat[:, self.sketcher.cut :] @ current.rounding).double()
            data = data if self.own_step else data - of_entries
            rounding = of_entries if rounding is None else rounding + of_entries
        return Accounts(data, data.abs(), decay, inherited, rounding, points=len(points)), found

    def _average(self, step: int, mover: Mover, points: Points) -> tuple[Tensor, Gradients]:
        total: Tensor | None = None
        for place, weight in points:
            with mover.at(place):
                found = self.validation.gradients(self.parameters.tensors(), step)
            if total is None:
                k = len(found.rows)
                if self.direction is None or len(self.direction) != k:
                    self.direction = mover.flat.buffer(k)
                total = self.direction
                for one, row in zip(total, found.rows, strict=True):
                    mover.flat.fill(one, row)
                if weight != 1.0:
                    total *= weight
                continue
            for one, row in zip(total, found.rows, strict=True):
                mover.flat.fill(mover.scratch, row)
                one.add_(mover.scratch, alpha=weight)
        assert total is not None
        return total, found

    def own_credits(self) -> Tensor:
        """Return what the step pays its own rows, ``[n, k]``."""
        assert self.current is not None
        return self.current.pay_own(self.sketcher)

    def by_tensor(self) -> Tensor:
        """Return Σ|contribution| of the step's samples by tensor, ``[k, tensors]``."""
        assert self.current is not None
        found = self.current.by_tensor(self.sketcher)
        return self.parameters.processes.all_reduced("sums of contributions by tensor", found)

    def abs_sum(self) -> Tensor:
        """Return Σ|credit| over all open uses and the step's own; ordinary steps estimate it by the step's own."""
        current = self.current
        assert current is not None
        own = self.own_credits().abs().sum(0, dtype=torch.float64)
        total = own + self.window.abs_sum_of(current.memories, self._by_epoch())
        total, own = self.parameters.processes.all_reduced("sums of contributions", torch.stack([total, own]))
        self._to_all = total / own.clamp_min(1e-300)
        return total

    def _by_epoch(self) -> dict[int, SketchedDirection]:
        """Return the direction as it is sketched in every epoch that has open uses."""
        assert self.current is not None and self.current.sketched is not None and self.direction is not None
        found = {id(self.window.epoch): self.current.sketched}
        for e in self.window.epochs:
            if id(e) not in found:
                found[id(e)] = self.sketcher.of_flat(self.direction, e, self.window.tables)
        return found

    # The end of the step

    @torch.no_grad()
    def commit(self, step: int, mover: Mover) -> list[Settled]:
        """Let the step's uses in, pay, and settle those whose window has ended."""
        by_epoch = self._by_epoch()
        current, self.current = self.current, None
        assert current is not None and current.own is not None
        for carried in self.carried.values():
            carried.commit()
        known = None if self.known is None else self.known.flat
        self.window.pay(step, current.memories, current.entering, by_epoch, known, current.own)
        self.known = current.sketched
        settled = self.window.settle_passed()
        self.steps += 1
        if self.steps in REFRESH_AT or self.steps % REFRESH == 0:
            self._refresh(mover)
        return settled

    def drop(self) -> None:
        """The step will not be scored: its optimizers did not step."""
        self.current = None

    def restart(self, optimizers: Sequence[torch.optim.Optimizer], mover: Mover) -> list[Settled]:
        """Settle all that is open; what the optimizers remember is inherited from now on."""
        self.carried = {name: Carried() for name in self.carried}
        self.inherit(optimizers, mover)
        return self.settle_all()

    def _refresh(self, mover: Mover) -> None:
        """Sketch with new weights and signs from now on, and begin the sums anew."""
        if self.sketcher.lossy and self.direction is not None:
            epoch: Epoch = self.sketcher.epoch(self.window.epoch.number + 1, mover.factors_and_pushes())
            self.window.rebase()
            self.window.begin_epoch(epoch)
            self.known = self.sketcher.of_flat(self.direction, epoch, self.window.tables)
        else:
            self.window.rebase()

    def settle_all(self) -> list[Settled]:
        """Settle all that is open as it stands."""
        return self.window.settle_all()

    def open_credits(self) -> list[Settled]:
        """Return the credits so far."""
        return self.window.open_credits()

    def nbytes(self) -> int:
        """Return the memory of the ring, the known direction and what no sample is paid for."""
        direction = 0 if self.direction is None else self.direction.nbytes
        return direction + sum(c.nbytes for c in self.carried.values()) + self.window.nbytes()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        return {
            "steps": self.steps,
            "direction": self.direction,
            "known": None if self.known is None else {"flat": self.known.flat, "tables": self.known.tables},
            "carried": {name: c.value for name, c in self.carried.items()},
            "to_all": self._to_all,
            "noise": self.noise.level,
            "noisy_tensors": self.noise.tensors,
            "window": self.window.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        device = self.sketcher.device
        self.steps, self.direction, self._to_all = state["steps"], _to(state["direction"], device), state["to_all"]
        self.noise.level, self.noise.tensors = _to(state["noise"], device), list(state["noisy_tensors"])
        known = state["known"]
        self.known = None
        if known is not None:
            tables = {int(i): _to(t, device) for i, t in known["tables"].items()}
            self.known = SketchedDirection(known["flat"].to(device), tables)
        for name, value in state["carried"].items():
            self.carried[name].value = _to(value, device)
        self.window.load_state_dict(state["window"])


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device, copy=True) if isinstance(x, Tensor) else x
