"""Squared norms of per-sample gradients, and inner products of two shapes sample by sample, without forming more than is small.

==============  =================================================================  ==========================
shapes          ⟨g_n, h_n⟩                                                         operations per sample
==============  =================================================================  ==========================
outer, outer    Σ_{t,s} (x_t · x'_s)(y_t · y'_s)                                   t·s·(p + q)
outer, look-up  Σ_{t,s} x_t[token_s] (y_t · b_s)                                   t·s·q
look-up twice   Σ_{t,s} [token_t = token'_s] (b_t · b'_s), but for the padding     t·s·d
formed          Σ g ∘ h                                                            p·q
==============  =================================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inrun.old.layers.layout import SCRATCH_BYTES
from inrun.old.layers.shapes import GradientShape, LookUp, Outer


def squares(shape: GradientShape) -> Tensor:
    """Return ‖g_n‖² of one use of a parameter, ``[n]``."""
    return paired(shape, shape)


def squares_of_sum(uses: Sequence[GradientShape]) -> Tensor:
    """Return ‖Σ_u g_n^u‖², ``[n]``, for the uses u of one parameter: cross terms count twice."""
    found = [squares(a) for a in uses]
    found += [2.0 * paired(a, b) for i, a in enumerate(uses) for b in uses[:i]]
    return torch.stack([x.double() for x in found]).sum(0)


def paired(a: GradientShape, b: GradientShape) -> Tensor:
    """Return ⟨g_n, h_n⟩ sample by sample, ``[n]``."""
    if isinstance(a, LookUp) and isinstance(b, Outer):
        return paired(b, a)
    if isinstance(a, Outer) and isinstance(b, Outer):
        return _outer_outer(a, b)
    if isinstance(a, Outer) and isinstance(b, LookUp):
        return _outer_look_up(a, b)
    if isinstance(a, LookUp) and isinstance(b, LookUp):
        return _look_up_look_up(a, b)
    g, h = a.form(), b.form()
    return (_wide(g) * _wide(h)).flatten(1).sum(1) if g is not h else _wide(g).flatten(1).square().sum(1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _outer_outer(a: Outer, b: Outer) -> Tensor:
    """Products of positions with positions, or formed gradients some at a time, whichever is less work."""
    (n, t, p), s, q = a.x.shape, b.x.shape[1], a.y.shape[2]
    if t * s * (p + q) <= (t + s) * p * q:
        rows = torch.bmm(_wide(a.x), _wide(b.x).transpose(1, 2))
        return rows.mul_(torch.bmm(_wide(a.y), _wide(b.y).transpose(1, 2))).flatten(1).sum(1)
    piece = max(1, SCRATCH_BYTES // max(p * q * _wide(a.x[:0]).element_size(), 1))
    found = []
    for first in range(0, n, piece):
        g = _wide(a.samples(first, first + piece).form())
        h = g if a is b else _wide(b.samples(first, first + piece).form())
        found.append(torch.linalg.vecdot(g.flatten(1), h.flatten(1)))
    return torch.cat(found) if found else _wide(a.x.new_zeros(0))


def _outer_look_up(a: Outer, b: LookUp) -> Tensor:
    index = b.tokens.unsqueeze(1).expand(-1, a.x.shape[1], -1)
    picked = _wide(a.x).gather(2, index)
    return picked.mul_(torch.bmm(_wide(a.y), _wide(b.unpadded()).transpose(1, 2))).flatten(1).sum(1)


def _look_up_look_up(a: LookUp, b: LookUp) -> Tensor:
    same = a.tokens.unsqueeze(2) == b.tokens.unsqueeze(1)
    products = torch.bmm(_wide(a.unpadded()), _wide(b.unpadded()).transpose(1, 2))
    return products.mul_(same).flatten(1).sum(1)
