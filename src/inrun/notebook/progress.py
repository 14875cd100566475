"""A bar in a notebook, without ipywidgets: an HTML element that is replaced as work goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from inrun.notebook.html import block, escaped

#: Seconds between two pictures of the bar.
PATIENCE = 0.2


@contextlib.contextmanager
def notebook_bar(unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the number done; the bar goes when all is over, and comes only if it takes a while.

    Args:
        unit: What is counted.
        total: Where it ends.
    """
    from IPython.display import HTML, display

    began = last = time.monotonic()
    handle = None

    def tell(done: int) -> None:
        nonlocal handle, last
        now = time.monotonic()
        if now - last < PATIENCE:
            return
        last = now
        picture = HTML(bar_html(unit, done, total, now - began))
        if handle is None:
            handle = display(picture, display_id=True)
        else:
            handle.update(picture)

    try:
        yield tell
    finally:
        if handle is not None:
            handle.update(HTML(""))


def bar_html(unit: str, done: int, total: int, seconds: float) -> str:
    """Return the bar: how much is done, and the time left at this pace."""
    left = f", {seconds / done * (total - done):,.0f} s left" if done else ""
    said = f"{done:,} of {total:,}{left}"
    bar = f'<progress value="{int(done)}" max="{int(total)}" aria-label="{escaped(unit)}" style="width:20em"></progress>'
    return block(unit, f"{bar} {escaped(said)}")
