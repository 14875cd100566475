"""The fidelity study on a terminal and on disk."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from inrun.experiments.fidelity import Cell, FidelityConfig, as_data, tabulate


def print_table(config: FidelityConfig, cells: list[Cell]) -> None:
    """Print worst and median over seeds for every learning rate, step and method."""
    game = "the SGD game at states of an AdamW run" if config.proxy else f"the real {config.optimizer} game"
    title = f"{game}, batch {config.batch}, {config.permutations} permutations, {len(config.seeds)} seeds (worst / median)"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
    for name in ("lr", "step", "method", "Spearman", "RMSE", "mean\n|truth|", "|Σc − truth|\n/ Σ|c|, %"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    previous = None
    for row in tabulate(cells):
        if previous not in (None, (row["lr"], row["step"])):
            table.add_section()
        previous = (row["lr"], row["step"])
        table.add_row(
            f"{row['lr']:.0e}".replace("e-0", "e-"),
            str(row["step"]),
            row["method"],
            f"{row['spearman_min']:.3f}/{row['spearman_median']:.3f}",
            f"{row['rmse_median']:.1e}",
            f"{row['spread_median']:.1e}",
            f"{100 * row['residual_max']:.2g}/{100 * row['residual_median']:.2g}",
        )
    console = Console()
    console.print(table)
    for cell in cells:
        if cell.report.utility is not None:
            console.print(f"lr {cell.lr:g}, step {cell.report.step}, seed {cell.seed}: {cell.report.utility}", highlight=False)


def save(config: FidelityConfig, cells: list[Cell], folder: str) -> list[Path]:
    """Write ``fidelity.json`` and one picture per cell; return the paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    written = [path / "fidelity.json"]
    written[0].write_text(json.dumps(as_data(config, cells), indent=1) + "\n", encoding="utf-8")
    for cell in cells:
        picture = path / f"scatter-seed{cell.seed}-lr{cell.lr:g}-step{cell.report.step}.png"
        cell.report.save_picture(str(picture))
        written.append(picture)
    return written
