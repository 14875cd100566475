"""Norms: the gradient of sample n is Σ_t b ∘ x̂ at the scale and Σ_t b at the shift, x̂ the normed input.

x̂ is made again in the backward by the function itself, without scale and shift: it has the model's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inrun.layers.gradients import Formed, PerSample
from inrun.layers.tap import Source, Tap
from inrun.layers.tape import Tape, rule_for


def _targets(tape: Tape, *parameters: Tensor | None) -> tuple[list[Source], tuple[bool, ...]]:
    """Return the scored sources among scale and shift, and which they are."""
    sources = [tape.tensors.source(p) for p in parameters]
    wanted = tuple(s is not None and s.scored for s in sources)
    return [s for s, w in zip(sources, wanted, strict=True) if s is not None and w], wanted


def rule_of_norm(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """``constants`` are what norms the input, which of scale and shift are wanted, and their dimensions."""
    normed, wanted, features = tap.constants
    found: list[PerSample] = []
    if wanted[0]:
        scaled = tap.split(b * normed(saved[0]), features)
        found.append(Formed(scaled.sum(1), lambda: scaled))
    if len(wanted) > 1 and wanted[1]:
        rows = tap.split(b, features)
        found.append(Formed(rows.sum(1), lambda: rows))
    return found


@rule_for(F.layer_norm, torch.layer_norm)
def tap_layer_norm(
    tape: Tape,
    met: bool,
    func: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Any:
    """Tap ``F.layer_norm``."""
    if not met or tape.tensors.source(x):
        return NotImplemented
    targets, wanted = _targets(tape, weight, bias)
    out = func(x, shape, weight, bias, eps)
    constants = (lambda z: F.layer_norm(z, shape, eps=eps), wanted, len(shape))
    return tape.observe(func, out, rule_of_norm, targets, (x,), (x,), constants)


@rule_for(F.rms_norm, torch.rms_norm)
def tap_rms_norm(
    tape: Tape, met: bool, func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Tap ``F.rms_norm``."""
    if not met or tape.tensors.source(x):
        return NotImplemented
    targets, wanted = _targets(tape, weight)
    constants = (lambda z: F.rms_norm(z, shape, eps=eps), wanted, len(shape))
    return tape.observe(func, func(x, shape, weight, eps), rule_of_norm, targets, (x,), (x,), constants)


def rule_of_channels(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """Scale and shift per channel, in the second dimension."""
    normed, wanted = tap.constants
    found: list[PerSample] = []

    def summed(x: Tensor) -> Formed:
        rows = tap.split(x.movedim(1, -1) if x.dim() > 2 else x, 1)
        return Formed(rows.sum(1), lambda: rows)

    if wanted[0]:
        found.append(summed(b * normed(saved[0])))
    if wanted[1]:
        found.append(summed(b))
    return found


@rule_for(F.group_norm, torch.group_norm)
def tap_group_norm(
    tape: Tape,
    met: bool,
    func: Any,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Any:
    """Tap ``F.group_norm``."""
    if not met or tape.tensors.source(x):
        return NotImplemented
    targets, wanted = _targets(tape, weight, bias)
    constants = (lambda z: F.group_norm(z, groups, eps=eps), wanted)
    return tape.observe(func, func(x, groups, weight, bias, eps), rule_of_channels, targets, (x,), (x,), constants)


@rule_for(F.batch_norm, torch.batch_norm)
def tap_batch_norm(
    tape: Tape,
    met: bool,
    func: Any,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: Any,
) -> Any:
    """Tap ``F.batch_norm``. In training mode a sample's share is what flows through its rows."""
    if not met or tape.tensors.source(x) or func is torch.batch_norm:
        return NotImplemented
    targets, wanted = _targets(tape, weight, bias)
    mean, var = (None, None) if training else (running_mean, running_var)
    out = func(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        tape.pass_rows(out)
    constants = (lambda z: F.batch_norm(z, mean, var, training=training, eps=eps), wanted)
    return tape.observe(func, out, rule_of_channels, targets, (x,), (x,), constants)


@rule_for(F.instance_norm)
def tap_instance_norm(
    tape: Tape,
    met: bool,
    func: Any,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Tap ``F.instance_norm``."""
    if not met or tape.tensors.source(x):
        return NotImplemented
    targets, wanted = _targets(tape, weight, bias)
    mean, var = (None, None) if use_input_stats else (running_mean, running_var)
    out = func(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    constants = (lambda z: F.instance_norm(z, mean, var, use_input_stats=use_input_stats, eps=eps), wanted)
    return tape.observe(func, out, rule_of_channels, targets, (x,), (x,), constants)
