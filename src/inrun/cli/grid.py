"""Tables that fit a terminal: one line a row, and columns left out from the least important on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inrun.cli.text import printable

#: Columns of a page that is no terminal, and what a column takes beside its text.
PAGE, BETWEEN = 120, 2


@dataclass(frozen=True)
class Heading:
    """A column: its name, how soon it goes (0 never, the highest first), and how narrow it may get (None: as wide as its cells)."""

    name: str
    goes: int = 0
    narrow: int | None = None

    @property
    def is_text(self) -> bool:
        """Whether it holds texts, which begin at the left and may be cut."""
        return self.narrow is not None


@dataclass
class Grid:
    """Rows of texts under headings."""

    title: str
    headings: Sequence[Heading]
    rows: list[list[str]] = field(default_factory=list)
    #: Rows that a line is drawn behind.
    ends: set[int] = field(default_factory=set)

    def add(self, *cells: str) -> None:
        """Add a row; white space is collapsed, so that it is one line."""
        self.rows.append([" ".join(c.split()) for c in cells])

    def end_section(self) -> None:
        """Draw a line behind the last row."""
        self.ends.add(len(self.rows) - 1)

    def print(self) -> list[str]:
        """Print it as wide as the terminal is; return the names of the columns that found no room."""
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=max(console.width, PAGE), highlight=False)
        names = [printable(" ".join(h.name.split()), 40) for h in self.headings]
        wide = [max(cell_len(x) for x in [name, *(r[k] for r in self.rows)]) for k, name in enumerate(names)]
        shown, room = self._shown(wide, console.width)
        table = Table(
            title=Text(printable(self.title, 200)), title_justify="left", box=box.SIMPLE, padding=(0, 1), collapse_padding=True
        )
        for k in shown:
            table.add_column(Text(_cut(names[k], room[k])), justify="left" if self.headings[k].is_text else "right", no_wrap=True)
        for place, row in enumerate(self.rows):
            table.add_row(*(Text(_cut(row[k], room[k])) for k in shown), end_section=place in self.ends)
        console.print(table)
        return [names[k] for k in range(len(names)) if k not in shown]

    def _shown(self, wide: list[int], width: int) -> tuple[list[int], dict[int, int]]:
        """Return which columns fit, and how wide each is: texts are cut before a column goes, the widest first."""
        shown, least = (
            list(range(len(wide))),
            [w if h.narrow is None else min(w, h.narrow) for w, h in zip(wide, self.headings, strict=True)],
        )
        while sum(least[k] + BETWEEN for k in shown) + BETWEEN > width and any(self.headings[k].goes for k in shown):
            shown.remove(max(shown, key=lambda k: self.headings[k].goes))
        room = {k: wide[k] for k in shown}
        while sum(w + BETWEEN for w in room.values()) + BETWEEN > width:
            cut = [k for k in shown if room[k] > least[k]]
            if not cut:
                break
            room[max(cut, key=lambda k: room[k])] -= 1
        return shown, room


def _cut(text: str, width: int) -> str:
    """Return a text that takes so many columns at most; wide characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"
