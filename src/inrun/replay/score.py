"""Score the samples of a run for validation data that arrived after it began, into books of their own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inrun.errors import ConfigurationError, TrainingError
from inrun.files import Files, put_folder
from inrun.ledger import Ledger, StepRecord
from inrun.ledger.labels import set_of
from inrun.ledger.record import SettledCredits
from inrun.replay.compare import Closeness, compare
from inrun.replay.replayer import Look, Passed, Replayer, Tell
from inrun.replay.source import RecordedStep, Source
from inrun.replay.viewpoints import Anchor, anchors_of, viewpoint_of
from inrun.training.models import describe_model


@dataclass(frozen=True)
class Replayed:
    """How a replay went."""

    out: str
    mode: str
    method: str
    validation: list[str]
    #: Steps in the run's books, and those of them that were replayed and scored.
    recorded: int
    scored: int
    #: Steps that could not be scored, with the reason.
    skipped: dict[int, str]
    #: Steps between a step and the state that it was looked at from, at most; 0 for exact ones.
    furthest: int
    #: Where exact replay came by checkpoints.
    passed: list[Passed]
    #: Sets that were scored live, replayed in the same pass.
    check: list[Closeness]
    seconds: float
    #: Why sets that were scored live are not compared; empty where they are, or were not asked for.
    unchecked: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "check": [c.as_dict() for c in self.check]}


def choose_steps(source: Source, look: Look, every: int = 1, limit: int | None = None) -> list[RecordedStep]:
    """Return the steps to replay, about one in ``every``, among the first ``limit`` of the run.

    Exact steps are the first ones after every checkpoint, so that none is trained for nothing. Others are the middle ones of every
    few: at a checkpoint, where many a grid would begin, they look better than they do elsewhere.
    """
    chosen = [r for r in source.steps if limit is None or r.step < limit]
    if look.mode != "exact":
        chosen = [r for r in chosen if r.step % every == every // 2]
    elif every > 1:
        at = [a.step for a in anchors_of(source.checkpoints)]
        last = source.steps[-1].step + 1
        length = {a: -(-(b - a) // every) for a, b in zip(at, [*at[1:], max(last, at[-1])], strict=True)}
        starts = [at[viewpoint_of(r.step, at, "before").first] for r in chosen]
        chosen = [r for r, start in zip(chosen, starts, strict=True) if r.step < start + length[start]]
    if not chosen:
        raise TrainingError(
            f"no recorded step is among those asked for: the books of {source.run} have steps {source.steps[0].step} to "
            f"{source.steps[-1].step}, --every is {every}, --limit-steps {limit}"
        )
    return chosen


def replay(
    source: Source,
    sets: Sequence[str],
    out: str | Path,
    look: Look | None = None,
    *,
    steps: Sequence[RecordedStep] | None = None,
    check: Sequence[str] = (),
    tell: Tell = lambda done, total: None,
) -> Replayed:
    """Replay a run and write the scores of its samples for other validation sets to a new folder.

    Args:
        source: The run, opened with those sets.
        sets: Their names.
        out: A folder that does not exist yet; it is complete or absent.
        look: From where steps are looked at, and by which method.
        steps: Those to replay; all by default.
        check: Sets that were scored live, to replay beside; they are compared and not written.
        tell: Called after every step.
    """
    final, look = Path(out), look or Look()
    steps = source.steps if steps is None else steps
    if final.exists():
        raise ConfigurationError(f"{final} exists already; choose another folder with --out, or move it away")
    began = time.perf_counter()
    replayer = Replayer(source, [*sets, *check], look, steps)
    aside = final.with_name(f".{final.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of a replay that was killed
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        with Ledger(aside, about=_about(source, sets, look, replayer, steps)) as ledger:
            source.data.register(ledger)
            scribe = _Scribe(ledger, list(sets), bool(check))
            passed = _run(replayer, steps, anchors_of(source.checkpoints), scribe, tell)
            in_full = set(scribe.settled)
            replayer.close(settle=True)
            _check_scored(scribe, steps)
        put_folder(Files(), aside, final)
    except OSError as error:
        raise TrainingError(f"the replay cannot be written to {final}: {error}") from error
    finally:
        replayer.close()
        shutil.rmtree(aside, ignore_errors=True)
    seconds = time.perf_counter() - began
    at = [a.step for a in anchors_of(source.checkpoints)]
    far = 0 if look.mode == "exact" else max(_distance(r.step, at, look.mode) for r in steps)
    spacing = float(np.median(np.diff(at))) if len(at) > 1 else float("nan")
    method = replayer.accountant.method
    credits = None
    if method == "whole":
        # Where the replay ends before the run, uses at its end are paid in part, and those of the run were paid in full.
        whole = steps[-1].step == source.steps[-1].step
        credits = {step: s for step, s in scribe.settled.items() if whole or step in in_full}
    unchecked = _unlike(source.method, method, bool(credits)) if check else ""
    compared = [] if unchecked else check
    held = [compare(source, n, steps, scribe.kept, look.mode, spacing, len(at), seconds, credits) for n in compared]
    scored = len(steps) - len(scribe.skipped)
    return Replayed(
        str(final), look.mode, method, list(sets), len(source.steps), scored, scribe.skipped, far, passed, held, seconds, unchecked
    )


def _unlike(live: str, now: str, some: bool) -> str:
    """Say why a replay cannot be held against live scores; empty if it can."""
    if now == "whole" and live != "whole":
        return f"the run was scored by method={live}, and these are whole credits"
    if live == "whole" and now != "whole":
        return f"the run was scored by whole credit, and these steps by method={now}; `inrun replay RUN` compares like with like"
    return "" if some or now != "whole" else "no use was paid in full within the steps replayed, as those of the run were"


class _Scribe:
    """Writes what belongs into the books, and keeps the rest for a comparison."""

    def __init__(self, ledger: Ledger, sets: list[str], keep: bool) -> None:
        self.ledger, self.sets, self.keep = ledger, sets, keep
        self.kept: dict[int, StepRecord] = {}
        self.settled: dict[int, SettledCredits] = {}
        self.skipped: dict[int, str] = {}

    def __call__(self, record: StepRecord) -> None:
        accounts = [row for row in record.accounts if set_of(row["validation"]) in self.sets]
        self.ledger.write(StepRecord(record.step, record.sample_ids, self._mine(record.contributions), accounts))
        if self.keep:
            self.kept[record.step] = record
        reason = accounts[0]["skipped"] if accounts else None
        if reason is not None:
            self.skipped[record.step] = reason

    def settle(self, settled: Sequence[SettledCredits]) -> None:
        """Credits that were settled."""
        self.ledger.settle([replace(s, credits=self._mine(s.credits), errors=self._mine(s.errors)) for s in settled])
        if self.keep:
            self.settled |= {s.step: s for s in settled}

    def _mine(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {label: x for label, x in columns.items() if set_of(label) in self.sets}


def _run(replayer: Replayer, steps: Sequence[RecordedStep], anchors: list[Anchor], scribe: _Scribe, tell: Tell) -> list[Passed]:
    if replayer.look.mode == "exact":
        return replayer.exact([r.step for r in steps], anchors, scribe, tell, scribe.settle)
    replayer.pinned(steps, anchors, replayer.look.mode, scribe, tell)
    return []


def _check_scored(scribe: _Scribe, steps: Sequence[RecordedStep]) -> None:
    if len(scribe.skipped) == len(steps):
        step, reason = next(iter(scribe.skipped.items()))
        raise TrainingError(f"none of the {len(steps)} steps could be scored; nothing is written. Step {step}: {reason}")


def _distance(step: int, at: Sequence[int], mode: str) -> int:
    view = viewpoint_of(step, at, mode)
    ends = [view.first] if view.second is None else [view.first, view.second]
    return min(abs(step - at[i]) for i in ends)


def _about(source: Source, sets: Sequence[str], look: Look, replayer: Replayer, steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """Return what ``run.json`` says: that these books are a replay, and of what."""
    model = replayer.training.model
    told = replayer.accountant.about()
    shape, size = describe_model(model), sum(p.numel() for p in model.parameters())
    return {
        **{key: told[key] for key in ("method", "sketch") if key in told},
        "validation": list(sets),
        "model": f"{shape.get('type') or shape.get('model_type')}, {size:,} parameters",
        "optimizers": ["AdamW"],
        "tokenizer": source.data.tokenizer.name,
        "context": source.config.model.context,
        "batch": source.config.batch.size,
        "steps_planned": source.config.steps,
        "seed": source.config.seed,
        "replay": {
            "of": source.run_id,
            "run": str(source.run.resolve()),
            "from": look.mode,
            "checkpoints": [c.step for c in source.checkpoints],
            "steps_replayed": len(steps),
            "steps_recorded": len(source.steps),
            "complete": len(steps) == len(source.steps),
        },
    }
