"""The three cards under the finding: what helped, what hurt, how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, field

from inrun.analysis.verdict import GIVEN
from inrun.report.finding import Group, Told
from inrun.report.text import counted, number, percent, signed

#: Groups that a card names.
MOST_ROWS = 3
#: The verdict on the books in a few words.
STATES = {
    "balanced": "The books balance",
    "rough": "The order holds, sums are rough",
    "coarse": "Too coarse to act on",
    "cancelling": "Scores nearly cancel",
    "thin": "Too little audited to say",
    "unmeasured": "Not audited",
    "nothing": "Nothing to judge",
}
MOODS = {"balanced": "good", "coarse": "bad", "cancelling": "bad"}


@dataclass(frozen=True)
class Row:
    """A line of a card: a name, a figure, and what it is."""

    name: str
    figure: str
    note: str


@dataclass(frozen=True)
class FindingCard:
    """A card: what it says in a few words (a name where ``named``), its rows, and a closing note; ``mood`` is "good" or "bad"."""

    title: str
    value: str
    mood: str = ""
    named: bool = False
    rows: list[Row] = field(default_factory=list)
    note: str = ""
    #: Whether it leads to the lowest samples, and to the command that drops them.
    see: bool = False
    drop: bool = False


def finding_cards(told: Told) -> list[FindingCard]:
    """Return the three cards of a validation set and a column."""
    if told.scores is None or not told.scores.samples:
        return []
    return [_helped(told), _hurt(told), _sure(told)]


def _helped(told: Told) -> FindingCard:
    scores = told.scores
    assert scores is not None
    judged = scores.clear is not None
    above = scores.helpful if judged else scores.positive
    note = f"{above:,} of {counted(scores.samples, 'sample')} {'clearly ' if judged else ''}above zero"
    return _side("What helped", "good", told, told.helped, told.above, above, note)


def _hurt(told: Told) -> FindingCard:
    scores = told.scores
    assert scores is not None
    below = scores.negative if scores.clear is None else scores.clear
    note = f"{below:,} of {counted(scores.samples, 'sample')} {'clearly ' if scores.clear is not None else ''}below zero"
    return _side("What hurt", "bad", told, told.hurt, told.below, below, note)


def _side(title: str, mood: str, told: Told, groups: list[Group], every: list[Group], count: int, note: str) -> FindingCard:
    """Make a card of the groups that are clear, and of the first of all of them where that is another one."""
    rows = [Row(g.name, _total(g), _about(g)) for g in groups[:MOST_ROWS]]
    if every and every[0] not in groups:
        which = "highest" if mood == "good" else "lowest"
        rows.append(Row(every[0].name, _total(every[0]), f"the {which} total, not clear of its error"))
    see = mood == "bad" and count > 0
    drop = see and told.may_drop
    if len(told.groups) > 1:
        if len(groups) > MOST_ROWS:
            note = f"and {len(groups) - MOST_ROWS:,} more; {note}"
        value = groups[0].name if groups else "no group" + (" clearly" if told.errors_away is not None else "")
        return FindingCard(title, value, mood if groups else "", bool(groups), rows, note, see, drop)
    value = counted(count, "sample") if count else "no sample" + (" clearly" if told.judged else "")
    return FindingCard(title, value, mood if count else "", False, [], note, see, drop)


def _total(group: Group) -> str:
    return signed(group.total) + ("" if group.error is None else f" ± {number(group.error, 2)}")


def _about(group: Group) -> str:
    share = "" if group.share is None else f"{percent(group.share)} of all that helped, "
    return f"{share}{signed(group.each)} a sample"


def _sure(told: Told) -> FindingCard:
    judged, scores = told.accounts.judged, told.scores
    assert scores is not None
    rows = []
    if told.accounts.audited and judged.relative_residual is not None:
        held = "" if judged.audited_share is None else f", which hold {percent(judged.audited_share)} of {GIVEN}"
        where = f"on {told.accounts.audited:,} audited of {counted(told.accounts.steps, 'step')}{held}"
        of_fall = "" if judged.residual_to_fall is None else f"{percent(judged.residual_to_fall)} of the fall, "
        rows.append(Row("Method's error", percent(judged.relative_residual), f"{of_fall}{where}"))
    else:
        rows.append(Row("Method's error", "not measured", "audit_every= measures it while training"))
    if scores.clear is None:
        rows.append(Row("Scores", "no error known", "needs folds: inrun.folds(validation, k)"))
    else:
        clear = scores.helpful + scores.clear
        chance = f"; if no sample did anything, chance could still put {told.by_chance:,} clearly below zero"
        note = f"of the samples are more than two standard errors from zero ({told.folds} folds){chance}"
        rows.append(Row("Scores", percent(clear / scores.samples), note))
    if told.found.pending:
        rows.append(Row("Credit", "still coming in", f"for {counted(told.found.pending, 'step')}"))
    return FindingCard("How sure", STATES[judged.state], MOODS.get(judged.state, ""), False, rows)
