"""Which library draws."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from inrun.errors import ConfigurationError
from inrun.figures.chart import Chart
from inrun.notebook import notebook_shell

#: In the order of preference.
LIBRARIES = ("plotly", "matplotlib")
INSTALL = "pip install inrun[plots]"


def library_of(wanted: str | None = None) -> str:
    """Return the library that draws: the one that is wanted, else plotly, else matplotlib; ConfigurationError if there is none."""
    if wanted is not None and wanted not in LIBRARIES:
        raise ConfigurationError(f"library is {wanted!r}; accepted are {', '.join(LIBRARIES)}, or None for the one that is there")
    there = [name for name in LIBRARIES if find_spec(name) is not None]
    if wanted is not None:
        if wanted not in there:
            raise ConfigurationError(f"{wanted} is not installed: {INSTALL}")
        return wanted
    if not there:
        raise ConfigurationError(f"figures need plotly or matplotlib, and neither is installed: {INSTALL}")
    if there == list(LIBRARIES) and not _plotly_can_show():
        return "matplotlib"
    return there[0]


def _plotly_can_show() -> bool:
    """Whether plotly draws here: in a kernel its figures raise without nbformat, when they are about to be shown."""
    return notebook_shell() is None or find_spec("nbformat") is not None


def draw(chart: Chart, library: str | None = None) -> Any:
    """Return the library's own figure."""
    if library_of(library) == "plotly":
        from inrun.figures.by_plotly import draw_plotly

        return draw_plotly(chart)
    from inrun.figures.by_matplotlib import draw_matplotlib

    return draw_matplotlib(chart)
