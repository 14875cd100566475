"""What was wrong with the data: counted by kind, with the first places. A bad row never stops a run, and never goes unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inrun.errors import DataError

#: Kinds of problems, and what happened to the row or file.
CONSEQUENCES = {
    "unreadable JSON": "skipped",
    "not UTF-8": "skipped",
    "no text field": "skipped",
    "text is not a string": "skipped",
    "empty text": "skipped",
    "too long": "skipped",
    "binary file": "skipped",
    "broken file": "the rest of the file is lost",
    "link out of the folder": "not followed",
    "file beside a curation": "skipped",
    "metadata is not text or number": "left empty",
    "duplicate id": "kept under a new id",
}
#: Places that are remembered of each kind.
EXAMPLES = 5
#: Characters that are kept of a reason: it may quote the data.
LONGEST_REASON = 200


def printable(text: str) -> str:
    """Return text that is safe on a terminal and in any file: control, bidi and undecodable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class Problems:
    """Counts of what was wrong, by kind, with the first places of each.

    >>> problems = Problems()
    >>> problems.add("empty text", "a.jsonl:3", "the field 'text' is empty")
    >>> problems.lines()
    ["1 empty text (skipped): a.jsonl:3: the field 'text' is empty"]
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, kind: str, where: str, reason: str, count: int = 1) -> None:
        """Count a problem of a known kind.

        Args:
            kind: One of ``CONSEQUENCES``.
            where: ``file:line``.
            reason: What was found there.
            count: Rows that share it.
        """
        assert kind in CONSEQUENCES, kind
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.examples.setdefault(kind, [])
        if len(kept) < EXAMPLES:
            kept.append(printable(f"{where}: {reason[:LONGEST_REASON]}"))

    @property
    def total(self) -> int:
        """All problems together, also those whose row was kept."""
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """Return one line per kind with its first place, and further places indented below it."""
        found: list[str] = []
        for kind, count in self.counts.items():
            first, *more = self.examples[kind]
            found.append(f"{count:,} {kind} ({CONSEQUENCES[kind]}): {first}")
            found += [f"    {place}" for place in more]
            if count > len(more) + 1:
                found.append(f"    and {count - len(more) - 1:,} more")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; :meth:`from_dict` reads it."""
        return {kind: {"count": count, "examples": list(self.examples[kind])} for kind, count in self.counts.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problems:
        """Read what :meth:`as_dict` gave."""
        problems = cls()
        try:
            for kind, found in data.items():
                if kind not in CONSEQUENCES:
                    raise KeyError(kind)
                problems.counts[str(kind)] = int(found["count"])
                problems.examples[str(kind)] = [str(e) for e in found["examples"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the list of problems cannot be read: {error!r}; it was not written by this version of inrun"
            ) from None
        return problems
