"""Arithmetic on lists of tensors that never waits for a device.

``numbers`` are one number for all tensors, or one per tensor: a list, or a vector ``[n]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

#: The smallest normal float32: what sizes are kept above where they divide.
TINY = torch.finfo(torch.float32).tiny


def on_host(x: Any) -> bool:
    """Whether a number can be read without waiting for a device."""
    return not isinstance(x, Tensor) or x.device.type == "cpu"


def exact(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(tensors: Tensors) -> list[Tensor]:
    """Return the tensors, those of half precision as float32."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def spread(numbers: Any) -> Any:
    """Turn a vector ``[n]`` into a list: of Python numbers, or of tensors if it is on a device."""
    if not isinstance(numbers, Tensor) or numbers.dim() == 0:
        return numbers
    return numbers.tolist() if on_host(numbers) else list(numbers.unbind())


def scaled_(tensors: list[Tensor], numbers: Any) -> list[Tensor]:
    """Multiply in place."""
    torch._foreach_mul_(tensors, spread(numbers))
    return tensors


def shifted_(tensors: list[Tensor], numbers: Any) -> list[Tensor]:
    """Add in place."""
    torch._foreach_add_(tensors, spread(numbers))
    return tensors


def filled(like: Tensors, numbers: Any) -> list[Tensor]:
    """Return new tensors shaped like others, each filled with its number."""
    return scaled_([torch.ones_like(x) for x in wide(like)], numbers)


def quotient(history: Tensors, sizes: Tensors, numbers: Any) -> list[Tensor]:
    """Return number / size in new tensors, and 0 where history (≥ 0) is 0."""
    out = list(torch._foreach_sign(history))
    torch._foreach_div_(out, sizes)
    return scaled_(out, numbers)


def over_roots(squares: Tensors, added: Any, numbers: Any) -> list[Tensor]:
    """Return number / (√x + added) in new tensors, and 0 where x (≥ 0) is 0."""
    if squares[0].device.type != "cpu":
        return quotient(squares, shifted_(list(torch._foreach_sqrt(squares)), added), numbers)
    # Tensor by tensor, what is worked on stays in the cache: 1.7 times as fast as lists.
    n, each = len(squares), (spread(added), spread(numbers))
    more, rates = (x if isinstance(x, list) else [x] * n for x in each)
    out = []
    for x, above, rate in zip(squares, more, rates, strict=True):
        size = torch.threshold_(x.sqrt(), 0.0, math.inf).add_(above)
        out.append(size.reciprocal_().mul_(rate))
    return out


def dots(xs: Tensors, ys: Tensors) -> list[Tensor]:
    """Return ⟨x, y⟩ of each pair, 0-dim, summed in float64."""
    return [(x * y).sum(dtype=exact(x.device)) for x, y in zip(xs, ys, strict=True)]


@torch.no_grad()
def along(q: Tensors, amounts: list[Tensor]) -> list[Tensor]:
    """Return q · amount / ‖q‖² by tensor, 0 where q is 0: the D along q with ⟨q, D⟩ = amount."""
    out = [x.clone() for x in wide(q)]
    norms = list(torch._foreach_norm(out, 2, dtype=exact(out[0].device)))
    torch._foreach_clamp_min_(norms, TINY)
    torch._foreach_div_(out, norms)
    torch._foreach_mul_(out, amounts)
    torch._foreach_div_(out, norms)
    return out


@torch.no_grad()
def agree(q: Tensors, directions: Tensors) -> list[Tensor]:
    """Return q ⟨q, D⟩ / ‖q‖² by tensor, 0 where q is 0: one factor for all of a tensor.

    ⟨q, D⟩ stays what it was; each sample is then paid for its agreement with q.
    """
    return along(q, dots(wide(q), directions))
