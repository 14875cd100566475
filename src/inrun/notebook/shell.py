"""Whether we are inside IPython."""

from __future__ import annotations

import sys
from typing import Any


def shell() -> Any:
    """Return IPython's shell, or None outside of it; IPython is never imported for the question."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask() if callable(ask) else None


def notebook_shell() -> Any:
    """Return the shell of a kernel, which draws HTML; None in a terminal and outside IPython."""
    found = shell()
    return found if getattr(found, "kernel", None) is not None else None
