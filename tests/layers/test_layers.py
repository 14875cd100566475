"""Every layer of the table against one-sample-at-a-time autograd in double precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import CASES, Case, masked_sum, model_of, position_mask
from inrun.engine import Accountant
from inrun.errors import CoverageError
from reference import gradients, relative_error, sample_gradients

#: Autograd functions of Python are not seen.
UNSEEN = {"no forward-mode derivative", "neither that, nor many samples at once", "an autograd function of others"}
SEEN = [case for case in CASES if case.name not in UNSEEN]
BY_NAME = [pytest.param(case, id=case.name) for case in SEEN]
#: So small that the middle of a move explains it, and no further points are taken.
LR = 1e-7


@dataclass
class Scored:
    """Scores of one step by the engine and by autograd, ``[n, k]``, and the weight gradients of both."""

    got: Tensor
    expected: Tensor
    own: list[Tensor]
    plain: list[Tensor]
    #: The largest ‖g_n‖ ‖v‖ times the learning rate: what rounding is relative to where products cancel.
    scale: float


def score(case: Case, method: str, n: int, t: int, seed: int = 1, own: bool = False, dtype: torch.dtype = torch.float64) -> Scored:
    """Score one SGD step of a case with two validation sets."""
    g = torch.Generator().manual_seed(seed)
    reference = model_of(case)
    model = copy.deepcopy(reference).to(dtype)
    x, mask = case.draw(n, t, g), position_mask(n, t, g)
    held = [(case.draw(rows, t, g), torch.ones(rows, t)) for rows in (1, 3)]
    norm = mask.sum()

    def like(z: Tensor) -> Tensor:
        return z.to(dtype) if z.is_floating_point() else z

    def loss_of(rows: Tensor, m: Tensor) -> Callable[[nn.Module], Tensor]:
        return lambda net: masked_sum(net(like(rows) if net is model else rows), m) / m.sum()

    validation = {str(i): loss_of(*rows) for i, rows in enumerate(held)}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    sketch = {} if method == "first" else {"sketch": "exact"}
    with Accountant(model, optimizer, validation, method=method, audit_every=1, **sketch) as accountant:
        accountant._run.tape.own_in_double = own
        with accountant.step(range(n)):
            (masked_sum(model(like(x)), mask) / norm).backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        got = torch.stack(list(accountant.last.contributions.values()), 1)

    trainable = [p for p in reference.parameters() if p.requires_grad]
    g_n = sample_gradients(lambda j: masked_sum(reference(x[j : j + 1]), mask[j : j + 1]) / norm, n, trainable)
    sums = [sum(parts) for parts in zip(*g_n, strict=True)]
    with torch.no_grad():  # all but `first` take the validation gradient in the middle of the move
        for p, total in zip(trainable, sums, strict=True):
            p -= (0.0 if method == "first" else 0.5) * LR * total
    columns, sizes = [], []
    for name in validation:
        v = gradients(validation[name](reference), trainable)
        columns.append(torch.stack([torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)]).sum() for g in g_n]))
        sizes.append(max(_norm(g) for g in g_n) * _norm(v))
    plain = [s for s, p in zip(sums, trainable, strict=True) if p.requires_grad]
    return Scored(got, LR * torch.stack(columns, 1), found, plain, LR * max(sizes))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([x.square().sum() for x in tensors]).sum().sqrt())


@pytest.mark.parametrize("case", BY_NAME)
@pytest.mark.parametrize("n", [1, 5])
def test_first(case: Case, n: int) -> None:
    found = score(case, "first", n, 4)
    assert relative_error(found.got, found.expected) < case.accuracy


@pytest.mark.parametrize("name", sorted(UNSEEN))
def test_refused_by_name(name: str) -> None:
    with pytest.raises(CoverageError, match="weight received gradient through no function that is tapped"):
        score(next(c for c in CASES if c.name == name), "first", 3, 4)


@pytest.mark.parametrize("case", BY_NAME)
@pytest.mark.parametrize("method", ["step", "whole"])
def test_exact_sketch(case: Case, method: str) -> None:
    found = score(case, method, 4, 4, seed=2)
    assert relative_error(found.got, found.expected) < case.accuracy


@pytest.mark.parametrize("case", BY_NAME)
def test_weight_gradients_are_those_of_the_framework(case: Case) -> None:
    """Where a rule takes the weight gradient from the per-sample gradients, training does not notice."""
    found = score(case, "first", 5, 4, seed=3, own=True)
    own, plain = (torch.cat([p.reshape(-1) for p in parts]) for parts in (found.own, found.plain))
    assert relative_error(own, plain) < (1e-12 if case.accuracy <= 1e-9 else case.accuracy)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    index=st.integers(0, len(SEEN) - 1),
    n=st.integers(1, 6),
    t=st.integers(1, 6),
    method=st.sampled_from(["first", "whole"]),
    own=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape(index: int, n: int, t: int, method: str, own: bool, seed: int) -> None:
    case = SEEN[index]
    if "two dimensions" in case.name:
        t = 4
    found = score(case, method, n, t, seed, own)
    rounding = 1e-12 if case.accuracy <= 1e-9 else 1e-6
    assert float((found.got - found.expected).abs().max()) <= rounding * found.scale + case.accuracy * float(
        found.expected.abs().max()
    )


@pytest.mark.parametrize("case", BY_NAME)
def test_single_precision(case: Case) -> None:
    found = score(case, "first", 6, 4, seed=4, dtype=torch.float32)
    assert float((found.got - found.expected).abs().max()) < 2e-6 * found.scale


@pytest.mark.parametrize("name", ["weight used three times", "convolution 2d", "LSTM", "embedding"])
def test_controls(name: str) -> None:
    """The comparison sees a wrong sample, a wrong sign and a wrong scale."""
    found = score(next(c for c in CASES if c.name == name), "first", 5, 4)
    assert relative_error(found.got.roll(1, 0), found.expected) > 1e-3
    assert relative_error(-found.got, found.expected) > 1
    assert relative_error(found.got * 0.999, found.expected) > 1e-4
