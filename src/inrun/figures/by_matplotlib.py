"""Charts by matplotlib. It typesets what stands between two ``$``, so that these are escaped."""

from __future__ import annotations

from typing import Any

import numpy as np

from inrun.figures.chart import COLOURS, DASHES, Chart
from inrun.notebook import notebook_shell

_STYLES = dict(zip(DASHES, ("-", "--", ":"), strict=True))


def safe(text: str) -> str:
    """Escape a text: ``$`` is a dollar; and a legend leaves out what begins with ``_``, so that a thin space comes first."""
    shown = text.replace("$", r"\$")
    return f"\u200a{shown}" if shown.startswith("_") else shown


def new_figure(width: float, height: float) -> Any:
    """Return a figure that nobody else draws on.

    In a notebook pyplot has to make it, since it tells IPython how figures are drawn; it is closed at once, or the cell would show
    it twice. Elsewhere no window system is touched.
    """
    if notebook_shell() is not None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(width, height), layout="constrained")
        plt.close(figure)
        return figure
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_matplotlib(chart: Chart) -> Any:
    """Return a ``matplotlib.figure.Figure``."""
    rows = len(chart.labels) * (0.22 + 0.1 * len(chart.series)) if chart.kind == "bars" else 0.0
    figure = new_figure(7.5, max(3.4, 1.5 + rows))
    axis = figure.add_subplot()
    {"bars": _bars, "lines": _lines, "points": _points}[chart.kind](axis, chart)
    figure.suptitle(safe(chart.title), fontsize=11)
    axis.set_title(safe(chart.note), fontsize=8, color="0.35")
    axis.set_xlabel(safe(chart.x), fontsize=9)
    axis.set_ylabel(safe(chart.y), fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axis.legend(fontsize=8, frameon=False)
    return figure


def _bars(axis: Any, chart: Chart) -> None:
    height = 0.8 / len(chart.series)
    places = np.arange(len(chart.labels))
    for i, series in enumerate(chart.series):
        colours = [COLOURS[1] if chart.colour and value < 0 else COLOURS[i % len(COLOURS)] for value in series.values]
        at = places - 0.4 + height * (i + 0.5)
        errors = None if series.errors is None else list(series.errors)
        bars = axis.barh(at, list(series.values), height, xerr=errors, color=colours, error_kw={"lw": 0.8, "ecolor": "0.3"})
        bars.set_label(safe(series.name))
    axis.set_yticks(places, [safe(label) for label in chart.labels])
    axis.invert_yaxis()
    axis.axvline(0, color="0.6", lw=0.8)


def _lines(axis: Any, chart: Chart) -> None:
    for i, series in enumerate(chart.series):
        style = _STYLES[DASHES[i // len(COLOURS) % len(DASHES)]]
        width = 4.0 if chart.wide and not i else 1.5
        axis.plot(chart.places, series.values, style, color=COLOURS[i % len(COLOURS)], lw=width, label=safe(series.name))
    axis.axhline(0, color="0.6", lw=0.8)


def _points(axis: Any, chart: Chart) -> None:
    (series,) = chart.series
    axis.plot(chart.places, series.values, "o", ms=3.5, alpha=0.6, color=COLOURS[0])
    axis.axhline(0, color="0.8", lw=0.8, zorder=0)
    axis.axvline(0, color="0.8", lw=0.8, zorder=0)
