"""Charts by plotly. Its texts are HTML of a kind, and templates where ``%{`` stands: nothing untrusted goes in unescaped."""

from __future__ import annotations

import html
from typing import Any

from inrun.figures.chart import COLOURS, DASHES, Chart


def safe(text: str) -> str:
    """Escape a text: tags, entities, ``$`` (else MathJax, where a page has it, typesets what is between two) and ``%{``."""
    return html.escape(text, quote=True).replace("$", "&#36;").replace("%{", "%&#123;")


def draw_plotly(chart: Chart) -> Any:
    """Return a ``plotly.graph_objects.Figure``."""
    import plotly.graph_objects as go

    figure = go.Figure(data={"bars": _bars, "lines": _lines, "points": _points}[chart.kind](go, chart))
    figure.update_layout(
        template="plotly_white",
        title={"text": f"{safe(chart.title)}<br><sub>{safe(chart.note)}</sub>"},
        xaxis={"title": {"text": safe(chart.x)}, "zeroline": True, "automargin": True},
        yaxis={"title": {"text": safe(chart.y)}, "zeroline": True, "automargin": True},
        showlegend=len(chart.series) > 1,
        height=max(380, 180 + (22 + 8 * len(chart.series)) * len(chart.labels)) if chart.kind == "bars" else 420,
    )
    if chart.kind == "bars":
        # Places are numbers with texts beside them: plotly would read labels such as "2024-01" or "1e3" as dates and numbers, and
        # would draw two groups that look alike as one.
        places = list(range(len(chart.labels)))
        texts = [safe(label) for label in chart.labels]
        figure.update_layout(
            barmode="group", yaxis={"autorange": "reversed", "tickmode": "array", "tickvals": places, "ticktext": texts}
        )
    return figure


def _bars(go: Any, chart: Chart) -> list[Any]:
    found = []
    for i, series in enumerate(chart.series):
        colours = [COLOURS[1] if chart.colour and value < 0 else COLOURS[i % len(COLOURS)] for value in series.values]
        said = [safe(f"{label}: {value:+.4g}") for label, value in zip(chart.labels, series.values, strict=True)]
        found.append(
            go.Bar(
                orientation="h",
                x=list(series.values),
                y=list(range(len(series.values))),
                name=safe(series.name),
                marker={"color": colours},
                error_x=None if series.errors is None else {"type": "data", "array": list(series.errors)},
                hovertext=said,
                hoverinfo="text",
            )
        )
    return found


def _lines(go: Any, chart: Chart) -> list[Any]:
    return [
        go.Scatter(
            x=list(chart.places),
            y=list(series.values),
            mode="lines+markers" if len(chart.places) <= 40 else "lines",
            name=safe(series.name),
            line={
                "color": COLOURS[i % len(COLOURS)],
                "dash": DASHES[i // len(COLOURS) % len(DASHES)],
                "width": 5 if chart.wide and not i else 2,
            },
            marker={"size": 5},
            hoverinfo="x+y+name",
        )
        for i, series in enumerate(chart.series)
    ]


def _points(go: Any, chart: Chart) -> list[Any]:
    (series,) = chart.series
    return [
        go.Scattergl(
            x=list(chart.places),
            y=list(series.values),
            mode="markers",
            marker={"color": COLOURS[0], "size": 6, "opacity": 0.6},
            hovertext=[safe(label) for label in chart.labels],
            hoverinfo="text+x+y",
        )
    ]
