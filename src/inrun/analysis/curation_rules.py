"""Rules of a curation: which samples are kept, given their scores."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.errors import ConfigurationError
from inrun.ledger.tables import Tables

Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """The scores of one validation set (or of the mean of several), one entry per registered sample; NaN where there is none."""

    score: Values
    standard_error: Values
    times_used: Values
    #: How well the score itself is known, under whole credit with sketches; NaN where nothing was estimated.
    estimate_error: Values

    @property
    def used(self) -> Mask:
        """Whether a sample has a score."""
        return self.times_used > 0

    @property
    def folds(self) -> bool:
        """Whether there are standard errors."""
        return bool(np.isfinite(self.standard_error).any())


@dataclass(frozen=True)
class CurationRule:
    """What is kept, in words and as a function of the scores of one set (and of all, for ``score.NAME``)."""

    words: str
    keep: Callable[[Judged, dict[str, Judged]], Mask]
    #: Sets that the rule names itself.
    names: tuple[str, ...] = ()


def column_values(tables: Tables, name: str) -> npt.NDArray[Any]:
    """Return a metadata column as texts (None where it is empty), one entry per registered sample."""
    table = tables.table(f"SELECT sample_id, {tables.column(name)}::VARCHAR AS kind FROM samples")
    values = np.array([*table["kind"].to_pylist(), None], dtype=object)[:-1]
    keep = np.sort(np.unique(table["sample_id"].to_numpy(), return_index=True)[1])
    return values[keep]


def make_rule(tables: Tables, keep: str | None, top_fraction: float | None, quota: Sequence[str], z: float) -> CurationRule:
    """Return the rule that was asked for; the default drops what is clear of its error below zero."""
    if keep is not None:
        return parse_rule(keep)
    if top_fraction is not None:
        share = _fraction(top_fraction, f"top fraction {top_fraction!r}")

        def best(j: Judged, _: dict[str, Judged]) -> Mask:
            return _without(len(j.score), [_top(j, share, np.arange(len(j.score)))])

        return CurationRule(f"kept is a share of {share:.6g} of the scored samples, those with the highest scores", best)
    if quota:
        return _quota_rule(tables, quota)

    return significance_rule(z)


def significance_rule(z: float) -> CurationRule:
    """Return the rule that drops what is clear of its error below zero."""

    def clear(j: Judged, _: dict[str, Judged]) -> Mask:
        # A score that is smaller than the error it was estimated with has no sign to judge by, with folds or without.
        margin = np.maximum(z * np.nan_to_num(j.standard_error), np.nan_to_num(j.estimate_error))
        return ~(j.score + margin < 0)

    return CurationRule(
        f"dropped is what scores below zero by more than {z:g} standard errors (without folds, what scores below zero), and by "
        "more than the estimate_error of the score, if it has one",
        clear,
    )


def _fraction(text: Any, what: str) -> float:
    try:
        share = float(text)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigurationError(f"{what} is not a number from 0 to 1")
    return share


def _top(j: Judged, share: float, among: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return which of some samples are not in the best ``share`` (rounded up); ties go to those registered first."""
    scored = among[j.used[among]]
    count = min(len(scored), math.ceil(share * len(scored) - 1e-9))
    return scored[np.argsort(-j.score[scored], kind="stable")[count:]]


def _without(count: int, dropped: list[npt.NDArray[np.intp]]) -> Mask:
    keep = np.ones(count, bool)
    for places in dropped:
        keep[places] = False
    return keep


def _quota_rule(tables: Tables, quota: Sequence[str]) -> CurationRule:
    column: str | None = None
    general: float | None = None
    special: dict[str | None, float] = {}
    for given in quota:
        head, equals, share = given.rpartition("=")
        name, colon, value = (head, "", "") if head in tables.columns else head.partition(":")
        if not equals or not name or column not in (None, name):
            raise ConfigurationError(f"quota {given!r} is not COLUMN=FRACTION or COLUMN:VALUE=FRACTION, with one column for all")
        column = name
        if colon:
            special[value] = _fraction(share, f"quota {given!r}: {share!r}")
        else:
            general = _fraction(share, f"quota {given!r}: {share!r}")
    assert column is not None
    kinds = column_values(tables, column)
    unknown = list(special.keys() - set(kinds.tolist()))
    if unknown:
        raise ConfigurationError(f"quota: no sample has {unknown[0]!r} in column {column!r}")

    members: dict[str | None, list[int]] = {}
    for place, kind in enumerate(kinds.tolist()):
        members.setdefault(kind, []).append(place)

    def keep(j: Judged, _: dict[str, Judged]) -> Mask:
        wanted = {kind: special.get(kind, general) for kind in members}
        dropped = [_top(j, share, np.array(members[kind])) for kind, share in wanted.items() if share is not None]
        return _without(len(kinds), dropped)

    words = [] if general is None else [f"{general:g} of the scored samples of every {column!r}"]
    words += [f"{share:g} of {column!r} {value!r}" for value, share in special.items()]
    return CurationRule(f"kept are those with the highest scores: {', '.join(words)}", keep)


_TOKEN = re.compile(
    r"\s*(?:(?P<op><=|>=|==|!=|<|>)|(?P<par>[()])|(?P<word>(?:and|or)\b)"
    r"|(?P<column>score|standard_error|estimate_error|times_used)(?:\.(?:\"(?P<quoted>[^\"]*)\"|(?P<name>[^\s<>=!()\"]+)))?(?=[\s<>=!()]|$)"
    r"|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?=[\s<>=!()]|$))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def parse_rule(text: str) -> CurationRule:
    """Read a rule: ``COLUMN OP NUMBER``, joined by ``and`` and ``or`` (``and`` binds closer), with parentheses.

    Columns are ``score``, ``standard_error``, ``estimate_error`` and ``times_used`` of the set that is judged, or of a certain
    one: ``score.math``, ``score."odd name"``. A comparison with a value that is missing is false.
    """
    tokens = list(_tokens(text))
    names: list[str] = []
    rule, rest = _either(tokens, names, text, 0)
    if rest:
        raise _bad_rule(text, f"{rest[0].group().strip()!r} is left over")
    return CurationRule(f"kept is what fulfils {text.strip()!r}", rule, tuple(dict.fromkeys(names)))


def _bad_rule(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the rule {text!r} cannot be read: {why}. Accepted is for example 'score > 0 and times_used >= 2' with the columns score, "
        "standard_error, estimate_error, times_used, or score.NAME of a validation set"
    )


def _tokens(text: str) -> Iterator[re.Match[str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _bad_rule(text, f"{text[at:].strip()[:40]!r} is not understood")
        yield token
        at = token.end()


Keep = Callable[[Judged, dict[str, Judged]], Mask]
Tokens = list[re.Match[str]]


def _either(tokens: Tokens, names: list[str], text: str, depth: int) -> tuple[Keep, Tokens]:
    left, tokens = _every(tokens, names, text, depth)
    while tokens and tokens[0]["word"] == "or":
        right, tokens = _every(tokens[1:], names, text, depth)
        left = _join(operator.or_, left, right)
    return left, tokens


def _every(tokens: Tokens, names: list[str], text: str, depth: int) -> tuple[Keep, Tokens]:
    left, tokens = _term(tokens, names, text, depth)
    while tokens and tokens[0]["word"] == "and":
        right, tokens = _term(tokens[1:], names, text, depth)
        left = _join(operator.and_, left, right)
    return left, tokens


def _join(how: Callable[[Any, Any], Any], left: Keep, right: Keep) -> Keep:
    return lambda j, sets: how(left(j, sets), right(j, sets))


def _term(tokens: Tokens, names: list[str], text: str, depth: int) -> tuple[Keep, Tokens]:
    if depth > 50:
        raise _bad_rule(text, "it is nested too deep")
    if tokens and tokens[0]["par"] == "(":
        inner, tokens = _either(tokens[1:], names, text, depth + 1)
        if not tokens or tokens[0]["par"] != ")":
            raise _bad_rule(text, "a parenthesis is not closed")
        return inner, tokens[1:]
    if len(tokens) < 3 or not (tokens[0]["column"] and tokens[1]["op"] and tokens[2]["number"]):
        raise _bad_rule(
            text, "expected COLUMN OPERATOR NUMBER" + (f" at {tokens[0].group().strip()!r}" if tokens else " at its end")
        )
    quoted_name, plain_name = tokens[0]["quoted"], tokens[0]["name"]
    name = plain_name if quoted_name is None else quoted_name
    if name is not None:
        names.append(name)
    compare = _comparison(tokens[0]["column"], name, _COMPARE[tokens[1]["op"]], float(tokens[2]["number"]))
    return compare, tokens[3:]


def _comparison(column: str, name: str | None, compare: Callable[[Any, Any], Any], number: float) -> Keep:
    def keep(j: Judged, sets: dict[str, Judged]) -> Mask:
        judged = j if name is None else sets[name]
        if column == "standard_error" and not judged.folds:
            raise ConfigurationError("the rule asks for standard_error, and the validation set has none: it is not in folds")
        if column == "estimate_error" and not np.isfinite(judged.estimate_error).any():
            raise ConfigurationError("the rule asks for estimate_error, and nothing was estimated: only whole credit has it")
        values = getattr(judged, column)
        return np.asarray(compare(values, number) & ~np.isnan(values), bool)

    return keep
