"""What one real optimizer step does to a weight, and how it is shared out: the registry by optimizer class.

A rule describes the move u(G) = w' − w of one parameter as a function of the gradient G the optimizer is about to use.
u(0) is what happens without data (momentum, weight decay). The rest is shared out linearly: sample n gets P∘g_n with
P = (u(G) − u(0)) / G, so that its contribution is ⟨g_n, v⟩ with the direction v = −P∘∇ℓ. Learning rates are included
everywhere but in ``frozen``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from inrun import statistics
from inrun.errors import OptimizerError

Group = dict[str, Any]
State = dict[str, Any]

#: Entries worked on at once: the scratch buffers stay in a core's cache. A GPU has no such limit, but launches cost.
CHUNK = {"cpu": 2**17}
CHUNK_ELSEWHERE = 2**22
#: A gradient this much smaller than the entry's scale is replaced by one of this size: u is straight there, and the
#: difference of two float64 numbers still has 1e-8 of relative accuracy.
TINY = 1e-7


@dataclass(frozen=True)
class Recall:
    """How one step treats the pushes that an optimizer remembers: a ← keep · a, append enter; κ = read · a + direct · [s = t].

    κ_{t,s} is the coefficient with which the gradient of step s moves the weights at step t.
    """

    keep: float
    enter: float
    read: float = 1.0
    direct: float = 0.0
    #: What the steps to come keep, where this one is another (the first).
    keeps_later: float | None = None

    @property
    def later(self) -> float:
        """Return the factor by which the steps to come will forget, as far as is known."""
        return self.keep if self.keeps_later is None else self.keeps_later

    @property
    def own(self) -> float:
        """Return κ_{t,t}: the coefficient of this step's own gradient."""
        return self.read * self.enter + self.direct


#: An optimizer without memory: a step is moved by its own gradient alone.
NO_MEMORY = Recall(keep=0.0, enter=1.0)


@dataclass
class Realised:
    """The move that a step really makes: −pace · gain ∘ q, beside decoupled weight decay.

    q = Σ_s κ_{t,s} z_s is linear in the gradients of all steps so far, z_s = entry_s ∘ (±G_s + λw_s).
    """

    #: ``[*shape]`` or one number, 0 where nothing can move.
    gain: Tensor | float
    q: Tensor
    #: The learning rate, or what stands for it.
    pace: float
    #: What this step's gradient is multiplied by before it is remembered; None for 1.
    entry: Tensor | None = None


class UpdateRule:
    """The update of one optimizer class. ``move`` is all that a rule must bring.

    Shapes: ``gradient``, ``parameter`` and the state's entries of that shape may be the same selection of rows of a
    parameter where ``elementwise``; scalars of the state (the step) stay.
    """

    #: True where the gain is one number per tensor, known before the gradient.
    linear: bool = False
    #: True where entry j of the move depends on entry j of gradient, weight and state only.
    elementwise: bool = True
    #: True where ``frozen`` divides by the learning rate as it stands: it must not change until the step.
    rate_is_state: bool = False
    #: Points on the way from no gradient to the real one, where the update is not elementwise.
    points: int = 4

    def check(self, group: Group) -> None:
        """Raise OptimizerError for options the rule does not describe."""

    def bind(self, optimizer: torch.optim.Optimizer) -> UpdateRule:
        """Return the rule for one optimizer, after checking its groups; some keep options outside the groups."""
        for group in optimizer.param_groups:
            self.check(group)
        return self

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return u(G): the whole change of the weight that the next real step would make with this gradient.

        Args:
            gradient: The gradient as the optimizer sees it, ``[*shape]``; its dtype is the one computed in.
            parameter: The weight before the step, ``[*shape]``.
            group: Its parameter group.
            state: Its optimizer state before the step; may be empty. Nothing is modified.

        Returns:
            w' − w with learning rate, momentum and weight decay, ``[*shape]``; differentiable in the gradient where
            the rule is not elementwise.
        """
        raise NotImplementedError

    def varying(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the move up to a part that does not depend on the gradient: less to cancel in a difference."""
        return self.move(gradient, parameter, group, state)

    def scale(self, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return a gradient size, ``[*shape]``, far below which the update is straight; 0 where there is no history.

        Used for gradients that are 0 or nearly so. By default the largest of what the state holds for an entry, which
        may be a gradient or its square (the smaller of |x| and √|x| is taken), and the coupled weight decay.
        """
        decay = 0.0 if group.get("decoupled_weight_decay", False) else option(group, "weight_decay")
        size = parameter.detach().abs() * decay
        for x in state.values():
            if isinstance(x, Tensor) and x.shape == parameter.shape and x.is_floating_point():
                size = torch.maximum(size, torch.minimum(x.abs(), x.abs().sqrt()).to(size.dtype))
        return size

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Return the weight decay in the zero-gradient move (None where it cannot be told from memory), and that move."""
        zeros = torch.zeros_like(parameter, dtype=at_least_float32(parameter.dtype))
        decay = None if option(group, "weight_decay") != 0.0 else zeros.new_zeros(()).expand_as(zeros)
        return decay, self.move(zeros, parameter, group, state)

    @torch.no_grad()
    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """Return the gain −P = (u(0) − u(G)) / G elementwise, given the gradient the optimizer is about to use.

        Samples may cancel to G = 0 while none of them is 0, so that the limit matters: there, and where G is tiny, the
        difference is taken over a small step in the direction of G. No history and no gradient is a gain of 0 if the
        update jumps there (Adam's first step): nothing moves.
        """
        if not self.elementwise:
            raise OptimizerError(f"{type(self).__name__} is not elementwise: it has directions, but no gain per entry")

        def difference(g: Tensor, w: Tensor, part: State) -> Tensor:
            least = self.scale(w, group, part).to(g.dtype) * TINY
            step = torch.where(g.abs() < least, torch.where(g < 0, -least, least), g)
            still = self.varying(torch.zeros_like(g), w, group, part)

            def slope(step: Tensor) -> Tensor:
                return (still - self.varying(step, w, group, part)) / step

            none = step == 0
            if not bool(none.any()):
                return slope(step)
            # No gradient and nothing to measure it by. A jump shows in a gain that grows as the gradient shrinks.
            usual = g.abs().max()
            usual = torch.where(usual == 0, 1.0, usual).expand_as(g)
            small = slope(usual * 1e-6)
            small = torch.where(small.abs() <= 10 * slope(usual).abs(), small, 0.0)
            return torch.where(none, small, slope(torch.where(none, usual, step)))

        return by_chunks(difference, gradient, parameter, state)

    @torch.no_grad()
    def direction(self, raw: Tensor, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return v = −P∘∇ℓ, ``[k, *shape]``, from validation gradients ``raw`` of the same shape.

        Where the update is not elementwise, P is the mean of its Jacobian along the way s·G, s from 0 to 1:
        v = −Σ_q w_q J(s_q G)ᵀ ∇ℓ with Gauss-Legendre points. The shares then sum to the move as far as the points reach.
        """
        if self.elementwise:
            return raw * self.secant(gradient, parameter, group, state)
        dtype = at_least_float32(torch.promote_types(raw.dtype, gradient.dtype))
        real, weight, cotangents = gradient.detach().to(dtype), parameter.detach(), raw.detach().to(dtype)
        v = torch.zeros_like(cotangents)
        for s, part in self.path(real, weight, group, state):
            with torch.enable_grad():
                at = (s * real).requires_grad_()
                moved = self.move(at, weight, group, state)
            for k, cotangent in enumerate(cotangents):
                (pulled,) = torch.autograd.grad(moved, at, cotangent, retain_graph=k + 1 < len(cotangents))
                v[k].add_(pulled, alpha=-part)
        return v.to(raw.dtype)

    def travel(self, weight: Tensor, gradient: Tensor, group: Group, state: State, fraction: float, gain: Tensor) -> bool:
        """Write w + u(0) + fraction · (u(G) − u(0)) into ``weight`` and −P into ``gain``, in one pass over memory.

        Returns:
            False where the rule has no such pass; then nothing was written.
        """
        return False

    def coast(self, weight: Tensor, group: Group, state: State) -> bool:
        """Write w + u(0) into ``weight`` in one pass over memory; False where the rule has no such pass."""
        return False

    def path(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> list[tuple[float, float]]:
        """Return the points s of the way s·G at which the Jacobian is taken, and their weights."""
        return gauss_legendre(self.points)

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Turn validation gradients into directions in place, with the state as it stands before the step.

        Args:
            raw: Validation gradients ∇ℓ, ``[k, *shape]``; becomes gain ∘ ∇ℓ up to the returned factor.
            parameter: The parameter, ``[*shape]``.
            group: Its parameter group.
            state: Its optimizer state.

        Returns:
            The factor still to be applied beside the learning rate, or None where the gain is not known before the
            gradient: the parameter then waits for it.
        """
        return None

    def frozen_each(self, items: Sequence[tuple[Tensor, Tensor, Group, State]]) -> list[float | None]:
        """Do the same for many parameters, given as the arguments of :meth:`frozen`."""
        return [self.frozen(*item) for item in items]

    def thaw(self, v: Tensor, group: Group, state: State) -> Tensor:
        """Return the validation gradients from which ``frozen`` made ``v``, where no gain was 0."""
        raise NotImplementedError

    def without_history(self, state: State) -> int:
        """Return how many entries of a parameter never had a gradient, so that their frozen gain is 0."""
        return 0

    def can_thaw(self, state: State) -> bool:
        """Whether ``frozen`` can be undone, so that no copy of the validation gradients is needed."""
        return False

    # Whole credit: what a step does with the gradients of all steps so far. A rule with ``recall`` and ``realised`` has it.

    #: Whether the realised gain depends on the gradient of its own step.
    adaptive: bool = True
    #: Why whole credit is kept only on request; None where it is the rule.
    whole_on_request: str | None = None

    def recall(self, group: Group, state: State) -> Recall | None:
        """Return how the next step treats remembered pushes; None where shares of earlier gradients are not unique."""
        return None

    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return the move that the next step makes with this gradient, as a gain on a sum over all gradients so far."""
        raise NotImplementedError

    def realised_again(self, before: Realised | None, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """The same, in the memory of an earlier step's where a rule cares to."""
        return self.realised(gradient, parameter, group, state)

    def remembered(self, state: State) -> Tensor | None:
        """Return the memory whose entries ``recall`` describes, Σ_s a_s z_s; None where there is none yet."""
        return None

    def entering_decay(self, group: Group) -> float:
        """Return λ where weight decay is added to the gradient, else 0."""
        return 0.0

    def decay_beside(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return the factor of −w in the move, where weight decay is beside the update, else 0."""
        return 0.0


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in for tensors of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def learning_rate(group: Group) -> float:
    """Return the learning rate of a group as a number."""
    if group.get("lr") is None:
        raise OptimizerError("the parameter group has no learning rate `lr`, as a number or a tensor of one entry")
    return float(group["lr"])


def option(group: Group, name: str) -> float:
    """Return an option of a group as a number; 0 if it is absent or None."""
    return float(group.get(name) or 0.0)


def sign_of(group: Group) -> float:
    """Return −1 where the optimizer maximises, else 1."""
    return -1.0 if group.get("maximize", False) else 1.0


def held(state: State, name: str, like: Tensor) -> Tensor:
    """Return a tensor of the state in the dtype of ``like``; zeros before the first step."""
    x = state.get(name)
    return like.new_zeros(()).expand_as(like) if x is None else x.to(like.dtype)


def next_step(state: State) -> float:
    """Return the number of the step that is about to happen, counted from 1."""
    return float(state.get("step", 0.0)) + 1.0


def by_chunks(f: Callable[[Tensor, Tensor, State], Tensor], gradient: Tensor, parameter: Tensor, state: State) -> Tensor:
    """Apply an elementwise function of gradient, weight and state in float64, some entries at a time."""
    shape, device = gradient.shape, gradient.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    flat = {k: x.reshape(-1) for k, x in state.items() if isinstance(x, Tensor) and x.shape == shape}
    g, w = gradient.reshape(-1), parameter.detach().reshape(-1)
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    for some in chunks_of(g):
        part = state | {k: x[some] for k, x in flat.items()}
        out[some] = f(g[some].to(wide), w[some].to(wide), part)
    return out.view(shape)


def chunks_of(flat: Tensor) -> list[slice]:
    """Return slices that cover a flat tensor."""
    size = CHUNK.get(flat.device.type, CHUNK_ELSEWHERE)
    return [slice(i, min(i + size, flat.numel())) for i in range(0, flat.numel(), size)]


def in_panels(edges: list[float], points: int) -> list[tuple[float, float]]:
    """Return points and weights on the panels between edges, which descend from 1 to 0."""
    panels, inner = zip(edges[1:], edges[:-1], strict=True), gauss_legendre(points)
    return [(low + s * (high - low), part * (high - low)) for low, high in panels for s, part in inner]


def gauss_legendre(points: int) -> list[tuple[float, float]]:
    """Return points on [0, 1] and their weights; see :func:`inrun.statistics.gauss_legendre`."""
    return list(statistics.gauss_legendre(points))


_rules: dict[type[torch.optim.Optimizer], UpdateRule] = {}
_rules_by_name: dict[str, UpdateRule] = {}
U = TypeVar("U", bound=type[UpdateRule])


def register(*optimizer_classes: type[torch.optim.Optimizer] | str) -> Callable[[U], U]:
    """Register an update rule for optimizer classes (and subclasses that keep their ``step``).

    A class of a package that should not be imported is given as ``"package.module.Class"``, where it is defined.
    """

    def add(rule: U) -> U:
        for cls in optimizer_classes:
            if isinstance(cls, str):
                _rules_by_name[cls] = rule()
            else:
                _rules[cls] = rule()
        return rule

    return add


class PlainRule(UpdateRule):
    """The paper's proxy, whatever the optimizer: w ← w − lr · G."""

    linear = True

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return ∓lr · G."""
        return gradient * (-sign_of(group) * learning_rate(group))

    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """In the proxy nothing happens without data."""
        zeros = torch.zeros((), dtype=at_least_float32(parameter.dtype), device=parameter.device).expand_as(parameter)
        return zeros, zeros

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """The gain is 1, or −1 where the optimizer maximises."""
        return sign_of(group)

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """The same number times the learning rate."""
        return sign_of(group) * learning_rate(group)


plain = PlainRule()


def _update_of(cls: type) -> Any:
    """Return the class's ``step`` as it was written (torch wraps it for profiling when an optimizer is made)."""
    return inspect.unwrap(cls.step)  # type: ignore[attr-defined]


def find_update(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the update rule of an optimizer, or raise with what is registered."""
    cls = type(optimizer)
    for base in cls.__mro__:
        rule = _rules.get(base) or _rules_by_name.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None and _update_of(cls) is _update_of(base):
            return rule.bind(optimizer)
    known = ", ".join(sorted({c.__name__ for c in _rules} | set(_rules_by_name)))
    raise OptimizerError(
        f"no update rule for {cls.__module__}.{cls.__name__}; known are {known}. "
        'Use update="sgd" for the plain-SGD proxy, or register a rule with inrun.old.optimizers.register.'
    )
