"""∇ℓ + ½H·d by central differences, where double backward is not to be had, and as a check of it where it is."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn

from inrun.errors import ValidationError
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Called, Scored
from inrun.old.engine.update_path import UpdatePath
from inrun.old.engine.validation import Gradients, Validation


def own(found: Gradients) -> Gradients:
    """Copy gradients out of buffers that the next pass overwrites."""
    return Gradients(found.columns, found.losses, [None if g is None else g.clone() for g in found.raw])


def add_scaled(total: Gradients, more: Gradients, scale: float) -> None:
    """Add scaled gradients; a parameter that only one of both depends on counts as 0 in the other."""
    for i, g in enumerate(more.raw):
        if g is not None:
            mine = total.raw[i]
            total.raw[i] = g * scale if mine is None else mine.add_(g, alpha=scale)


def _norm(tensors: list[Tensor], processes: Processes) -> float:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x).double() for x in tensors]))
    return float(processes.joined(norm.square().view(1)).sqrt()) if processes.sharded else float(norm)


def _precision_of_passes(own: float, called: Called | None, processes: Processes, step: int) -> float:
    """Return what the passes of some rank round to: that of the parameters, or less inside an autocast block."""
    if called is None:
        return own
    eps = max(own, 0.0 if called.autocast is None else torch.finfo(called.autocast).eps)
    with processes.together("the precision of validation passes", step) as meeting:
        meeting.own = [round(-math.log2(eps))]
    return max(own, 2.0 ** -min(digits for digits, *_ in meeting.all))


def bent_by_differences(
    validation: Validation,
    path: UpdatePath,
    parameters: list[nn.Parameter],
    moving: list[Scored],
    move: dict[nn.Parameter, Tensor],
    step: int,
    shorter: float = 1.0,
    called: Called | None = None,
) -> tuple[Gradients, Gradients, float]:
    """Return ∇ℓ + ½H·d with H·d = (∇ℓ(w + hd) − ∇ℓ(w − hd)) / 2h, ∇ℓ itself, and h.

    The step h balances rounding (precision / h) against the curvature of the Hessian (h²), times ``shorter``. The 1/32 was
    found on small GPTs: weights of scale 0.02 turn the Hessian within a much shorter way than their norm suggests.

    Where a policy of ``fully_shard`` rounds the weights of passes (to bfloat16), ±hd is less than it can tell: the two passes take
    weights as they are, and ∇ℓ of the result is their mean, so that both terms are of one function. Losses, and the ∇ℓ that is
    returned beside it, stay those of the weights that the run trains with.

    An autocast block that the callable or the model enters is theirs: it rounds whatever the weights are (``called`` tells of it),
    and h is longer. The same GPTs want a tenth of what that precision suggests; curvature then is only roughly right.
    """
    plain = own(validation.gradients(parameters, step))
    bent = own(plain)
    length = _norm(list(move.values()), validation.processes)
    if length == 0.0:
        return bent, plain, 0.0
    precision = max(torch.finfo(s.parameter.dtype).eps for s in moving)
    in_passes = _precision_of_passes(precision, called, validation.processes, step)
    autocast = in_passes > precision
    short = shorter / (320 if autocast else 32)
    h = short * in_passes ** (1 / 3) * (1.0 + _norm([s.weight for s in moving], validation.processes)) / length
    with contextlib.nullcontext(False) if autocast else validation.in_own_precision() as rounds_else:
        if rounds_else:
            bent.raw = [None] * len(parameters)
        for sign in (1.0, -1.0):
            with path.at(moving, move, sign * h):
                there = validation.gradients(parameters, step)
            add_scaled(bent, there, sign * 0.25 / h + (0.5 if rounds_else else 0.0))
    return bent, plain, h


def check_hessian(
    found: Gradients,
    validation: Validation,
    path: UpdatePath,
    parameters: list[nn.Parameter],
    moving: list[Scored],
    move: dict[nn.Parameter, Tensor],
    step: int,
) -> bool:
    """Compare a Hessian product with central differences; raise if it is another one, return False if nothing moved.

    Autograd does not always say when a second derivative is missing: a custom function whose backward is written with
    plain tensors counts as a constant there, and the product would be silently partial.
    """
    bent, plain, h = bent_by_differences(validation, path, parameters, moving, move, step)
    if h == 0.0:
        return False
    coarse = bent_by_differences(validation, path, parameters, moving, move, step, shorter=2.0)[0]
    quads = [
        (a, b, c, d)
        for a, b, c, d in zip(found.raw, bent.raw, plain.raw, coarse.raw, strict=True)
        if a is not None and b is not None and c is not None and d is not None
    ]
    precision = max(torch.finfo(s.parameter.dtype).eps for s in moving)
    off = _norm([a - b for a, b, _, _ in quads], validation.processes)
    bend = _norm([b - c for _, b, c, _ in quads], validation.processes)
    slope = _norm([c for _, _, c, _ in quads], validation.processes)
    # How far differences are to be trusted: what twice the step changes, and the rounding of the gradients.
    doubt = _norm([b - d for _, b, _, d in quads], validation.processes)
    if doubt > 0.3 * bend:
        return True  # they cannot tell
    if off > 0.25 * bend + 3.0 * doubt + 64 * precision * slope / h:
        raise ValidationError(
            f"the Hessian product of the validation loss is off by {off / max(bend, 1e-300):.0%} from central differences: some "
            'function in it has no true second derivative (a custom autograd function, perhaps). Take hessian="differences", or '
            'method="midpoint", which needs no Hessian.'
        )
    return True
