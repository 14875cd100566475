"""A figure per question: by either library, with the numbers of the ledger, and harmless whatever names are in it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inrun.analysis import queries
from inrun.errors import ConfigurationError, LedgerError
from inrun.figures import Plots, by_plotly, charts
from inrun.figures.draw import library_of
from inrun.ledger import Ledger, LedgerReader, MemoryLedger, StepRecord
from report_hostile import SETS, hostile_run

ASKED = {
    "groups": lambda plot, **more: plot.groups(**more),
    "samples": lambda plot, **more: plot.samples(**more),
    "over_time": lambda plot, **more: plot.over_time(**more),
    "agreement": lambda plot, **more: plot.agreement(**more),
    "books": lambda plot, **more: plot.books(**more),
}
LIBRARIES = ("plotly", "matplotlib")


def fill(ledger: Any, steps: int = 12, groups: int = 3) -> Any:
    rng = np.random.default_rng(0)
    ledger.register_samples([{"sample_id": i, "domain": f"d{i % groups}"} for i in range(60)])
    for step in range(steps):
        ids = rng.integers(0, 60, 8)
        values = {name: rng.standard_normal(8).astype(np.float32) for name in ("math", "code")}
        rows = [
            {"step": step, "validation": name, "loss_before": 2.0, "loss_after": 1.9, "data": 0.06, "spread": 1.0}
            | {"momentum": 0.03, "decay": 0.005, "residual": 0.005, "lr": 0.1}
            for name in values
        ]
        ledger.write(StepRecord(step, ids, values, rows))
    return ledger


@pytest.fixture
def run(tmp_path: Path) -> LedgerReader:
    fill(Ledger(tmp_path / "run")).close()
    return Ledger.open(tmp_path / "run")


def texts(data: Any) -> list[str]:
    """All texts of a plotly figure, but its template."""
    if isinstance(data, dict):
        return [t for key, value in data.items() if key != "template" for t in texts(value)]
    if isinstance(data, list | tuple):
        return [t for value in data for t in texts(value)]
    return [data] if isinstance(data, str) else []


def check_harmless(figure: Any) -> None:
    for text in texts(figure.to_dict()):
        own = text.replace("<br><sub>", "").replace("</sub>", "")
        assert not set("<>$") & set(own) and "%{" not in own and "\x1b" not in own and "\u202e" not in own, text


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ASKED)
def test_every_figure_by_either_library(run: LedgerReader, name: str, library: str, tmp_path: Path) -> None:
    module = pytest.importorskip("plotly.graph_objects" if library == "plotly" else "matplotlib.figure")
    figure = ASKED[name](run.plot, library=library)
    assert isinstance(figure, module.Figure)
    if library == "plotly":
        assert len(figure.to_json()) < 40_000
    else:
        figure.savefig(tmp_path / "figure.png", dpi=40)
        assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ASKED)
def test_hostile_names_by_plotly(name: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    figure = ASKED[name](Ledger.open(hostile_run(tmp_path / "run")).plot, library="plotly")
    check_harmless(figure)
    if name == "groups":  # every set is there, and goes by a name of its own
        assert len({trace.name for trace in figure.data}) == len(SETS)


def test_control_unescaped_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setattr(by_plotly, "safe", lambda text: text)
    with pytest.raises(AssertionError):
        check_harmless(Ledger.open(hostile_run(tmp_path / "run")).plot.samples(library="plotly"))


@pytest.mark.parametrize("name", ASKED)
def test_hostile_names_by_matplotlib(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = ASKED[name](Ledger.open(hostile_run(tmp_path / "run")).plot, library="matplotlib")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|.*glyph|constrained_layout|Matplotlib currently")
        figure.savefig(tmp_path / "figure.png", dpi=20)


@pytest.mark.parametrize("library", LIBRARIES)
def test_dollars_and_underscores_are_letters(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    memory = MemoryLedger()
    names = ["$\\frac{1$", "_hidden", "2024-01-01", "1e3"]
    memory.register_samples([{"sample_id": i, "domain": name} for i, name in enumerate(names)])
    values = {"_set": np.arange(4, dtype=np.float32), "$b$": np.arange(4, dtype=np.float32)}
    memory.write(StepRecord(0, np.arange(4), values))
    figure = memory.plot.groups(library=library)
    if library == "matplotlib":
        figure.savefig(tmp_path / "figure.png", dpi=20)
        axis = figure.axes[0]
        assert len(axis.get_legend().get_texts()) == 2 and len(axis.get_yticklabels()) == 4
    else:
        assert figure.layout.yaxis.ticktext == ("1e3", "2024-01-01", "_hidden", "&#36;\\frac{1&#36;")


def test_numbers_are_those_of_the_queries(run: LedgerReader) -> None:
    chart = charts.groups_chart(run, "domain", "math", "total")
    rows = queries.groups(run, "domain", "math").to_pylist()
    assert list(chart.labels) == [r["group"] for r in rows] and list(chart.series[0].values) == [r["total"] for r in rows]
    lines = charts.stages_chart(run, "domain", "math", 4, True)
    assert {s.name: s.values[-1] for s in lines.series} == {r["group"]: pytest.approx(r["total"]) for r in rows}
    points = charts.agreement_chart(run, None, None)
    alike = queries.agreement(run, "code", "math")
    assert f"Spearman {alike.spearman:.3f} over {alike.samples:,} samples" in points.note
    assert len(points.places) == len(points.labels) == alike.samples
    books = charts.books_chart(run, "math")
    ends = {s.name: s.values[-1] for s in books.series}
    assert ends["fall of the loss"] == pytest.approx(1.2)
    assert sum(v for name, v in ends.items() if name != "fall of the loss") == pytest.approx(1.2)


def test_much_is_cut_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fill(MemoryLedger(), steps=60, groups=40)
    plot = memory.plot
    chart = charts.groups_chart(plot._source(), "domain", None, "mean_per_use")
    assert len(chart.labels) == charts.MOST_BARS and "24 of 40 groups are drawn" in chart.note
    monkeypatch.setattr(charts, "MOST_POINTS", 10)
    assert "10 of 60 samples are drawn" in charts.agreement_chart(plot._source(), "math", "code").note


def test_names_that_look_alike_stay_apart() -> None:
    assert charts._told_apart(["a\u200b", "a\u200b ", None, "(no value)"]) == [
        "a⟨U+200B⟩",
        "a⟨U+200B⟩ ′",
        "(no value)",
        "(no value) ′",
    ]


REFUSED = [
    (lambda plot: plot.groups(by="domian"), "no column 'domian'; they have 'domain'"),
    (lambda plot: plot.groups(value="best"), "value is 'best'; accepted are total"),
    (lambda plot: plot.samples("maths"), "no validation set 'maths'; it has 'code', 'math'"),
    (lambda plot: plot.samples(["math", "code"]), "one validation set, not of .*; there are 'code', 'math'"),
    (lambda plot: plot.over_time(stages=0), "stages is 0"),
    (lambda plot: plot.agreement("math", "math"), "between two validation sets.*'code', 'math'"),
    (lambda plot: plot.agreement("math", "x"), "no validation set 'x'"),
    (lambda plot: plot.books("x"), "no validation set 'x'; it has 'math', 'code'"),
    (lambda plot: plot.books(library="gnuplot"), "library is 'gnuplot'; accepted are plotly, matplotlib"),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED)
def test_what_is_not_there_is_said(run: LedgerReader, ask: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ask(run.plot)


def test_books_without_steps_or_audits() -> None:
    memory = MemoryLedger()
    for name in ("samples", "books"):
        with pytest.raises(LedgerError, match=r"no contributions yet|no steps yet"):
            ASKED[name](memory.plot)
    values = {"math": np.ones(2, np.float32)}
    memory.write(StepRecord(0, np.arange(2), values, [{"step": 0, "validation": "math", "data": 2.0}]))
    with pytest.raises(LedgerError, match="audit_every=1"):
        memory.plot.books()
    with pytest.raises(ConfigurationError, match="between two validation sets"):
        memory.plot.agreement()


def test_the_library_that_is_there(monkeypatch: pytest.MonkeyPatch, run: LedgerReader) -> None:
    assert library_of() == "plotly"
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert library_of() == "matplotlib" and type(run.plot.groups()).__module__ == "matplotlib.figure"
    with pytest.raises(ConfigurationError, match="plotly is not installed: pip install inrun\\[plots\\]"):
        library_of("plotly")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="pip install inrun\\[plots\\]"):
        run.plot.groups()


def test_plots_say_what_there_is(run: LedgerReader) -> None:
    assert isinstance(run.plot, Plots) and all(f".{name}(" in repr(run.plot) for name in ASKED)
