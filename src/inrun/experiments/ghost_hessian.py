"""The paper's ghost products of a multilayer perceptron: all second-order scores without one gradient-sized vector.

A layer j without bias maps s_j = W_j a_j, and a_{j+1} = φ(s_j). The gradient of one row is W_j's outer product b_j ⊗ a_j with
b_j = ∂ℓ/∂s_j, so that a product of two gradients is two products of vectors (the ghost dot product):

    ⟨∇ℓ¹, ∇ℓ²⟩ = Σ_j (a¹_j·a²_j)(b¹_j·b²_j)

The gradient-Hessian-gradient product ∇ℓⁿᵀ H G, with G = Σ_m ∇ℓᵐ of the batch and H the Hessian of the validation loss, is the
derivative along ∇ℓⁿ of Q = ⟨∇ℓᵛ, G⟩ = Σ_j Σ_m c_jm d_jm, c = aᵛ·aᵐ and d = bᵛ·bᵐ. W_i enters Q in the forward (through sᵛ_i) and
in the backward (through W_iᵀbᵛ_i), hence the two terms of the paper's appendix:

    ∇ℓⁿᵀHG = Σ_i (aⁿ_i·aᵛ_i)(bⁿ_i·h_i) + (aⁿ_i·g_i)(bⁿ_i·bᵛ_i)        h_i = ∂Q/∂sᵛ_i,  g_i = ∂Q/∂(W_iᵀbᵛ_i)

Two things differ from the paper as printed. Its second term lacks the factor c_j, without which the product is wrong (a test shows
it). And it keeps one g(i, j) for every pair of layers; g is linear in what enters at each layer, so one running sum does for all j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """An elementwise φ with its first two derivatives."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]


def _tanh_slope(s: Tensor) -> Tensor:
    return 1 - torch.tanh(s).square()


ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda s: (s > 0).to(s), torch.zeros_like),
    "tanh": Activation(torch.tanh, _tanh_slope, lambda s: -2 * torch.tanh(s) * _tanh_slope(s)),
}


@dataclass(frozen=True)
class Passes:
    """What one forward and backward leave at every layer.

    Attributes:
        a: Inputs, ``[n, i]`` each.
        s: Outputs before the activation, ``[n, o]`` each.
        b: Gradients of the loss at ``s``, ``[n, o]`` each.
        back: Wᵀ_{j+1} b_{j+1}, the gradient at a_{j+1}, ``[n, o]`` each; the last layer has none.
        probabilities: Softmax of the last ``s``, ``[n, classes]``.
        weights: What each row counts in the loss, ``[n]``.
    """

    a: list[Tensor]
    s: list[Tensor]
    b: list[Tensor]
    back: list[Tensor]
    probabilities: Tensor
    weights: Tensor

    def rows(self, chosen: slice) -> Passes:
        """Return those of some rows."""

        def some(tensors: list[Tensor]) -> list[Tensor]:
            return [x[chosen] for x in tensors]

        weights, probabilities = self.weights[chosen], self.probabilities[chosen]
        return Passes(some(self.a), some(self.s), some(self.b), some(self.back), probabilities, weights)


def run_passes(matrices: Sequence[Tensor], act: Activation, inputs: Tensor, targets: Tensor, weights: Tensor) -> Passes:
    """Run forward and backward for the loss Σ_n weights_n · cross entropy of row n; no weight gradient is formed.

    Args:
        matrices: W_j, ``[o, i]`` each.
        act: φ between the layers.
        inputs: ``[n, i]``.
        targets: Class of each row, ``[n]``.
        weights: ``[n]``: 1/n for training rows and 1/m for validation rows make both losses means, in one pass.
    """
    a, s = [inputs], [inputs @ matrices[0].T]
    for w in matrices[1:]:
        a.append(act.value(s[-1]))
        s.append(a[-1] @ w.T)
    probabilities = torch.softmax(s[-1], dim=1)
    last = probabilities.clone()
    last[torch.arange(len(targets)), targets] -= 1
    b, back = [last * weights.unsqueeze(1)], []
    for w, before in zip(reversed(matrices[1:]), reversed(s[:-1]), strict=True):
        back.append(b[-1] @ w)
        b.append(act.slope(before) * back[-1])
    return Passes(a, s, b[::-1], back[::-1], probabilities, weights)


def weight_gradients(passes: Passes) -> list[Tensor]:
    """Return Σ_n b_n ⊗ a_n of every layer, ``[o, i]``: the update's gradient, from what the pass has kept (book-keeping)."""
    return [b.T @ a for a, b in zip(passes.a, passes.b, strict=True)]


def ghost_dot_products(samples: Passes, validation: Passes) -> Tensor:
    """Return ⟨∇ℓⁿ, ∇ℓᵛ⟩ = Σ_j Σ_v (aⁿ_j·aᵛ_j)(bⁿ_j·bᵛ_j) for every sample, ``[n]``."""
    return sum_over_layers(
        (a @ x.T) * (b @ y.T) for a, b, x, y in zip(samples.a, samples.b, validation.a, validation.b, strict=True)
    )


def ghost_hessian_products(matrices: Sequence[Tensor], act: Activation, samples: Passes, validation: Passes) -> Tensor:
    """Return ∇ℓⁿᵀ H Σ_m ∇ℓᵐ for every sample of the batch, ``[n]``; H is that of the validation loss.

    Args:
        matrices: W_j, ``[o, i]`` each.
        act: φ between the layers.
        samples: Of the batch, n rows.
        validation: Of the validation rows, v rows.
    """
    c = [x @ a.T for x, a in zip(validation.a, samples.a, strict=True)]  # [v, n] of every layer
    d = [y @ b.T for y, b in zip(validation.b, samples.b, strict=True)]
    g, bars = _forward(matrices, act, samples, validation, c)
    h = _backward(matrices, act, samples, validation, d, bars)
    return sum_over_layers(
        (a @ x.T) * (b @ h_i.T) + (0 if g_i is None else (a @ g_i.T) * (b @ y.T))
        for a, b, x, y, h_i, g_i in zip(samples.a, samples.b, validation.a, validation.b, h, g, strict=True)
    )


def _forward(
    matrices: Sequence[Tensor], act: Activation, samples: Passes, validation: Passes, c: list[Tensor]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return g_i ``[v, i]`` (none for the first layer) and ∂Q/∂bᵛ_i ``[v, o]``, from the first layer to the last.

    ∂Q/∂bᵛ_i = Σ_m c_im bᵐ_i + W_i g_i, and g_{i+1} = φ'(sᵛ_i) ∘ ∂Q/∂bᵛ_i.
    """
    g: list[Tensor | None] = [None]
    bars: list[Tensor] = []
    for i, w in enumerate(matrices):
        bar, carried = c[i] @ samples.b[i], g[-1]
        bars.append(bar if carried is None else bar + carried @ w.T)
        g.append(act.slope(validation.s[i]) * bars[-1])
    return g[:-1], bars


def _backward(
    matrices: Sequence[Tensor], act: Activation, samples: Passes, validation: Passes, d: list[Tensor], bars: list[Tensor]
) -> list[Tensor]:
    """Return h_i = ∂Q/∂sᵛ_i ``[v, o]``, from the last layer to the first, in the first layer's order.

    The last is H_out ∂Q/∂bᵛ_L with the Hessian of cross entropy; then
    h_i = φ'(s_i) ∘ (W_{i+1}ᵀ h_{i+1} + Σ_m d_{i+1,m} aᵐ_{i+1}) + φ''(s_i) ∘ (W_{i+1}ᵀ b_{i+1}) ∘ ∂Q/∂b_i.
    """
    p = validation.probabilities
    h = [validation.weights.unsqueeze(1) * p * (bars[-1] - (p * bars[-1]).sum(1, keepdim=True))]
    for i in range(len(matrices) - 2, -1, -1):
        s = validation.s[i]
        at_input = h[-1] @ matrices[i + 1] + d[i + 1] @ samples.a[i + 1]
        h.append(act.slope(s) * at_input + act.bend(s) * validation.back[i] * bars[i])
    return h[::-1]


def sum_over_layers(parts: Iterable[Tensor]) -> Tensor:
    """Add ``[n, v]`` of all layers and take the sum over validation rows, ``[n]``."""
    return torch.stack([part.sum(1) for part in parts]).sum(0)
