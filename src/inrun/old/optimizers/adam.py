"""Adam and AdamW (with amsgrad, maximize and either kind of weight decay).

At step t, with z = ±G (+ λw for Adam's L2 decay):

    m_t = β₁m + (1−β₁)z     s_t = β₂s + (1−β₂)z²     w ← w − lr · (m_t / (1−β₁ᵗ)) / (√(s_t / (1−β₂ᵗ)) + ε)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.old.optimizers.quotient import QuotientRule, slope_of_root
from inrun.old.optimizers.registry import (
    Group,
    Realised,
    Recall,
    State,
    chunks_of,
    held,
    learning_rate,
    next_step,
    register,
    sign_of,
)

#: Entries up to which a parameter is taken together with others.
SMALL = 64 << 10


def first_moment(group: Group) -> Recall:
    """Return the memory of Adam's first moment."""
    beta1 = float(group["betas"][0])
    return Recall(beta1, 1.0 - beta1)


class MomentsRule(QuotientRule):
    """What Adam, NAdam and RAdam share: the second moment s_t = β₂s + (1−β₂)z², r = √(s_t / (1−β₂ᵗ))."""

    def correction(self, group: Group, state: State) -> float:
        """Return what s_t is divided by."""
        return 1.0 - float(group["betas"][1]) ** next_step(state)

    def recall(self, group: Group, state: State) -> Recall | None:
        """The first moment forgets by β₁ and takes 1 − β₁ of what comes."""
        return first_moment(group)

    def remembered(self, state: State) -> Tensor | None:
        """Return the first moment."""
        return state.get("exp_avg")

    def _second(self, z: Tensor, group: Group, state: State) -> Tensor:
        beta2 = float(group["betas"][1])
        return torch.addcmul(held(state, "exp_avg_sq", z) * beta2, z, z, value=1.0 - beta2)

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return √(s_t / (1−β₂ᵗ)); amsgrad takes the largest s so far."""
        second = self._second(z, group, state)
        if group.get("amsgrad", False):
            second = torch.maximum(second, held(state, "max_exp_avg_sq", z))
        return torch.sqrt(second / self.correction(group, state))

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """The divided difference of s_t is (1−β₂)(z₀ + z₁)."""
        slope = (z0 + z1) * (1.0 - float(group["betas"][1]))
        if group.get("amsgrad", False):
            largest = held(state, "max_exp_avg_sq", z0)
            slope = slope_above(largest, self._second(z0, group, state), self._second(z1, group, state), slope, z1 - z0)
        return slope_of_root(slope / self.correction(group, state), r0, r1)


@register(torch.optim.Adam)
class AdamRule(MomentsRule):
    """Adam's update; elementwise but not linear in the gradient."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Return lr/(1−β₁ᵗ) times β₁m and 1−β₁."""
        beta1 = float(group["betas"][0])
        step = learning_rate(group) / (1.0 - beta1 ** next_step(state))
        return held(state, "exp_avg", like) * (step * beta1), step * (1.0 - beta1)

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Divide by √(s_{t−1} / (1−β₂ᵗ⁻¹)) + ε; entries that never had a gradient get the gain 0.

        The gain is (1−β₁)/(1−β₁ᵗ) / (√(s_{t−1} / (1−β₂ᵗ⁻¹)) + ε). Where s = 0 that would be 1/ε, which no real step
        does: the real step divides by the new gradient's own size.
        """
        done = float(state["step"]) if "exp_avg_sq" in state else 0.0
        if done < 1:
            return None
        beta1, beta2 = (float(beta) for beta in group["betas"])
        correction = math.sqrt(1.0 - beta2**done)
        second, eps = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"], float(group["eps"]) * correction
        parts = chunks_of(second)
        if len(parts) == 1:
            raw.div_(torch.threshold_(torch.sqrt(second), 0.0, math.inf).add_(eps))
        else:
            second, rows = second.reshape(-1), raw.view(len(raw), -1)
            size = second.new_empty(parts[0].stop if parts else 0)
            for some in parts:
                here = torch.sqrt(second[some], out=size[: some.stop - some.start])
                rows[:, some].div_(torch.threshold_(here, 0.0, math.inf).add_(eps))
        return (-1.0 if group["maximize"] else 1.0) * correction * (1.0 - beta1) / (1.0 - beta1 ** (done + 1.0))

    def frozen_each(self, items: Sequence[tuple[Tensor, Tensor, Group, State]]) -> list[float | None]:
        """Take the options of small parameters of a group that have stepped equally often once: they cost more than the sums."""
        found: list[float | None] = [None] * len(items)
        alike: dict[tuple[int, float], list[int]] = {}
        for place, (raw, _, group, state) in enumerate(items):
            second = None if group["amsgrad"] else state.get("exp_avg_sq")
            done = float(state["step"]) if second is not None and second.numel() <= SMALL and second.dtype == raw.dtype else 0.0
            if done >= 1:
                alike.setdefault((id(group), done), []).append(place)
            else:
                found[place] = self.frozen(*items[place])
        for (_, done), places in alike.items():
            group = items[places[0]][2]
            beta1, beta2 = (float(beta) for beta in group["betas"])
            correction = math.sqrt(1.0 - beta2**done)
            eps = float(group["eps"]) * correction
            for raw, _, _, state in (items[place] for place in places):
                raw.div_(torch.threshold_(torch.sqrt(state["exp_avg_sq"]), 0.0, math.inf).add_(eps))
            factor = sign_of(group) * correction * (1.0 - beta1) / (1.0 - beta1 ** (done + 1.0))
            for place in places:
                found[place] = factor
        return found

    def _correction(self, group: Group, state: State) -> float:
        return math.sqrt(1.0 - float(group["betas"][1]) ** float(state["step"]))

    def _denominator(self, group: Group, state: State) -> Tensor:
        """Return √s + ε√(1−β₂ᵗ⁻¹), infinite where s = 0."""
        denominator = torch.sqrt(state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"])
        return torch.threshold_(denominator, 0.0, math.inf).add_(self._small(group, state))

    def _small(self, group: Group, state: State) -> float:
        return float(group["eps"]) * self._correction(group, state)

    def thaw(self, v: Tensor, group: Group, state: State) -> Tensor:
        """Multiply by what ``frozen`` divided by."""
        return v * self._denominator(group, state)

    def without_history(self, state: State) -> int:
        """Count the entries whose second moment is 0."""
        second = state.get("exp_avg_sq")
        return 0 if second is None else second.numel() - int(torch.count_nonzero(second))

    def can_thaw(self, state: State) -> bool:
        """Only where every entry has had a gradient."""
        return "exp_avg_sq" in state and self.without_history(state) == 0

    def _usual(self, gradient: Tensor, group: Group, state: State) -> bool:
        """Whether the case is the one with a path of its own, being every step's work for AdamW."""
        plain = self.coupled(group) == 0.0 and not group["amsgrad"] and float(group["betas"][1]) > 0.0
        return plain and "exp_avg_sq" in state and gradient.device.type != "mps"

    @torch.no_grad()
    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """Return the divided difference in closed form."""
        if not self._usual(gradient, group, state):
            return super().secant(gradient, parameter, group, state)
        out = torch.empty(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        for some, gain, _ in self._gains(gradient, group, state):
            out[some] = gain
        return out.view(gradient.shape)

    @torch.no_grad()
    def travel(self, weight: Tensor, gradient: Tensor, group: Group, state: State, fraction: float, gain: Tensor) -> bool:
        """The memory's part is −k β₁ m / D₀, with the D₀ of the gain; decay shrinks the weight before."""
        contiguous = weight.is_contiguous() and gain.is_contiguous()
        if not contiguous or weight.dtype != gradient.dtype or not self._usual(gradient, group, state):
            return False
        pull, unit = self._pull(group, state)
        keeps = 1.0 - self.shrinks(group)
        w, g, m, out = weight.view(-1), gradient.reshape(-1), state["exp_avg"].reshape(-1), gain.view(-1)
        for some, part, size in self._gains(gradient, group, state):
            out[some] = part
            here = w[some].mul_(keeps).addcdiv_(m[some], size.to(w.dtype), value=-pull / unit)
            here.addcmul_(out[some], g[some], value=-fraction)
        return True

    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return gain and q, in new memory."""
        return self.realised_again(None, gradient, parameter, group, state)

    @torch.no_grad()
    def realised_again(self, before: Realised | None, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """In one pass: q = β₁m ± (1−β₁)G and the gain 1/(1−β₁ᵗ) / (√(s_t / (1−β₂ᵗ)) + ε), 0 where s_t = 0."""
        if not self._usual(gradient, group, state):
            return super().realised(gradient, parameter, group, state)
        (beta1, beta2), t = (float(b) for b in group["betas"]), next_step(state)
        old = (None, None) if before is None else (before.q, before.gain)
        q, gain = (_again(x, gradient) for x in old)
        g, m, s = gradient.reshape(-1), state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1)
        of_second, eps, bare = 1.0 / (1.0 - beta2**t), float(group["eps"]), 1.0 / (1.0 - beta1**t)
        for some in chunks_of(g):
            torch.mul(g[some], sign_of(group) * (1.0 - beta1), out=q.view(-1)[some]).add_(m[some], alpha=beta1)
            size = torch.mul(s[some], beta2 * of_second, out=gain.view(-1)[some])
            size.addcmul_(g[some], g[some], value=(1.0 - beta2) * of_second).sqrt_()
            torch.threshold_(size, 0.0, math.inf).add_(eps).reciprocal_().mul_(bare)
        return Realised(gain, q, learning_rate(group))

    @torch.no_grad()
    def coast(self, weight: Tensor, group: Group, state: State) -> bool:
        """Shrink, and add −k β₁ m / (√s + ε) in the unit of sizes."""
        if not weight.is_contiguous() or not self._usual(weight, group, state) or state["exp_avg"].dtype != weight.dtype:
            return False
        pull, unit = self._pull(group, state)
        keeps, eps = 1.0 - self.shrinks(group), float(group["eps"]) / unit
        w, m, s = weight.view(-1), state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1)
        parts = chunks_of(w)
        size = w.new_empty(parts[0].stop if parts else 0)
        for some in parts:
            here = torch.sqrt(s[some], out=size[: some.stop - some.start]).add_(eps)
            w[some].mul_(keeps).addcdiv_(m[some], here, value=-pull / unit)
        return True

    def _pull(self, group: Group, state: State) -> tuple[float, float]:
        """Return lr β₁/(1−β₁ᵗ), and the unit of sizes √(β₂ / (1−β₂ᵗ)) in which D₀ is kept."""
        beta1, beta2 = (float(b) for b in group["betas"])
        t = next_step(state)
        return learning_rate(group) * beta1 / (1.0 - beta1**t), math.sqrt(beta2 / (1.0 - beta2**t))

    @torch.no_grad()
    def direction(self, raw: Tensor, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return gain ∘ ∇ℓ without holding all gains at once."""
        if not self._usual(gradient, group, state):
            return super().direction(raw, gradient, parameter, group, state)
        rows, out = raw.reshape(len(raw), -1), torch.empty(len(raw), gradient.numel(), dtype=raw.dtype, device=raw.device)
        for some, gain, _ in self._gains(gradient, group, state):
            torch.mul(rows[:, some], gain.to(raw.dtype), out=out[:, some])
        return out.view(raw.shape)

    def _gains(self, gradient: Tensor, group: Group, state: State) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the gain without coupled decay and amsgrad, and D₀, chunk by chunk, in scratch buffers that stay in cache.

        Sizes are kept in units of √(β₂ / (1−β₂ᵗ)), so that r₀ = √s; with κ = (1−β₂)/β₂ and k = lr/(1−β₁ᵗ) in that unit

            gain = (±k(1−β₁) − kβ₁κ · mG / ((r₀ + r₁) D₀)) / D₁,      r₁ = √(s + κG²),  D = r + ε/unit
        """
        beta1, beta2 = (float(b) for b in group["betas"])
        t = next_step(state)
        unit, entering = math.sqrt(beta2 / (1.0 - beta2**t)), (1.0 - beta2) / beta2
        eps, k = float(group["eps"]) / unit, learning_rate(group) / (1.0 - beta1**t) / unit
        g, m, s = gradient.reshape(-1), state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1)
        # How much of the first term the second takes away, per unit of mG / ((r₀ + r₁) D₀).
        drags, first = sign_of(group) * beta1 * entering / (1.0 - beta1), sign_of(group) * k * (1.0 - beta1)
        parts = chunks_of(g)
        single = g.dtype == m.dtype == s.dtype == torch.float32 and g.device.type == "cpu"
        rough = g.new_empty(4, parts[0].stop if parts and single else 0)
        exact: Tensor | None = None
        for some in parts:
            inputs, size = (g[some], m[some], s[some]), some.stop - some.start
            if single and _gain(inputs, rough[:, :size], eps, entering, drags, first, careful=True):
                yield some, rough[0, :size], rough[1, :size]
                continue
            exact = torch.empty(7, parts[0].stop, dtype=torch.float64, device=g.device) if exact is None else exact
            for wide, x in zip(exact[4:], inputs, strict=True):
                wide[:size].copy_(x)
            _gain(exact[4:, :size], exact[:4, :size], eps, entering, drags, first, careful=False)
            yield some, exact[0, :size], exact[1, :size]


def _again(old: Tensor | float | None, like: Tensor) -> Tensor:
    """Return memory for a tensor: that of an old one of the same kind, or new."""
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (like.shape, like.dtype, like.device):
        return old if old.is_contiguous() else old.contiguous()
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _gain(inputs: Any, scratch: Tensor, eps: float, entering: float, drags: float, first: float, careful: bool) -> bool:
    """Write gain and D₀ of one chunk into the first two rows of ``scratch``, ``[4, size]``.

    ``careful`` looks whether the two terms nearly cancel in some entry, or numbers get too small: rounding would then be
    more than 1e-6 of that entry in single precision. Such entries are done again in double precision; where that is more than
    an eighth of the chunk, the answer is False.
    """
    g, m, s = inputs
    gain, d0, r1, product = scratch
    torch.sqrt(s, out=d0)
    # No second moment and no gradient: nothing moves, whatever the samples' gradients that cancelled.
    torch.threshold_(torch.addcmul(s, g, g, value=entering, out=r1).sqrt_(), 0.0, math.inf)
    torch.add(d0, r1, out=product)
    product.mul_(d0.add_(eps))
    torch.mul(m, g, out=gain).div_(product).mul_(drags)
    rough: Tensor | None = None
    if careful and not (float(gain.amax()) < 0.7 and float(product.amin()) > 1e-30):
        # Not "too large or too small": neither is true of what is no number.
        rough = torch.nonzero(((gain < 0.7) & (product > 1e-30)).logical_not_()).flatten()
        if rough.numel() > gain.numel() // 8:
            return False
    gain.neg_().add_(1.0).mul_(first).div_(r1.add_(eps))
    if rough is not None:
        again = torch.empty(4, len(rough), dtype=torch.float64, device=gain.device)
        _gain([x.index_select(0, rough).double() for x in inputs], again, eps, entering, drags, first, careful=False)
        for wide, found in zip(again[:2], (gain, d0), strict=True):
            found.index_copy_(0, rough, wide.to(found.dtype))
    return True


@register(torch.optim.AdamW)
class AdamWRule(AdamRule):
    """Adam with decoupled weight decay, which is part of the zero-gradient move."""

    decoupled = True


def slope_above(floor: Tensor, q0: Tensor, q1: Tensor, slope: Tensor, step: Tensor) -> Tensor:
    """Return the divided difference of max(floor, q) over a step of z, given that of q."""
    crossing = (torch.maximum(q1, floor) - torch.maximum(q0, floor)) / torch.where(step == 0, 1.0, step)
    both_above = (q0 >= floor) & (q1 >= floor)
    return torch.where(both_above, slope, torch.where(step == 0, torch.zeros_like(slope), crossing))
