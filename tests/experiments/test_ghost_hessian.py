"""The paper's ghost products against plain autograd, in double precision."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inrun.experiments.ghost_hessian import (
    ACTIVATIONS,
    Passes,
    ghost_dot_products,
    ghost_hessian_products,
    run_passes,
    weight_gradients,
)


def problem(widths: list[int], n: int, v: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    matrices = [torch.randn(o, i, dtype=torch.float64) / i**0.5 for i, o in itertools.pairwise(widths)]
    inputs, targets = torch.randn(n + v, widths[0], dtype=torch.float64), torch.randint(0, widths[-1], (n + v,))
    weights = torch.cat([torch.full((n,), 1 / n), torch.full((v,), 1 / v)]).double()
    return matrices, inputs, targets, weights


def loss_of(matrices: list[Tensor], name: str, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    x = inputs
    for w in matrices[:-1]:
        x = ACTIVATIONS[name].value(x @ w.T)
    return (weights * F.cross_entropy(x @ matrices[-1].T, targets, reduction="none")).sum()


def flat(parts) -> Tensor:
    return torch.cat([p.flatten() for p in parts])


def by_autograd(matrices, name, inputs, targets, weights, n):
    """Per-sample gradients, the validation gradient, and every sample's product with H times the batch gradient."""
    leaves = [w.clone().requires_grad_() for w in matrices]
    rows = [
        flat(torch.autograd.grad(loss_of(leaves, name, inputs[k : k + 1], targets[k : k + 1], weights[k : k + 1]), leaves))
        for k in range(n)
    ]
    gradients = torch.stack(rows)
    held_out = loss_of(leaves, name, inputs[n:], targets[n:], weights[n:])
    gradient = flat(torch.autograd.grad(held_out, leaves, create_graph=True))
    product = flat(torch.autograd.grad(gradient @ gradients.sum(0), leaves))
    return gradients, gradient.detach(), gradients @ product


def by_ghost(matrices, name, inputs, targets, weights, n) -> tuple[Passes, Passes]:
    passes = run_passes(matrices, ACTIVATIONS[name], inputs, targets, weights)
    return passes.rows(slice(0, n)), passes.rows(slice(n, None))


def close(got: Tensor, expected: Tensor) -> bool:
    return float((got - expected).abs().max()) <= 1e-9 * float(expected.abs().max()) + 1e-15


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=6),
    n=st.integers(1, 5),
    v=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_ghost_products_are_those_of_autograd(name: str, widths: list[int], n: int, v: int, seed: int) -> None:
    matrices, *rest = problem([*widths, 4], n, v, seed)
    gradients, gradient, expected = by_autograd(matrices, name, *rest, n)
    samples, validation = by_ghost(matrices, name, *rest, n)
    assert close(flat(weight_gradients(samples)), gradients.sum(0))
    assert close(ghost_dot_products(samples, validation), gradients @ gradient)
    assert close(ghost_hessian_products(matrices, ACTIVATIONS[name], samples, validation), expected)


def test_the_second_term_needs_the_factor_that_the_paper_leaves_out() -> None:
    """As printed, ② = Σ_{i>j} (aⁿ_i·(∂a_i/∂s_j bᵐ_j))(bⁿ_i·bᵛ_i), without c_j = aᵛ_j·aᵐ_j: another number."""
    matrices, *rest = problem([5, 6, 4], 3, 1)
    _, _, expected = by_autograd(matrices, "tanh", *rest, 3)
    samples, validation = by_ghost(matrices, "tanh", *rest, 3)
    got = ghost_hessian_products(matrices, ACTIVATIONS["tanh"], samples, validation)
    slope = ACTIVATIONS["tanh"].slope(validation.s[0])
    with_c = slope * ((validation.a[0] @ samples.a[0].T) @ samples.b[0])
    printed = slope * samples.b[0].sum(0, keepdim=True)
    part = lambda g: ((samples.a[1] @ g.T) * (samples.b[1] @ validation.b[1].T)).sum(1)  # noqa: E731
    assert close(got, expected)
    assert not torch.allclose(got - part(with_c) + part(printed), expected, rtol=0.01)
