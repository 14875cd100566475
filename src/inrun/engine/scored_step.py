"""The step that is being scored: the rows of its uses, and the parts of its move that no sample is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inrun.engine.carried import Carried, merged
from inrun.engine.checks import check_memory
from inrun.engine.parameters import Parameters, Scored
from inrun.engine.reading import Reading, correct, joined
from inrun.engine.ring import Entering, contract
from inrun.engine.rounding import Noise
from inrun.engine.scorer import finite
from inrun.engine.sketch import SketchedDirection, Sketcher
from inrun.engine.validation import Gradients
from inrun.errors import ConfigurationError
from inrun.optimizers import NO_MEMORY, Memory

if TYPE_CHECKING:
    from inrun.engine.move import Mover


@dataclass(eq=False)
class ScoredStep:
    """One step, from its backward to its end."""

    #: The rows of its uses, and the gradients of small tensors as the optimizers used them.
    entering: Entering
    now: Tensor
    #: Σ_n g_n of small tensors, without the entries whose gradient is only rounding; and which these are.
    total: Tensor
    cancelled: Tensor | None = None
    failures: Tensor | None = None
    #: Whether the gradients, and the validation losses, were finite.
    valid: Tensor | None = None
    #: κ by tensor; parts of q that no sample is paid for.
    memories: list[Memory | None] = field(default_factory=list)
    decay: Tensor | None = None
    inherited: Tensor | None = None
    rounding: Tensor | None = None
    #: The direction that pays, and what it pays the step's own rows, ``[n, k]``.
    sketched: SketchedDirection | None = None
    own: Tensor | None = None

    def take_gradients(self, sketcher: Sketcher, parameters: Parameters, kept: Sequence[Scored]) -> None:
        """Copy the gradients of an optimizer's small tensors as they are now."""
        if not kept:
            return
        here = self.now[sketcher.kept_columns(kept[0].place).start : sketcher.kept_columns(kept[-1].place).stop]
        torch.cat([_entries(s, sketcher, parameters) for s in kept], out=here)
        if parameters.shards is not None:
            parameters.processes.all_reduce_("gradients of small tensors", [here])

    def scale(self, sketcher: Sketcher, parameters: Parameters, mover: Mover, clips: dict[int, Tensor], own_step: bool) -> None:
        """Multiply rows by the factor of their gradients; take out what is only rounding, and what is not finite."""
        entering = self.entering
        # The direction of a step's own share has the sign already.
        signs = [-1.0 if s.group.get("maximize") and not own_step else 1.0 for s in parameters.scored]
        if self.cancelled is not None:
            self.rounding = torch.where(self.cancelled, self.now, 0.0)
        if len(clips) == 1 and len(set(signs)) == 1:
            (factor,) = clips.values()
            by: list[Tensor] = [factor * signs[0]] * len(signs)
            entering.rows.mul_(by[0])
            self.total.mul_(by[0])
        else:
            one = torch.zeros((), dtype=sketcher.dtype, device=sketcher.device)
            by = [clips.get(s.optimizer, one) * sign for s, sign in zip(parameters.scored, signs, strict=True)]
            columns = torch.stack([by[i] for i in sketcher.order]).to(sketcher.dtype)[sketcher.owner]
            entering.rows.mul_(columns)
            self.total.mul_(columns[sketcher.cut :])
        for i, _, _, _, values in entering.tables:
            values.mul_(by[i])
        if self.rounding is not None and len(set(signs)) > 1:
            by_tensor = torch.tensor([signs[i] for i in sketcher.order], device=sketcher.device)
            self.rounding *= by_tensor[sketcher.owner[sketcher.cut :]]
        elif self.rounding is not None and signs[0] < 0:
            self.rounding.neg_()
        if not own_step:
            self._divide(sketcher, mover, split=parameters.shards is not None)
        valid = finite(entering.rows, *(values for *_, values in entering.tables), *clips.values())
        self.valid = valid = parameters.processes.all_true(valid)
        entering.rows = torch.where(valid, entering.rows, 0.0)
        entering.tables = [(*t, torch.where(valid, values, 0.0)) for *t, values in entering.tables]  # type: ignore[misc]

    def _divide(self, sketcher: Sketcher, mover: Mover, split: bool) -> None:
        """RMSprop with momentum divides a gradient before it remembers it."""
        for g in mover.groups:
            for places, part, entry in zip(g.places, g.parts, g.entries() or (), strict=False):
                for i in places:
                    if split:
                        raise ConfigurationError(
                            'RMSprop with momentum is not scored under fully_shard. Take momentum=0, or method="step".'
                        )
                    if not sketcher.plans[i].lossless:
                        raise ConfigurationError(
                            'RMSprop with momentum needs sketch="exact": a gradient is divided before it is remembered.'
                        )
                    here = sketcher.flat.slices[i]
                    by = entry[here.start - part.start : here.stop - part.start].to(sketcher.dtype)
                    self.entering.rows[:, sketcher.columns[i]] *= by
                    self.total[sketcher.kept_columns(i)] *= by
                    if self.rounding is not None:
                        self.rounding[sketcher.kept_columns(i)] *= by

    def remember(self, mover: Mover, own_step: bool) -> None:
        """Note how each tensor's optimizer remembers; with ``own_step`` nothing but the step itself counts."""
        self.memories = mover.memories()
        if own_step:
            stepped = {i for g in mover.groups for some in g.places for i in some}
            self.memories = [NO_MEMORY if i in stepped else None for i in range(len(self.memories))]

    def take_unpaid(self, sketcher: Sketcher, parameters: Parameters, mover: Mover, carried: dict[str, Carried]) -> None:
        """Work out the parts of q that belong to no sample; on audits, check that the rest is what the samples gave."""
        spans, inflow = mover.spans(), None
        if any(g.coupled != 0.0 for g in mover.groups):
            inflow = torch.zeros_like(mover.weights_before)
            for g in mover.groups:
                entries: Sequence[Tensor | None] = g.entries() or [None] * len(g.parts)
                for part, entry in zip(g.parts, entries, strict=True):
                    here = torch.mul(mover.weights_before[part], g.coupled, out=inflow[part])
                    if entry is not None:
                        here.mul_(entry)
        self.decay = carried["decay"].part(spans, inflow)
        self.inherited = carried["inherited"].part(spans)
        columns = merged([(sketcher.kept_columns(i), self.memories[i]) for i in sketcher.kept])
        self.rounding = carried["rounding"].part(columns, self.rounding)
        data = carried["data"].part(columns, self.total) if sketcher.kept else None
        if self.failures is not None and data is not None:
            known = data if self.rounding is None else data + self.rounding
            check_memory(self.failures[2:], sketcher, mover, known, [self.decay, self.inherited], parameters)

    def keep_finite(self, found: Gradients, direction: Tensor, sketched: SketchedDirection) -> None:
        """Pay nothing where gradients or validation losses are not finite. The host learns of it later."""
        assert self.valid is not None
        if self.valid.dim() > 0:
            return
        self.valid = torch.stack([self.valid, finite(found.losses, sketched.flat, *sketched.tables.values())])
        failed = ~self.valid.all()
        for x in (direction, sketched.flat, *sketched.tables.values()):
            x.masked_fill_(failed, 0.0)

    # What it pays its own rows

    def pay_own(self, sketcher: Sketcher) -> Tensor:
        """Return κ_{t,t} ⟨S g_n, S D⟩ of the step's rows, ``[n, k]``."""
        assert self.sketched is not None
        own = [m.own if m else 0.0 for m in self.memories]
        flat, rows = self.sketched.flat * sketcher.columns_of(own), self.entering.rows
        found = torch.mv(rows, flat[0]).unsqueeze(1) if len(flat) == 1 else rows @ flat.t()
        for i, _, first, numbers, values in self.entering.tables:
            if i in self.sketched.tables:
                found[first : first + len(numbers)] += own[i] * contract(numbers, values, self.sketched.tables[i])
        self.own = found
        return found

    def by_tensor(self, sketcher: Sketcher) -> Tensor:
        """Return Σ|contribution| of this process's samples by tensor, ``[k, tensors]``."""
        assert self.sketched is not None
        d = self.sketched
        total = torch.zeros(len(d.flat), len(sketcher.order), dtype=torch.float64, device=sketcher.device)
        for i, memory in enumerate(self.memories):
            if memory is None:
                continue
            here = sketcher.columns[i]
            found = self.entering.rows[:, here] @ d.flat[:, here].t()
            for j, _, first, numbers, values in self.entering.tables:
                if i == j and i in d.tables:
                    found[first : first + len(numbers)] += contract(numbers, values, d.tables[i])
            total[:, i] = abs(memory.own) * found.abs().sum(0, dtype=torch.float64)
        return total


def enter(
    sketcher: Sketcher, parameters: Parameters, noise: Noise, known: SketchedDirection | None, readings: Sequence[Reading]
) -> ScoredStep:
    """Begin with what the backwards left; entries whose gradient is only rounding are nobody's."""
    entering = joined(sketcher, readings)
    if known is not None:
        correct(sketcher, entering, readings, known.flat, known.tables)
    now = torch.zeros(sketcher.size - sketcher.cut, dtype=sketcher.dtype, device=sketcher.device)
    noise.measure(sketcher, entering.rows, readings, parameters)
    for i in noise.tensors:
        entering.rows[:, sketcher.columns[i]] = 0.0
    entries = entering.rows[:, sketcher.cut :]
    total = parameters.processes.all_reduced("sums of gradients", entries.sum(0))
    cancelled = noise.covers(total)
    if cancelled is not None:
        entries.masked_fill_(cancelled, 0.0)
        total.masked_fill_(cancelled, 0.0)
    return ScoredStep(entering, now, total, cancelled)


def _entries(s: Scored, sketcher: Sketcher, parameters: Parameters) -> Tensor:
    """Return a gradient's entries as far as they are here, and zeros elsewhere."""
    if s.grad is None:
        return torch.zeros((), dtype=sketcher.dtype, device=sketcher.device).expand(s.parameter.numel())
    shards = parameters.shards
    return (s.grad if shards is None else shards.embed(s.place, s.grad.unsqueeze(0))).reshape(-1).to(sketcher.dtype)
