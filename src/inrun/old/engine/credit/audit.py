"""The audit of whole credit: what the samples pushed must add up to what the optimizers remember, at every step.

With sketches it is a sketch of both that is compared. By linearity S q_t = Σ_s κ_{t,s} c_s Σ_n S g_n + decay + inherited. The right
side is followed step by step, like the optimizer's own memory; a wrong β or clip factor, a step that was counted but did not
happen, an optimizer that was reset or a window that was lost show at once, before anything is spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import ConservationError, CreditError
from inrun.old.engine.checks.conservation import OF_TERMS, USUAL_CAUSES
from inrun.old.engine.credit.exact_store import ExactEntry, ExactStore
from inrun.old.engine.credit.move import ParameterMove, WholeMove
from inrun.old.engine.credit.sketch_store import SketchEntry, SketchStore
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored

#: How far both sides may differ, relative to the larger: rounding, in single precision, and where gradients were coarser.
TOLERANCE, COARSE = 5e-3, 5e-2


class SketchAudit:
    """Follows what the optimizers remember of the samples, in sketches."""

    #: What is compared, for the message.
    kind = "sketches"

    def __init__(self, sketcher: Sketcher) -> None:
        """Nothing is remembered yet."""
        self.sketcher = sketcher
        #: Σ_s a_s c_s Σ_n S g_n by parameter, ``[buckets]``.
        self.remembered: list[Tensor] = []

    def restart(self, sketcher: Sketcher) -> None:
        """Nothing of any sample is remembered."""
        self.sketcher = sketcher
        self.remembered = [torch.zeros(p.buckets, dtype=torch.float64) for p in self.sketcher.plans]

    def restore(self, sketcher: Sketcher, remembered: list[Tensor]) -> None:
        """Go on from a saved state."""
        self.sketcher, self.remembered = sketcher, remembered

    def entering(self, entry: SketchEntry) -> list[Tensor]:
        """Return Σ_n S g_n of a step's rows, by parameter."""
        sk = self.sketcher
        summed = entry.sketch.double().sum(0)
        found = [
            summed[sk.places[i]].clone() if i in sk.places else torch.zeros(p.buckets, dtype=torch.float64, device=sk.device)
            for i, p in enumerate(sk.plans)
        ]
        one = torch.ones((), dtype=torch.float64, device=sk.device)
        for r in entry.rows:
            plan = sk.plans[r.parameter]
            found[r.parameter] += sk.folded(r.parameter, r.by_segment(plan.rows).view(1, -1), one)[0]
        return [x.cpu() for x in found]

    def of(self, index: int, x: Tensor, weights: list[Tensor]) -> Tensor:
        """Return the sketch of a whole tensor, ``[buckets]``."""
        return self.sketcher.folded(index, self.sketcher.sums(index, x.unsqueeze(0)), weights[index])[0].double().cpu()

    def pushed(self, index: int, m: ParameterMove, entry: Any) -> Tensor:
        """Return what the samples of the coming step push, before the factor of their gradients."""
        found: Tensor = entry.entering[index]
        return found

    def check(
        self,
        move: WholeMove,
        entry: Any,
        weights: list[Tensor],
        decays: Mapping[int, Tensor],
        inherited: Mapping[int, tuple[Tensor, float]],
        step: int,
        coarse: bool = False,
    ) -> float:
        """Compare both sides before anything is spread; return the relative difference.

        Raises:
            CreditError: They differ by more than rounding.
        """
        off = size = 0.0
        worst: tuple[float, str] = (0.0, "")
        for i, m in move.moves.items():
            r = m.recall
            mine = self.remembered[i] * (r.keep * r.read) + self.pushed(i, m, entry) * (m.factor * r.own)
            real = self.of(i, m.realised.q, weights)
            if i in decays:
                through = decays[i] * r.read
                if m.entering_decay and r.direct:
                    through = through + m.scored.weight.to(through.dtype) * (m.entering_decay * r.direct)
                real = real - self.of(i, through, weights)
            if i in inherited:
                held, alpha = inherited[i]
                real = real - self.of(i, held, weights) * (alpha * r.keep * r.read)
            gap, norm = float((real - mine).norm()), float(torch.maximum(real.norm(), mine.norm()))
            off, size = off + gap**2, size + norm**2
            worst = max(worst, (gap, m.scored.name))
        relative = (off / size) ** 0.5 if size > 0 else 0.0
        if not relative <= (COARSE if coarse else TOLERANCE):
            raise CreditError(
                f"at step {step} what the optimizer remembers is not what the samples of the open windows pushed: the {self.kind} "
                f"differ by {100 * relative:.2g} % (most at {worst[1]}). Usual causes: the optimizer's state was reset, or loaded "
                "without the accountant's; its options were changed behind its back; gradients were changed by more than one "
                "factor; a step was counted that did not happen. Load both states together, or take credit='step'."
            )
        return relative

    def advance(self, move: WholeMove, entry: Any) -> None:
        """The step happened."""
        for i, m in move.moves.items():
            self.remembered[i] = self.remembered[i] * m.recall.keep + self.pushed(i, m, entry) * (m.factor * m.recall.enter)

    def rebase(
        self,
        sketcher: Sketcher,
        remembered: Mapping[int, Tensor | None],
        weights: list[Tensor],
        decays: Mapping[int, Tensor],
        inherited: Mapping[int, tuple[Tensor, float]],
    ) -> None:
        """Sketch what is remembered in a new way; it was compared in the old way a moment ago."""
        self.sketcher = sketcher
        for i, held in remembered.items():
            if held is None:
                self.remembered[i] = torch.zeros(sketcher.plans[i].buckets, dtype=torch.float64)
                continue
            found = self.of(i, held, weights)
            if i in decays:
                found = found - self.of(i, decays[i], weights)
            if i in inherited:
                found = found - self.of(i, inherited[i][0], weights) * inherited[i][1]
            self.remembered[i] = found


class ExactAudit(SketchAudit):
    """The same where gradients are kept as they are: what the samples pushed is followed entry by entry, in host memory."""

    kind = "gradients"

    def __init__(self, scored: list[Scored]) -> None:
        """Nothing is remembered yet."""
        self.scored = scored
        self.remembered: list[Tensor] = []

    def forget(self) -> None:
        """Nothing of any sample is remembered."""
        self.remembered = [torch.zeros(s.parameter.numel(), dtype=torch.float64) for s in self.scored]

    def go_on(self, remembered: list[Tensor]) -> None:
        """Go on from a saved state; one of an earlier version has none, and nothing is compared until scoring begins anew."""
        self.remembered = remembered

    def added_up(self, entry: ExactEntry) -> list[Tensor]:
        """Return Σ_n g_n of a step's rows, by parameter, flat."""
        found = [torch.zeros(s.parameter.numel(), dtype=torch.float64) for s in self.scored]
        for i, _, shape in entry.held:
            found[i] += shape.total().double().reshape(-1)
        return found

    def of(self, index: int, x: Tensor, weights: list[Tensor]) -> Tensor:
        """Return the tensor itself, flat."""
        return x.double().cpu().reshape(-1)

    def pushed(self, index: int, m: ParameterMove, entry: Any) -> Tensor:
        """Return what the samples push: their gradients, times what those of this step are multiplied by on entering."""
        found: Tensor = entry.entering[index]
        return found if m.realised.entry is None else found * self.of(index, m.realised.entry, [])


def check_totals(
    move: WholeMove,
    entry: Any,
    store: SketchStore | ExactStore,
    step: int,
    processes: Processes,
    coarse: Set[nn.Parameter] = frozenset(),
) -> None:
    """On audited steps: the samples' gradients must add up to the gradient that is used, parameter by parameter.

    ``coarse`` are the parameters whose gradient came through tensors of a lower precision than their own: it was rounded there,
    and the samples' parts were added up before.

    Raises:
        ConservationError: Some gradient flows through no sample's rows.
    """
    bad = []
    totals = _totals(move, entry, processes)
    for i, m in move.moves.items():
        used = m.scored.used_gradient.detach()
        mine = totals[i] * abs(m.factor)
        if isinstance(store, SketchStore):
            real = SketchAudit(store.sketcher).of(i, used, store.weights_now)
        else:
            real = used.double().cpu().reshape(-1)
        if not bool(torch.isfinite(real).all()):
            continue
        exact = all(site.rule.exact for site, _ in m.scored.uses)
        eps = max(torch.finfo(used.dtype).eps, 0.0 if exact else 1e-7)
        gap = float((mine - real).norm()) if mine.shape == real.shape else float("inf")
        allowed = COARSE if m.scored.parameter in coarse else 2e3 * eps if eps > 1e-12 else 1e-8
        rounding = OF_TERMS * eps * _size_of_terms(i, entry, store) * abs(m.factor)
        if gap > allowed * max(float(real.norm()), float(mine.norm())) + 1e-9 * eps + rounding and gap > 1e-3 * allowed:
            bad.append((m.scored.name, gap / max(float(real.norm()), 1e-30)))
    if bad:
        named = ", ".join(f"{name} (off by {100 * off:.2g} %)" for name, off in bad[:5])
        raise ConservationError(f"at step {step} some gradient flows through no sample's rows: {named}. {USUAL_CAUSES}")


def _size_of_terms(index: int, entry: Any, store: SketchStore | ExactStore) -> float:
    """Return Σ_n ‖S g_n‖ of a parameter, here: samples that cancel leave a sum as small as the rounding of these."""
    if not isinstance(store, SketchStore) or index not in store.sketcher.places:
        return 0.0  # added up in double precision
    return float(entry.sketch[:, store.sketcher.places[index]].double().norm(dim=1).sum())


def _totals(move: WholeMove, entry: Any, processes: Processes) -> dict[int, Tensor]:
    """Return Σ_n g_n over the samples of all processes, before any factor, as they are kept: sketched, or whole."""
    if not isinstance(entry, ExactEntry):
        return {i: entry.entering[i] for i in move.moves}
    found = {}
    for i, m in move.moves.items():
        shapes = [shape.total() for j, _, shape in entry.held if j == i]
        none = torch.zeros(m.scored.parameter.numel(), dtype=torch.float64)
        found[i] = torch.stack(shapes).sum(0).double().reshape(-1) if shapes else none
    processes.sum_("conservation", list(found.values()))
    return found
