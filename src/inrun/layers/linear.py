"""Linear layers: ``torch.nn.Linear`` and the transposed ``Conv1D`` of transformers.

a: layer input ``[n, t, i]``, b: gradient at the layer output ``[n, t, o]``, v: direction ``[k, o, i]``.
The gradient of sample n is g_n = Σ_t b_nt a_ntᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inrun.layers.registry import Kept, KeptFactors, KeptGradients, Rule, Saved, Take, register, register_finder
from inrun.layers.rows import SCRATCH_BYTES, by_sample, row_dots, scratch_like, sum_positions
from inrun.layers.tap import Observer

#: Floating-point operations a device does while it moves one byte, for the choice of the form.
FLOPS_PER_BYTE = {"cpu": 5.0, "cuda": 60.0}


def shared_is_cheaper(t: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Choose the form of one layer: per entry of the weight and sample, shared moves bytes, project multiplies.

    Shared reads the running sum and v once more; project does 2t operations.
    Deterministic in shape, dtype and device, so that a resumed run rounds the same way.
    """
    shared_bytes = 3.0 * dtype.itemsize
    project_flops = 2.0 * t
    return project_flops > shared_bytes * FLOPS_PER_BYTE.get(device.type, FLOPS_PER_BYTE["cuda"])


def contract_outer(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Contract outer-product gradients g_n = Σ_t x_nt y_ntᵀ with directions; g_n is never formed.

    ⟨g_n, v⟩ = Σ_t x_nt · (v y_nt): the *project* form, one matrix product of the size of the layer's forward.

    Args:
        x: ``[n, t, p]``.
        y: ``[n, t, q]``.
        v: Directions, ``[k, p, q]``.

    Returns:
        One inner product per sample and direction, ``[n, k]``.
    """
    n = x.shape[0]
    x, y = x.to(v.dtype), y.to(v.dtype)
    flat = y.reshape(-1, y.shape[-1])
    x = x.reshape(n, -1)
    return torch.stack([row_dots(x, (flat @ direction.t()).view(n, -1)) for direction in v], dim=1)


def contract_outer_rows(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Contract row by row of the weight: Σ_t x_ntp (v y_nt)_p, ``[n, k, p]``."""
    n, t = x.shape[:2]
    flat = y.reshape(n * t, -1).to(v.dtype)
    x = x.to(v.dtype)
    return torch.stack([sum_positions((flat @ direction.t()).view(n, t, -1).mul_(x)) for direction in v], dim=1)


def shared_outer(x: Tensor, y: Tensor, v: Tensor, rowwise: bool = False) -> tuple[Tensor, Tensor]:
    """Make the weight gradient G = Σ_n g_n and the contractions ⟨g_n, v⟩ from the same products.

    The batched GEMM accumulates into as many running sums as fit the cache, S ← S + g_n, one sample each at a time, and
    ⟨g_n, v⟩ = ⟨S after, v⟩ − ⟨S before, v⟩; the running sums add up to G. So no g_n is ever added by a pass of its own,
    the sums stay in the cache, and the rounding is that of a sum over part of the batch, below that of G itself.
    A weight too large for several running sums has one, which is G.

    Args:
        x: ``[n, t, p]``.
        y: ``[n, t, q]``.
        v: Directions, ``[k, p, q]``.
        rowwise: Leave the rows of the weight apart.

    Returns:
        G ``[p, q]``, and the inner products ``[n, k]``, or ``[n, k, p]`` row by row.
    """
    n, k, p, q = x.shape[0], v.shape[0], x.shape[2], y.shape[2]
    total = x.new_empty(1, p, q)
    if n == 0:
        return total[0].zero_(), x.new_zeros((0, k, p) if rowwise else (0, k))
    chains = max(1, min(n, SCRATCH_BYTES // max(total.nbytes, 1)))
    running = total if chains == 1 else scratch_like(x, (chains, p, q))
    sums: list[Tensor] = []
    for first in range(0, n, chains):
        group = slice(first, min(first + chains, n))
        part, left, right = running[: group.stop - first], x[group].transpose(1, 2), y[group]
        if first == 0:
            torch.bmm(left, right, out=part)
        else:
            torch.baddbmm(part, left, right, out=part)
        sums.append(contract_formed(part, v, rowwise))
    after = torch.cat(sums)
    contributions = after.clone()
    contributions[chains:] -= after[:-chains] if n > chains else 0
    gradient = total[0] if chains == 1 else torch.sum(running, 0, out=total[0])
    return gradient, contributions


def contract_formed(g: Tensor, v: Tensor, rowwise: bool) -> Tensor:
    """Contract formed gradients ``[m, p, q]`` with directions ``[k, p, q]``: ``[m, k]``, or ``[m, k, p]`` by rows."""
    if rowwise:
        by_row = [torch.bmm(g_m.unsqueeze(1), d.unsqueeze(2)).view(-1) for g_m in g for d in v]
        return torch.stack(by_row).view(g.shape[0], v.shape[0], -1)
    flat = g.view(g.shape[0], -1)
    return torch.stack([torch.mv(flat, d) for d in v.reshape(v.shape[0], -1).unbind(0)], dim=1)


def gradients_are_smaller(t: int, p: int, q: int) -> bool:
    """Whether per-sample gradients p·q take less memory than inputs and output gradients t·(p + q)."""
    return p * q <= t * (p + q)


def form_outer(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Form g_n = Σ_t x_nt y_ntᵀ, ``[n, p, q]``, into ``out``; return their sum, which is the weight gradient."""
    n, p, q = out.shape
    torch.bmm(x.transpose(1, 2), y, out=out)
    # A product with ones: it reads at the speed of memory, which a reduction over the leading dimension does not.
    return (out.new_ones(1, n) @ out.view(n, -1)).view(p, q)


@register(nn.Linear)
class LinearRule(Rule):
    """``y = a Wᵀ + bias`` with ``weight`` of shape ``[o, i]``."""

    label = "linear"
    names = ("weight", "bias")
    #: Whether the weight is stored ``[i, o]`` instead of ``[o, i]``.
    transposed = False

    def _factors(self, saved: Saved, b: Tensor, n: int) -> tuple[Tensor, Tensor]:
        a, b = by_sample(saved[0], n, 1), by_sample(b, n, 1)
        return (a, b) if self.transposed else (b, a)

    def sample_gradient(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Form Σ_t b_nt a_ntᵀ, or Σ_t b_nt for the bias."""
        if name == "bias":
            return sum_positions(by_sample(b, n, 1))
        x, y = self._factors(saved, b, n)
        return torch.bmm(x.transpose(1, 2), y.to(x.dtype))

    def contract(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Project: Σ_t b_nt · (v a_nt)."""
        if name == "bias":
            return super().contract(module, name, saved, b, n, v)
        x, y = self._factors(saved, b, n)
        return contract_outer(x, y, v)

    def rows_are_classes(self, module: nn.Module, name: str) -> bool:
        """A weight with more than four outputs per input is taken for an output vocabulary."""
        rows, columns = module.get_parameter(name).shape if name == "weight" else (0, 1)
        return not self.transposed and rows > 4 * columns

    def contract_rows(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Project, output by output."""
        x, y = self._factors(saved, b, n)
        return contract_outer_rows(x, y, v)

    def keep(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, take: Take) -> Kept:
        """Keep the smaller of factors and per-sample gradients."""
        if name == "bias":
            return KeptGradients(self.sample_gradient(module, name, saved, b, n))
        x, y = self._factors(saved, b, n)
        if not gradients_are_smaller(x.shape[1], x.shape[2], y.shape[2]):
            return KeptFactors(self, module, name, saved, b, n)
        dtype = torch.promote_types(x.dtype, y.dtype)
        g = take((n, x.shape[2], y.shape[2]), x.to(dtype))
        return KeptGradients(torch.bmm(x.to(dtype).transpose(1, 2), y.to(dtype), out=g))

    def kept_bytes(self, module: nn.Module, name: str, lead: Tensor, n: int) -> int:
        """The smaller of both."""
        parameter = module.get_parameter(name)
        if name == "bias":
            return super().kept_bytes(module, name, lead, n)
        (p, q), t = parameter.shape, lead.numel() // max(lead.shape[-1] * n, 1)
        return n * min(p * q, t * (p + q)) * lead.element_size()

    def total(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """One product over all positions."""
        if name == "bias":
            return super().total(module, name, saved, b, n)
        x, y = self._factors(saved, b, n)
        return x.reshape(-1, x.shape[-1]).t() @ y.reshape(-1, y.shape[-1]).to(x.dtype)

    def shared_forward(self, module: nn.Module, args: tuple[Any, ...], observer: Observer, forced: bool) -> Tensor | None:
        """Own the layer's backward where the weight is scored and the cost model prefers it."""
        (a,) = args
        weight, bias = module.weight, module.bias
        n = observer.n
        if "weight" not in observer.names or a.dtype != weight.dtype or a.dtype not in (torch.float32, torch.float64):
            return None
        if not forced and not shared_is_cheaper(a.numel() // max(a.shape[-1] * n, 1), a.dtype, a.device):
            return None
        out: Tensor = SharedLinear.apply(a, weight, bias, self, observer, *observer.probes)
        return out


class SharedLinear(torch.autograd.Function):
    """A linear layer whose weight gradient and contributions come from the same products (the *shared* form)."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, rule: LinearRule, observer: Observer, *probes: Tensor
    ) -> Tensor:
        """Compute the layer as the framework does."""
        ctx.save_for_backward(a, weight)
        ctx.rule, ctx.observer, ctx.has_bias = rule, observer, bias is not None
        matrix = weight if rule.transposed else weight.t()
        # Not F.linear: its output is a view for inputs of three dimensions, and an in-place activation may follow.
        out = a.new_empty(*a.shape[:-1], matrix.shape[1])
        rows, flat = out.view(-1, matrix.shape[1]), a.reshape(-1, a.shape[-1])
        if bias is None:
            torch.mm(flat, matrix, out=rows)
        else:
            torch.addmm(bias, flat, matrix, out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and ⟨g_n, v⟩ for the probes."""
        (b,) = grads
        a, weight = ctx.saved_tensors
        rule, observer = ctx.rule, ctx.observer
        scores: dict[str, Tensor | None] = {}
        grad_a = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            flat = b.reshape(-1, b.shape[-1])
            grad_a = (flat @ (weight.t() if rule.transposed else weight)).view(a.shape)
        x, y = rule._factors((a,), b, observer.n)
        v = observer.direction("weight")
        if v is None and gradients_are_smaller(x.shape[1], x.shape[2], y.shape[2]):
            formed = observer.take("weight", (observer.n, x.shape[2], y.shape[2]), x)
            grad_weight = form_outer(x, y, formed)
            observer.keep("weight", KeptGradients(formed))
        elif v is None:
            grad_weight = x.reshape(-1, x.shape[-1]).t() @ y.reshape(-1, y.shape[-1])
            scores["weight"] = observer.settle("weight", (a,), b)
        else:
            rowwise = observer.rowwise("weight")
            grad_weight, contributions = shared_outer(x, y, v, rowwise)
            if rowwise:
                observer.keep_rows("weight", contributions)
            else:
                scores["weight"] = observer.book("weight", contributions)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_rows = sum_positions(by_sample(b, observer.n, 1))
            grad_bias = bias_rows.sum(0)
            if "bias" in observer.names:
                v = observer.direction("bias")
                if v is None:
                    observer.keep("bias", KeptGradients(bias_rows))
                else:
                    scores["bias"] = observer.book("bias", bias_rows @ v.t())
        return (grad_a, grad_weight, grad_bias, None, None, *(scores.get(name) for name in observer.names))


class Conv1DRule(LinearRule):
    """The ``Conv1D`` of transformers: a linear layer with ``weight`` of shape ``[i, o]``."""

    label = "linear (Conv1D)"
    transposed = True


_conv1d = Conv1DRule()


@register_finder
def find_conv1d(module: nn.Module) -> Rule | None:
    """Recognise transformers' Conv1D by where it is defined, without importing transformers."""
    cls = type(module)
    defined = any(
        b.__name__ == "Conv1D" and b.__module__ == "transformers.pytorch_utils" and getattr(b, "forward", None) is cls.forward
        for b in cls.__mro__
    )
    return _conv1d if defined else None
