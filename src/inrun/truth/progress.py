"""Tell how far a long evaluation is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inrun.notebook import notebook_shell
from inrun.notebook.progress import notebook_bar

Progress = Callable[[int, int], None] | bool | None


@contextmanager
def reporting(progress: Progress, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the number done.

    Args:
        progress: The user's ``callable(done, total)``, True for a bar in a notebook or on a terminal's stderr; or nothing.
        total: Where it ends.
        unit: What is counted, for the bar.
    """
    if callable(progress):
        tell = progress
        yield lambda done: tell(done, total)
    elif progress and notebook_shell() is not None:  # where rich wants ipywidgets, and warns without
        with notebook_bar(unit, total) as told:
            yield told
    elif progress and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(unit, total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield lambda done: None
