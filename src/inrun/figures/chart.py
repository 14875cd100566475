"""What is drawn, whoever draws it: plain data with plain texts, which are untrusted until a drawer has escaped them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Colours that can be told apart with any eyes (Okabe and Ito), without the yellow that is lost on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
#: Lines beyond the colours differ by these.
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Series:
    """One colour: a value per place, NaN where there is none."""

    name: str
    values: Sequence[float]
    #: Half the length of the bars of error; None for no such bars.
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Chart:
    """A figure: ``kind`` is "bars" (lying, one row per label, from the top), "lines" or "points".

    Attributes:
        kind: See above.
        title: What it shows.
        note: What must be known to read it.
        x: The title of the axis across.
        y: The title of the axis up.
        series: Of bars and lines one or more, of points exactly one.
        labels: Of bars the rows; of points what each is.
        places: Of lines and points where they are across.
        colour: Of bars of one series: whether bars below zero get a colour of their own.
        wide: Of lines: whether the first is wide, so that one which lies upon it can be seen.
    """

    kind: str
    title: str
    note: str
    x: str
    y: str
    series: Sequence[Series]
    labels: Sequence[str] = ()
    places: Sequence[float] = field(default_factory=tuple)
    colour: bool = False
    wide: bool = False
