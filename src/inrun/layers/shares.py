"""Rules that need no knowledge of the function: shares of a sum, and backwards of masked gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun.layers.gradients import Formed
from inrun.layers.tap import Tap, run_grads


def rule_of_spread(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[Any]:
    """Add up what arrives at an expanded tensor, sample by sample."""
    return [Formed(sum_to(tap, b, tap.constants))]


def sum_to(tap: Tap, b: Tensor, shape: torch.Size) -> Tensor:
    """Sum ``b``, which lies like the tap's output, to one tensor of ``shape`` per sample, ``[n, *shape]``."""
    layout = tap.layout
    assert layout is not None, tap.name
    n, sizes = layout.n, (1,) * (b.dim() - len(shape)) + tuple(shape)
    if layout.kind == "all":
        return b.sum_to_size(shape).unsqueeze(0)
    split = 1 if layout.kind == "second" else 0
    if layout.kind == "index" and all(size == 1 for size in sizes[: layout.lead]):
        by_sample = layout.split(b, b.dim() - layout.lead)
        sizes = (1, *sizes[layout.lead :])
    elif layout.kind == "index" or sizes[split] != 1:  # the tensor has rows of samples itself
        who = layout.owners(b.shape).to(b.device)
        return torch.stack([(b * (who == j)).sum_to_size(shape) for j in range(n)])
    elif layout.kind == "second":
        by_sample, sizes = b.transpose(0, 1), (sizes[0], *sizes[2:])
    elif layout.kind == "inside":
        by_sample = b.unflatten(0, (-1, n)).transpose(0, 1)
    elif b.shape[0] == n:
        by_sample, sizes = b, sizes[1:]
    else:
        by_sample = b.unflatten(0, (n, -1))
    over = [i + 1 for i, size in enumerate(sizes) if size == 1]
    return (by_sample.sum(over) if over else by_sample).reshape(n, *shape)


def rule_of_masks(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[Any]:
    """Run the function's own backward on every sample's part of the gradient."""
    out, inputs = tap.constants
    layout = tap.layout
    assert layout is not None, tap.name
    who = layout.owners(b.shape).to(b.device)
    found: list[list[Tensor]] = [[] for _ in inputs]
    at_once = max(1, (1 << 24) // max(1, b.numel() * b.element_size()))
    for low in range(0, layout.n, at_once):
        samples = torch.arange(low, min(low + at_once, layout.n), device=b.device)
        masks = samples.view(-1, *[1] * b.dim()) == who
        grads = run_grads(out, inputs, b * masks)
        for parts, g, source in zip(found, grads, tap.targets, strict=True):
            parts.append(b.new_zeros(len(samples), *source.tensor.shape) if g is None else g)
    return [Formed(torch.cat(parts)) for parts in found]
