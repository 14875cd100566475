"""What a request may ask for: columns by their names, filters, a search. Everything is checked; values are only ever bound.

A column is named ``id``, ``c:NAME`` (metadata), ``s:MEASURE`` (of the chosen set) or ``s:MEASURE:SET``, or ``mark``. Names are
looked up in the snapshot; what stands in SQL is our own name for the column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inrun.errors import ConfigurationError
from inrun.explorer.snapshot import View
from inrun.explorer.sums import MEASURES

#: Filters of one question, and characters of a search.
MOST_FILTERS, MOST_SEARCH = 12, 400
#: SQL of what a filter asks of column {c}, with the value {v}.
TEXT_TESTS = {
    "is": "{c} = {v}",
    "not": "{c} IS DISTINCT FROM {v}",
    "has": "contains(lower({c}), lower({v}))",
    "empty": "({c} IS NULL OR {c} = '')",
    "filled": "({c} IS NOT NULL AND {c} <> '')",
}
NUMBER_TESTS = {
    "is": "{c} = {v}",
    "not": "{c} IS DISTINCT FROM {v}",
    "lt": "{c} < {v}",
    "le": "{c} <= {v}",
    "gt": "{c} > {v}",
    "ge": "{c} >= {v}",
    "empty": "{c} IS NULL",
    "filled": "{c} IS NOT NULL",
}
_NUMBERS = (
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "HUGEINT",
    "UTINYINT",
    "USMALLINT",
    "UINTEGER",
    "UBIGINT",
    "FLOAT",
    "DOUBLE",
)


def kind_of(duckdb_type: str) -> str:
    """Return what a type is to people: "number" or "text" (dates and truth values are compared as texts)."""
    return "number" if duckdb_type in _NUMBERS or duckdb_type.startswith("DECIMAL") else "text"


@dataclass(frozen=True)
class Named:
    """A column that was asked for."""

    sql: str
    kind: str


def set_place(view: View, name: str | None) -> int:
    """Return the number of a validation set; the first if none is named. ConfigurationError if there is no such set."""
    if name is None:
        if not view.sets:
            raise ConfigurationError("the run has no scores yet")
        return 0
    if name not in view.sets:
        raise ConfigurationError("there is no such validation set")
    return view.sets.index(name)


def column(view: View, asked: str, place: int | None) -> Named:
    """Look a column up; ConfigurationError if there is none of that name."""
    if asked == "id":
        return Named("sample_id", "number")
    head, _, name = asked.partition(":")
    if head == "c":
        for known in view.columns:
            if known.name == name:
                kind = kind_of(known.kind)
                return Named(known.here if kind == "number" or known.kind == "VARCHAR" else f"{known.here}::VARCHAR", kind)
    elif head == "s":
        measure, _, of_set = name.partition(":")
        if measure in MEASURES:
            number = set_place(view, of_set) if of_set else place
            if number is not None:
                return Named(f"{measure}_{number}", "number")
    raise ConfigurationError("there is no such column")


@dataclass
class Question:
    """Conditions on ``items`` in SQL, with the values bound to them."""

    clauses: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def bind(self, value: Any) -> str:
        """Bind a value; return its name in SQL. ConfigurationError for a text that is none."""
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigurationError("a text holds half a character (a lone surrogate)")
        key = f"q{len(self.values)}_"
        self.values[key] = value
        return f"${key}"

    @property
    def where(self) -> str:
        """Return the condition; empty if there is none."""
        return " WHERE " + " AND ".join(f"({c})" for c in self.clauses) if self.clauses else ""


def question(view: View, place: int | None, asked: Mapping[str, str], marks: Mapping[int, str]) -> Question:
    """Read ``search`` and ``filters`` of a request.

    Args:
        view: The snapshot.
        place: The chosen validation set.
        asked: The request's parameters; ``filters`` is JSON, a list of ``[column, test, value]``.
        marks: What is marked, for filters by mark.
    """
    found = Question()
    search = asked.get("search", "").strip()
    if len(search) > MOST_SEARCH:
        raise ConfigurationError(f"the search is longer than {MOST_SEARCH} characters")
    if search:
        found.clauses.append(f"contains(hay, lower({found.bind(search)}))")
    for given in _filters(asked.get("filters", "")):
        name, test, value = given
        if name == "mark":
            found.clauses.append(_marked(found, test, value, marks))
            continue
        known = column(view, name, place)
        tests = NUMBER_TESTS if known.kind == "number" else TEXT_TESTS
        if test not in tests:
            raise ConfigurationError(f"there is no such test; accepted are {', '.join(tests)}")
        if "{v}" not in tests[test]:
            found.clauses.append(tests[test].format(c=known.sql))
            continue
        bound = found.bind(_number(value) if known.kind == "number" else value[:10_000])
        found.clauses.append(tests[test].format(c=known.sql, v=bound))
    return found


def _filters(text: str) -> list[list[str]]:
    try:
        given = json.loads(text) if text else []
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list) or len(given) > MOST_FILTERS:
        raise ConfigurationError(f"filters are a JSON list of at most {MOST_FILTERS}")
    for entry in given:
        if not (isinstance(entry, list) and len(entry) == 3 and all(isinstance(x, str) for x in entry)):
            raise ConfigurationError("a filter is [column, test, value], three texts")
    return given


def _number(text: str) -> float | int:
    try:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError
        exact = text.strip().lstrip("+-").isdecimal() and abs(value) < 2**62
        return int(text) if exact else value
    except ValueError:
        raise ConfigurationError("a filter on a number needs a number") from None


def _marked(found: Question, test: str, value: str, marks: Mapping[int, str]) -> str:
    if test != "is":
        raise ConfigurationError("a filter on marks is [mark, is, NAME]; `any` and `none` are names, too")
    wanted = [n for n, mark in marks.items() if value in ("any", "none", mark)]
    inside = f"sample_id IN (SELECT unnest({found.bind(wanted)}::BIGINT[]))"
    return f"NOT {inside}" if value == "none" else inside
