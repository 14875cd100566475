"""The summary of a validation set as a page of text."""

from __future__ import annotations

from inrun.analysis.steps import OutsizedStep
from inrun.analysis.summary import SetSummary, Summary
from inrun.analysis.verdict import GIVEN, percent
from inrun.methods import PROXY
from inrun.notebook import shown

#: Outsized steps and samples that a page names.
MOST_NAMED = 5


def page(s: SetSummary, summary: Summary) -> str:
    """Return the accounts, what they are worth, what stands out, and what to do."""
    whole = summary.method == "whole"
    lines = [heading(s, summary), *_accounts(s, summary.method)]
    if s.relative_residual is not None:
        of_fall = "" if s.residual_to_fall is None else f", |residual| / |fall| = {s.residual_to_fall:.3g}"
        lines.append(f"  |residual| / Σ|c_n| = {s.relative_residual:.3g}{of_fall}")
    if s.worst:
        named = ", ".join(f"{w.step} ({w.residual:+.2g}, {percent(w.relative)})" for w in s.worst[:3])
        lines.append(f"  largest residuals at steps {named}")
    lines += [*(f"  {line}" for line in sums(s, whole)), *(f"  {line}" for line in standing_out(s))]
    lines.append(f"  {s.verdict}")
    lines += [f"  > {line}" for line in s.advice]
    return "\n".join(lines)


def heading(s: SetSummary, summary: Summary) -> str:
    """Return what was scored, how, and over how many steps."""
    steps = f"{s.steps} step{'s' * (s.steps != 1)}"
    return f"{s.validation}: method {summary.method}, {steps}, {s.audited} audited, {s.skipped} not scored"


def _accounts(s: SetSummary, method: str) -> list[str]:
    def line(label: str, value: float | None, note: str) -> str:
        shown = "not measured" if value is None else f"{value:+.6f}"
        share = "" if value is None or not s.fall else f"{100 * value / s.fall:7.1f} %"
        return f"  {label:<10}{shown:>14}  {share:>9}  {note}"

    return [line(*account) for account in accounts_of(s, method)]


def accounts_of(s: SetSummary, method: str) -> list[tuple[str, float | None, str]]:
    """Return the accounts of a set: each with its name, its value (None: not measured) and what it is."""
    folds = "" if s.data_error is None else f", ± {s.data_error:.2g} over the folds"
    paid = (
        "parts paid to samples at these steps, for all their pushes so far"
        if method == "whole"
        else "contributions of the samples of these steps"
    )
    found = [("fall", s.fall, "of the validation loss over the audited steps"), ("data", s.data, f"{paid}{folds}")]
    if method in PROXY:
        return [*found, ("residual", s.residual, "what the method's SGD step leaves of the fall")]
    known = {
        "momentum": "the optimizer's memory: earlier samples' gradients, still at work",
        "decay": "weight decay",
        "inherited": "momentum from before scoring began",
        "rounding": "moves of entries whose gradient is only rounding error; no sample is paid for them",
    }
    found += [(key, value, note) for key, note in known.items() if (value := getattr(s, key)) is not None]
    return [*found, ("residual", s.residual, "the quadrature's error on the whole move")]


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
    lines = excess(s)
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


def excess(s: SetSummary) -> list[str]:
    """Name the tensors and samples with the largest parts of Σ|c|, where that far exceeds the fall."""
    if not s.exceeds:
        return []
    times = "far more than" if s.spread_to_fall is None else f"{s.spread_to_fall:,.0f} times"
    lines = [f"Σ|c| is {times} what the loss fell on the audited steps."]
    if s.largest_tensors:
        lines.append(f"  largest tensors: {', '.join(f'{shown(x.name, 80)} ({percent(x.share)})' for x in s.largest_tensors)}")
    if s.largest_samples:
        named = ", ".join(f"{x.sample_id} ({percent(x.share)}, {x.total:+.2g})" for x in s.largest_samples)
        lines.append(f"  largest samples: {named}")
    return lines


def step_words(o: OutsizedStep) -> str:
    """Return what there is to say of a step that stands out."""
    return f"step {o.step}: {percent(o.share)}; {'; '.join(o.why)}{'' if o.audited else '; not audited'}"


def _steps(count: int) -> str:
    return f"{count:,} scored step{'' if count == 1 else 's'}"
