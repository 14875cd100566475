"""The panels of the page, in their order: each a module here with a ``PANEL``, and a script in ``assets/panels``."""

from __future__ import annotations

from importlib import import_module

from inrun.report.panel import Panel

ORDER = (
    "groups",
    "scores",
    "agreement",
)

PANELS: tuple[Panel, ...] = tuple(import_module(f"{__name__}.{name}").PANEL for name in ORDER)

__all__ = ["PANELS"]
