"""The figures of a run, one per common question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inrun.figures import charts
from inrun.figures.chart import Chart
from inrun.figures.draw import draw, library_of
from inrun.ledger import LedgerReader
from inrun.ledger.scores import Names


class Plots:
    """Figures of a run: ``accountant.plot`` and ``Ledger.open(run).plot``.

    Each is a figure of plotly where that is installed, else of matplotlib; ``library="matplotlib"`` asks for one of them. A
    notebook shows what a cell ends with; elsewhere there are ``figure.show()`` of plotly and ``savefig`` of matplotlib.
    """

    def __init__(self, source: Callable[[], LedgerReader]) -> None:
        """Take a function that gives the books as they stand, so that every figure is of the moment it is asked for."""
        self._source = source

    def __repr__(self) -> str:
        """Name the figures."""
        return "figures: .groups(), .samples(), .over_time(), .agreement(a, b), .books()"

    def groups(self, by: str = "domain", validation: Names = None, *, value: str = "total", library: str | None = None) -> Any:
        """Draw which groups of samples helped and which hurt: one bar per group and validation set.

        Args:
            by: A column of the registered samples.
            validation: A set, several, or None for all.
            value: "total" (sum of scores), "mean_per_sample" or "mean_per_use".
            library: "plotly" or "matplotlib".
        """
        return self._drawn(library, lambda reader: charts.groups_chart(reader, by, validation, value))

    def samples(self, validation: str | None = None, *, top: int = 10, bottom: int = 10, library: str | None = None) -> Any:
        """Draw the samples that helped and hurt most, with their errors where these are known.

        Args:
            validation: A set (default: the first by name).
            top: How many of the highest.
            bottom: How many of the lowest.
            library: "plotly" or "matplotlib".
        """
        return self._drawn(library, lambda reader: charts.samples_chart(reader, validation, top, bottom))

    def over_time(
        self,
        by: str = "domain",
        validation: str | None = None,
        *,
        stages: int = 20,
        cumulative: bool = True,
        library: str | None = None,
    ) -> Any:
        """Draw when groups of samples earned what they earned.

        Args:
            by: A column of the registered samples.
            validation: A set (default: the first by name).
            stages: Equal ranges of steps, never more than there are steps.
            cumulative: Whether a stage counts everything up to its end.
            library: "plotly" or "matplotlib".
        """
        return self._drawn(library, lambda reader: charts.stages_chart(reader, by, validation, stages, cumulative))

    def agreement(self, a: str | None = None, b: str | None = None, *, library: str | None = None) -> Any:
        """Draw whether two validation sets value the same samples: one point per sample.

        Args:
            a: A set (default: the first by name, that is not ``b``).
            b: Another (default: the next).
            library: "plotly" or "matplotlib".
        """
        return self._drawn(library, lambda reader: charts.agreement_chart(reader, a, b))

    def books(self, validation: str | None = None, *, library: str | None = None) -> Any:
        """Draw the accounts, added up over the audited steps: the fall of the loss, and what samples and the rest did to it.

        Args:
            validation: A set (default: the first).
            library: "plotly" or "matplotlib".
        """
        return self._drawn(library, lambda reader: charts.books_chart(reader, validation))

    def _drawn(self, library: str | None, ask: Callable[[LedgerReader], Chart]) -> Any:
        chosen = library_of(library)  # before a long question is asked for nothing
        return draw(ask(self._source()), chosen)
