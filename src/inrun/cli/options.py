"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

RUN = click.argument("run", type=click.Path(exists=True, file_okay=False))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")


class Registered(click.ParamType[str]):
    """One of the names of a registry, as it stands when the command runs."""

    name = "choice"

    def __init__(self, registry: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Keep the registry itself, not its names; or what imports it, where that takes time."""
        self._registry = registry

    @property
    def registry(self) -> Mapping[str, Any]:
        """Return the registry."""
        return self._registry() if callable(self._registry) else self._registry

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the names for the help."""
        return f"[{'|'.join(self.registry)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; say what there is if it is none."""
        return click.Choice(list(self.registry)).convert(value, param, ctx)


class _Sketch(click.ParamType[int | str]):
    """A number of numbers per sample, or "exact"."""

    name = "sketch"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return what stands for it in the help."""
        return "[N|exact]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or "exact"."""
        return "exact" if value == "exact" else click.IntRange(1).convert(value, param, ctx)


SKETCH = _Sketch()
