"""The fidelity report in a notebook."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostile_html import plain_text
from inrun.fidelity import FidelityReport, MethodResult, Truth, UtilityReport
from report_payloads import PAYLOADS


def report(name: str) -> FidelityReport:
    result = MethodResult(name, "real", [0.1, 0.2], 0.9, -0.5, 1e-3, 0.25)
    return FidelityReport(3, name, 2, name, {"real": Truth([0.1, 0.3], [0.0, 0.01], 0.4)}, [result])


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_names_stay_text(payload: str) -> None:
    plain_text(report(payload)._repr_html_())


def test_figures_are_those_of_the_table() -> None:
    utility = UtilityReport(5, [0.0], [0.0], [0.0], 0.5, 0.6, 0.7, 0.8)
    text = plain_text(replace(report("first"), utility=utility)._repr_html_())
    for words in (
        "step 3, first, 2 samples",
        "the step of the real optimizer",
        "0.9",
        "−0.5",
        "25.00 %",
        "+4.000e-01",
        "utility over 5 random subsets",
    ):
        assert words in text, words


def test_control_the_text_table_would_not_do() -> None:
    with pytest.raises(AssertionError):
        plain_text(f"<div class='mathjax_ignore'>{report('<img src=x onerror=alert(1)>')}</div>")
