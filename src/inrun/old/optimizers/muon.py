"""Muon: the momentum of a matrix with all its singular values moved towards 1.

    B ← μB + (1−μ)G      X = (1−μ)G + μB with Nesterov momentum, else B      w ← w − lr·λ·w − lr′·NS(X)

NS divides by the Frobenius norm and iterates X ← aX + (bA + cA²)X, A = XXᵀ (from the short side). The real optimizer
does so in bfloat16; here it is float32 at least, and differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.old.optimizers.registry import (
    Group,
    State,
    UpdateRule,
    at_least_float32,
    gauss_legendre,
    held,
    in_panels,
    learning_rate,
    option,
    register,
)

#: Panels of the way from no gradient to the real one.
MOST_PANELS = 12


class MuonRule(UpdateRule):
    """Not elementwise: every entry of the gradient moves every weight of the matrix."""

    elementwise = False

    def _momentum(self, gradient: Tensor, group: Group, state: State) -> Tensor:
        """Return X, ``[p, q]``."""
        mu = float(group["momentum"])
        buffer = torch.lerp(held(state, "momentum_buffer", gradient), gradient, 1.0 - mu)
        return torch.lerp(gradient, buffer, mu) if group["nesterov"] else buffer

    def _rate(self, parameter: Tensor, group: Group) -> float:
        """Return lr′, which depends on the shape."""
        p, q = parameter.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return learning_rate(group) * 0.2 * math.sqrt(max(p, q))
        return learning_rate(group) * math.sqrt(max(1.0, p / q))

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −lr·λ·w − lr′·NS(X)."""
        dtype = at_least_float32(gradient.dtype)
        x = newton_schulz(self._momentum(gradient.to(dtype), group, state), group)
        shrinks = learning_rate(group) * option(group, "weight_decay")
        return torch.add(x * -self._rate(parameter, group), parameter.detach().to(dtype), alpha=-shrinks).to(gradient.dtype)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Decay is beside the update."""
        weight = parameter.detach().to(at_least_float32(parameter.dtype))
        whole = self.move(torch.zeros_like(weight), weight, group, state)
        return weight * (-learning_rate(group) * option(group, "weight_decay")), whole

    @torch.no_grad()
    def path(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> list[tuple[float, float]]:
        """Take more points where the gradient is larger than what is remembered: the matrix turns early on the way.

        Measured on 64 x 64 matrices of noise, the worst of 12: with r the size of what s·G adds to X at s = 1 over that
        of X at s = 0, four points miss 1 % of Σ|c_n| at r = 0.25, 10 % at 0.4 and half at 2 (the second step). So eight
        from 0.3 on, in panels that shrink by 4 towards s = 1/r.
        """
        kept = self._momentum(torch.zeros_like(gradient), group, state)
        added = self._momentum(gradient, group, state) - kept
        ratio = float(torch.linalg.vector_norm(added) / torch.linalg.vector_norm(kept))
        if not ratio >= 0.3:
            return gauss_legendre(self.points)
        edges = [1.0]
        while edges[-1] * ratio > 1.0 and len(edges) < MOST_PANELS:
            edges.append(edges[-1] / 4.0)
        return in_panels([*edges, 0.0], 2 * self.points)

    @torch.no_grad()
    def direction(self, raw: Tensor, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the mean Jacobian along s·G; with nothing remembered, the matrix by which G itself was multiplied.

        Without a buffer NS(sG) is the same for all s > 0: the path has only its jump at 0, which no point on it sees.
        But NS(X) = L·X with L a polynomial in XXᵀ, and with that L held fixed the shares L·g_n sum to the move.
        """
        buffer = state.get("momentum_buffer")
        if buffer is not None and float(group["momentum"]) != 0.0 and bool(buffer.any()):
            return super().direction(raw, gradient, parameter, group, state)
        dtype = at_least_float32(torch.promote_types(raw.dtype, gradient.dtype))
        g = gradient.detach().to(dtype)
        left = multiplier(self._momentum(g, group, state), group)
        # X is G times a number here, which L must be given too.
        ones = self._momentum(torch.ones_like(g[:1, :1]), group, {})
        left = left * (float(ones) * self._rate(parameter, group))
        wide = raw.to(dtype)
        return (wide @ left if g.shape[0] > g.shape[1] else left @ wide).to(raw.dtype)


def newton_schulz(x: Tensor, group: Group) -> Tensor:
    """Return NS(X), ``[p, q]``."""
    a, b, c = (float(k) for k in group["ns_coefficients"])
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / torch.linalg.vector_norm(x).clamp_min(float(group["eps"]))
    for _ in range(int(group["ns_steps"])):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


def multiplier(x: Tensor, group: Group) -> Tensor:
    """Return the symmetric L of the short side with NS(X) = L·X (X·L for a tall X)."""
    a, b, c = (float(k) for k in group["ns_coefficients"])
    x = x.T if x.shape[0] > x.shape[1] else x
    eye = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    size = torch.linalg.vector_norm(x).clamp_min(float(group["eps"]))
    left, x = eye / size, x / size
    for _ in range(int(group["ns_steps"])):
        gram = x @ x.T
        factor = a * eye + b * gram + c * (gram @ gram)
        left, x = factor @ left, factor @ x
    return left


if hasattr(torch.optim, "Muon"):  # torch 2.9 and later
    register(torch.optim.Muon)(MuonRule)
