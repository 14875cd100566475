"""One layer of a recurrent network in one direction, forward and back, on tensors alone.

Sequence first: x ``[t, n, i]``, states ``[n, h]``. The backward returns the gradients at the gates, d ``[t, n, gates · h]``, from
which per-sample gradients follow as outer products: Σ_t d_nt x_ntᵀ for the input weights, Σ_t d_nt h_n,t−1ᵀ for the state's.

    LSTM   i, f, o = σ(·), g = tanh(·);  c ← f c + i g;  h ← o tanh c  (then projected, where there is a projection)
    GRU    r, z = σ(·), m = tanh(a_x + r a_h);  h ← (1 − z) m + z h
    RNN    h ← tanh(·) or relu(·)

Where samples differ in length, ``mask`` ``[t, n, 1]`` is 1 in the places that count; elsewhere states stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What a forward leaves for its backward; lists have one entry per step, in the order of the steps."""

    x: Tensor
    #: States before every step, ``[t, n, h]``; for LSTM cells ``[t + 1, n, h]`` too.
    before: Tensor
    cells: list[Tensor] = field(default_factory=list)
    #: Gates after their nonlinearities, and what else the kind needs.
    gates: list[Tensor] = field(default_factory=list)
    extra: list[Tensor] = field(default_factory=list)


@dataclass
class Weights:
    """Weights of one layer and direction; biases and the projection may be missing."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None


@dataclass
class Back:
    """Gradients at inputs and first states, and at the gates as the input's and the state's products see them."""

    x: Tensor
    h: Tensor
    c: Tensor | None
    d_input: Tensor
    d_state: Tensor
    #: For a projection: gradients after it, and what it projected.
    d_out: Tensor | None = None
    unprojected: Tensor | None = None


def _steps(t: int, reverse: bool) -> range:
    return range(t - 1, -1, -1) if reverse else range(t)


def _input_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = flat @ weight.t() if bias is None else torch.addmm(bias, flat, weight.t())
    return out.view(*x.shape[:2], -1)


def run(
    kind: str, x: Tensor, h: Tensor, c: Tensor | None, w: Weights, reverse: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Trace]:
    """Return outputs ``[t, n, h]``, the last state, the last cell (LSTM) and the trace."""
    t, n = x.shape[:2]
    out = x.new_empty(t, n, h.shape[1])
    before = x.new_empty(t, n, h.shape[1])
    trace = Trace(x, before)
    gru = kind == "GRU"
    both = w.b_ih if gru or w.b_ih is None or w.b_hh is None else w.b_ih + w.b_hh
    given = _input_products(x, w.ih, both)
    back = w.hh.t()
    if c is not None:
        trace.cells.append(c)
    for s in _steps(t, reverse):
        before[s] = h
        if kind == "LSTM":
            assert c is not None
            gates = torch.addmm(given[s], h, back)
            i, f, g, o = gates.chunk(4, 1)
            size = i.shape[1]
            gates[:, : 2 * size].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            new_c = torch.addcmul(f * c, i, g)
            tanh = new_c.tanh()
            inner = o * tanh
            new = inner if w.hr is None else inner @ w.hr.t()
            trace.gates.append(gates)
            trace.extra += [tanh, inner]
            c = new_c if mask is None else torch.where(mask[s], new_c, c)
            trace.cells.append(c)
        elif gru:
            products = h @ back if w.b_hh is None else torch.addmm(w.b_hh, h, back)
            size = h.shape[1]
            rz = (given[s, :, : 2 * size] + products[:, : 2 * size]).sigmoid_()
            inner = products[:, 2 * size :]
            m = torch.addcmul(given[s, :, 2 * size :], rz[:, :size], inner).tanh_()
            new = torch.lerp(m, h, rz[:, size:])
            trace.gates.append(rz)
            trace.extra += [m, inner]
        else:
            new = torch.addmm(given[s], h, back)
            new = new.tanh_() if kind == "RNN_TANH" else new.relu_()
            trace.gates.append(new)
        if mask is not None:
            out[s] = new * mask[s]
            h = torch.where(mask[s], new, h)
        else:
            out[s] = h = new
    return out, h, c, trace


def backward(
    kind: str, trace: Trace, w: Weights, reverse: bool, mask: Tensor | None, b: Tensor | None, dh: Tensor, dc: Tensor | None
) -> Back:
    """Go back from gradients at outputs ``b`` ``[t, n, h]``, last state and last cell."""
    t, n = trace.x.shape[:2]
    width = w.ih.shape[0]
    d = trace.x.new_empty(t, n, width)
    gru = kind == "GRU"
    d_state = torch.empty_like(d) if gru else d
    projected = w.hr is not None
    d_out = trace.x.new_empty(t, n, dh.shape[1]) if projected else None
    unprojected = trace.x.new_empty(t, n, width // 4) if projected else None
    order = list(_steps(t, reverse))
    for place in range(t - 1, -1, -1):
        s = order[place]
        new = dh if b is None else dh + b[s]
        held = None
        if mask is not None:
            held, new = dh * ~mask[s], new * mask[s]
        if kind == "LSTM":
            assert dc is not None
            gates, tanh, inner = trace.gates[place], trace.extra[2 * place], trace.extra[2 * place + 1]
            if w.hr is not None and d_out is not None and unprojected is not None:
                d_out[s], unprojected[s] = new, inner
                new = new @ w.hr
            i, f, g, o = gates.chunk(4, 1)
            held_c = None if mask is None else dc * ~mask[s]
            dc = dc if mask is None else dc * mask[s]
            dc = torch.addcmul(dc, new * o, 1 - tanh * tanh)
            di, df, dg, do = d[s].chunk(4, 1)
            torch.mul(dc * g, i - i * i, out=di)
            torch.mul(dc * trace.cells[place], f - f * f, out=df)
            torch.mul(dc * i, 1 - g * g, out=dg)
            torch.mul(new * tanh, o - o * o, out=do)
            dc = dc * f if held_c is None else dc * f + held_c
            dh = d[s] @ w.hh
        elif gru:
            rz, m, inner = trace.gates[place], trace.extra[2 * place], trace.extra[2 * place + 1]
            size = m.shape[1]
            r, z = rz[:, :size], rz[:, size:]
            dm = new * (1 - z) * (1 - m * m)
            d[s, :, size : 2 * size] = new * (trace.before[s] - m) * (z - z * z)
            d[s, :, :size] = dm * inner * (r - r * r)
            d[s, :, 2 * size :] = dm
            d_state[s, :, : 2 * size] = d[s, :, : 2 * size]
            d_state[s, :, 2 * size :] = dm * r
            dh = torch.addmm(new * z, d_state[s], w.hh)
        else:
            h = trace.gates[place]
            torch.mul(new, 1 - h * h if kind == "RNN_TANH" else (h > 0).to(h.dtype), out=d[s])
            dh = d[s] @ w.hh
        dh = dh if held is None else dh + held
    x = (d.view(t * n, width) @ w.ih).view(t, n, -1)
    return Back(x, dh, dc, d, d_state, d_out, unprojected)
