"""Experts: their gradients against one sample at a time, in every shape they are wanted in; what is no such module."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from torch import Tensor, nn

import inrun
from inrun.old.layers import Formed, SketchPlan, find_rule
from inrun.old.layers.routed import Order, Routed
from reference import contributions, gradients, relative_error, sample_gradients

N, T, E, D = 4, 5, 6, 8


class Layer(nn.Module):
    """Experts behind a router, over positions that are laid end to end."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        shares, chosen = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, chosen, shares).view(x.shape)


def mixtral(implementation: str) -> nn.Module:
    config = tr.MixtralConfig(hidden_size=D, intermediate_size=8, num_local_experts=E, num_experts_per_tok=2)
    config._experts_implementation = implementation
    return tr.models.mixtral.modeling_mixtral.MixtralExperts(config)


def gpt_oss(implementation: str) -> nn.Module:
    """With biases, weights stored the other way round, and a gate of its own."""
    config = tr.GptOssConfig(hidden_size=D, intermediate_size=8, num_local_experts=E, num_experts_per_tok=2)
    config._experts_implementation = implementation
    return tr.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)


def made(build, implementation: str, dtype: torch.dtype) -> Layer:
    torch.manual_seed(0)
    layer = Layer(build(implementation)).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * 0.4)
    return layer


def rows(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("options", [{}, {"form": "project"}, {"method": "midpoint", "quadrature": "midpoint"}], ids=str)
def test_against_one_sample_at_a_time(build, implementation: str, options: dict) -> None:
    """Grouped products are kernels for single precision alone."""
    dtype, tolerance = (torch.float32, 1e-5) if implementation == "grouped_mm" else (torch.float64, 1e-9)
    model, twin = made(build, implementation, dtype), made(build, "eager", torch.float64)
    x, held, lr = rows(N, 1, dtype), rows(2, 2, dtype), 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    accountant = inrun.Accountant(
        model, optimizer, lambda m: m(held).square().sum(), credit="step", audit_every=1, **{"method": "first", **options}
    )
    with accountant, accountant.step(range(N)):
        model(x).square().sum().backward()
        optimizer.step()
    assert {row.rule for row in accountant.coverage} == {"linear", "experts"}
    x, held, params = x.double(), held.double(), list(twin.parameters())
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), N, params)
    if "method" in options:
        with torch.no_grad():
            for p, *g in zip(params, *g_n, strict=True):
                p.sub_(lr / 2 * torch.stack(g).sum(0))
    truth = contributions(g_n, [torch.full_like(p, lr) for p in params], gradients(twin(held).square().sum(), params))
    assert relative_error(accountant.last.contributions["validation"], truth) < tolerance


def test_gradients_in_every_shape() -> None:
    """Contracted, added up, formed, kept and sketched: all of the same gradients; an expert that nobody is sent to has none."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(N, 7, size, generator=generator, dtype=torch.float64) for size in (3, 4))
    experts = torch.randint(0, E - 1, (N, 7), generator=generator)
    shape = Routed.sort(x, y, experts, E)
    formed = torch.zeros(N, E, 3, 4, dtype=torch.float64)
    for j in range(N):
        for s in range(7):
            formed[j, experts[j, s]] += torch.outer(x[j, s], y[j, s])
    v = torch.randn(2, E, 3, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(shape.form(), formed)
    torch.testing.assert_close(shape.total(), formed.sum(0))
    torch.testing.assert_close(shape.contract(v), torch.einsum("nepq,kepq->nk", formed, v))
    torch.testing.assert_close(Routed.of(shape.parts(), E).form(), formed)
    assert isinstance(shape.keep(Formed), Formed)
    signs = torch.randint(0, 2, (formed[0].numel(),), generator=generator).double() * 2 - 1
    plan = SketchPlan(rows=E, columns=12, segment=4, buckets=8)
    torch.testing.assert_close(shape.segment_sums(signs, plan), (formed.flatten(1) * signs).view(N, -1, 4).sum(2))
    assert Order(experts, E).groups[-1][0] < E - 1


def test_what_computes_something_else_is_not_taken_for_experts() -> None:
    module = mixtral("eager")
    assert find_rule(module).label == "experts"

    class Halved(type(module)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 0.5 * super().forward(hidden_states, top_k_index, top_k_weights)

    Halved.__module__ = type(module).__module__
    module.__class__ = Halved
    assert find_rule(module) is None
