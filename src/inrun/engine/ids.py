"""Sample ids: checked where they come in, added to datasets that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inrun.errors import IdsError

ID_FIELD = "sample_id"


def check_ids(ids: Any) -> Tensor:
    """Return ids as an int64 tensor on the host, ``[n]`` or by position ``[n, t]`` (packed documents), or raise IdsError."""
    if isinstance(ids, Tensor):
        tensor = ids.detach()
    else:
        if isinstance(ids, (str, bytes, int)) or not hasattr(ids, "__len__"):
            raise IdsError(f"sample ids must be a sequence of integers, one per batch row; got {type(ids).__name__}")
        try:
            tensor = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise IdsError(
                f"sample ids must be integers that fit 64 bits; got {type(ids).__name__} ({error}). "
                "Map string ids to integers first (inrun.with_ids gives every item of a dataset one)."
            ) from error
        if tensor.numel() == 0 and tensor.dim() == 1:
            return torch.zeros(0, dtype=torch.int64)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise IdsError(f"sample ids must be integers; got dtype {tensor.dtype}")
    if tensor.dim() not in (1, 2):
        raise IdsError(
            "sample ids must be one per batch row, shape [n], or one per position of packed documents, shape [n, t]; got shape "
            f"{tuple(tensor.shape)}"
        )
    if tensor.numel() == 0 and tensor.dim() == 2:
        raise IdsError(f"ids per position are empty, shape {tuple(tensor.shape)}; for a batch without rows give no ids, shape [0]")
    host = tensor.to("cpu", copy=True)
    if host.dtype == torch.uint64 and bool((host.view(torch.int64) < 0).any()):
        raise IdsError(
            "sample ids must fit a signed 64-bit integer, up to 2**63 - 1; some of these uint64 ids are larger. Take the position "
            "in the dataset (inrun.with_ids), or the hash modulo 2**63."
        )
    host = host.to(torch.int64)
    if host.dim() == 2:
        _check_positions(host)
    return host


def _check_positions(ids: Tensor) -> None:
    if bool((ids < -1).any()):
        raise IdsError(f"ids of packed documents are 0 or more, and -1 for positions that are nobody's; got {int(ids.min())}")
    if not bool((ids >= 0).any()):
        raise IdsError("all positions of this microbatch have the id -1, nobody's; there is no document to score")


class WithIds(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose items carry their position as ``sample_id``. Made by :func:`with_ids`."""

    def __init__(self, dataset: Any, first: int = 0, field: str = ID_FIELD) -> None:
        """Wrap ``dataset``; ids count from ``first``, and mappings get them under the name ``field``."""
        self.dataset, self.first, self.field = dataset, first, field

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the item with its id."""
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for a dataset of {len(self)} items")
        return _attach(self.dataset[index], self.first + index, self.field)


def _attach(item: Any, sample_id: int, field: str) -> Any:
    if isinstance(item, Mapping):
        if field in item:
            raise IdsError(f"the dataset's items already have a field {field!r}; use it, or rename it")
        return {**item, field: sample_id}
    if isinstance(item, (tuple, list)):
        return (*item, sample_id)
    return (item, sample_id)


def with_ids(dataset: Any, first: int = 0) -> WithIds:
    """Give every item of a map-style dataset a stable integer id, its position in the dataset.

    A mapping gets the field ``sample_id``, a tuple one more entry at the end, anything else becomes ``(item, id)``.
    The id does not depend on shuffling, workers or epochs. ``first`` shifts the ids, to keep several datasets apart.

    Example:
        >>> import inrun
        >>> inrun.with_ids([{"text": "a"}, {"text": "b"}])[1]
        {'text': 'b', 'sample_id': 1}
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise IdsError(
            f"with_ids needs a map-style dataset (with __getitem__ and __len__); got {type(dataset).__name__}. "
            "For a stream, put the ids into the records where they are written."
        )
    return WithIds(dataset, first)
