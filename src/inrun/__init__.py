"""inrun: what every training sample was worth to the model you actually trained, while you train it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inrun import errors

if TYPE_CHECKING:
    from inrun.engine import Accountant, folds, with_ids
    from inrun.ledger import Ledger, MemoryLedger

__version__ = "0.1.0"
__all__ = ["Accountant", "Ledger", "MemoryLedger", "__version__", "errors", "folds", "with_ids"]

_lazy = {
    "Accountant": "inrun.engine",
    "folds": "inrun.engine",
    "with_ids": "inrun.engine",
    "Ledger": "inrun.ledger",
    "MemoryLedger": "inrun.ledger",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that ``import inrun`` does not import torch."""
    if name not in _lazy:
        raise AttributeError(f"module 'inrun' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_lazy[name]), name)
