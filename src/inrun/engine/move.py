"""What one step did to the weights, read from the optimizers after they stepped: w' − w = −A∘q − shrink·w.

The tensors of a group that stepped alike are one *segment* of the flat vector, so that a step of an elementwise optimizer
takes a few operations whatever the number of tensors. Tensors that stepped otherwise are segments of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.engine.carried import Spans, merged
from inrun.engine.flat import FlatLayout
from inrun.engine.parameters import Parameters, Scored
from inrun.optimizers import GroupStep, Memory, UpdateRule, agree

#: Entries of an optimizer's state that are one number per tensor.
NUMBERS = ("step", "mu_product", "eta", "mu", "ax")


class JoinedState(dict[str, Any]):
    """The states of several tensors as that of one vector; entries are joined when they are read."""

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._states = states

    def __contains__(self, name: object) -> bool:
        return name in self._states[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or the default."""
        return self[name] if name in self._states[0] else default

    def __missing__(self, name: str) -> Any:
        first = self._states[0][name]
        joined = name not in NUMBERS and isinstance(first, Tensor)
        return torch.cat([s[name].reshape(-1) for s in self._states]) if joined else first


@dataclass(eq=False)
class GroupMove:
    """What one step did to the tensors of a group that stepped: one segment if they stepped alike, else one per tensor.

    A and q are computed when they are asked for, and not kept: each is as large as the weights.
    """

    rule: UpdateRule
    step: GroupStep
    #: The tensors of each segment, and its slice of the flat vector.
    places: list[list[int]]
    parts: list[slice]
    #: κ's recursion by segment; None where earlier gradients have no unique shares.
    memories: list[Memory] | None
    #: Whether one factor stands for a whole tensor, by segment.
    early: list[bool]
    #: The factor of −w in the move, and weight decay that is added to the gradient.
    shrink: float | Tensor
    coupled: float

    @property
    def part(self) -> slice | None:
        """Return the slice of all tensors; None if they do not lie next to each other."""
        first, last = self.parts[0], self.parts[-1]
        whole = last.stop - first.start == sum(p.stop - p.start for p in self.parts)
        return slice(first.start, last.stop) if whole else None

    def factors(self) -> list[Tensor | float]:
        """Return A by segment, learning rate included, ``[m]`` or one number."""
        found: Any = self.rule.factor(self.step)
        return [f.reshape(-1) for f in found] if isinstance(found, list) else [found] * len(self.parts)

    def pushed(self) -> list[Tensor]:
        """Return q by segment, ``[m]``."""
        return [q.reshape(-1) for q in self.rule.pushed(self.step)]

    def entries(self) -> list[Tensor] | None:
        """Return what gradients are multiplied by before they are remembered, by segment; None for 1."""
        found = self.rule.entry(self.step)
        return None if found is None else [e.reshape(-1) for e in found]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group as they are now: before the step ends, a schedule may set those of the next one."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in group.items() if name != "params"}


class Mover:
    """Copies weights before a step and describes the move after it."""

    def __init__(self, parameters: Parameters, rules: Sequence[UpdateRule], keeps_weights: bool = True) -> None:
        self.parameters, self.rules, self.keeps_weights = parameters, list(rules), keeps_weights
        self.flat = FlatLayout(parameters.tensors(), parameters.dtype)
        self._before: Tensor | None = None
        self._scratch: Tensor | None = None
        self._first: dict[int, bool] = {}
        #: Groups of which some tensors did not step at times.
        self._uneven: set[int] = set()
        self._stepping: list[Scored] = []
        self.groups: list[GroupMove] = []

    @property
    def low_precision(self) -> bool:
        """Whether losses along a move differ by rounding, so that points that lie close to each other are no better than fewer."""
        return any(dtype.itemsize < 4 for dtype in self.parameters.precisions())

    @property
    def scratch(self) -> Tensor:
        """Return a vector for anyone's use, ``[size]``; it is overwritten whenever the weights are moved."""
        if self._scratch is None:
            self._scratch = self.flat.buffer()
        return self._scratch

    @property
    def weights_before(self) -> Tensor:
        """Return the weights before the step, ``[size]``."""
        assert self._before is not None
        return self._before

    def nbytes(self) -> int:
        """Return the memory of the copies."""
        return sum(x.nbytes for x in (self._before, self._scratch) if x is not None)

    @torch.no_grad()
    def has_moved(self) -> bool:
        """Return whether any weight that was copied has changed; waits for the device."""
        stepping = self._stepping if self._before is not None else []
        before = self.flat.views(self.weights_before, [s.place for s in stepping]) if stepping else []
        return any(not torch.equal(b.to(s.parameter.dtype), s.parameter) for b, s in zip(before, stepping, strict=True))

    def begin(self) -> None:
        """Begin a step."""
        self.groups, self._stepping = [], []

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Copy the weights that an optimizer is about to move."""
        if not self.keeps_weights:
            return
        owned, rule = self.parameters.of(index), self.rules[index]
        stepping = [s for s in owned if s.grad is not None]
        self._first |= {s.place: rule.remembered(s.state_of(optimizer)) is None for s in stepping}
        for group in optimizer.param_groups:
            states = [s.state_of(optimizer) for s in stepping if s.group is group and s.parameter in optimizer.state]
            rule.before_step(group, states)
        if self._before is None:
            self._before = self.flat.buffer()
        self.flat.fill(self._before, [s.weights for s in owned], owned[0].place)
        self._stepping += stepping

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Describe what an optimizer did."""
        for group in optimizer.param_groups:
            some = [s for s in self._stepping if s.optimizer == index and s.group is group]
            if some:
                self._describe(optimizer, group, some, self.rules[index])

    def _describe(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], some: list[Scored], rule: UpdateRule) -> None:
        states = [s.state_of(optimizer) for s in some]
        joined = self._alike(some, states, rule)
        group = options_of(group)
        if joined:
            step = self._joined_step(group, some, states, rule)
        else:
            before = self.flat.views(self.weights_before, [s.place for s in some])
            first = [self._first[s.place] for s in some]
            # Copies where they are read later: before the step ends, users may clear gradients in place.
            gradients: list[Any] = [s.grad.clone() if rule.reads_gradients else s.grad for s in some]  # type: ignore[union-attr]
            step = GroupStep(before, gradients, group, states, first)
        places = [[s.place for s in some]] if joined else [[s.place] for s in some]
        self.groups.append(
            GroupMove(
                rule,
                step,
                places,
                [self.flat.part(p) for p in places],
                rule.memory(step),
                rule.is_early(step),
                rule.shrink(group),
                rule.coupled(group),
            )
        )

    def _alike(self, some: list[Scored], states: list[dict[str, Any]], rule: UpdateRule) -> bool:
        """Return whether tensors lie next to each other and have stepped equally often, with the same kind of state."""
        if not rule.elementwise or len({self._first[s.place] for s in some}) > 1:
            return False
        if some[-1].place - some[0].place + 1 != len(some):
            return False
        group = some[0].group
        if len(some) < sum(s.group is group for s in self.parameters.scored):
            self._uneven.add(id(group))
        counts = [s.get("step") for s in states]
        if any(isinstance(c, Tensor) and c.device.type != "cpu" for c in counts):
            return id(group) not in self._uneven and rule.counts_agree(counts)
        return len({None if c is None else float(c) for c in counts}) == 1

    def _joined_step(self, group: dict[str, Any], some: list[Scored], states: list[dict[str, Any]], rule: UpdateRule) -> GroupStep:
        part = self.flat.part([s.place for s in some])
        gradients = []
        if rule.reads_gradients:
            gradients = [torch.cat([s.grad.reshape(-1) for s in some])]  # type: ignore[union-attr]
        return GroupStep([self.weights_before[part]], gradients, group, [JoinedState(states)], [self._first[some[0].place]])

    @contextlib.contextmanager
    def at(self, fraction: float) -> Iterator[None]:
        """Hold the model at w + fraction · (w' − w); afterwards the weights are w' again, bit for bit."""
        if fraction == 1.0:
            yield
            return
        places = [i for g in self.groups for some in g.places for i in some]
        weights = [self.parameters.scored[i].weights for i in places]
        self.flat.fill(self.scratch, self.parameters.tensors())
        before = self.flat.views(self.weights_before, places)
        with torch.no_grad():
            if fraction == 0.0:
                torch._foreach_copy_(weights, before)
            elif all(w.dtype == self.flat.dtype for w in weights):
                torch._foreach_lerp_(weights, before, 1.0 - fraction)
            else:
                middle = torch.lerp(self.scratch, self.weights_before, 1.0 - fraction)
                torch._foreach_copy_(weights, self.flat.views(middle, places))
        try:
            yield
        finally:
            with torch.no_grad():  # a forward may have given a parameter other memory
                weights = [self.parameters.scored[i].weights for i in places]
                torch._foreach_copy_(weights, self.flat.views(self.scratch, places))

    def moved(self) -> Tensor:
        """Return w − w′, ``[size]``, in the scratch vector."""
        self.flat.fill(self.scratch, self.parameters.tensors())
        return torch.sub(self.weights_before, self.scratch, out=self.scratch)

    def spans(self) -> Spans:
        """Return how the tensors' optimizers remember, by slices of the flat vector."""
        return merged([(part, m) for g in self.groups if g.memories for part, m in zip(g.parts, g.memories, strict=True)])

    def memories(self) -> list[Memory | None]:
        """Return how each tensor's optimizer remembers; None for tensors that did not step, and where it is not known."""
        found: list[Memory | None] = [None] * len(self.flat.shapes)
        for g in self.groups:
            for places, memory in zip(g.places, g.memories or (), strict=bool(g.memories)):
                for i in places:
                    found[i] = memory
        return found

    def factors_and_pushes(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return A and q of tensors whose factor differs from entry to entry, ``[m]`` each, by place."""
        found = {}
        for g in self.groups:
            if g.memories is None:
                continue
            for places, part, factor, q in zip(g.places, g.parts, g.factors(), g.pushed(), strict=True):
                if not isinstance(factor, Tensor) or factor.dim() == 0:
                    continue
                for i in places:
                    at = self.flat.slices[i]
                    here = slice(at.start - part.start, at.stop - part.start)
                    found[i] = (factor[here], q[here])
        return found

    # Directions

    @torch.no_grad()
    def to_directions_(self, gradients: Tensor) -> None:
        """Turn validation gradients ``[k, size]`` into D = A∘∇ in place; in a tensor's first steps D agrees with q."""
        done, agreeing = [], []
        for g in self.groups:
            if g.memories is None:
                continue
            done += g.parts
            pushed = g.pushed() if any(g.early) else g.parts
            for part, factor, early, places, q in zip(g.parts, g.factors(), g.early, g.places, pushed, strict=True):
                gradients[:, part] *= factor
                for i in places if early else ():
                    here = self.flat.slices[i]
                    agreeing.append((q[here.start - part.start : here.stop - part.start], gradients[:, here]))  # type: ignore[index]
        self._clear_others(gradients, done)
        if self.parameters.shards is not None:
            self.parameters.shards.agree_(agreeing)  # type: ignore[arg-type]
            return
        for own, mine in agreeing:
            mine.copy_(torch.stack(agree([own] * len(mine), list(mine))))  # type: ignore[list-item]

    @torch.no_grad()
    def to_own_directions_(self, gradients: Tensor) -> None:
        """Turn validation gradients into the directions by which the step pays its own samples, in place."""
        moved, done = self.moved(), []
        for g in self.groups:
            done += g.parts
            joined = len(g.parts) == 1 and len(g.places[0]) > 1
            shapes = [torch.Size((-1,))] if joined else [self.flat.shapes[i] for (i,) in g.places]
            own = [moved[part].view(shape) for part, shape in zip(g.parts, shapes, strict=True)]
            for one in gradients:
                raw = [one[part].view(shape) for part, shape in zip(g.parts, shapes, strict=True)]
                for part, d in zip(g.parts, g.rule.own_direction(raw, own, g.step), strict=True):
                    one[part] = d.reshape(-1)
        self._clear_others(gradients, done)

    def _clear_others(self, gradients: Tensor, done: list[slice]) -> None:
        """Set the columns of tensors that did not step to 0."""
        at = 0
        for part in [*sorted(done, key=lambda p: p.start), slice(self.flat.size, self.flat.size)]:
            if part.start > at:
                gradients[:, at : part.start] = 0.0
            at = max(at, part.stop)
