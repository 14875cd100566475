"""From the dataset to the step: ids of samples through datasets and collators; and scores back onto the dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine.ids import ID_FIELD, WithIds
from inrun.errors import IdsError

__all__ = ["ID_FIELD", "BatchIds", "KeepIds", "add_scores", "ids_of", "is_arrow", "is_stream", "with_id_column"]


@dataclass(frozen=True)
class BatchIds:
    """The ids of a batch, on the host: loaders that move tensors to a device leave it where it is."""

    ids: Tensor


def ids_of(given: Any) -> Any:
    """Return what a step takes of what a batch carries."""
    return given.ids if isinstance(given, BatchIds) else given


def _dataset_class(name: str) -> tuple[type, ...]:
    """Return a class of the datasets package, if anybody has imported it."""
    found = getattr(sys.modules.get("datasets"), name, None)
    return () if found is None else (found,)


def is_arrow(dataset: Any) -> bool:
    """Whether it is a ``datasets.Dataset``."""
    return isinstance(dataset, _dataset_class("Dataset"))


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from its beginning."""
    return isinstance(dataset, (torch.utils.data.IterableDataset, *_dataset_class("IterableDataset")))


def with_id_column(dataset: Any, column: str) -> Any:
    """Return a dataset whose items have ids in ``column``: those it has, or else the position of every item.

    The dataset that is given stays as it is.
    """
    if is_stream(dataset):
        return dataset  # its items must carry ids; the collator says so where they do not
    if not is_arrow(dataset):
        return dataset if _has(dataset, column) else WithIds(dataset, field=column)
    shown = dataset.format["columns"]
    if dataset.format["type"] == "custom" and not _has(dataset, column):
        return WithIds(dataset, field=column)  # a transform makes its items, and knows nothing of new columns
    if column not in dataset.column_names:
        dataset = dataset.add_column(column, np.arange(len(dataset), dtype=np.int64))
    if column not in dataset.format["columns"]:
        kind = dataset.format
        dataset = dataset.with_format(kind["type"], columns=[*shown, column], **kind["format_kwargs"])
    return dataset


def _has(dataset: Any, column: str) -> bool:
    if len(dataset) == 0:
        return True
    first = dataset[0]
    if not isinstance(first, Mapping):
        raise IdsError(
            f"items of the training dataset are {type(first).__name__}; ids can be kept where items are dictionaries. Give a "
            f"dataset of dictionaries (with a field {column!r}, or without: then ids are positions)"
        )
    return column in first


class KeepIds:
    """A collator that takes ids out of the items, lets another collate the rest, and puts them back into the batch.

    Args (of the constructor):
        collate: The collator of the trainer.
        column: Where the ids are.
        keeps: What keeps that column in the items, for the error message.
        as_tensor: Put them back as a tensor, for loaders that cut batches up and send them to other processes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], column: str, keeps: str, as_tensor: bool = False) -> None:
        """Hold the inner collator."""
        self.collate, self.column, self.keeps, self.as_tensor = collate, column, keeps, as_tensor

    def __call__(self, items: Sequence[Any]) -> Any:
        """Collate items without their ids; add the ids."""
        ids = [self._id_of(item) for item in items]
        batch = self.collate([{k: v for k, v in item.items() if k != self.column} for item in items])
        return self.put(batch, torch.tensor(ids, dtype=torch.int64))

    def put(self, batch: Any, ids: Tensor) -> Any:
        """Put ids into a batch."""
        batch[self.column] = ids if self.as_tensor else BatchIds(ids)
        return batch

    def _id_of(self, item: Any) -> int:
        value = item.get(self.column) if isinstance(item, Mapping) else None
        if value is None:
            have = sorted(item) if isinstance(item, Mapping) else type(item).__name__
            raise IdsError(
                f"the id column {self.column!r} was dropped before the collator (items have {have}), so that nobody can be scored; "
                f"{self.keeps}"
            )
        try:
            number = int(value)
        except (TypeError, ValueError) as error:
            raise IdsError(
                f"the id column {self.column!r} holds {value!r}; ids are integers. Name another column as id_column=, or none that "
                "the dataset has: then ids are positions"
            ) from error
        return number


def add_scores(dataset: Any, scores: Any, id_column: str) -> Any:
    """Return a ``datasets.Dataset`` with columns ``score`` (of one validation set; else ``score_NAME`` of each) and ``times_used``.

    A row's id is its entry in ``id_column``, or its position where the dataset has no such column. Rows that no step used have the
    score NaN and were used 0 times.
    """
    if not is_arrow(dataset):
        raise IdsError(
            f"scored() takes a datasets.Dataset; got {type(dataset).__name__}. scores() is an Arrow table for anything else"
        )
    has_ids = id_column in dataset.column_names
    ids = np.asarray(dataset.with_format("numpy")[id_column][:]) if has_ids else np.arange(len(dataset))
    sets = list(dict.fromkeys(scores["validation"].to_pylist()))
    labels, samples = np.asarray(scores["validation"].to_pylist()), scores["sample_id"].to_numpy()
    used = np.zeros(len(ids), np.int64)
    for name in sets:
        mine = labels == name
        values, times = scores["score"].to_numpy()[mine], scores["times_used"].to_numpy()[mine]
        order = np.argsort(samples[mine])
        known = samples[mine][order]
        at = np.searchsorted(known, ids).clip(max=max(len(known) - 1, 0))
        found = known[at] == ids if len(known) else np.zeros(len(ids), bool)
        column = np.full(len(ids), np.nan)
        column[found] = values[order][at[found]]
        used[found] = times[order][at[found]]
        dataset = dataset.add_column("score" if len(sets) == 1 else f"score_{name}", column)
    return dataset.add_column("times_used", used)
