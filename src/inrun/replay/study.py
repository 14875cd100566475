"""Which checkpoints does a replay need? Sets that were scored live are replayed with fewer and fewer of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from inrun.errors import ConfigurationError
from inrun.ledger import StepRecord
from inrun.replay.compare import Closeness, compare
from inrun.replay.replayer import Look, Replayer
from inrun.replay.source import RecordedStep, Source
from inrun.replay.viewpoints import Anchor, anchors_of, viewpoint_of

#: Called with what is looked at, steps done and steps in all.
Tell = Callable[[str, int, int], None]


def thinned(anchors: Sequence[Anchor], factor: int) -> list[Anchor]:
    """Keep every ``factor``-th state; the first and the last stay."""
    return [a for i, a in enumerate(anchors) if i % factor == 0 or i + 1 == len(anchors)]


def thinnings(anchors: Sequence[Anchor]) -> list[list[Anchor]]:
    """Return the states, every 2nd, every 4th ... of them, down to the first and the last."""
    found = [list(anchors)]
    factor = 2
    while len(found[-1]) > 2:
        found.append(thinned(anchors, factor))
        factor *= 2
    return found


def sampled_steps(steps: Sequence[RecordedStep], count: int, seed: int = 0) -> list[RecordedStep]:
    """Draw one step at random from each of ``count`` equal stretches: a regular grid would favour some distances to checkpoints."""
    if count >= len(steps):
        return list(steps)
    edges = np.linspace(0, len(steps), count + 1).astype(int)
    generator = np.random.default_rng(seed)
    return [steps[generator.integers(low, high)] for low, high in pairwise(edges)]


def whole_stretches(steps: Sequence[RecordedStep], anchors: Sequence[Anchor], count: int) -> list[RecordedStep]:
    """Choose stretches between states, spread over the run, up to about ``count`` steps: training errs most at their ends."""
    at = [a.step for a in anchors]
    parts: dict[int, list[RecordedStep]] = {}
    for recorded in steps:
        parts.setdefault(viewpoint_of(recorded.step, at, "before").first, []).append(recorded)
    wanted = max(1, round(count * len(parts) / len(steps)))
    chosen = np.unique(((np.arange(wanted) + 0.5) * len(parts) / wanted).astype(int))
    return [recorded for i in chosen for recorded in list(parts.values())[i][:count]]


def study(
    source: Source,
    sets: Sequence[str],
    modes: Sequence[str],
    count: int,
    look: Look | None = None,
    tell: Tell = lambda what, done, total: None,
) -> list[Closeness]:
    """Replay sets that were scored live, for every mode and every thinning of the checkpoints.

    Args:
        source: The run.
        sets: Validation sets that were scored live; every step takes the same rows as it did then.
        modes: From where steps are looked at. "exact" is done once: fewer checkpoints would only make it longer.
        count: About how many steps to compare; live scores are added up over the same ones.
        look: Method and sketch; those of the run by default. Steps are looked at one by one: beside a run that was scored by whole
            credit, the method is "step", and live figures are what uses did in their own steps.
        tell: Called after every step.
    """
    unknown = [name for name in sets if name not in source.live_sets]
    if unknown or not sets:
        live = ", ".join(source.live_sets) or "none"
        raise ConfigurationError(f"{source.run} did not score a validation set {unknown[0] if sets else ''!r} live; it has {live}")
    replayer = Replayer(source, sets, look or Look(), source.steps[1:])  # whatever the mode, only some steps
    found: list[Closeness] = []
    try:
        for some in thinnings(anchors_of(source.checkpoints)):
            for mode in modes:
                if mode != "exact" or not any(c.mode == mode for c in found):
                    found += _one(replayer, some, mode, count, tell)
    finally:
        replayer.close()
    return found


def _one(replayer: Replayer, anchors: list[Anchor], mode: str, count: int, tell: Tell) -> list[Closeness]:
    source, records, began = replayer.source, dict[int, StepRecord](), time.perf_counter()

    def keep(record: StepRecord) -> None:
        records[record.step] = record

    def watch(done: int, total: int) -> None:
        tell(f"{len(anchors)} states, {mode}", done, total)

    if mode == "exact":
        steps = whole_stretches(source.steps, anchors, count)
        replayer.exact([r.step for r in steps], anchors, keep, watch)
    else:
        steps = sampled_steps(source.steps, count)
        replayer.pinned(steps, anchors, mode, keep, watch)
    seconds = time.perf_counter() - began
    spacing = float(np.median(np.diff([a.step for a in anchors]))) if len(anchors) > 1 else math.nan
    return [compare(source, name, steps, records, mode, spacing, len(anchors), seconds) for name in replayer.sets]
