"""An accountant's state for files: plain data (JSON) apart from tensors (safetensors)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The key of what stands for a tensor in the plain data.
TENSOR = "tensor of the file"


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Return the plain data of an accountant's ``state_dict()``, and its tensors by name; None if it has none."""
    tensors: dict[str, Tensor] = {}
    owners: set[int] = set()

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: plain(x, f"{name}.{key}" if name else str(key)) for key, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(x, f"{name}.{i}") for i, x in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        owner = value.untyped_storage().data_ptr()
        # A tensor that is part of another's memory cannot be written as it is.
        alone = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes and owner not in owners
        tensors[name] = value if alone else value.clone(memory_format=torch.contiguous_format)
        owners.add(owner)
        return {TENSOR: name}

    return plain(state, ""), tensors or None


def join_state(state: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    """Undo :func:`split_state`: return what ``load_state_dict`` takes."""

    def joined(value: Any) -> Any:
        if isinstance(value, list):
            return [joined(x) for x in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {TENSOR}:
            # A copy, where torch puts its own tensors: products of tensors that lie in the file itself round differently.
            return (tensors or {})[value[TENSOR]].clone()
        return {key: joined(x) for key, x in value.items()}

    found: dict[str, Any] = joined(state)
    return found
