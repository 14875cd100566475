"""inrun: what every training sample was worth to the model you actually trained, while you train it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inrun import errors

if TYPE_CHECKING:
    from inrun.engine import Accountant, Options, folds, with_ids
    from inrun.ledger import Ledger, MemoryLedger

__version__ = "0.1.0"
__all__ = ["Accountant", "Ledger", "MemoryLedger", "Options", "__version__", "errors", "folds", "with_ids"]

_lazy = {
    "Accountant": "inrun.engine",
    "Options": "inrun.engine",
    "folds": "inrun.engine",
    "with_ids": "inrun.engine",
    "Ledger": "inrun.ledger",
    "MemoryLedger": "inrun.ledger",
}
#: Rooms that people reach for by their name, without an import of their own.
_rooms = (
    "analysis",
    "baselines",
    "bench",
    "corpus",
    "engine",
    "explorer",
    "fidelity",
    "figures",
    "integrations",
    "layers",
    "ledger",
    "methods",
    "optimizers",
    "paper",
    "replay",
    "report",
    "training",
    "truth",
)


def __getattr__(name: str) -> Any:
    """Import public names and rooms when they are first used, so that ``import inrun`` does not import torch."""
    import importlib

    if name in _rooms:
        return importlib.import_module(f"inrun.{name}")
    if name not in _lazy:
        raise AttributeError(f"module 'inrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_lazy[name]), name)


def __dir__() -> list[str]:
    """Return all that can be had, imported yet or not."""
    return sorted({name for name in globals() if name.endswith("__")} | {*__all__, *_rooms})
