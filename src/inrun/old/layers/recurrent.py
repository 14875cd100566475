"""Recurrent networks: ``torch.nn.LSTM``, ``GRU`` and ``RNN``, of several layers, in both directions, with packed sequences.

With d_nt the gradients at the gates (``cells.py``), the gradient of sample n is Σ_t d_nt x_ntᵀ at the input weights,
Σ_t d_nt h_n,t−1ᵀ at the state's, and Σ_t d_nt at the biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from inrun.errors import CoverageError
from inrun.old.layers import cells, lstm
from inrun.old.layers.layout import sum_positions
from inrun.old.layers.registry import LayerRule, register
from inrun.old.layers.seam import Call, gradients_for_probes, unrounded
from inrun.old.layers.shapes import Formed, GradientShape, Outer, Parts


@dataclass(frozen=True)
class Network:
    """What a recurrent network is beside its weights."""

    kind: str
    layers: int
    directions: int
    bias: bool
    projected: bool
    #: Between layers, in training mode.
    dropout: float

    def parts(self) -> Iterator[tuple[int, int, str]]:
        """Yield layer, direction and the end of the names of their parameters."""
        for layer in range(self.layers):
            for direction in range(self.directions):
                yield layer, direction, f"l{layer}{'_reverse' if direction else ''}"

    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters, in the order in which they are given."""
        kinds = [
            "weight_ih",
            "weight_hh",
            *(["bias_ih", "bias_hh"] if self.bias else []),
            *(["weight_hr"] if self.projected else []),
        ]
        return tuple(f"{kind}_{end}" for _, _, end in self.parts() for kind in kinds)

    def weights(self, given: tuple[Tensor, ...]) -> list[cells.Weights]:
        """Sort parameters by layer and direction."""
        named = dict(zip(self.names(), given, strict=True))
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        return [cells.Weights(*(named.get(f"{kind}_{end}") for kind in kinds)) for _, _, end in self.parts()]  # type: ignore[arg-type]


@dataclass
class Run:
    """One run of all layers: outputs, and what the backward needs."""

    out: Tensor
    h: Tensor
    c: Tensor | None
    traces: list[cells.Trace | lstm.Trace]
    noise: list[Tensor]


def _run(
    kind: str, x: Tensor, h: Tensor, c: Tensor | None, w: cells.Weights, reverse: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, cells.Trace | lstm.Trace]:
    """Run one layer in one direction."""
    if c is not None and lstm.serves(kind, mask, w):
        return lstm.run(x, h, c, w, reverse)
    return cells.run(kind, x, h, c, w, reverse, mask)


def _back(
    kind: str,
    trace: cells.Trace | lstm.Trace,
    w: cells.Weights,
    reverse: bool,
    mask: Tensor | None,
    b: Tensor | None,
    dh: Tensor,
    dc: Tensor | None,
) -> cells.Back:
    """Go back through one layer in one direction."""
    if isinstance(trace, lstm.Trace):
        assert dc is not None
        return lstm.backward(trace, w, reverse, b, dh, dc)
    return cells.backward(kind, trace, w, reverse, mask, b, dh, dc)


def packed_places(packed: PackedSequence, n: int) -> Tensor:
    """Return where the rows of packed data lie in a padded batch ``[t · n]`` in the order of the samples."""
    order = torch.arange(n) if packed.sorted_indices is None else packed.sorted_indices.cpu()
    return torch.cat([t * n + order[:size] for t, size in enumerate(packed.batch_sizes.tolist())]).to(packed.data.device)


def _noise(x: Tensor, p: float, places: Tensor | None) -> Tensor:
    """Draw what dropout multiplies ``x`` ``[t, n, h]`` with; of packed sequences for the packed rows, as the framework does."""
    if places is None:
        return F.dropout(torch.ones_like(x), p)
    flat = x.new_zeros(x.shape[0] * x.shape[1], x.shape[2])
    flat[places] = F.dropout(x.new_ones(len(places), x.shape[2]), p)
    return flat.view(x.shape)


def run_layers(
    net: Network,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    mask: Tensor | None,
    weights: list[cells.Weights],
    places: Tensor | None = None,
) -> Run:
    """Run all layers on ``x`` ``[t, n, i]`` from states ``[layers · directions, n, h]``; ``places`` are those of packed rows."""
    traces, hs, cs, noise = [], [], [], []
    for layer in range(net.layers):
        outs = []
        for direction in range(net.directions):
            k = layer * net.directions + direction
            first = None if c is None else c[k]
            out, last, cell, trace = _run(net.kind, x, h[k], first, weights[k], direction == 1, mask)
            outs.append(out)
            traces.append(trace)
            hs.append(last)
            cs.append(cell)
        x = torch.cat(outs, 2) if len(outs) > 1 else outs[0]
        if net.dropout and layer < net.layers - 1:
            noise.append(_noise(x, net.dropout, places))
            x = x * noise[-1]
    return Run(x, torch.stack(hs), None if c is None else torch.stack(cs), traces, noise)  # type: ignore[arg-type]


def by_sample_first(x: Tensor) -> Tensor:
    """Turn ``[t, n, ...]`` into ``[n, t, ...]``; batched products take it as it lies."""
    return x.transpose(0, 1)


def go_back(
    net: Network, done: Run, mask: Tensor | None, weights: list[cells.Weights], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, GradientShape]]:
    """Return the gradients at input and first states, and the shapes of all parameters' gradients."""
    b, dh, dc = grads
    ends = [end for _, _, end in net.parts()]
    shapes: dict[str, GradientShape] = {}
    first_h, first_c = torch.zeros_like(done.h), None if done.c is None else torch.zeros_like(done.c)
    for layer in range(net.layers - 1, -1, -1):
        below: Tensor | None = None
        for direction in range(net.directions):
            k = layer * net.directions + direction
            width = done.h.shape[2]
            own = None if b is None else b[..., direction * width : (direction + 1) * width]
            last = torch.zeros_like(done.h[k]) if dh is None else dh[k]
            last_c = None if done.c is None else torch.zeros_like(done.c[k]) if dc is None else dc[k]
            found = _back(net.kind, done.traces[k], weights[k], direction == 1, mask, own, last, last_c)
            below = found.x if below is None else below + found.x
            first_h[k] = found.h
            if first_c is not None and found.c is not None:
                first_c[k] = found.c
            shapes |= _shapes(found, done.traces[k], ends[k])
        b = below
        if layer and net.dropout:
            assert b is not None
            b = b * done.noise[layer - 1]
    assert b is not None
    return b, first_h, first_c, shapes


def _shapes(found: cells.Back, trace: cells.Trace | lstm.Trace, end: str) -> dict[str, GradientShape]:
    """Return the shapes of the gradients of one layer and direction."""
    # Laid out by sample: two batched products and a sum read it.
    d = by_sample_first(found.d_input).contiguous()
    d_state = d if found.d_state is found.d_input else by_sample_first(found.d_state)
    bias = Formed(sum_positions(d))
    shapes: dict[str, GradientShape] = {
        f"weight_ih_{end}": Outer(d, by_sample_first(trace.x)),
        f"weight_hh_{end}": Outer(d_state, by_sample_first(trace.before)),
        f"bias_ih_{end}": bias,
        f"bias_hh_{end}": bias if d_state is d else Formed(sum_positions(d_state)),
    }
    if found.d_out is not None and found.unprojected is not None:
        shapes[f"weight_hr_{end}"] = Outer(by_sample_first(found.d_out), by_sample_first(found.unprojected))
    return shapes


class Recurrent(torch.autograd.Function):
    """The network; its backward makes all gradients and contractions from the same gradients at the gates."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        buffers: dict[str, Tensor],
        taken: int,
        mask: Tensor | None,
        places: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """Run it, or take ``taken`` outputs that the framework made: the backward then runs it once more.

        ``tensors`` are those outputs, x ``[t, n, i]``, first states (the cell is None but for LSTM), parameters, directions
        and probes.
        """
        net: Network = call.constants
        outs, (x, h, c) = tensors[:taken], tensors[taken : taken + 3]
        count = taken + 3 + len(net.names())
        given, asked = tensors[taken + 3 : count], tensors[count:]
        ctx.call, ctx.buffers, ctx.taken, ctx.directions = call, buffers, taken, call.given(asked)
        ctx.run = None if taken else run_layers(net, x, h, c, mask, net.weights(given), places)
        ctx.save_for_backward(x, h, c, mask, *given)
        ctx.set_materialize_grads(False)
        if taken:
            return tuple(z.clone() for z in outs)
        done: Run = ctx.run
        return (done.out, done.h) if done.c is None else (done.out, done.h, done.c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and what was asked for."""
        call, net = ctx.call, ctx.call.constants
        x, h, c, mask, *given = ctx.saved_tensors
        # Autocast may have rounded what the framework's kernel was given and made; the loop here runs as the weights are.
        dtype = torch.promote_types(x.dtype, given[0].dtype)
        x, h = x.to(dtype), h.to(dtype)
        c, *wide = (None if z is None else z.to(dtype) for z in (c, *grads))
        weights = net.weights(tuple(z.to(dtype) for z in given))
        buffers, ctx.buffers = ctx.buffers, {}
        with unrounded(x):
            done = ctx.run if ctx.run is not None else run_layers(net, x, h, c, mask, weights)
            b, dh, dc, shapes = go_back(net, done, mask, weights, (*wide, None)[:3])
            needs = dict(zip(net.names(), ctx.needs_input_grad[8 + ctx.taken :], strict=False))
            wanted = {name: shapes[name] for name, need in needs.items() if need or name in call.asked_names}
            totals, leaving = gradients_for_probes(call, wanted, ctx.directions, buffers, want_totals=not ctx.taken)
        unasked = [None] * len(ctx.directions)
        if ctx.taken:
            return (None, None, None, None, None, *grads, None, None, None, *([None] * len(given)), *unasked, *leaving)
        own = [totals[name].to(p.dtype) if needs[name] else None for name, p in zip(net.names(), given, strict=True)]
        return (None, None, None, None, None, b, dh, dc, *own, *unasked, *leaving)


@register(nn.LSTM, nn.GRU, nn.RNN)
class RecurrentRule(LayerRule):
    """``torch.nn.LSTM``, ``GRU`` and ``RNN``."""

    label = "recurrent"
    whole = True

    def covers(self, module: nn.Module, names: set[str]) -> bool:
        """All parameters, however many layers there are; not those that a hook makes weights of (the old weight norm)."""
        return names <= set(getattr(module, "_flat_weights_names", names)) & {name for name, _ in module.named_parameters()}

    def constants(self, module: Any) -> Network:
        """Return what the network is."""
        dropout = module.dropout if module.training and module.num_layers > 1 else 0.0
        directions = 2 if module.bidirectional else 1
        return Network(module.mode, module.num_layers, directions, module.bias, module.proj_size > 0, dropout)

    def _given(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        return given["input"], given.get("hx")

    def lead(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The input, samples first; of packed sequences one number each: how long the longest is must not show."""
        x, _ = self._given(module, args, kwargs)
        if isinstance(x, PackedSequence):
            padded = pad_packed_sequence(x)[0].detach()
            places = torch.arange(len(padded), device=padded.device, dtype=padded.dtype).cos() + 1.5
            features = torch.arange(padded.shape[2], device=padded.device, dtype=padded.dtype).sin() + 1.5
            return torch.einsum("tni,t,i->n", padded, places, features).unsqueeze(1)
        return x.unsqueeze(0) if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return x ``[t, n, i]``, first states, the cells' (or nothing) and the mask of packed sequences (or nothing)."""
        x, hx = self._given(module, args, kwargs)
        mask = None
        if isinstance(x, PackedSequence):
            x, lengths = pad_packed_sequence(x)
            mask = (torch.arange(len(x)).unsqueeze(1) < lengths).unsqueeze(2).to(x.device)
        else:
            lead = self.lead(module, args, kwargs)
            assert lead is not None
            x = lead.transpose(0, 1)
        count = module.num_layers * (2 if module.bidirectional else 1)
        h, c = hx if isinstance(hx, tuple) else (hx, None)
        if h is None:
            h = x.new_zeros(count, x.shape[1], module.proj_size or module.hidden_size)
        if c is None and module.mode == "LSTM":
            c = x.new_zeros(count, x.shape[1], module.hidden_size)
        h, c = (None if z is None else z.unsqueeze(1) if z.dim() == 2 else z for z in (h, c))
        return x, h, c, mask  # type: ignore[return-value]

    def outputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...]) -> Any:
        """Return outputs as the module does: its layout, packed or not."""
        x, _ = self._given(module, args, kwargs)
        out, h, *c = outs
        if isinstance(x, PackedSequence):
            lengths = pad_packed_sequence(x)[1]
            again = pack_padded_sequence(out, lengths, enforce_sorted=x.unsorted_indices is None)
            # The very order of the input: sorting is not stable, and downstream indices must mean the same.
            made: Any = again
            if x.sorted_indices is not None:
                rows = out.index_select(1, x.sorted_indices)
                data = pack_padded_sequence(rows, lengths[x.sorted_indices.cpu()]).data
                made = PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        else:
            made = out.squeeze(1) if x.dim() == 2 else out.transpose(0, 1) if module.batch_first else out
            h, *c = (z.squeeze(1) if x.dim() == 2 else z for z in (h, *c))
        return made, (h, c[0]) if c else h

    def flat_outputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> tuple[Tensor, ...]:
        """Undo :meth:`outputs`."""
        x, _ = self._given(module, args, kwargs)
        out, states = made
        states = states if isinstance(states, tuple) else (states,)
        if isinstance(x, PackedSequence):
            return (pad_packed_sequence(out)[0], *states)
        out = out.unsqueeze(1) if x.dim() == 2 else out.transpose(0, 1) if module.batch_first else out
        return (out, *(z.unsqueeze(1) if x.dim() == 2 else z for z in states))

    def run_scored(
        self,
        call: Call,
        buffers: dict[str, Tensor],
        asked: list[Tensor],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
    ) -> Any:
        """Run the module (or take what it ``made``) with probes."""
        x, h, c, mask = self.inputs(module, args, kwargs)
        given = [x, h, c, *(module.get_parameter(name) for name in call.constants.names())]
        outs: tuple[Tensor, ...] = ()
        if made is not None:
            if call.constants.dropout:
                raise CoverageError(
                    f"a {type(module).__name__} with dropout between its layers cannot be scored where its own kernel must run "
                    "(bitwise=True, form='project' or autocast); set its dropout to 0, or leave these options out"
                )
            outs = self.flat_outputs(module, args, kwargs, made)
            given = [None if z is None else z.detach() for z in given]
        packed, _ = self._given(module, args, kwargs)
        drops = call.constants.dropout and isinstance(packed, PackedSequence)
        places = packed_places(packed, x.shape[1]) if drops else None
        found = Recurrent.apply(call, buffers, len(outs), mask, places, *outs, *given, *asked)
        return self.outputs(module, args, kwargs, found)

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """The smaller of factors and formed gradients."""
        if parameter.dim() == 1:
            return super().kept_as(constants, name, parameter, inputs, dtype, n)
        (p, q), t, kind = parameter.shape, inputs[0].shape[0], inputs[0].dtype
        return Outer.kept_as(n, t, p, q, (kind, kind))
