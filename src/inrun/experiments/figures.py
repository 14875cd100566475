"""Matplotlib for experiments: imported when a figure is drawn, without a display."""

from __future__ import annotations

from typing import Any

from inrun.errors import ConfigurationError

#: Fifteen colours that differ, for domains.
DOMAIN_COLOURS: tuple[str, ...] = ("#0b3954", "#c98a00", "#4f9d69", "#b3446c", "#6c5b7b", "#1f9bb3", "#d1603d", "#8a9a5b")
DOMAIN_COLOURS += ("#355c7d", "#e0b04a", "#7b2d26", "#8fb8de", "#5f6f52", "#c77dff", "#888888")


def literal(text: str) -> str:
    """Return text that Matplotlib draws as it is: between two dollar signs it would see a formula, and stop where it is none."""
    return text.replace("$", r"\$")


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` that draws into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError("figures need matplotlib: pip install 'inrun[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
