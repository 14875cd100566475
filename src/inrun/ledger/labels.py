"""What a validation label says: a set, one point of a set, or one fold of a set. The only place that knows the grammar.

``math``      a validation set
``math[3]``   point 3 of a set whose callable returns a vector of losses: a validation set of its own, in every answer
``math#3``    fold 3 of a set in folds: a part of the set ``math``, whose figures are means over its folds, with a standard error
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Characters that the grammar needs, and names may not have.
RESERVED = "#[]"
_GRAMMAR = re.compile(r"(?P<name>[^#\[\]]+)(?:#(?P<fold>0|[1-9][0-9]*)|\[(?P<point>0|[1-9][0-9]*)\])", re.DOTALL)


@dataclass(frozen=True)
class Label:
    """One column of contributions: ``name`` of the callable, ``point`` among its points or folds, None where it has none."""

    name: str
    point: int | None = None
    is_fold: bool = False

    @classmethod
    def parse(cls, text: str) -> Label:
        """Read a label. Any other text is a name: a ledger written by hand may hold some, and each is a set of its own."""
        found = _GRAMMAR.fullmatch(text)
        if found is None:
            return cls(text)
        fold = found["fold"]
        return cls(found["name"], int(found["point"] if fold is None else fold), fold is not None)

    def __str__(self) -> str:
        """Return the text in the ledger."""
        if self.point is None:
            return self.name
        return f"{self.name}#{self.point}" if self.is_fold else f"{self.name}[{self.point}]"

    @property
    def set_name(self) -> str:
        """Return the validation set it belongs to: folds to the set of their name, anything else is a set of its own."""
        return self.name if self.is_fold else str(self)


def is_name(text: object) -> bool:
    """Whether a text can be the name of a validation set: it has characters, and none that labels need."""
    return isinstance(text, str) and bool(text) and not set(RESERVED) & set(text)


def set_of(text: str) -> str:
    """Return the validation set that a label, as a text, belongs to."""
    return Label.parse(text).set_name


def by_set(texts: Iterable[str]) -> dict[str, list[str]]:
    """Group labels by validation set: sets in order of their names, as SQL and Arrow sort them, the folds of each by number."""
    found: dict[str, list[str]] = {}
    for label in sorted(map(Label.parse, texts), key=_place):
        found.setdefault(label.set_name, []).append(str(label))
    return found


def sets_of_accounts(scored: Mapping[str, bool]) -> dict[str, list[str]]:
    """Return the validation sets that the accounts speak of, each with its labels, as :func:`by_set` does.

    A step that is skipped before its points are known has one account with the bare name of their callable, and speaks of each of
    them: such a name is a label of all its points.

    Args:
        scored: The labels of the accounts, and whether any step was scored under each.
    """
    found = by_set(scored)
    points: dict[str, list[str]] = {}
    for name in found:
        label = Label.parse(name)
        if label.point is not None:
            points.setdefault(label.name, []).append(name)
    for name in [name for name in points if name in found and found[name] == [name] and not scored[name]]:
        del found[name]
        for point in points[name]:
            found[point].append(name)
    return found


def _place(label: Label) -> tuple[bytes, int]:
    return label.set_name.encode("utf-8", "surrogatepass"), -1 if label.point is None else label.point
