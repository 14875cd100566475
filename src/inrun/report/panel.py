"""What a panel of the page is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inrun.ledger.tables import Tables
from inrun.report.findings import Findings
from inrun.report.text import one_line


@dataclass(frozen=True)
class Panel:
    """A section of the page that stands on its own: data from the ledger, and a script that draws it.

    The page gives it a heading; ``assets/panels/<id>.js`` does the rest: ``panels.<id> = { build(section), draw(found) }``.
    """

    #: Of the section, of its data, and of its files.
    id: str
    #: The heading, or what makes it of the findings; untrusted text in it is escaped by the page.
    title: str | Callable[[Findings], str]
    #: Reads plain data for the script, of bounded size and with every untrusted text made visible (``text.one_line``,
    #: ``text.visible``); None leaves the panel out. What other parts of the page need too is in the findings already.
    read: Callable[[Tables, Findings], Any]
    #: A sentence under the heading.
    lead: str = ""
    #: The word that leads to the section from the bar at the top, if any.
    jump: str = ""
    #: Whether it needs scores (the table ``scored``); a run without leaves it out.
    needs_scores: bool = True

    def heading(self, found: Findings) -> str:
        """Return the heading."""
        return one_line(self.title if isinstance(self.title, str) else self.title(found), 120)
