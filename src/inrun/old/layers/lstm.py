"""One layer of an LSTM in one direction, of sequences of one length and without a projection, in few operations per position.

As ``cells.py``, whose functions these stand in for. A position costs one small product and a handful of operations on
``[n, h]``, so that their number is what counts: gates are ordered i, f, o, g, for one sigmoid over three of them; all that the
backward needs beside the running gradients is computed for all positions at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.old.layers import cells


@dataclass
class Trace:
    """What the backward needs: as in ``cells.Trace``, and the gates i, f, o, g ``[t, n, 4, h]``, cells and their tanh."""

    x: Tensor
    before: Tensor
    gates: Tensor
    #: ``[t, n, h]``, in order of time: cells before the positions, and tanh of those after.
    cells_before: Tensor
    tanh: Tensor


def serves(kind: str, mask: Tensor | None, weights: cells.Weights) -> bool:
    """Whether a layer is of this kind."""
    return kind == "LSTM" and mask is None and weights.hr is None


def _reordered(w: Tensor) -> Tensor:
    """Turn rows for i, f, g, o into those for i, f, o, g."""
    i_f, g, o = w.split([len(w) // 2, len(w) // 4, len(w) // 4])
    return torch.cat([i_f, o, g])


def run(x: Tensor, h: Tensor, c: Tensor, w: cells.Weights, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Trace]:
    """Return outputs ``[t, n, h]``, the last state, the last cell and the trace.

    Everything is laid out in order of time: in reverse, position t − 1 comes first.
    """
    t, n, size = x.shape[0], *h.shape
    x_timed = x.flip(0) if reverse else x
    flat, ih, back = x_timed.reshape(t * n, -1), _reordered(w.ih).t(), _reordered(w.hh).t()
    if w.b_ih is None or w.b_hh is None:
        gates = flat @ ih
    else:
        gates = torch.addmm(_reordered(w.b_ih + w.b_hh), flat, ih)
    out, tanh, cs = x.new_empty(t, n, size), x.new_empty(t, n, size), x.new_empty(t + 1, n, size)
    cs[0] = c
    views = gates.view(t, n, 4 * size)
    each = gates.view(t, n, 4, size)
    places = zip(
        views.unbind(0),
        views[..., : 3 * size].unbind(0),
        *(z.unbind(0) for z in each.unbind(2)),
        tanh.unbind(0),
        out.unbind(0),
        cs.unbind(0)[1:],
        strict=True,
    )
    before, cell = h, cs[0]
    for whole, open_, i, f, o, g, squashed, after, new_cell in places:
        whole.addmm_(before, back)
        open_.sigmoid_()
        g.tanh_()
        torch.mul(f, cell, out=new_cell).addcmul_(i, g)
        torch.tanh(new_cell, out=squashed)
        torch.mul(o, squashed, out=after)
        before, cell = after, new_cell
    # A copy: what is handed out may be written to.
    states = torch.cat([h.unsqueeze(0), out[:-1]])
    trace = Trace(x, states.flip(0) if reverse else states, each, cs[:-1], tanh)
    return out.flip(0) if reverse else out, before.clone(), cell.clone(), trace


def backward(trace: Trace, w: cells.Weights, reverse: bool, b: Tensor | None, dh: Tensor, dc: Tensor) -> cells.Back:
    """Go back from gradients at outputs ``b`` ``[t, n, h]``, last state and last cell.

    With e the gradient at a state and s at a cell, d_i = s g i(1−i), d_f = s c₋ f(1−f), d_g = s i(1−g²), d_o = e tanh(c) o(1−o),
    and s ← s + e o(1 − tanh²c) on the way: all but e and s is known beforehand.
    """
    t, n, size = trace.tanh.shape
    i, f, o, g = trace.gates.unbind(2)
    tanh = trace.tanh
    known = torch.empty_like(trace.gates)  # in the order of the weights: i, f, g, o
    d_i, d_f, d_g, d_o = known.unbind(2)
    # i(1−i)g = ig − i(ig), and i(1−g²) = i − (ig)g: products that two of them share are made once, in one buffer.
    product = i * g
    torch.addcmul(product, i, product, value=-1, out=d_i)
    torch.addcmul(i, product, g, value=-1, out=d_g)
    torch.mul(f, trace.cells_before, out=product)
    torch.addcmul(product, f, product, value=-1, out=d_f)
    torch.mul(o, tanh, out=product)
    torch.addcmul(product, o, product, value=-1, out=d_o)
    to_cell = torch.addcmul(o, product, tanh, value=-1)
    # Laid out by sample, as the batched products that follow want it.
    d = trace.gates.new_empty(n, t, 4, size).transpose(0, 1)
    timed = None if b is None else b.flip(0) if reverse else b
    arriving = [None] * t if timed is None else list(timed.unbind(0))
    places = zip(
        d.view(t, n, 4 * size).unbind(0),
        d[:, :, :3].unbind(0),
        d[:, :, 3].unbind(0),
        known[:, :, :3].unbind(0),
        known[:, :, 3].unbind(0),
        to_cell.unbind(0),
        f.unbind(0),
        [None, *arriving[:-1]],
        strict=True,
    )
    new = dh if arriving[-1] is None else dh + arriving[-1]
    dc = dc.clone()
    column = dc.unsqueeze(1)
    for whole, inner, outer, k_inner, k_outer, into, forget, above in reversed(list(places)):
        dc.addcmul_(new, into)
        torch.mul(column, k_inner, out=inner)
        torch.mul(new, k_outer, out=outer)
        dc.mul_(forget)
        new = whole @ w.hh if above is None else torch.addmm(above, whole, w.hh)
    flat = d.view(t, n, 4 * size)
    flat = flat.flip(0) if reverse else flat
    x = (flat.transpose(0, 1).reshape(n * t, -1) @ w.ih).view(n, t, -1).transpose(0, 1)
    return cells.Back(x, new, dc, flat, flat)
