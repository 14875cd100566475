"""Ways from a parameter to what is made of it: directions pushed along, gradients pulled back, whatever derivatives torch has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from inrun.old.layers.read_gradients import Through, Way
from inrun.old.layers.shapes import Formed, Outer
from reference import contributions, gradients, relative_error, sample_gradients

P, Q, N, K = 5, 4, 3, 2


def weight_norm(p: Tensor) -> Tensor:
    return torch._weight_norm(p, p.new_ones(P, 1), 0)


def distances(p: Tensor) -> Tensor:
    return torch.cdist(p, p.flip(1) + 1)


def bags(p: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([[0, 1], [2, 4], [3, 3]]), p)


#: A function of a ``[5, 4]`` parameter; whether torch has its forward-mode derivative, and a derivative of its backward.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool]] = {
    "exponential": (torch.exp, True, True),
    "weight norm": (weight_norm, False, True),
    "distances": (distances, False, False),
    "bags": (bags, False, False),
}


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ways_of_every_kind_of_derivative(name: str) -> None:
    function, forward, twice = FUNCTIONS[name]
    p, v = floats(P, Q), floats(K, P, Q, seed=1)
    way = Way(p, function, linear=False)
    if not forward:  # if torch has one by now, another function must be found that takes this path
        with pytest.raises(NotImplementedError):
            torch.func.jvp(function, (p,), (v[0],))
    jacobian = torch.autograd.functional.jacobian(function, p).reshape(-1, p.numel())
    out = function(p)
    pushed = way.push(v)
    assert (pushed is not None) is twice
    if pushed is not None:
        assert relative_error(pushed.flatten(1), v.flatten(1) @ jacobian.t()) < 1e-12
    d = floats(N, *out.shape, seed=2)
    pulled = d.flatten(1) @ jacobian
    assert relative_error(way.pull(d).flatten(1), pulled) < 1e-12
    x, y = floats(N, 3, out.shape[0], seed=3), floats(N, 3, out.shape[1], seed=4)
    for inner in (Formed(d), Outer(x, y)):
        shape = Through(inner, way)
        expected = inner.form().flatten(1) @ jacobian @ v.flatten(1).t()
        assert relative_error(shape.contract(v), expected) < 1e-12
        total, c = shape.total_and_contract(v, by_rows=False)
        assert relative_error(total, inner.form().sum(0)) < 1e-12
        assert relative_error(c, expected) < 1e-12
        assert relative_error(shape.contract(-v), expected) > 1  # the control


def test_other_problems_of_a_derivative_are_raised() -> None:
    """Only what torch does not have is gone around."""

    class Broken(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def backward(ctx: object, b: Tensor) -> Tensor:
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        Way(floats(P, Q), lambda p: weight_norm(Broken.apply(p)), linear=False).push(floats(K, P, Q))


class Made(nn.Module):
    """A product with a weight that is made of a parameter, met by the samples three times per row."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.raw, self.function = nn.Parameter(floats(P, Q)), function

    def forward(self, x: Tensor) -> Tensor:
        weight = self.function(self.raw)
        return torch.tanh(F.linear(x[..., : weight.shape[1]], weight))


@pytest.mark.parametrize("form", ["shared", "project"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_are_made_of_a_parameter(name: str, form: str) -> None:
    model = Made(FUNCTIONS[name][0])
    twin = copy.deepcopy(model)
    x, held = floats(N, 3, P, seed=5), floats(2, 3, P, seed=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inrun.Accountant(
        model, optimizer, lambda m: m(held).square().sum(), form=form, audit_every=1, credit="step", method="first"
    ) as accountant:
        with accountant.step(range(N)):
            model(x).square().sum().backward()
            optimizer.step()
        assert [row.rule for row in accountant.coverage] == ["read"]
    each = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), N, [twin.raw])
    towards = gradients(twin(held).square().sum(), [twin.raw])
    expected = contributions(each, [torch.full_like(twin.raw, 0.1)], towards)
    assert relative_error(accountant.last.contributions["validation"], expected) < 1e-9
