"""What the page opens with: the finding in one or two sentences, and how much of it can be trusted.

Sentences are lists of pieces, so that names, which are untrusted, stay apart from our words until the page escapes and marks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inrun.analysis.queries import CLEAR
from inrun.report.accounts import SetAccounts
from inrun.report.distribution import Distribution
from inrun.report.findings import Findings
from inrun.report.text import counted, one_line, percent
from inrun.statistics import binomial_quantile, errors_away, student_tail

#: Groups that a sentence names, and characters of a name; few steps decide a run from this part of Σ|c| on.
MOST_NAMED, MOST_NAME, MUCH = 3, 40, 0.3
#: How often samples below zero may be called clear though nothing did anything.
FALSE_SAMPLES = 0.01


@dataclass(frozen=True)
class Piece:
    """A part of a sentence; ``kind`` is "name", "good" or "bad" for names, "see" or "drop" for links, empty for our words."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Group:
    """A group of samples with its total for one validation set; ``error`` is None without folds."""

    name: str
    total: float
    samples: int
    #: Of all that is above zero; None for a total that is not.
    share: float | None
    error: float | None

    @property
    def each(self) -> float:
        """The total per sample."""
        return self.total / self.samples if self.samples else 0.0


@dataclass(frozen=True)
class Told:
    """What there is to tell of one validation set, by one column (None: there is none to group by)."""

    found: Findings
    name: str
    folds: int
    accounts: SetAccounts
    scores: Distribution | None
    column: str | None
    groups: list[Group]
    #: Whether there are lighter groups that are not named.
    gathered: bool = False

    @property
    def judged(self) -> bool:
        """Whether there are standard errors."""
        return self.scores is not None and self.scores.clear is not None

    @property
    def errors_away(self) -> float | None:
        """How many standard errors a group must be away from zero; None where nothing can say: without folds, and with two."""
        return errors_away(len(self.groups), self.folds) if self.judged else None

    @property
    def above(self) -> list[Group]:
        """Groups above zero, clear or not; the highest total first."""
        return sorted((g for g in self.groups if g.total > 0), key=lambda g: -g.total)

    @property
    def below(self) -> list[Group]:
        """Groups below zero, clear or not; the lowest total first."""
        return sorted((g for g in self.groups if g.total < 0), key=lambda g: g.total)

    @property
    def helped(self) -> list[Group]:
        """Groups above zero, clear of their error where that can be said; the highest total first."""
        return [g for g in self.above if self.clear(g)]

    @property
    def hurt(self) -> list[Group]:
        """Groups below zero, clear of their error where that can be said; the lowest total first."""
        return [g for g in self.below if self.clear(g)]

    def clear(self, group: Group) -> bool:
        """Whether a group's total is clear of its error; without three folds it has none to be clear of."""
        away = self.errors_away
        return group.total != 0 and (away is None or group.error is None or abs(group.total) > away * group.error)

    @property
    def by_chance(self) -> int:
        """How many samples could be "clear" below zero if none did anything: more are there in one run of a hundred at most.

        Each is there with Student's probability to be ``CLEAR`` errors below zero, by itself: samples that share their noise
        come and go together, and their number scatters more.
        """
        if not self.scores or not self.scores.samples or self.folds < 2:
            return 0
        return binomial_quantile(FALSE_SAMPLES, self.scores.samples, student_tail(CLEAR, self.folds - 1))

    @property
    def may_drop(self) -> bool:
        """Whether dropping what is clearly below zero is sound advice."""
        if self.scores is None or not self.found.samples_registered or self.accounts.judged.state == "coarse":
            return False
        return self.scores.clear is not None and self.scores.clear > self.by_chance


def tell(found: Findings, place: int, column: int | None) -> Told:
    """Gather what is known of a validation set, by its place, and of a column's groups for it."""
    name = list(found.sets)[place]
    scores = found.distributions[place] if found.distributions else None
    grouping = None if column is None else found.panels["groups"]["groupings"][column]
    told = one_line(name, MOST_NAME), found.sets[name], found.accounts[place], scores
    if grouping is None:
        return Told(found, *told, None, [])
    return Told(found, *told, grouping["column"], _groups(grouping, place), grouping["gathered"] > 0)


def _groups(grouping: dict[str, Any], place: int) -> list[Group]:
    rows = grouping["whole"][place]
    positive = sum(max(r["total"], 0.0) for r in rows)
    named = len(rows) - (1 if grouping["gathered"] else 0)  # what is gathered is no group
    pairs = list(zip(grouping["names"], rows, strict=True))[:named]
    return [
        Group(one_line(n, MOST_NAME), r["total"], r["samples"], r["total"] / positive if r["total"] > 0 else None, r["error"])
        for n, r in pairs
        if r["samples"]
    ]


def sentences(told: Told) -> list[list[Piece]]:
    """Return the finding: who helped and who hurt, and what to do about the samples that are below zero."""
    if told.scores is None or not told.scores.samples:
        return [[Piece("No sample was scored for "), Piece(told.name, "name"), Piece(", so there is nothing to say of them yet.")]]
    return [_of_groups(told), _below(told, told.scores)] if len(told.groups) > 1 else _of_samples(told, told.scores)


def _of_groups(told: Told) -> list[Piece]:
    helped, hurt, judged = told.helped, told.hurt, told.errors_away is not None
    which = Piece(told.name, "name")
    none = [Piece("No "), Piece(told.column or "group", "name")]
    if judged and not helped and not hurt:
        return [*none, Piece(" is clear of its error for "), which, Piece(": none clearly helped, none clearly hurt.")]
    said = _best(told, which) if helped else [*none, Piece(" clearly helped " if judged else " helped "), which]
    unsure = "" if judged or not told.judged else f"; {told.folds} folds cannot say how sure that is"
    if not hurt:
        none_of = f"of the {len(told.groups)} heaviest none" if told.gathered else "none"
        return [*said, Piece(f"; {none_of} clearly hurt it." if judged else f"; {none_of} is below zero{unsure}.")]
    named = _listed([Piece(g.name, "bad") for g in hurt], "more")
    are = "are below zero" if len(hurt) > 1 else "is below zero"
    lowest = told.below[0]
    if judged and lowest is not hurt[0]:
        said += [Piece("; "), Piece(lowest.name, "name"), Piece(" has the lowest total, but is not clear of its error")]
        return [*said, Piece("; "), *named, Piece(" clearly hurt it.")]
    return [*said, Piece("; "), *named, Piece(" hurt it." if judged else f" {are}{unsure}.")]


def _best(told: Told, which: Piece) -> list[Piece]:
    """Say who helped: "most" only of what has the highest of all totals, and is clear of its error."""
    helped, best, densest = told.helped, told.above[0], max(told.above, key=lambda g: g.each)
    judged = told.errors_away is not None
    share = f" ({percent(best.share)} of all that helped)"
    highest = [Piece(best.name, "good" if best is helped[0] else "name"), Piece(" has the highest total for "), which, Piece(share)]
    if best is not helped[0]:
        clear = _listed([Piece(g.name, "good") for g in helped], "more")
        return [*highest, Piece(", but is not clear of its error; "), *clear, Piece(" clearly helped")]
    said = [Piece(best.name, "good"), Piece(" helped "), which, Piece(f" most{share}")] if judged else highest
    # A light group that has no name here may be denser, and one that is not clear of its error is not known to be.
    if densest is best or densest not in helped or told.gathered:
        return said
    return [*said, Piece(", "), Piece(densest.name, "good"), Piece(" most per sample" if judged else " the highest per sample")]


def _of_samples(told: Told, scores: Distribution) -> list[list[Piece]]:
    """Say the same of a run without groups to compare."""
    which, every = Piece(told.name, "name"), f"Of {counted(scores.samples, 'sample')} "
    unsure = [Piece("Without folds nothing says how sure that is.")]
    if scores.clear is None:
        said = [Piece(f"{every}{scores.positive:,} lowered the loss on "), which, Piece(f", and {scores.negative:,} raised it")]
        return [[*said, *_links(told, scores.negative), Piece(".")], unsure]
    above, below = scores.helpful, scores.clear
    if not above and not below:
        return [[Piece(f"{every}none is clear of its error for "), which, Piece(": none clearly helped, none clearly hurt.")]]
    rest = scores.samples - above - below
    said = [Piece(f"{every}{above:,} clearly helped "), which, Piece(f", {below:,} clearly hurt it"), *_links(told, below)]
    chance = [[Piece("Chance alone could put as many below zero.")]] if 0 < below <= told.by_chance else []
    return [[*said, Piece(f", and {rest:,} cannot be told from zero." if rest else ".")], *chance]


def _links(told: Told, count: int) -> list[Piece]:
    if not count:
        return []
    drop = [Piece(", "), Piece("drop them", "drop")] if told.may_drop else []
    return [Piece(" ("), Piece("see them", "see"), *drop, Piece(")")]


def _below(told: Told, scores: Distribution) -> list[Piece]:
    count = scores.negative if scores.clear is None else scores.clear
    are = "is" if count == 1 else "are"
    start = f"{count:,} of {counted(scores.samples, 'sample')} {are}"
    if scores.clear is None:
        if not count:
            return [Piece("No sample is below zero; without folds nothing says how sure that is.")]
        return [Piece(f"{start} below zero ("), Piece("see them", "see"), Piece("); without folds nothing says how sure that is.")]
    if not count:
        return [Piece("No sample is clearly below zero.")]
    if count <= told.by_chance:
        words = f"{start} below zero by more than two standard errors, no more than chance alone could put there ("
        return [Piece(words), Piece("see them", "see"), Piece(").")]
    said = [Piece(f"{start} clearly below zero: "), Piece("see them", "see")]
    return [*said, *([Piece(", "), Piece("drop them", "drop")] if told.may_drop else []), Piece(".")]


def _listed(pieces: list[Piece], more: str) -> list[Piece]:
    """Return names as a list in words."""
    shown = pieces if len(pieces) <= MOST_NAMED else [*pieces[: MOST_NAMED - 1], Piece(f"{len(pieces) - MOST_NAMED + 1} {more}")]
    said: list[Piece] = []
    for k, piece in enumerate(shown):
        said += [Piece("" if not k else " and " if k == len(shown) - 1 else ", "), piece]
    return [p for p in said if p.text]


def cautions(told: Told) -> list[str]:
    """Say what the books hold against the finding, if anything; these words are ours alone."""
    judged, found = told.accounts.judged, told.found
    said = []
    if told.scores is None or not told.scores.samples:
        return []
    if judged.state == "coarse":
        said.append(
            f"Do not act on this yet: the method's error is {percent(judged.relative_residual)} of what the samples were given "
            "and taken, too coarse for these steps."
        )
    elif judged.state == "cancelling":
        times = "far more than" if judged.spread_to_fall is None else f"{judged.spread_to_fall:,.0f} times"
        said.append(
            f"Careful: what the samples were given and taken is {times} what the loss fell, so that single scores mean little."
        )
    elif judged.state == "thin":
        said.append(f"Careful: {_thin(told.accounts)}, so nothing says how far off the sums of the other steps are.")
    elif judged.state == "unmeasured":
        said.append("Careful: no audited step measured the method's error, so nothing says how far off the sums are.")
    elif judged.state == "rough":
        said.append(f"The order holds; sums are off by about {percent(judged.relative_residual)}.")
    if judged.outsized_share > MUCH:
        hold = "step holds" if judged.outsized_steps == 1 else "steps hold"
        said.append(
            f"Few steps decide here: {judged.outsized_steps:,} {hold} {percent(judged.outsized_share)} of what the samples "
            "were given and taken."
        )
    if found.pending:
        said.append(f"Credit is still coming in for {counted(found.pending, 'step')}: the scores of their samples may change.")
    return said


def _thin(accounts: SetAccounts) -> str:
    share = accounts.judged.audited_share
    if share is not None and any(not o.audited for o in accounts.judged.outsized):
        return "steps that hold an outsized part were not audited"
    held = "an unknown part" if share is None else f"only {percent(share)}"
    return f"the audited steps hold {held} of what the samples were given and taken"
