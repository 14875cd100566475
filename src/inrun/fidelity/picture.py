"""The scatter of contributions against the truth, as PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inrun.errors import ConfigurationError

if TYPE_CHECKING:
    from inrun.fidelity.study import FidelityReport


def pyplot() -> Any:
    """Import matplotlib for files, without a display; an error that names the extra where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError("pictures need matplotlib: pip install inrun[plots]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_scatter(report: FidelityReport, path: str) -> None:
    """Draw one panel per method: the truth with its standard error across, the contribution up, the diagonal grey."""
    plt = pyplot()
    panels = len(report.results) + (1 if report.utility is not None else 0)
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.0 * columns, 3.8 * rows), squeeze=False, layout="constrained")
    for axis, result in zip(axes.flat, report.results, strict=False):
        truth = report.truths[result.game]
        axis.errorbar(truth.shapley, result.contributions, xerr=truth.standard_errors, fmt="o", ms=4, lw=0.8, color="#1f6f8b")
        span = [min(*truth.shapley, *result.contributions), max(*truth.shapley, *result.contributions)]
        axis.plot(span, span, color="0.7", lw=1, zorder=0)
        axis.axhline(0, color="0.9", lw=0.8, zorder=0)
        axis.axvline(0, color="0.9", lw=0.8, zorder=0)
        axis.set_title(f"{result.method}, game: {result.game}\nSpearman {result.spearman:.3f}, RMSE {result.rmse:.1e}", fontsize=10)
        axis.set_xlabel("true Shapley value", fontsize=9)
        axis.set_ylabel("contribution", fontsize=9)
        axis.ticklabel_format(style="sci", scilimits=(-2, 2))
        axis.tick_params(labelsize=8)
    if report.utility is not None:
        axis = axes.flat[len(report.results)]
        u = report.utility
        axis.plot(u.true, u.first, "o", ms=3, color="#c2571a", label=f"first order, r = {u.first_pearson:.3f}")
        axis.plot(u.true, u.second, "o", ms=3, color="#1f6f8b", label=f"second order, r = {u.second_pearson:.3f}")
        span = [min(u.true), max(u.true)]
        axis.plot(span, span, color="0.7", lw=1, zorder=0)
        axis.set_title(f"utility of {u.subsets} random subsets", fontsize=10)
        axis.set_xlabel("true utility", fontsize=9)
        axis.set_ylabel("Taylor utility", fontsize=9)
        axis.ticklabel_format(style="sci", scilimits=(-2, 2))
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8, frameon=False)
    for axis in list(axes.flat)[panels:]:
        axis.set_visible(False)
    figure.suptitle(f"step {report.step}, {report.validation}, {report.n} samples, truth: {report.evaluated}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
