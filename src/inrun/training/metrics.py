"""Metrics of a run: metrics.jsonl always, TensorBoard and wandb where they are installed and asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol, TextIO

from inrun.errors import ConfigurationError
from inrun.files import Files, write_durably


class Sink(Protocol):
    """Takes plain numbers by name."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the values of one step."""

    def close(self) -> None:
        """Write out what is left."""


class Metrics:
    """Writes one JSON object a line, and the same numbers to further sinks.

    Args:
        run: The run's folder.
        step: Where training goes on: lines of this and later steps, from before a kill, are dropped.
        tensorboard: Write event files to ``run/tensorboard``.
        wandb: Write an offline run to ``run/wandb``.
    """

    def __init__(self, run: Path, step: int, tensorboard: bool = False, wandb: bool = False) -> None:
        """Open the file; see the class."""
        self.path = run / "metrics.jsonl"
        self._sinks: list[Sink] = [_TensorBoard(run / "tensorboard", step)] if tensorboard else []
        if wandb:
            self._sinks.append(_Wandb(run))
        _cut(self.path, step)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Write a row; nested names are joined by slashes for the other sinks."""
        self._file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(int(row["step"]), dict(_flat(row)))

    def close(self) -> None:
        """Close all files."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _plain(value: Any) -> Any:
    """Return JSON that every reader takes: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(row: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += _flat(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            found.append((name, float(value)))
    return found


def _cut(path: Path, step: int) -> None:
    """Drop the lines of steps that will run again, and a last line that was torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_durably(Files(), path, "".join(f"{line}\n" for line in kept).encode())


class _TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError("logging.tensorboard needs tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder), purge_step=step)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError("logging.wandb needs wandb: pip install wandb") from error
        self._run = wandb.init(dir=str(run), mode="offline", project="inrun", name=run.name)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
