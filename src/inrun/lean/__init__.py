"""The lean engine, beside the one that it replaces."""

from __future__ import annotations

from typing import Any

__all__ = ["Accountant"]


def __getattr__(name: str) -> Any:
    """Import the accountant, and torch with it, when it is first used."""
    if name == "Accountant":
        from inrun.lean.engine.accountant import Accountant

        return Accountant
    raise AttributeError(name)
