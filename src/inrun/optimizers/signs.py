"""Lion and Muon: momentum without its sizes.

Lion, as lion-pytorch, timm and pytorch-optimizer have it:

    q = β₁m + (1−β₁)z      w ← w − lr·sign(q) − decay      m ← β₂m + (1−β₂)z

The packages are recognized by where their class is defined and never imported. They differ in
what weight decay is multiplied by; some of it is kept in the optimizer, not in its groups.

Muon moves all singular values of a matrix towards 1:

    B ← μB + (1−μ)G      q = (1−μ)G + μB with Nesterov momentum, else B
    w ← w − lr·λ·w − lr′·NS(q)

NS divides by the Frobenius norm and iterates X ← (a + bS + cS²) X, S = XXᵀ, from the short side.
So NS(q) = L q with a polynomial L in q qᵀ (q L for a tall q). torch computes NS in bfloat16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.errors import OptimizerError
from inrun.optimizers import rule
from inrun.optimizers.lists import TINY, Tensors, quotient, scaled_, wide
from inrun.optimizers.registry import register
from inrun.optimizers.rule import Group, GroupStep, Memory, Scalar, UpdateRule

#: Options that mix the entries of a tensor, or that this rule does not describe.
UNKNOWN = ("caution", "cautious", "use_gc", "adanorm")


@register(
    "lion_pytorch.lion_pytorch.Lion",
    "lion_pytorch.foreach.Lion",
    "timm.optim.lion.Lion",
    "pytorch_optimizer.optimizer.lion.Lion",
)
class LionRule(UpdateRule):
    """q = β₁m + (1−β₁)z, A = lr / |q|; afterwards m ← β₂m + (1−β₂)z."""

    adaptive = elementwise = True
    buffer = "exp_avg"

    def __init__(self) -> None:
        super().__init__()
        self._maximize = False
        self._decay_over: float | None = None  # the learning rate that decay is divided by

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the options that the optimizer keeps outside its groups."""
        self._maximize = bool(getattr(optimizer, "maximize", False))
        if getattr(optimizer, "decoupled_wd", False):
            self._decay_over = float(optimizer._init_lr)  # type: ignore[attr-defined]
        if any(group.get("corrected_weight_decay") for group in optimizer.param_groups):
            self._decay_over = float(optimizer.defaults["lr"])
        super().bind(optimizer)

    def check(self, group: Group) -> None:
        """Refuse variants, and β₂ = 0, which keeps nothing that q could be read from."""
        super().check(group)
        for name in UNKNOWN:
            if group.get(name):
                raise OptimizerError(f"Lion with {name}={group[name]!r} is not supported.")
        if float(group["betas"][1]) == 0.0:
            raise OptimizerError("Lion with betas[1]=0 is not supported. Use a number above 0.")

    def sign(self, group: Group) -> float:
        """Return −1 where the group or the optimizer says ``maximize``."""
        return -1.0 if self._maximize else super().sign(group)

    def coupled(self, group: Group) -> float:
        """Return λ where decay is added to the gradient."""
        return 0.0 if group.get("weight_decouple", True) else rule.option(group, "weight_decay")

    def shrink(self, group: Group) -> Scalar:
        """Return the factor of −w in the move."""
        decay, lr = rule.option(group, "weight_decay"), rule.learning_rate(group)
        if decay == 0.0 or not group.get("weight_decouple", True):
            return 0.0
        if group.get("fixed_decay", False):
            return decay
        if group.get("corrected_weight_decay", False):
            assert self._decay_over is not None
            return decay * lr * lr / self._decay_over
        if "corrected_weight_decay" not in group and self._decay_over is not None:
            return decay * lr / self._decay_over
        return decay * lr

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """Return m's memory; q is read from m as it stands after the step, and z."""
        beta2 = step.betas[1]
        return [Memory(beta2, 1.0 - beta2, *self._weights(step))] * len(step.states)

    def _weights(self, step: GroupStep) -> tuple[float, float]:
        beta1, beta2 = step.betas
        return beta1 / beta2, 1.0 - beta1 - beta1 / beta2 * (1.0 - beta2)

    @torch.no_grad()
    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return read·m + direct·z."""
        read, direct = self._weights(step)
        q = list(torch._foreach_mul(super().pushed(step), read))
        torch._foreach_add_(q, self.entering(step), alpha=direct)
        return q

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr / |q|; 0 where q is 0."""
        sizes = torch._foreach_abs(self.pushed(step))
        return quotient(sizes, torch._foreach_clamp_min(sizes, TINY), step.lr)


@register("torch.optim.Muon", "torch.optim._muon.Muon")  # torch 2.9 and later
class MuonRule(UpdateRule):
    """Every entry of q moves the whole matrix: earlier gradients have no unique shares."""

    decoupled = True

    @torch.no_grad()
    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return q, from which NS makes the move."""
        buffers = step.kept("momentum_buffer")
        if not step.group["nesterov"]:
            return buffers
        momentum = float(step.group["momentum"])
        return list(torch._foreach_lerp(wide(step.gradients), buffers, momentum))

    @torch.no_grad()
    def own_direction(self, raw: Tensors, moved: Tensors, step: GroupStep) -> list[Tensor]:
        """Return κ·lr′·L∇ (∇L for a tall matrix), κ the coefficient of this step's G in q.

        What is shared is κ·lr′·L G: the part of the move lr′·L q that this step's gradient made
        with L held fixed. L is the matrix that the step really applied, but for its rounding to
        bfloat16: L q is within 1 to 2 % of the move (6 % in a matrix of 3 by 3).
        """
        group, momentum, out = step.group, float(step.group["momentum"]), []
        own = (1.0 - momentum) * (1.0 + momentum if group["nesterov"] else 1.0)
        for q, v in zip(self.pushed(step), wide(raw), strict=True):
            left = multiplier(q, group) * (own * adjustment(q, group))
            out.append(v @ left if q.shape[0] > q.shape[1] else left @ v)
        return scaled_(out, step.lr)


def adjustment(x: Tensor, group: Group) -> float:
    """Return lr′ / lr, which depends on the shape."""
    rows, columns = x.shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def multiplier(x: Tensor, group: Group) -> Tensor:
    """Return the symmetric L of the short side with NS(X) = L X, or X L for a tall X."""
    a, b, c = (float(k) for k in group["ns_coefficients"])
    x = x.T if x.shape[0] > x.shape[1] else x
    size = torch.linalg.vector_norm(x).clamp_min(float(group["eps"]))
    eye, x = torch.eye(x.shape[0], dtype=x.dtype, device=x.device), x / size
    left = eye / size
    for _ in range(int(group["ns_steps"])):
        gram = x @ x.T
        power = a * eye + b * gram + c * (gram @ gram)
        left, x = power @ left, power @ x
    return left
