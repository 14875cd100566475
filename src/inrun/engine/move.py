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
        self[name] = torch.cat([s[name].reshape(-1) for s in self._states]) if joined else first
        return self[name]


@dataclass(eq=False)
class Segment:
    """What one step did to some tensors that lie next to each other.

    Attributes:
        places: The tensors.
        part: Their slice of the flat vector.
        memory: How their optimizer remembers gradients; None where earlier gradients have no unique shares.
        factor: A, learning rate included, ``[m]`` or one number.
        q: What A multiplies, ``[m]``.
        shrink: The factor of −w in the move.
        coupled: Weight decay that is added to the gradient.
        early: Whether one factor stands for a whole tensor.
        entry: What gradients are multiplied by before they are remembered, ``[m]``.
    """

    places: list[int]
    part: slice
    memory: Memory | None
    factor: Tensor | float
    q: Tensor
    shrink: float | Tensor
    coupled: float
    early: bool
    entry: Tensor | None


class Mover:
    """Copies weights before a step and describes the move after it."""

    def __init__(self, parameters: Parameters, rules: Sequence[UpdateRule], keeps_weights: bool = True) -> None:
        self.parameters, self.rules, self.keeps_weights = parameters, list(rules), keeps_weights
        self.flat = FlatLayout(parameters.tensors(), parameters.dtype)
        #: Where weights are rounded, points of a move that lie close to each other are no better than fewer.
        self.low_precision = any(s.parameter.dtype.itemsize < 4 for s in parameters.scored)
        self._before: Tensor | None = None
        self._scratch: Tensor | None = None
        self._first: dict[int, bool] = {}
        #: Groups of which some tensors did not step at times.
        self._uneven: set[int] = set()
        self._stepping: list[Scored] = []
        self.segments: list[Segment] = []
        #: The steps of the groups, for the shares of a step's own move: step, tensors, whether they are joined.
        self._groups: list[tuple[GroupStep, list[Scored], bool]] = []

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

    def begin(self) -> None:
        """Begin a step."""
        self.segments, self._stepping, self._groups = [], [], []

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Copy the weights that an optimizer is about to move."""
        if not self.keeps_weights:
            return
        owned, rule = self.parameters.of(index), self.rules[index]
        stepping = [s for s in owned if s.parameter.grad is not None]
        self._first |= {s.place: rule.remembered(optimizer.state.get(s.parameter, {})) is None for s in stepping}
        for group in optimizer.param_groups:
            states = [optimizer.state[s.parameter] for s in stepping if s.group is group and s.parameter in optimizer.state]
            rule.before_step(group, states)
        if self._before is None:
            self._before = self.flat.buffer()
        self.flat.fill(self._before, [s.parameter for s in owned], owned[0].place)
        self._stepping += stepping

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Describe what an optimizer did."""
        for group in optimizer.param_groups:
            some = [s for s in self._stepping if s.optimizer == index and s.group is group]
            if some:
                self._describe(optimizer, group, some, self.rules[index])

    def _describe(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], some: list[Scored], rule: UpdateRule) -> None:
        states = [optimizer.state.get(s.parameter, {}) for s in some]
        joined = self._alike(some, states, rule)
        if joined:
            step = self._joined_step(group, some, states, rule)
        else:
            before = self.flat.views(self.weights_before, [s.place for s in some])
            first = [self._first[s.place] for s in some]
            step = GroupStep(before, [s.parameter.grad for s in some], group, states, first)  # type: ignore[misc]
        self._groups.append((step, some, joined))
        memories = rule.memory(step)
        if memories is None:
            factors: Any = 0.0
            pushed: Any = step.gradients
        else:
            factors, pushed = rule.factor(step), rule.pushed(step)
        entries, early = rule.entry(step), rule.is_early(step)
        shrink, coupled = rule.shrink(group), rule.coupled(group)
        for j, scored in enumerate([some] if joined else [[s] for s in some]):
            places = [s.place for s in scored]
            self.segments.append(
                Segment(
                    places,
                    self.flat.part(places),
                    None if memories is None else memories[j],
                    factors if not isinstance(factors, list) else factors[j].reshape(-1),
                    pushed[j].reshape(-1),
                    shrink,
                    coupled,
                    early[j],
                    None if entries is None else entries[j].reshape(-1),
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
            gradients = [torch.cat([s.parameter.grad.reshape(-1) for s in some])]  # type: ignore[union-attr]
        return GroupStep([self.weights_before[part]], gradients, group, [JoinedState(states)], [self._first[some[0].place]])

    @contextlib.contextmanager
    def at(self, fraction: float) -> Iterator[None]:
        """Hold the model at w + fraction · (w' − w); afterwards the weights are w' again, bit for bit."""
        if fraction == 1.0:
            yield
            return
        places = [i for s in self.segments for i in s.places]
        weights = [self.parameters.scored[i].parameter.detach() for i in places]
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
            with torch.no_grad():
                torch._foreach_copy_(weights, self.flat.views(self.scratch, places))

    def after_weights(self) -> Tensor:
        """Return the weights after the step, ``[size]``, in the scratch vector."""
        self.flat.fill(self.scratch, self.parameters.tensors())
        return self.scratch

    # Directions

    @torch.no_grad()
    def to_directions_(self, gradients: Tensor) -> None:
        """Turn validation gradients ``[k, size]`` into D = A∘∇ in place; in a tensor's first steps D agrees with q."""
        at = 0
        for s in sorted(self.segments, key=lambda s: s.part.start):
            gradients[:, at : s.part.start] = 0.0
            at = s.part.stop
            d = gradients[:, s.part]
            if s.memory is None:
                d.zero_()
                continue
            d.mul_(s.factor)
            if s.early:
                for i in s.places:
                    here = self.flat.slices[i]
                    q = s.q[here.start - s.part.start : here.stop - s.part.start]
                    mine = gradients[:, here]
                    mine.copy_(torch.stack(agree([q] * len(mine), list(mine))))
        gradients[:, at:] = 0.0

    @torch.no_grad()
    def to_own_directions_(self, gradients: Tensor) -> None:
        """Turn validation gradients into the directions by which the step pays its own samples, in place."""
        after, done = self.after_weights(), torch.zeros(len(self.flat.shapes), dtype=torch.bool)
        for step, some, joined in self._groups:
            rule, places = self.rules[some[0].optimizer], [s.place for s in some]
            done[places] = True
            parts = [self.flat.part(places)] if joined else [self.flat.slices[i] for i in places]
            shapes = [torch.Size((-1,))] if joined else [self.flat.shapes[i] for i in places]
            moved = [(self.weights_before[part] - after[part]).view(shape) for part, shape in zip(parts, shapes, strict=True)]
            for one in gradients:
                raw = [one[part].view(shape) for part, shape in zip(parts, shapes, strict=True)]
                for part, d in zip(parts, rule.own_direction(raw, moved, step), strict=True):
                    one[part] = d.reshape(-1)
        for i in (~done).nonzero().flatten().tolist():
            gradients[:, self.flat.slices[i]] = 0.0
