"""What a step of an optimizer does to its weights, read from the optimizer's state after the step.

A step moves a tensor by

    w' − w = −A∘q − shrink·w      q = Σ_{s≤t} κ_{t,s} z_s      z_s = entry_s∘(±c_s G_s + λ w_s)

    factor      A, entry by entry, learning rate included, as the step really applied it
    pushed      q, linear in all gradients so far
    memory      κ, by the recursion  a ← keep·a, append enter;  κ = read·a + direct·[s = t]
    remembered  Σ_s a_s z_s, what the optimizer keeps of the steps so far
    entry       1, but for RMSprop with momentum, which divides a gradient before it remembers it
    sign        −1 where the optimizer maximizes
    coupled     λ, the weight decay that is added to the gradient
    shrink      the weight decay that is not

No method modifies what it is given, and none reads anything back from a device, but for
``is_early`` in the first four steps of a tensor whose step count is there (fused, capturable).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from inrun.errors import OptimizerError
from inrun.optimizers.lists import Tensors, along, dots, exact, on_host, scaled_, wide

Group = dict[str, Any]
State = dict[str, Any]
Scalar = float | Tensor

#: Steps of a tensor in which one factor stands for the whole tensor.
EARLY = 3


@dataclass(frozen=True)
class Memory:
    """How one step treats the gradients an optimizer remembers.

    a ← keep·a, append enter;  κ = read·a + direct·[s = t], where κ_{t,s} is the coefficient with
    which the gradient of step s moves the weights at step t.
    """

    keep: float
    enter: float
    read: float = 1.0
    direct: float = 0.0
    #: What later steps keep, where this step differs from them (SGD's first).
    keep_later: float | None = None

    @property
    def own(self) -> float:
        """κ_{t,t}: the coefficient of this step's own gradient."""
        return self.read * self.enter + self.direct

    @property
    def later(self) -> float:
        """The factor by which later steps forget, with the options as they are now."""
        return self.keep if self.keep_later is None else self.keep_later


#: A step that is moved by its own gradient alone.
NO_MEMORY = Memory(keep=0.0, enter=1.0)


@dataclass(frozen=True)
class GroupStep:
    """One step of the tensors of one parameter group that really stepped (at least one).

    Parallel lists; of DTensors, the local shards.

    Args:
        before: Weights before the step, ``[*shape]``.
        gradients: Gradients as the optimizer used them, clipped and unscaled, ``[*shape]``.
        group: The parameter group.
        states: The optimizer's state of each tensor as it is after the step.
        first: Whether ``remembered`` was None before the step, by tensor.
    """

    before: Tensors
    gradients: Tensors
    group: Group
    states: list[State]
    first: list[bool]

    @property
    def lr(self) -> Scalar:
        """The learning rate, a number if it can be read."""
        return learning_rate(self.group)

    @property
    def betas(self) -> tuple[float, float]:
        """β₁ and β₂."""
        first, second = self.group["betas"]
        return float(first), float(second)

    def option(self, name: str) -> float:
        """Return an option as a number; 0 if it is absent or None."""
        return option(self.group, name)

    def kept(self, name: str) -> list[Tensor]:
        """Return one entry of all states, in float32 at least."""
        return wide([state[name] for state in self.states])

    def counts(self) -> Tensor:
        """Return how often each tensor stepped, this step included, ``[n]``.

        On the CPU if both the counts and the learning rate are there, else on their device.
        """
        steps = [state["step"] for state in self.states]
        if all(on_host(step) for step in steps):
            counts = torch.tensor([float(step) for step in steps], dtype=torch.float64)
        else:
            counts = torch.stack(steps).reshape(-1)
        device = self.lr.device if isinstance(self.lr, Tensor) else counts.device
        return counts.to(device=device, dtype=exact(device), non_blocking=True)


class UpdateRule:
    """The update of one optimizer class. This base class is the rule of an unknown optimizer.

    A rule of your own needs ``factor`` and, for whole credit, ``memory`` with ``buffer``, or
    ``forgetful``; with weight decay also ``decoupled``.
    """

    #: Whether A depends on the gradient of its own step.
    adaptive: bool = False
    #: Whether a step is moved by its own gradient alone.
    forgetful: bool = False
    #: Whether every entry moves by itself, so that several tensors may be given as one vector.
    elementwise: bool = False
    #: Whether ``factor``, ``pushed`` or ``entry`` read this step's gradients.
    reads_gradients: bool = True
    #: The entry of the state that is remembered, and q unless ``pushed`` says otherwise.
    buffer: str | None = None
    #: Whether weight decay is lr·λ beside the update where the group does not say; None: neither.
    decoupled: bool | None = None

    def __init__(self) -> None:
        #: Step counts on a device that are known to be beyond EARLY.
        self._late = WeakTensorKeyDictionary()
        #: Whether the tensors of a group have stepped equally often, by the count of its first tensor.
        self._agreed = WeakTensorKeyDictionary()

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Check all groups; a rule may also read options that an optimizer keeps elsewhere."""
        for group in optimizer.param_groups:
            self.check(group)

    def check(self, group: Group) -> None:
        """Raise OptimizerError for options that the rule does not describe."""
        for beta in group.get("betas", ()):
            if not on_host(beta):
                raise OptimizerError(
                    f"betas on {beta.device} cannot be read without waiting for the device. "
                    "Give them as Python numbers or CPU tensors.",
                )

    def before_step(self, group: Group, states: list[State]) -> None:
        """Note what the step will overwrite and ``factor`` needs; called before the step.

        Only ASGD needs it, and only where the learning rate changes.
        """

    def sign(self, group: Group) -> float:
        """Return −1 where the optimizer maximizes, else 1."""
        return -1.0 if group.get("maximize", False) else 1.0

    def coupled(self, group: Group) -> float:
        """Return λ where weight decay is added to the gradient, else 0."""
        known = self.decoupled is not None
        beside = group.get("decoupled_weight_decay", self.decoupled)
        return option(group, "weight_decay") if known and not beside else 0.0

    def shrink(self, group: Group) -> Scalar:
        """Return the factor of −w in the move; a tensor where the learning rate is on a device."""
        known, decay = self.decoupled is not None, option(group, "weight_decay")
        beside = group.get("decoupled_weight_decay", self.decoupled)
        return learning_rate(group) * decay if known and beside and decay != 0.0 else 0.0

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """Return κ's recursion by tensor (often one object many times).

        None where earlier gradients have no unique shares in the move.
        """
        return [NO_MEMORY] * len(step.states) if self.forgetful else None

    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return A, as new tensors ``[*shape]`` or one number for all.

        A is 0 where nothing can move: where an adaptive optimizer's second moment is 0.
        """
        raise NotImplementedError

    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return q, ``[*shape]``. It may be the gradients or the state: do not write to it."""
        return self.entering(step) if self.buffer is None else step.kept(self.buffer)

    def remembered(self, state: State) -> Tensor | None:
        """Return Σ_s a_s z_s ``[*shape]``, the state itself; None where there is none (yet)."""
        return None if self.buffer is None else state.get(self.buffer)

    def entry(self, step: GroupStep) -> list[Tensor] | None:
        """Return what this step's gradients are multiplied by when they enter; None for 1."""
        return None

    def is_early(self, step: GroupStep) -> list[bool]:
        """Whether this was one of a tensor's first three steps, by the optimizer's own count.

        Where the optimizer does not count (Lion), only the first step is early; where A does not
        depend on the gradient, none is. A count on a device is read until it is beyond 3.
        """
        each = zip(step.states, step.first, strict=True)
        return [self.adaptive and self._early(state, first) for state, first in each]

    def _early(self, state: State, first: bool) -> bool:
        count = state.get("step")
        if count is None:
            return first
        if on_host(count):
            return float(count) <= EARLY
        if count not in self._late and float(count) > EARLY:
            self._late[count] = True
        return count not in self._late

    def counts_agree(self, counts: Sequence[Any]) -> bool:
        """Return whether step counts on a device are equal. They are read once, and later believed to go on alike."""
        key = counts[0]
        if key not in self._agreed:
            self._agreed[key] = len({float(c) for c in counts}) == 1
        return bool(self._agreed[key])

    @torch.no_grad()
    def own_direction(self, raw: Tensors, moved: Tensors, step: GroupStep) -> list[Tensor]:
        """Return the direction D by which a step pays its own samples: score = ⟨c g_n, D⟩.

        With a memory, D = ±κ_{t,t} A∘entry∘∇: what is shared is the part of the move that this
        step's gradient made, with A held fixed. Without one, D = G ⟨moved, ∇⟩ / ‖G‖²: all of the
        move is shared, earlier gradients' part included, less decoupled decay where the rule
        knows it, by agreement with this step's gradient. The scores then sum to ⟨moved, ∇⟩.

        Args:
            raw: Validation gradients ∇, ``[*shape]``.
            moved: Weights before minus weights after the step, ``[*shape]``.
            step: The step.
        """
        memories = self.memory(step)
        if memories is None:
            shrink = self.shrink(step.group)
            if isinstance(shrink, Tensor) or shrink != 0.0:
                moved = torch._foreach_sub(moved, torch._foreach_mul(step.before, shrink))
            return along(step.gradients, dots(moved, raw))
        factor: Any = self.factor(step)
        out, entry = list(torch._foreach_mul(raw, factor)), self.entry(step)
        if entry is not None:
            torch._foreach_mul_(out, entry)
        return scaled_(out, [memory.own * self.sign(step.group) for memory in memories])

    @torch.no_grad()
    def entering(self, step: GroupStep) -> list[Tensor]:
        """Return ±G + λw; the gradients themselves if that is all."""
        sign, decay, z = self.sign(step.group), self.coupled(step.group), wide(step.gradients)
        if sign != 1.0:
            z = list(torch._foreach_mul(z, sign))
        return list(torch._foreach_add(z, wide(step.before), alpha=decay)) if decay != 0.0 else z


def learning_rate(group: Group) -> Scalar:
    """Return ``lr`` as a number, or as the tensor it is if that is on a device."""
    lr = group.get("lr")
    if lr is None:
        raise OptimizerError("The parameter group has no learning rate `lr`. Set one.")
    return float(lr) if on_host(lr) else lr.reshape(())


def option(group: Group, name: str) -> float:
    """Return an option as a number; 0 if it is absent or None."""
    return float(group.get(name) or 0.0)
