"""The LSTM in few operations is the one that goes position by position: states, gradients at the gates, both directions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from inrun.old.layers import cells, lstm
from reference import relative_error


def _weights(inputs: int, size: int, bias: bool) -> cells.Weights:
    rows = 4 * size
    first, second = torch.randn(2, rows).double().unbind(0)
    both = (first, second) if bias else (None, None)
    return cells.Weights(torch.randn(rows, inputs).double(), torch.randn(rows, size).double(), *both, None)


@pytest.mark.parametrize(("reverse", "bias", "outputs"), list(itertools.product((False, True), repeat=3)))
def test_few_operations_are_the_same_network(reverse: bool, bias: bool, outputs: bool) -> None:
    torch.manual_seed(0)
    t, n, size = 5, 3, 6
    w, x = _weights(4, size, bias), torch.randn(t, n, 4).double()
    h, c, dh, dc = torch.randn(4, n, size).double().unbind(0)
    b = torch.randn(t, n, size).double() if outputs else None
    *slow, slow_trace = cells.run("LSTM", x, h, c, w, reverse, None)
    *fast, fast_trace = lstm.run(x, h, c, w, reverse)
    slow_back = cells.backward("LSTM", slow_trace, w, reverse, None, b, dh, dc)
    fast_back = lstm.backward(fast_trace, w, reverse, b, dh, dc)
    names = ("x", "h", "c", "d_input", "d_state")
    pairs: list[tuple[Tensor, Tensor]] = [*zip(fast, slow, strict=True), (fast_trace.before, slow_trace.before)]
    pairs += [(getattr(fast_back, name), getattr(slow_back, name)) for name in names]
    for found, wanted in pairs:
        assert relative_error(found, wanted) < 1e-12


def test_what_is_handed_out_may_be_written_to() -> None:
    torch.manual_seed(0)
    w, x = _weights(4, 6, bias=True), torch.randn(5, 3, 4).double()
    h, c, dh, dc = torch.randn(4, 3, 6).double().unbind(0)
    out, last, cell, trace = lstm.run(x, h, c, w, reverse=False)
    before = lstm.backward(trace, w, False, None, dh, dc)
    for given in (out, last, cell):
        given.zero_()
    after = lstm.backward(trace, w, False, None, dh, dc)
    assert torch.equal(before.d_input, after.d_input)
    assert float(trace.before[1:].abs().min()) > 0
