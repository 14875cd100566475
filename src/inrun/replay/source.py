"""What a run left behind that it can be replayed from: configuration, data, checkpoints, and what its books say of every step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from inrun.corpus.build import Tell
from inrun.errors import ConfigurationError, TrainingError
from inrun.ledger import Ledger, Skip, method_of
from inrun.ledger.labels import set_of
from inrun.training.checkpoint import Checkpoint, checkpoints_of, whole_checkpoints
from inrun.training.config import TrainConfig, ValidationSet, load_config, make_config
from inrun.training.loop import lr_at
from inrun.training.order import Ids, Order
from inrun.training.prepare import Prepared, prepare, tokenizer_of

log = logging.getLogger("inrun")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RecordedStep:
    """One step as it happened."""

    step: int
    ids: Ids
    lr: float
    #: The factor between backward and optimizer; None where no books say it.
    clip: float | None
    #: Updates that the optimizer had made before.
    updates: int
    #: Contributions of the sets that were scored live, by label (a set, or one of its folds), ``[n]`` each.
    live: dict[str, Floats] = field(default_factory=dict)
    #: With method="whole": the settled credits of its uses, in the same way; empty while its window is open.
    credits: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A run of ``inrun train`` to look back at."""

    run: Path
    #: None for a run that was trained without scores and has no books.
    run_id: str | None
    #: That of the run, with the sets that arrived later among its validation sets.
    config: TrainConfig
    data: Prepared
    #: Oldest first; all of them whole.
    checkpoints: list[Checkpoint]
    steps: list[RecordedStep]
    #: Steps that were not scored, with the reason.
    skipped: dict[int, str]
    #: By which the run itself was scored; without books, the one that its configuration names.
    method: str = "whole"

    @property
    def live_sets(self) -> list[str]:
        """Return the validation sets that were scored live."""
        return list(dict.fromkeys(set_of(label) for label in self.steps[0].live))


def open_source(
    run: str | Path,
    new: Mapping[str, ValidationSet] | None = None,
    *,
    paths: Sequence[str] = (),
    reading: Tell = lambda done, total, documents: None,
) -> Source:
    """Open a run, finished or not, together with validation sets that arrived after it began.

    Args:
        run: Its folder.
        new: Validation sets by name; each must name files of its own.
        paths: Where the training data is now, if it has moved.
        reading: Called while documents are tokenised.

    Raises:
        ConfigurationError: The folder is not of ``inrun train``, or a new set has the name of an old one.
        TrainingError: No whole checkpoint, no recorded step, or other data than the run was trained on.
    """
    folder = Path(run)
    config = _config(folder, new or {}, paths)
    checkpoints = list(whole_checkpoints(folder))[::-1]
    if not checkpoints:
        damaged = len(checkpoints_of(folder))
        raise TrainingError(
            f"{folder} has no {'whole ' if damaged else ''}checkpoint to look from. A run writes one at its end, and every "
            "checkpoints.every steps before; checkpoints.keep=null keeps all of them"
        )
    data = prepare(config, tokenizer_of(config, folder), reading)
    if checkpoints[-1].state["data"] != data.chunks.store.fingerprint:
        raise TrainingError(
            f"the documents in {', '.join(config.data.paths)}, or how they are read, have changed since {folder} was trained: "
            "sample ids would mean other samples. Give the original files with --data"
        )
    if Ledger.exists(folder):
        reader = Ledger.open(folder)
        steps, skipped = _recorded(reader.contributions(), reader.accounts(), reader.credits())
        run_id, method = str(reader.about.get("run_id")), method_of(reader.about)
    else:
        log.warning(
            "inrun: %s was trained without scores: its batches follow from its seed, and no live score can be checked", folder
        )
        steps, skipped, run_id = _by_seed(config, data, checkpoints[-1].step), {}, None
        method = config.scoring.method
    if not steps:
        why = f"all {len(skipped)} were skipped, such as {next(iter(skipped.items()))}" if skipped else "wait until it has some"
        raise TrainingError(f"{folder} has no scored step in its books, and there is nothing to replay: {why}")
    return Source(folder, run_id, config, data, checkpoints, steps, skipped, method)


def _config(folder: Path, new: Mapping[str, ValidationSet], paths: Sequence[str]) -> TrainConfig:
    if not (folder / "config.yaml").is_file():
        raise ConfigurationError(
            f"{folder} is not a run of `inrun train`: there is no config.yaml. Only such runs have the data, recipe and "
            "checkpoints that a replay needs"
        )
    config = load_config(folder / "config.yaml")
    taken = [name for name in new if name in config.validation]
    if taken:
        raise ConfigurationError(f"{folder} has a validation set {taken[0]!r} already; give the new one another name: NAME=FILE")
    given: dict[str, Any] = msgspec.to_builtins(config)
    given["run"] = str(folder)
    given["validation"] |= {name: msgspec.to_builtins(settings) for name, settings in new.items()}
    if paths:
        given["data"]["paths"] = list(paths)
    return make_config(given)


def _recorded(contributions: pa.Table, accounts: pa.Table, credits: pa.Table) -> tuple[list[RecordedStep], dict[int, str]]:
    """Put together what the books say, step by step."""
    grouped = accounts.group_by("step").aggregate([("lr", "min"), ("clip", "min"), ("skipped", "min")])
    first = grouped.sort_by("step").to_pylist()
    skipped = {a["step"]: a["skipped_min"] for a in first if a["skipped_min"] is not None}
    # A step that the optimizer left out moved nothing, and it did not count it.
    held = np.array(sorted(step for step, reason in skipped.items() if _held(reason)), np.int64)
    columns, settled = _by_label(contributions, "contribution"), _by_label(credits, "credit")
    steps = []
    for account in first:
        step = account["step"]
        parts = {label: by_step[step] for label, by_step in columns.items() if step in by_step}
        if parts and account["lr_min"] is not None:
            live = {label: values for label, (_, values) in parts.items()}
            ids = next(iter(parts.values()))[0]
            updates = step - int(np.searchsorted(held, step))
            paid = {label: by_step[step][1] for label, by_step in settled.items() if step in by_step}
            steps.append(RecordedStep(step, ids, account["lr_min"], account["clip_min"], updates, live, paid))
    return steps, skipped


def _held(reason: str) -> bool:
    skip = Skip.parse(reason)
    return skip is not None and not skip.stepped


def _by_label(rows: pa.Table, value: str) -> dict[str, dict[int, tuple[Ids, Floats]]]:
    labels = pc.unique(rows["validation"]).to_pylist()
    return {label: _by_step(rows.filter(pc.equal(rows["validation"], label)), value) for label in labels}


def _by_step(rows: pa.Table, value: str) -> dict[int, tuple[Ids, Floats]]:
    """Split the rows of one label by step, in the order of the batch: that in which they were written, rank by rank.

    Credits say their row: windows that go on with another number of processes are settled in another order.
    """
    steps = rows["step"].to_numpy()
    order = np.lexsort((rows["row"].to_numpy(), steps)) if "row" in rows.column_names else np.argsort(steps, kind="stable")
    numbers, starts = np.unique(steps[order], return_index=True)
    ids = np.split(rows["sample_id"].to_numpy()[order], starts[1:])
    values = np.split(rows[value].to_numpy()[order], starts[1:])
    return {int(n): (i, v) for n, i, v in zip(numbers, ids, values, strict=True)} if len(numbers) else {}


def _by_seed(config: TrainConfig, data: Prepared, count: int) -> list[RecordedStep]:
    order = Order(data.chunks.ids, config.batch.size, config.seed)
    return [RecordedStep(step, order.batch(step), lr_at(step, config), None, step) for step in range(count)]
