"""Linear maps: ``F.linear`` and products with a matrix of parameters.

a: inputs ``[n, t, i]``, b: gradients at the outputs ``[n, t, o]``. The gradient of sample n is g_n = Σ_t b_nt a_ntᵀ.
Under autocast the inputs are saved as they were given, and rounded as the function rounded them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inrun.layers.gradients import Formed, Outer, PerSample, work_dtype
from inrun.layers.tap import Source, Tap
from inrun.layers.tape import Tape, rule_for


def rule_of_linear(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """Return outer products for the weight, sums over positions for the bias; ``constants`` tells which are wanted."""
    has_weight, has_bias = tap.constants
    rows = tap.split(b, 1)
    found: list[PerSample] = []
    if has_weight:
        found.append(Outer(rows, tap.split(saved[0].to(b.dtype), 1)))
    if has_bias:
        found.append(Formed(rows.sum(1, dtype=work_dtype(b.dtype)), lambda: rows))
    return found


@rule_for(F.linear)
def tap_linear(tape: Tape, met: bool, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Tap ``F.linear`` on data."""
    known = tape.tensors
    of_weight, of_bias = known.source(weight), known.source(bias)
    if not met or known.source(x) or not isinstance(x, Tensor) or not known.is_data(x) or weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    wanted = (of_weight is not None and of_weight.scored, of_bias is not None and of_bias.scored)
    targets = [s for s, w in ((of_weight, wanted[0]), (of_bias, wanted[1])) if s is not None and w]
    given, saved = (x, weight), (x,) if wanted[0] else ()
    if not wanted[0] or not tape.owns(weight):
        return tape.observe(func, func(x, weight, bias), rule_of_linear, targets, given, saved, wanted)
    own_bias = bias if wanted[1] else None
    owned = (weight,) if own_bias is None else (weight, own_bias)
    out = func(x, weight.detach(), bias if own_bias is None else own_bias.detach())
    return tape.observe(func, out, rule_of_linear, targets, given, saved, wanted, owned)


def rule_of_product(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """X @ W: the same with the sides exchanged, ``[i, o]``."""
    rows, a = tap.split(b, 1), tap.split(saved[0].to(b.dtype), 1)
    found: list[PerSample] = [Outer(a, rows)]
    if len(tap.targets) > 1:
        found.append(Formed(rows.sum(1, dtype=work_dtype(b.dtype)), lambda: rows))
    return found


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


@rule_for(*_PRODUCTS)
def tap_product(tape: Tape, met: bool, func: Any, x: Tensor, other: Tensor, **rest: Any) -> Any:
    """Tap ``x @ W`` for a matrix W."""
    known = tape.tensors
    source: Source | None = known.source(other)
    if (
        not met
        or rest
        or source is None
        or not known.is_data(x)
        or known.source(x)
        or other.dim() != 2
        or x.dim() < 2
        or not source.scored
    ):
        return NotImplemented
    owned = (other,) if tape.owns(other) else ()
    out = func(x, other.detach() if owned else other)
    return tape.observe(func, out, rule_of_product, [source], (x, other), (x,), None, owned)


@rule_for(torch.addmm, Tensor.addmm)
def tap_addmm(tape: Tape, met: bool, func: Any, bias: Tensor, x: Tensor, weight: Tensor, **rest: Any) -> Any:
    """Tap ``torch.addmm(bias, x, W)``, the linear layer of GPT-2."""
    known = tape.tensors
    of_bias, of_weight = known.source(bias), known.source(weight)
    if not met or rest or of_bias is None or of_weight is None or not known.is_data(x) or known.source(x) or bias.dim() != 1:
        return NotImplemented
    if not (of_bias.scored and of_weight.scored):
        return NotImplemented
    targets, given = [of_weight, of_bias], (x, weight)
    if not tape.owns(weight):
        return tape.observe(func, func(bias, x, weight), rule_of_product, targets, given, (x,))
    out = func(bias.detach(), x, weight.detach())
    return tape.observe(func, out, rule_of_product, targets, given, (x,), None, (weight, bias))
