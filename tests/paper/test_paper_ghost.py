"""The two forms of a ghost product, on tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inrun.paper.ghost import Formed, Outer, Term, choose_form, contract
from reference import relative_error

P, Q = 5, 3
SHAPE = torch.Size((P, Q))


def dense(n: int, t: int) -> Outer:
    return Outer(torch.randn(n, t, P).double(), torch.randn(n, t, Q).double(), SHAPE)


def look_ups(n: int, t: int) -> Outer:
    return Outer(torch.randint(0, P, (n, t)), torch.randn(n, t, Q).double(), SHAPE)


def formed(term: Term) -> Tensor:
    """Per-row gradients by their definition."""
    if isinstance(term, Formed):
        return term.values
    left = torch.nn.functional.one_hot(term.left, P).double() if term.looks_up else term.left
    return torch.einsum("ntp,ntq->npq", left, term.right)


USES = {
    "one use": ([dense], [(2, 4)]),
    "look-ups": ([look_ups], [(3, 2)]),
    "tied table and head": ([look_ups, dense], [(2, 4), (3, 1)]),
}


@pytest.mark.parametrize("name", list(USES))
def test_both_forms_are_the_inner_product(name: str) -> None:
    makers, lengths = USES[name]
    samples = [make(4, t) for make, (t, _) in zip(makers, lengths, strict=True)]
    validation = [make(2, s) for make, (_, s) in zip(makers, lengths, strict=True)]
    every = torch.stack([formed(s) for s in samples]).sum(0)
    direction = torch.stack([formed(v).sum(0) for v in validation]).sum(0)
    expected = (every * direction).sum((1, 2))
    for form in ("gram", "formed"):
        assert relative_error(contract(samples, validation, form), expected) < 1e-12
        if len(samples) > 1:  # the control: cross terms count
            alone = contract(samples[:1], validation[:1], form) + contract(samples[1:], validation[1:], form)
            assert relative_error(alone, expected) > 1e-3
    assert relative_error(torch.stack([s.total() for s in samples]).sum(0), every.sum(0)) < 1e-12


def test_small_parameters_are_formed() -> None:
    values, v = torch.randn(4, P).double(), torch.randn(2, P).double()
    assert choose_form([Formed(values)], [Formed(v)], "gram") == "formed"
    assert relative_error(contract([Formed(values)], [Formed(v)], "formed"), values @ v.sum(0)) < 1e-12


@pytest.mark.parametrize(("t", "m", "form"), [(2, 1, "gram"), (3, 1, "formed"), (2, 2, "formed"), (1, 7, "gram"), (1, 8, "formed")])
def test_the_paper_s_rule_decides(t: int, m: int, form: str) -> None:
    """2·T·(m·T) against d₁·d₂ = 15; for one validation row it is 2T²."""
    assert choose_form([dense(4, t)], [dense(m, t)], "auto") == form
    assert {choose_form([dense(4, t)], [dense(m, t)], given) for given in ("gram", "formed")} == {"gram", "formed"}
