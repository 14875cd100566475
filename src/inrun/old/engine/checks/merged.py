"""What a merged pass can be asked for, and what would let validation gradient leak into the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun.errors import ConfigurationError, CoverageError, StepError, ValidationError
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Site
from inrun.torch_private import buffers_written_silently


def check_merged_step(setup: Setup, ids: Any, rows: int | None, points: bool) -> None:
    """Raise unless a step can be opened as it is asked for: merged where there is no ``validation=``, and only there."""
    if rows is None:
        if setup.merges:
            raise ConfigurationError(
                "this Accountant has no validation=: open steps with merged=m, where the last m rows of the batch are "
                "validation rows, or make it with validation="
            )
        if points:
            raise StepError("points=True is for merged steps; a validation callable that returns a vector has a column per point")
        return
    if not setup.merges:
        raise StepError(
            "merged= takes the validation rows from the batch, and this Accountant has validation= already: make it without, or "
            "leave merged= out"
        )
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigurationError(f"merged is {rows!r}; it must be how many of the last rows are validation rows, at least 1")
    if ids is None:
        raise StepError(
            "a merged step is one forward and backward over training and validation rows: give its ids to step(ids, merged=m). "
            "Accumulation over microbatches needs validation= and steps without merged=."
        )


def _idle(site: Site) -> bool:
    """Whether layers with a rule use all that a module registers, so that it need not read them itself (BERT's head bias)."""
    others = [[other.rule for other, _ in s.uses if other is not site] for s in site.scored.values()]
    return all(any(not (rule.reads or rule.replays or rule.whole) for rule in rules) for rules in others)


def check_merged_model(setup: Setup) -> None:
    """Raise for what would let validation gradient leak into the update, or training rows into validation."""
    way_out = "give the Accountant validation= and open steps without merged="
    alien = [
        f"{', '.join(site.scored)} of {site.title}"
        for site in setup.sites
        if site.rule.replays or site.rule.whole or (site.rule.reads and not _idle(site))
    ]
    if alien:
        raise CoverageError(
            f"merged steps need a layer with a rule of its own for every parameter, or validation gradient leaks into the update; "
            f"{', '.join(alien[:5])} has none: {way_out}, or freeze it"
        )
    coupled = [name for name, m in setup.model.named_modules() if m.training and buffers_written_silently(m)]
    if coupled:
        raise CoverageError(
            f"batch norm in training mode ({', '.join(coupled[:5])}) mixes training and validation rows in a merged step: put it "
            f"into eval mode, take GroupNorm, or {way_out}"
        )
    moved = {s.parameter for s in setup.scored}
    idle = [name for name, p in setup.model.named_parameters() if p.requires_grad and p not in moved]
    if idle:
        raise CoverageError(
            f"{', '.join(idle[:5])} is trainable and in no optimizer: in a merged step it would get validation gradient, which a "
            f"norm clip takes into account. Freeze it (requires_grad_(False)), or {way_out}."
        )


def check_split(train_loss: Tensor, validation_loss: Tensor, outputs: list[Tensor], n: int) -> None:
    """Raise if a loss depends on rows of the model's output that are not its own (``n`` training rows come first)."""
    if not outputs:
        return
    for loss, what, first, end in ((train_loss, "training", n, None), (validation_loss.sum(), "validation", 0, n)):
        found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        if any(g is not None and bool(g[first:end].any()) for g in found):
            raise ValidationError(
                f"the {what} loss of a merged step depends on the other part's rows: train_loss is made of rows :{n}, "
                f"validation_loss of rows {n}:, each with a mean of its own"
            )


def check_scored(contributions: Tensor, rows: int, moves: bool, may_be_zero: bool) -> None:
    """Raise if nobody scored anything, unless that is right: there is then no validation or no training part in the loss.

    Args:
        contributions: Of all samples and validation losses.
        rows: The validation rows of the step.
        moves: Whether anything moves at all (a warm-up may begin at a rate of 0).
        may_be_zero: Whether both losses were told (``step.merge``), and either a gradient was seen to arrive at the validation rows
            of the model's output, or the samples have none (all are masked).
    """
    if may_be_zero or not moves or not contributions.numel() or bool(contributions.any()):
        return
    raise ValidationError(
        f"every sample of a merged step scored exactly 0: the loss of a merged step is train_loss(rows :n) + "
        f"validation_loss(rows n:), and the last {rows} rows are the validation rows. If no training row has a gradient (all are "
        "masked), say so by step.merge(train_loss, validation_loss)."
    )
