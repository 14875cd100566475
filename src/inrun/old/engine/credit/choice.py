"""Whole credit or the step game: what was asked for, what the optimizers allow, and why not."""

from __future__ import annotations

import logging

import torch

from inrun.errors import ConfigurationError, OptimizerError
from inrun.old.methods import CREDITS
from inrun.old.optimizers import UpdateRule, find_update

log = logging.getLogger("inrun")


def resolve_credit(
    credit: str, method: str | None, update: str | None, optimizers: list[torch.optim.Optimizer], exact: bool
) -> str:
    """Return "whole" or "step".

    Raises:
        ConfigurationError: Whole credit was asked for with a method or update of the step game.
        OptimizerError: Whole credit was asked for and an optimizer has no unique shares of earlier gradients.
    """
    if credit not in CREDITS:
        raise ConfigurationError(f"credit is {credit!r}; accepted are {', '.join(CREDITS)}")
    if credit == "step" or (credit == "auto" and (method is not None or update is not None)):
        return "step"
    if credit == "whole":
        if method not in (None, "midpoint"):
            raise ConfigurationError(
                f'credit="whole" averages the validation gradient over the whole move of a step (method="midpoint", with '
                f'quadrature= for more points); method="{method}" belongs to credit="step"'
            )
        if update is not None and update != "auto" and update != "realised":
            raise ConfigurationError(
                f'credit="whole" shares out the move that was really made (update="realised"); update="{update}" belongs to '
                'credit="step"'
            )
    for optimizer in optimizers:
        why = _obstacle(optimizer, exact)
        if why is not None and credit == "whole":
            raise OptimizerError(f"credit=\"whole\" cannot be kept for {type(optimizer).__name__}: {why}. Take credit='step'.")
        on_request = None if why is not None else find_update(optimizer).whole_on_request
        if why is not None or (on_request is not None and credit == "auto"):
            log.warning(
                'inrun: samples are scored step by step (credit="step"): %s: %s', type(optimizer).__name__, why or on_request
            )
            return "step"
        if on_request is not None:
            log.warning("inrun: whole credit with %s: %s", type(optimizer).__name__, on_request)
    return "whole"


def _obstacle(optimizer: torch.optim.Optimizer, exact: bool) -> str | None:
    """Say why an optimizer has no whole credit, or return None."""
    try:
        rule = find_update(optimizer)
    except OptimizerError as error:
        return str(error)
    if not _has_memory(rule, optimizer):
        return "its moves have no unique shares of earlier gradients"
    if not exact and any(g.get("momentum", 0.0) > 0 and "alpha" in g for g in optimizer.param_groups):
        return (
            "a gradient enters its memory divided by the size of its own step, which no sketch knows beforehand; "
            'credit_memory="exact" can'
        )
    return None


def _has_memory(rule: UpdateRule, optimizer: torch.optim.Optimizer) -> bool:
    return all(rule.recall(group, {}) is not None for group in optimizer.param_groups)
