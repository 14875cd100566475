"""Linear maps: ``F.linear`` and products with a matrix of parameters.

a: inputs ``[n, t, i]``, b: gradients at the outputs ``[n, t, o]``. The gradient of sample n is g_n = Σ_t b_nt a_ntᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from inrun.layers.gradients import Formed, Outer, PerSample
from inrun.layers.tap import Source, Tap
from inrun.layers.tape import Tape, rule_for


class OwnedLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is the sum of the per-sample gradients that are formed anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tap, *probes: Tensor) -> Tensor:
        """Run the layer."""
        ctx.save_for_backward(x, weight)
        ctx.tap, ctx.probes, ctx.bias = tap, len(probes), bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Form the per-sample gradients once, for the weight gradient and for all that is read of them."""
        x, weight = ctx.saved_tensors
        tap: Tap = ctx.tap
        with torch._C.DisableTorchFunction(), torch.autocast(b.device.type, enabled=False):
            back = b @ weight.to(b.dtype) if ctx.needs_input_grad[0] else None
            if tap.tape.probing:
                return (back, None, None, None, *[None] * ctx.probes)
            probes, totals = tap.read(rule_of_linear(tap, b, (x,)), totals=True)
        by_target = iter(totals)
        of_weight = next(by_target).to(weight.dtype) if ctx.needs_input_grad[1] and tap.constants[0] else None
        of_bias = next(by_target).to(weight.dtype) if ctx.needs_input_grad[2] and tap.constants[1] else None
        return (back, of_weight, of_bias, None, *probes)


def rule_of_linear(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """Return outer products for the weight, sums over positions for the bias; ``constants`` tells which are wanted."""
    has_weight, has_bias = tap.constants
    rows = tap.split(b, 1)
    found: list[PerSample] = []
    if has_weight:
        found.append(Outer(rows, tap.split(saved[0], 1)))
    if has_bias:
        found.append(Formed(rows.sum(1), lambda: rows))
    return found


@rule_for(F.linear)
def tap_linear(tape: Tape, met: bool, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Tap ``F.linear`` on data."""
    of_weight, of_bias = tape.source(weight), tape.source(bias)
    if not met or tape.source(x) or not isinstance(x, Tensor) or not tape.is_data(x) or weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    targets = [s for s in (of_weight, of_bias) if s is not None and s.scored]
    wanted = (of_weight is not None and of_weight.scored, of_bias is not None and of_bias.scored)
    given = [t for t in (x, weight, bias) if isinstance(t, Tensor)]
    # The weight gradient is ours only where every tensor that wants a gradient is a target.
    others = [t for t, w in ((weight, wanted[0]), (bias, wanted[1])) if t is not None and t.requires_grad and not w]
    if not tape.owns(weight) or others or not wanted[0]:
        saved = (x,) if wanted[0] else ()
        return tape.observe(func, func(x, weight, bias), rule_of_linear, targets, given, saved, wanted)
    tap = tape.tap(func, rule_of_linear, targets, given, torch.Size((*x.shape[:-1], weight.shape[0])), wanted)
    out: Tensor = OwnedLinear.apply(x, weight, bias, tap, *tap.probes())
    tap.edge = get_gradient_edge(out)
    return out


def rule_of_product(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """X @ W: the same with the sides exchanged, ``[i, o]``."""
    rows, a = tap.split(b, 1), tap.split(saved[0], 1)
    found: list[PerSample] = [Outer(a, rows)]
    if len(tap.targets) > 1:
        found.append(Formed(rows.sum(1), lambda: rows))
    return found


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


@rule_for(*_PRODUCTS)
def tap_product(tape: Tape, met: bool, func: Any, x: Tensor, other: Tensor, **rest: Any) -> Any:
    """Tap ``x @ W`` for a matrix W."""
    source: Source | None = tape.source(other)
    if not met or rest or source is None or not tape.is_data(x) or tape.source(x) or other.dim() != 2 or x.dim() < 2:
        return NotImplemented
    return tape.observe(func, func(x, other), rule_of_product, [source], (x, other), (x,))


@rule_for(torch.addmm, Tensor.addmm)
def tap_addmm(tape: Tape, met: bool, func: Any, bias: Tensor, x: Tensor, weight: Tensor, **rest: Any) -> Any:
    """Tap ``torch.addmm(bias, x, W)``, the linear layer of GPT-2."""
    of_bias, of_weight = tape.source(bias), tape.source(weight)
    if not met or rest or of_bias is None or of_weight is None or not tape.is_data(x) or tape.source(x) or bias.dim() != 1:
        return NotImplemented
    if not (of_bias.scored and of_weight.scored):
        return NotImplemented
    return tape.observe(func, func(bias, x, weight), rule_of_product, [of_weight, of_bias], (bias, x, weight), (x,))
