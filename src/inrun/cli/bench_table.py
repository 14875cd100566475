"""The bench on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from inrun.bench.measure import Result
from inrun.bench.scaling import Scaled
from inrun.bench.shape import Shape


def print_table(shape: Shape, results: list[Result], rounds: int) -> None:
    """Print one row per contestant."""
    title = _title(shape, rounds)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("step", "of plain", "(CPU time)", "of floor", "(CPU time)", "peak memory", "over plain"):
        table.add_column(name, justify="right")
    peaks = {r.name: r.peak_bytes for r in results}
    for r in results:
        table.add_row(
            r.name,
            f"{1e3 * r.seconds:.1f} ms",
            f"{r.relative:.3f}",
            f"{r.relative_cpu:.3f}",
            *((f"{r.of_floor:.3f}", f"{r.of_floor_cpu:.3f}") if r.against == "plain" else ("", "")),
            f"{r.peak_bytes / 1e6:.0f} MB",
            f"{(r.peak_bytes - peaks[r.against]) / 1e6:+.1f} MB",
        )
    Console(width=max(Console().width, 120)).print(table)


def print_scaling(shape: Shape, found: list[Scaled], rounds: int, mode: str, threads: int) -> None:
    """Print one row per contestant, and what they exchange."""
    world = found[0].processes
    title = f"{_title(shape, rounds)}\n{world} processes ({mode}), {threads} thread(s) each; a batch for every process"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    names = ("step", "of plain", "step alone", "of plain", f"scaling (of {world})", "exchanged", "sent by rings")
    for name in names:
        table.add_column(name, justify="right")
    for x in found:
        table.add_row(
            x.name,
            f"{1e3 * x.seconds:.1f} ms",
            f"{x.relative:.3f}",
            f"{1e3 * x.seconds_alone:.1f} ms",
            f"{x.relative_alone:.3f}",
            f"{x.scaling:.2f}",
            *((f"{x.bytes:,} B", f"{x.wire:,.0f} B") if x.payload else ("", "")),
        )
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for x in found:
        if x.payload:
            kinds = ", ".join(f"{kind} {size:,}" for kind, size in sorted(x.payload.items(), key=lambda pair: -pair[1]))
            console.print(f"{x.name}, bytes per step and process beyond {mode}'s own: {kinds}", highlight=False)


def _title(shape: Shape, rounds: int) -> str:
    return (
        f"{shape.model} width {shape.width}, {shape.layers} layers, {shape.context} positions, vocabulary {shape.vocab}, "
        f"batch {shape.batch} + {shape.validation_rows}, {shape.optimizer}{', clipped' if shape.clip else ''}, "
        f"{shape.device} {shape.dtype}; mean of {rounds} steps"
    )
