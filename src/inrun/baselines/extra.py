"""Packages of the extra ``inrun[baselines]``, imported when a baseline runs."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from inrun.errors import ConfigurationError


def need(module: str, baseline: str) -> Any:
    """Import a module, or raise ConfigurationError that says what to install."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about their own source, at the first import
            return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"baseline {baseline!r} needs the package of {module!r} ({error}); install it with `pip install inrun[baselines]`"
        ) from error
