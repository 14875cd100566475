"""The slow truth: one sample at a time, plain autograd. Shares no code with inrun."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradients of a loss, zeros where it does not depend on a parameter."""
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(parameters, grads, strict=True)]


def sample_gradients(share: Callable[[int], Tensor], n: int, parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """g_n for each sample; ``share(j)`` runs sample j alone and returns its part of the batch loss."""
    return [gradients(share(j), parameters) for j in range(n)]


def contributions(g_n: list[list[Tensor]], gains: list[Tensor], g_val: list[Tensor], factor: float = 1.0) -> Tensor:
    """c_n = factor · Σ_p ⟨g_n, gain ∘ ∇ℓ⟩, ``[n]``."""
    rows = [sum((g * k * v).sum() for g, k, v in zip(g_p, gains, g_val, strict=True)) for g_p in g_n]
    return factor * torch.stack([torch.as_tensor(r) for r in rows])


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected number."""
    scale = expected.abs().max().clamp_min(1e-300)
    return float((got.double().cpu() - expected.double().cpu()).abs().max() / scale)
