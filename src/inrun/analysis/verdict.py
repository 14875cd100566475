"""What the books of a run mean, in plain words, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inrun.methods import PROXY

if TYPE_CHECKING:
    from inrun.analysis.summary import SetSummary

#: |residual| / Σ|c_n| below which the books balance, and above which the method is too coarse for the steps taken.
BALANCED, COARSE = 0.01, 0.10
#: Audited steps speak for a run if they hold more than this part of Σ|c_n|, or if there are so many of them, and no stretch without
#: any is that part of the run.
MOST, LEAST_AUDITS = 0.5, 8
#: Σ|c_n| is far more than the loss fell from so many times on.
EXCESS = 100.0
#: Momentum is much of a fall from this part of it on.
MUCH = 0.5
GIVEN = "what the samples were given and taken"
#: The story of whole credit in a line.
WHOLE_STORY = "every push belongs to a sample, and the samples' credits add up to what the model learned"


def far_exceeds(spread: float, falls: float, losses: float) -> bool:
    """Whether Σ|c_n| is far more than the loss fell, over steps with Σ|fall| and Σ|loss|. Float32 shows no smaller falls."""
    return spread > EXCESS * max(falls, 1e-6 * losses)


@dataclass(frozen=True)
class Verdict:
    """A judgement.

    ``state`` is "balanced", "rough", "coarse", "cancelling" (Σ|c| far exceeds the fall), "thin" (too little was audited),
    "unmeasured" or "nothing".
    """

    state: str
    #: The judgement in a few words, for a card or a table.
    short: str
    words: str


def judge(s: SetSummary, method: str) -> Verdict:
    """Say in plain words what the books of a set are worth."""
    relative, share = s.relative_residual, s.audited_share
    if relative is None and s.audited and share is None and s.residual is not None:
        return Verdict(
            "nothing", "no sample was given or taken anything", "No sample was given or taken anything on the audited steps."
        )
    if relative is None:
        words = "No audited step measured the residual, so nothing says how far the method is off."
        return Verdict("unmeasured", "no audited step measured the residual", words)
    of_fall = "" if s.residual_to_fall is None else f" and {percent(s.residual_to_fall)} of the fall"
    size = f"The residual is {percent(relative)} of {GIVEN}{of_fall}"
    if share != 1.0:
        size += " on the audited steps" + ("" if share is None else f", which hold {percent(share)} of that over the run")
    if relative > COARSE:
        what = "the quadrature is too coarse for steps of this size"
        if method in PROXY:
            what = f'the SGD step that method="{method}" assumes is not the step that was taken'
        return Verdict("coarse", "too coarse for these steps", f"{size}: {what}.")
    if s.exceeds:
        times = "far more than" if s.spread_to_fall is None else f"{s.spread_to_fall:,.0f} times"
        words = f"{GIVEN[0].upper()}{GIVEN[1:]} is {times} what the loss fell: the scores nearly cancel. {size}."
        return Verdict("cancelling", f"scores nearly cancel: Σ|c| is {times} the fall", words)
    if not s.sampled and (share is None or share <= MOST):
        known = "an unknown part" if share is None else percent(share)
        words = f"The audited steps hold {known} of {GIVEN}: too little to judge. On them the residual is {percent(relative)}."
        return Verdict("thin", f"on steps that hold {known} of Σ|c|, too little to judge", words)
    unseen = [o for o in s.outsized if not o.audited]
    if unseen:
        words = f"{size}. Too little to judge: not audited were outsized steps that hold {percent(sum(o.share for o in unseen))}."
        return Verdict("thin", "outsized steps were not audited, too little to judge", words)
    if relative <= BALANCED:
        yet = f" Yet outsized steps hold {percent(s.outsized_share)} of Σ|c|." if s.outsized else ""
        return Verdict("balanced", "the books balance", f"{size}: the books balance.{yet}")
    return Verdict("rough", "ranks hold, sums are rough", f"{size}: ranks hold, sums are off by about that much.")


def advise(s: SetSummary, state: str, method: str) -> list[str]:
    """Say what to do about it, the most useful first; nothing for calm books that balance."""
    found = []
    if state in ("thin", "unmeasured"):
        found.append("Audit more often (audit_every=1 audits every step; of `inrun train`, scoring.audit_every=1).")
    if state in ("rough", "coarse"):
        found.append(advice(method))
    if s.exceeds:
        found.append(
            "Look at the tensors that are named: where their gradients are noise, leave them out (parameters=); where samples pull "
            "against each other, order samples by score and do not read single scores as parts of the fall."
        )
    if s.outsized:
        found.append("Rank samples by the rank view (--view rank), in which every step counts the same.")
        early = sum(o.share for o in s.outsized if any("first steps" in w for w in o.why))
        late = s.outsized_share - early
        cures = [cure for cure, held in (("a lower learning rate", late), ("a longer warm-up", early)) if held > 0]
        found.append(f"Train with {' and '.join(cures)}, so that a few rough steps do not decide the scores.")
    elif s.samples:
        found.append("Rank samples by the rank view (--view rank), in which no use counts for more than its place in its step.")
    if any("outlier" in sample.why[0] for sample in s.samples or []):
        found.append("Look at the samples that are named: broken or very long texts, wrong labels, copies in one batch.")
    if s.momentum is not None and abs(s.momentum) > MUCH * abs(s.fall):
        found.append(
            'Score by method="whole": momentum is much of the fall here; it is earlier samples\' pushes, which whole credit pays.'
        )
    return found


def advice(method: str) -> str:
    """Say what makes the residual smaller."""
    if method in PROXY:
        return 'Score by method="whole" or "step", which share out the step that the optimizer really took.'
    return "Train with a smaller learning rate."


def percent(share: float) -> str:
    """Return a share with two digits: 0.055 %, 3.1 %, 66 %, 214 %."""
    shown = 100 * share
    if 0 < abs(shown) < 0.001:
        return "less than 0.001 %"
    return f"{shown:.0f} %" if abs(shown) >= 99.5 else f"{shown:.2g} %"
