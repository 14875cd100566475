"""The summary of a validation set as a page of text."""

from __future__ import annotations

from inrun.analysis.steps import OutsizedStep
from inrun.analysis.summary import SetSummary, Summary
from inrun.analysis.verdict import GIVEN, percent

#: Outsized steps and samples that a page names.
MOST_NAMED = 5


def page(s: SetSummary, summary: Summary) -> str:
    """Return the accounts, what they are worth, what stands out, and what to do."""
    whole = summary.credit == "whole"
    lines = [heading(s, summary), *_accounts(s, whole)]
    if s.relative_residual is not None:
        lines.append(f"  |residual| / Σ|c_n| = {s.relative_residual:.3g}")
    if s.worst:
        named = ", ".join(f"{w.step} ({w.residual:+.2g}, {percent(w.relative)})" for w in s.worst[:3])
        lines.append(f"  largest residuals at steps {named}")
    lines += [*(f"  {line}" for line in sums(s, whole)), *(f"  {line}" for line in standing_out(s))]
    lines.append(f"  {s.verdict}")
    lines += [f"  > {line}" for line in s.advice]
    return "\n".join(lines)


def heading(s: SetSummary, summary: Summary) -> str:
    """Return what was scored, how, and over how many steps."""
    game = "whole credit, " if summary.credit == "whole" else ""
    steps = f"{s.steps} step{'s' * (s.steps != 1)}"
    return f"{s.validation}: {game}{summary.method}+{summary.update}, {steps}, {s.audited} audited, {s.skipped} not scored"


def _accounts(s: SetSummary, whole: bool) -> list[str]:
    def line(label: str, value: float | None, note: str) -> str:
        shown = "not measured" if value is None else f"{value:+.6f}"
        share = "" if value is None or not s.fall else f"{100 * value / s.fall:7.1f} %"
        return f"  {label:<10}{shown:>14}  {share:>9}  {note}"

    return [line(*account) for account in accounts_of(s, whole)]


def accounts_of(s: SetSummary, whole: bool) -> list[tuple[str, float | None, str]]:
    """Return the accounts of a set: each with its name, its value (None: not measured) and what it is."""
    folds = "" if s.data_error is None else f", ± {s.data_error:.2g} over the folds"
    paid = (
        "parts paid to samples at these steps, for all their pushes so far"
        if whole
        else "contributions of the samples of these steps"
    )
    found = [("fall", s.fall, "of the validation loss over the audited steps"), ("data", s.data, f"{paid}{folds}")]
    if whole:
        rest = [("decay", s.decay, "weight decay"), ("inherited", s.inherited, "momentum from before scoring began")]
    elif s.momentum is not None and s.decay is not None:
        rest = [("momentum", s.momentum, "the optimizer's memory: earlier samples' gradients, still at work")]
        rest.append(("decay", s.decay, "weight decay"))
    else:
        rest = [("optimizer", s.optimizer, "momentum and decay: what a step does without its gradient")]
    error = "the quadrature's error on the whole move" if whole else "the method's own error on the data's part of the move"
    return [*found, *rest, ("residual", s.residual, error)]


def sums(s: SetSummary, whole: bool) -> list[str]:
    """Say what the scores add up to beside the fall that was measured, and how much of Σ|c| that speaks of."""
    scored = s.steps - s.skipped
    if s.scores_sum is None or not scored:
        return []
    what = "credits" if whole else "contributions"
    if not s.audited:
        return [
            f"The {what} of {_steps(scored)} add up to {s.scores_sum:+.4g}; no step was audited, so no fall was measured beside it."
        ]
    beside = f"{s.data:+.4g} beside a measured fall of {s.fall:+.4g}"
    if s.audited >= scored:
        return [f"The {what} add up to {beside}, over all {_steps(scored)}."]
    held = "an unknown part" if s.audited_share is None else percent(s.audited_share)
    return [
        f"The {what} of all {_steps(scored)} add up to {s.scores_sum:+.4g}; on the {s.audited} audited ones they are {beside}. "
        f"Those hold {held} of {GIVEN} (Σ|c|)."
    ]


def standing_out(s: SetSummary, named: int = MOST_NAMED) -> list[str]:
    """Name the steps and samples that hold an outsized part of Σ|c|, with their share and why."""
    lines = []
    if s.outsized:
        hold = "holds" if s.outsized_steps == 1 else "hold"
        lines.append(f"{s.outsized_steps:,} of {_steps(s.steps - s.skipped)} {hold} {percent(s.outsized_share)} of {GIVEN}:")
        lines += [f"  {step_words(o)}" for o in s.outsized[:named]]
        if s.outsized_steps > named:
            lines.append(f"  and {s.outsized_steps - named:,} more")
    if s.top_share is not None and s.steps - s.skipped > 1:
        hold, of = "holds" if s.top_steps == 1 else "hold", "it" if s.outsized else GIVEN
        lines.append(f"The top 3 % of steps ({s.top_steps:,}) {hold} {percent(s.top_share)} of {of}.")
    if s.samples:
        lines.append("Single samples that hold an outsized part:")
        lines += [f"  sample {o.sample_id}: {percent(o.share)}, {o.total:+.2g}; {'; '.join(o.why)}" for o in s.samples[:named]]
        if len(s.samples) > named:
            lines.append(f"  and {len(s.samples) - named} more")
    return lines


def step_words(o: OutsizedStep) -> str:
    """Return what there is to say of a step that stands out."""
    return f"step {o.step}: {percent(o.share)}; {'; '.join(o.why)}{'' if o.audited else '; not audited'}"


def _steps(count: int) -> str:
    return f"{count:,} scored step{'' if count == 1 else 's'}"
