"""What a step of several processes will exchange, computed from shapes alone (docs/distributed.md has the table)."""

from __future__ import annotations

import math

import torch

from inrun.old.engine.credit.keeper import WholeCredit
from inrun.old.engine.credit.sketch_store import SketchStore
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored


def expected_payload(setup: Setup, credit: WholeCredit | None, columns: int, microbatches: int = 1) -> dict[str, int]:
    """Return the bytes that a rank hands to collectives in the coming step, by kind.

    That of a usual step: the validation gradient is taken once, and not reused; nothing is audited, and every module is called
    once per microbatch. With N scored entries, k columns, W processes and B numbers of a sketch, whose sums are in double
    precision:

    - DDP: 4kN for the validation gradient; whole credit 8B.
    - ``fully_shard``: 4kN/W for every use of a parameter, and 4/W for every row of an output vocabulary whose frozen gain is
      corrected (in the step game); whole credit 4kN/W for uses other than look-ups, N/W for signs of
      matrices, and 4/W for each segment sum of q and (k of them, for every sketch that is in force) of D; 8B as above.

    Meetings and small sums, some hundred bytes and as many for every parameter, are not in it.

    Args:
        setup: What is fixed for the run.
        credit: The memory of whole credit; None in the step game.
        columns: k, columns of validation losses.
        microbatches: Of the step.
    """
    if not setup.processes.several:
        return {}
    found: dict[str, int] = {}
    sharded = setup.processes.sharded
    if not sharded:
        found["validation gradient"] = columns * sum(s.parameter.numel() * _width(s) for s in setup.scored)
    store = None if credit is None else credit.store
    if sharded:
        found["directions"] = microbatches * sum(_gathered(s, columns, store is not None) for s in setup.scored)
        if store is None and setup.update == "frozen":
            found["directions"] += microbatches * sum(_row_factors(s) for s in setup.scored if not setup.rules[s.optimizer].linear)
    if isinstance(store, SketchStore):
        found["sketch"] = 8 * sum(plan.buckets for plan in store.sketcher.plans)
        if sharded:
            open_sketchers = {id(x): x for x in (*(store.epochs[e.epoch].sketcher for e in store.entries), store.sketcher)}
            found["directions"] += _segments(store.sketcher) + columns * sum(map(_segments, open_sketchers.values()))
    return found


def _width(s: Scored) -> int:
    """Return the bytes of a number of a validation gradient."""
    return torch.promote_types(s.parameter.dtype, torch.float32).itemsize


def _rows_here(s: Scored) -> int:
    """Return the rows that every rank hands over, filled up with zeros where it has fewer."""
    assert s.shards is not None
    return s.shards.chunk


def _gathered(s: Scored, columns: int, whole_credit: bool) -> int:
    """Return the bytes of one parameter's directions and signs in a microbatch, once per use."""
    entries = _rows_here(s) * math.prod(s.parameter.shape[1:])
    if not whole_credit:
        return columns * entries * _width(s) * len(s.uses)
    contracted = sum(not site.rule.sparse for site, _ in s.uses)
    signs = len(s.uses) if s.parameter.dim() > 1 else 0
    return columns * entries * _width(s) * contracted + entries * signs


def _row_factors(s: Scored) -> int:
    """Return the bytes of the factors by which rows of an output vocabulary are corrected."""
    return _rows_here(s) * _width(s) if any(site.rule.rows_are_classes(name, s.parameter) for site, name in s.uses) else 0


def _segments(sketcher: Sketcher) -> int:
    """Return the bytes of the segment sums of one direction."""
    return sketcher.dtype.itemsize * sum(
        _rows_here(s) * (plan.per_row_apart if s.parameter.dim() > 1 else 1)
        for s, plan in zip(sketcher.scored, sketcher.plans, strict=True)
    )
