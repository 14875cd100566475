"""Linear layers: ``torch.nn.Linear`` and the transposed ``Conv1D`` of transformers.

a: layer input ``[n, t, i]``, b: gradient at the layer output ``[n, t, o]``, v: direction ``[k, o, i]``.
The gradient of sample n is g_n = Σ_t b_nt a_ntᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.layers.registry import Kept, KeptFactors, KeptGradients, Rule, Saved, register, register_finder
from inrun.layers.rows import by_sample, row_dots, scratch_like, sum_positions
from inrun.layers.tap import Observer

#: Samples whose gradients are summed in place before a new partial sum is begun, see :func:`shared_outer`.
CHAIN = 8

#: Floating-point operations a device does while it moves one byte, for the choice of the form.
FLOPS_PER_BYTE = {"cpu": 5.0, "cuda": 60.0}


def shared_is_cheaper(t: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Choose the form of one layer: per entry of the weight and sample, shared moves bytes, project multiplies.

    Shared reads the per-sample gradient and v once and adds some of it up; project does 2t operations.
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

    The products of ``CHAIN`` samples are accumulated by the GEMM itself, S_n = S_{n-1} + g_n, and
    ⟨g_n, v⟩ = ⟨S_n, v⟩ − ⟨S_{n-1}, v⟩: this spares most of the passes that add g_n into G. The rounding
    is that of a sum over CHAIN samples, far below that of G itself.

    Args:
        x: ``[n, t, p]``.
        y: ``[n, t, q]``.
        v: Directions, ``[k, p, q]``.
        rowwise: Leave the rows of the weight apart.

    Returns:
        G ``[p, q]`` and the inner products ``[n, k]``, or ``[n, k, p]`` row by row.
    """
    n, k, p = x.shape[0], v.shape[0], x.shape[2]
    total = x.new_empty(x.shape[2], y.shape[2])
    if n == 0:
        return total.zero_(), x.new_zeros((0, k, p) if rowwise else (0, k))
    spare = scratch_like(total) if n > CHAIN else total
    directions = (v.unsqueeze(-1) if rowwise else v.reshape(k, -1)).unbind(0)
    lefts, rights = x.transpose(1, 2).unbind(0), y.unbind(0)
    dots: list[Tensor] = []
    for sample, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        partial = total if sample < CHAIN else spare
        if sample % CHAIN == 0:
            torch.mm(left, right, out=partial)
        else:
            torch.addmm(partial, left, right, out=partial)
        flat = partial.unsqueeze(1) if rowwise else partial.view(-1)
        for direction in directions:
            dots.append(torch.bmm(flat, direction).view(-1) if rowwise else torch.dot(flat, direction))
        if sample >= CHAIN and (sample % CHAIN == CHAIN - 1 or sample == n - 1):
            total.add_(spare)
    sums = torch.stack(dots).view((n, k, p) if rowwise else (n, k))
    contributions = sums.clone()
    contributions[1:] -= sums[:-1]
    contributions[::CHAIN] = sums[::CHAIN]
    return total, contributions


def keep_outer(rule: Rule, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Kept:
    """Keep the smaller of inputs + output gradients and per-sample gradients of a weight."""
    a = by_sample(saved[0], n, 1)
    t, i, o = a.shape[1], a.shape[2], b.shape[-1]
    if name == "bias" or i * o < t * (i + o):
        return KeptGradients(rule.sample_gradient(module, name, saved, b, n))
    return KeptFactors(rule, module, name, saved, b, n)


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
        return name == "weight" and not self.transposed and module.weight.shape[0] > 4 * module.weight.shape[1]  # type: ignore[index, operator, union-attr]

    def contract_rows(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Project, output by output."""
        x, y = self._factors(saved, b, n)
        return contract_outer_rows(x, y, v)

    def keep(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Kept:
        """Keep the smaller of factors and per-sample gradients."""
        return keep_outer(self, module, name, saved, b, n)

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
        return F.linear(a, weight.t() if rule.transposed else weight, bias)

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
        if v is None:
            grad_weight = x.reshape(-1, x.shape[-1]).t() @ y.reshape(-1, y.shape[-1])
            scores["weight"] = observer.settle("weight", (a,), b)
        elif observer.rowwise("weight"):
            grad_weight, sums = shared_outer(x, y, v, rowwise=True)
            observer.keep_rows("weight", sums)
        else:
            grad_weight, contributions = shared_outer(x, y, v)
            scores["weight"] = observer.book("weight", contributions)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            per_sample = sum_positions(by_sample(b, observer.n, 1))
            grad_bias = per_sample.sum(0)
            if "bias" in observer.names:
                v = observer.direction("bias")
                scores["bias"] = (
                    observer.settle("bias", (a,), b) if v is None else observer.book("bias", per_sample @ v.t())
                )
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
        b.__name__ == "Conv1D" and b.__module__ == "transformers.pytorch_utils" and b.forward is cls.forward
        for b in cls.__mro__
    )
    return _conv1d if defined else None
