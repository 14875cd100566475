"""The bench on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from inrun.bench.measure import Result
from inrun.bench.shape import Shape
from inrun.bench.tune import Tuned


def print_forms(shape: Shape, found: list[Tuned], rounds: int) -> None:
    """Print one row per layer shape and kind of pass."""
    title = (
        f"{shape.model}, {shape.context} positions, batch {shape.batch} + {shape.validation_rows}, {shape.device} {shape.dtype}; "
        f"best of {rounds}, weight gradient included"
    )
    table = Table(title=title, title_justify="left")
    for name in ("pass", "weight", "layers"):
        table.add_column(name)
    forms = ("shared", "project", "gram")
    for name in ("gradient alone", *forms):
        table.add_column(name, justify="right")
    for name in ("cost model", "fastest", "lost per step"):
        table.add_column(name)
    for x in found:
        times = [f"{x.milliseconds[form]:.2f} ms" if form in x.milliseconds else "" for form in forms]
        lost = "" if x.model == x.fastest else f"{x.lost * x.layers:.2f} ms"
        weight = f"{x.rows} x {x.columns}"
        table.add_row(x.kind, weight, str(x.layers), f"{x.alone:.2f} ms", *times, x.model, x.fastest, lost)
    Console(width=max(Console().width, 120)).print(table)


def print_table(shape: Shape, results: list[Result], rounds: int) -> None:
    """Print one row per contestant."""
    title = (
        f"{shape.model} width {shape.width}, {shape.layers} layers, {shape.context} positions, vocabulary {shape.vocab}, "
        f"batch {shape.batch} + {shape.validation_rows}, {shape.optimizer}{', clipped' if shape.clip else ''}, "
        f"{shape.device} {shape.dtype}; best of {rounds}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("step", "of plain", "(CPU time)", "of limit", "(CPU time)", "peak memory", "over plain"):
        table.add_column(name, justify="right")
    peaks = {r.name: r.peak_bytes for r in results}
    for r in results:
        table.add_row(
            r.name,
            f"{1e3 * r.seconds:.1f} ms",
            f"{r.relative:.3f}",
            f"{r.relative_cpu:.3f}",
            *((f"{r.of_limit:.3f}", f"{r.of_limit_cpu:.3f}") if r.against == "plain" else ("", "")),
            f"{r.peak_bytes / 1e6:.0f} MB",
            f"{(r.peak_bytes - peaks[r.against]) / 1e6:+.1f} MB",
        )
    Console(width=max(Console().width, 120)).print(table)
