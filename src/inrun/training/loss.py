"""The next-token loss of rows of tokens, for our GPT and for models of transformers; all that train or measure use this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: What follows a sample that is shorter than the context.
PADDING = -1


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return ``[n, t, vocab]`` for our GPT and for models of transformers."""
    out = model(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def token_losses(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed next-token loss of every row and the number of its targets, both ``[n]``.

    Args:
        model: Maps tokens to logits.
        rows: Tokens ``[n, t + 1]``, ``PADDING`` after a sample's end. A causal model's positions before it do not see it.

    Returns:
        Losses in nats, taken in float32, or in float64 where the logits are.
    """
    targets = rows[:, 1:]
    logits = logits_of(model, rows[:, :-1].clamp(min=0)).flatten(0, 1)
    if logits.dtype != torch.float64:
        logits = logits.float()
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="none")
    return losses.view(targets.shape).sum(1), (targets != PADDING).sum(1)


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss over all tokens of the rows that have others before them; see :func:`token_losses`."""
    losses, counts = token_losses(model, rows)
    return losses.sum() / counts.sum()


def row_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return what each row adds to the loss, ``[n]``; their mean is the mean over all tokens, so folds measure the same loss."""
    losses, counts = token_losses(model, rows)
    return losses * len(losses) / counts.sum()
