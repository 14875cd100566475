"""Tables: the gradient of sample n at row w is Σ_t [token_nt = w] b_nt; row ``padding_idx`` has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inrun.errors import CoverageError
from inrun.layers.gradients import LookUp, PerSample
from inrun.layers.tap import Tap
from inrun.layers.tape import Tape, rule_for


def rule_of_embedding(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """Look up rows; ``constants`` are the number of rows and the row of the padding."""
    rows, padding = tap.constants
    (tokens,) = saved
    g, numbers = tap.split(b, 1), tap.split(tokens, 0)
    if padding is not None:
        g = g.masked_fill((numbers == padding).unsqueeze(-1), 0.0)
    return [LookUp(numbers, g, rows)]


@rule_for(F.embedding, torch.embedding)
def tap_embedding(tape: Tape, met: bool, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Tap a look-up of data. Positions are constants: their rows are a tensor made of the table."""
    if func is torch.embedding:
        return NotImplemented
    named = (
        dict(zip(("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), args, strict=False))
        | kwargs
    )
    tokens, weight, padding = named["input"], named["weight"], named.get("padding_idx")
    source = tape.tensors.source(weight)
    if source is None or not met:
        return NotImplemented
    used = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if named.get(name)]
    if used:
        raise CoverageError(f"{source.name}: an embedding with {', '.join(used)} has another gradient than the sum over its tokens")
    rows = weight.shape[0]
    padding = padding if padding is None or padding >= 0 else rows + padding
    return tape.observe(func, func(*args, **kwargs), rule_of_embedding, [source], (tokens, weight), (tokens,), (rows, padding))
