"""Where people already train: transformers' Trainer, TRL, Lightning and Accelerate, each by one line added to their loop.

Nothing here computes a score. A trainer calls in pieces, and each file says in which order its pieces come; :mod:`.scoring` turns
them into the steps of an accountant, :mod:`.data` brings the ids of samples from the dataset to the step.
"""

from __future__ import annotations

from typing import Any

#: Trainers, each imported when it is first used: their packages are extras.
_trainers = ("accelerate", "lightning", "transformers", "trl")


def __getattr__(name: str) -> Any:
    """Import a trainer's file by its name, so that ``inrun.integrations.transformers`` needs no import of its own."""
    if name not in _trainers:
        raise AttributeError(f"module 'inrun.integrations' has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"inrun.integrations.{name}")


def __dir__() -> list[str]:
    """Return all that can be had, imported yet or not."""
    return sorted({*(name for name in globals() if name.endswith("__")), *_trainers})
