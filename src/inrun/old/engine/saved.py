"""An accountant's state for files: plain data (JSON) apart from tensors (safetensors)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Return the plain data of an accountant's ``state_dict()``, and the tensors of its open windows (None: it keeps none)."""
    if state.get("credit") is None:
        return state, None
    tensors: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in state["credit"]["tensors"].items():
        owner = tensor.untyped_storage().data_ptr()
        # A tensor that is part of another's memory cannot be written as it is.
        alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes and owner not in owners
        tensors[name] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        owners.add(owner)
    return {**state, "credit": {k: v for k, v in state["credit"].items() if k != "tensors"}}, tensors


def join_state(plain: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    """Undo :func:`split_state`: return what ``load_state_dict`` takes."""
    windows = plain.get("credit")
    without = {k: v for k, v in plain.items() if k != "credit"}
    if windows is None or tensors is None:
        return without
    # Copies, where torch puts its own tensors: products of tensors that lie in the file itself are rounded in another way.
    return {**without, "credit": {**windows, "tensors": {name: x.clone() for name, x in tensors.items()}}}
