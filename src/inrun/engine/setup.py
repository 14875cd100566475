"""From the arguments of an accountant to the parts of its run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from inrun.engine.first import FirstScorer, SecondScorer
from inrun.engine.move import Mover
from inrun.engine.parameters import Parameters, find_parameters, table_places
from inrun.engine.plans import default_size, make_plans
from inrun.engine.processes import Processes
from inrun.engine.scorer import Scorer
from inrun.engine.sharded import ShardedPasses
from inrun.engine.shards import Shards
from inrun.engine.sketch import Sketcher
from inrun.engine.validation import Loss, Validation
from inrun.engine.whole import WholeScorer
from inrun.errors import ConfigurationError, LedgerError, OptimizerError
from inrun.methods import METHODS
from inrun.optimizers import UpdateRule, find_rule

#: Packages that hand out optimizers inside a wrapper of their own, which has no hooks.
WRAPPERS = ("accelerate.", "lightning.", "pytorch_lightning.")


@dataclass(frozen=True)
class Setup:
    """The parts of a run."""

    optimizers: list[torch.optim.Optimizer]
    parameters: Parameters
    scorer: Scorer
    mover: Mover


def check_arguments(
    model: Any, optimizer: Any, method: str, sketch: Any, ledger: Any, audit_every: Any, flags: Mapping[str, Any]
) -> list[torch.optim.Optimizer]:
    """Raise for arguments of a wrong type; return the optimizers."""
    if method not in METHODS:
        raise ConfigurationError(f"method is {method!r}. Accepted are {', '.join(map(repr, METHODS))}.")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}, not a torch.nn.Module.")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [o.optimizer if type(o).__module__.startswith(WRAPPERS) else o for o in optimizers]
    if not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ConfigurationError(f"optimizer is {type(optimizer).__name__}. Give a torch optimizer, or a list of them.")
    if not optimizers:
        raise ConfigurationError("optimizer is an empty list. Give the optimizers that train the model.")
    if sketch is not None and sketch != "exact" and (isinstance(sketch, bool) or not isinstance(sketch, int) or sketch < 1):
        raise ConfigurationError(
            f'sketch is {sketch!r}. Give a number of numbers per sample, "exact", or None to choose by model size.'
        )
    if ledger is not None and not isinstance(ledger, (str, os.PathLike)) and not callable(getattr(ledger, "write", None)):
        raise LedgerError(f"ledger is {type(ledger).__name__}. Give a folder, an inrun.Ledger, or an object with write(record).")
    if audit_every is not None and (isinstance(audit_every, bool) or not isinstance(audit_every, int) or audit_every < 0):
        raise ConfigurationError(f"audit_every is {audit_every!r}. Give a number of steps, 0 for never, or None to choose.")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is {value!r}. Give True or False.")
    return optimizers


def make_setup(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    validation: Loss | Mapping[str, Loss],
    method: str,
    sketch: int | str | None,
    patterns: Sequence[str] | None,
    validation_mode: str,
    processes: Processes,
) -> Setup:
    """Return the parts of a run."""
    if processes.sharded:
        ShardedPasses(model).reshard()
    found = find_parameters(model, optimizers, patterns)
    found.processes = processes
    if processes.sharded:
        found.shards = Shards([s.parameter.shape for s in found.scored], processes)
    passes = Validation(model, validation, validation_mode, processes)
    if method == "second" and processes.sharded:
        raise ConfigurationError(
            'method="second" needs a Hessian-vector product, which fully_shard has none of. Take method="first" or "whole", or '
            "DistributedDataParallel."
        )
    if method in ("first", "second"):
        scorer: Scorer = (FirstScorer if method == "first" else SecondScorer)(found, passes)
        return Setup(optimizers, found, scorer, Mover(found, [UpdateRule() for _ in optimizers], keeps_weights=False))
    rules = [find_rule(o) for o in optimizers]
    if method == "whole":
        for s in found.scored:
            if type(rules[s.optimizer]).memory is UpdateRule.memory and not rules[s.optimizer].forgetful:
                raise OptimizerError(
                    f'method="whole" needs an optimizer whose memory of gradients is known, and {s.name} is trained by '
                    f'{type(optimizers[s.optimizer]).__name__}. Take method="step", or register a rule (inrun.optimizers).'
                )
    for optimizer, rule in zip(optimizers, rules, strict=True):
        if processes.sharded and not rule.elementwise:
            raise OptimizerError(
                f"{type(optimizer).__name__} looks at a whole tensor, of which fully_shard leaves some rows on every rank. Take an "
                'elementwise optimizer (AdamW, SGD), method="first", or DistributedDataParallel.'
            )
    sketcher, tables = make_sketcher(model, found, sketch)
    sketcher.shards = found.shards
    whole = WholeScorer(found, passes, rules, sketcher, tables, own_step=method == "step")
    mover = Mover(found, rules)
    whole.inherit(optimizers, mover)
    return Setup(optimizers, found, whole, mover)


def check_ranks(processes: Processes, given: Mapping[str, Any]) -> None:
    """Raise where ranks were given different arguments."""
    of_ranks = processes.gather_objects(dict(given))
    differing = [name for name in given if any(x[name] != of_ranks[0][name] for x in of_ranks)]
    if differing:
        said = (f"rank {r} has {', '.join(f'{name}={x[name]!r}' for name in differing)}" for r, x in enumerate(of_ranks))
        raise ConfigurationError(
            f"arguments differ between ranks: {'; '.join(said)}. Every rank gives the same arguments, and every validation set."
        )


def make_sketcher(model: nn.Module, parameters: Parameters, sketch: int | str | None) -> tuple[Sketcher, list[int]]:
    """Return how gradients are sketched, and the places of tables and output vocabularies."""
    entries = sum(s.parameter.numel() for s in parameters.scored)
    size = None if sketch == "exact" else default_size(entries) if sketch is None else int(sketch)
    tables, outputs = table_places(model, parameters)
    leaves = [s.leaf for s in parameters.scored]
    return Sketcher(leaves, make_plans(leaves, size, tables, outputs), parameters.dtype), sorted(tables | outputs)
