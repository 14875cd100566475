"""Draw the pictures of docs/mathematics.md. Every number in them is computed here, from a small problem or from a run.

python docs/figures/mathematics.py RUN      # the run of the tutorial on domains and skills
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from style import BAD, GOOD, INK, LINE, MUTED, REST, save

import inrun

#: A validation loss of two weights, curved and tilted.
H = np.array([[1.0, 0.45], [0.45, 1.6]])
BEST = np.array([2.1, 0.7])
#: Where the step begins, and the pushes of four samples.
START = np.array([-0.9, -0.55])
PUSHES = {"a": (0.6, -0.38), "b": (0.95, 0.12), "c": (0.42, 0.85), "d": (-0.55, 0.12)}


def loss(w: Any) -> Any:
    """Return the validation loss at weights ``[..., 2]``."""
    d = np.asarray(w) - BEST
    return 0.5 * np.einsum("...i,ij,...j->...", d, H, d)


def gradient(w: Any) -> Any:
    """Return its gradient."""
    return (np.asarray(w) - BEST) @ H


def one_step() -> None:
    """Draw a step as its samples' pushes, over the level lines of the validation loss, beside what each is paid."""
    figure, (ax, bars) = plt.subplots(1, 2, figsize=(9.4, 3.9), width_ratios=[1.5, 1], layout="constrained")
    x, y = np.meshgrid(np.linspace(-1.5, 2.6, 200), np.linspace(-1.15, 1.45, 200))
    ax.contour(x, y, loss(np.stack([x, y], -1)), levels=14, colors=[LINE], linewidths=1)
    ax.plot(*BEST, marker="*", ms=12, color=REST)
    ax.text(BEST[0], BEST[1] + 0.13, "lowest validation loss", ha="center", color=MUTED, fontsize=9)
    move = sum(np.array(p) for p in PUSHES.values())
    mean = gradient(START + move / 2)  # of a quadratic loss, the mean along the move exactly
    at, paid = START.copy(), {}
    for name, push in PUSHES.items():
        paid[name] = -float(np.dot(push, mean))
        colour = GOOD if paid[name] > 0 else BAD
        ax.annotate("", at + push, at, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0})
        middle = at + np.array(push) / 2
        aside = np.array([push[1], -push[0]]) / np.linalg.norm(push) * 0.14
        ax.text(*(middle + aside), name, color=colour, fontweight="bold", ha="center", va="center")
        at = at + push
    ax.annotate(
        "", at, START, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4, "ls": (0, (4, 3)), "shrinkA": 0, "shrinkB": 0}
    )
    ax.plot(*START, "o", color=INK, ms=5)
    ax.text(START[0] - 0.06, START[1] - 0.08, "w", ha="right", va="top", fontsize=12)
    ax.text(at[0] - 0.08, at[1] + 0.02, "w′", va="center", ha="right", fontsize=12)
    ax.set(xticks=[], yticks=[], xlabel="a weight", ylabel="another weight", aspect="equal")
    fall = float(loss(START) - loss(at))
    assert abs(sum(paid.values()) - fall) < 1e-9
    names = [*paid, "fall"]
    values = [*paid.values(), fall]
    colours = [GOOD if v > 0 else BAD for v in paid.values()] + [INK]
    bars.barh(range(5), values, color=colours, height=0.62)
    for place, value in enumerate(values):
        shift, side = (0.05, "left") if value > 0 else (-0.05, "right")
        bars.text(value + shift, place, f"{value:+.2f}".replace("-", "−"), va="center", ha=side, color=MUTED)
    bars.axvline(0, color=REST, lw=1)
    bars.set_yticks(range(5), [*(f"sample {name}" for name in paid), "all: the fall"])
    bars.get_yticklabels()[-1].set_fontweight("bold")
    bars.set(xticks=[], xlim=(min(values) - 1.5, max(values) + 1.2), ylim=(4.6, -0.6))
    bars.spines[["left", "bottom"]].set_visible(False)
    bars.tick_params(length=0)
    bars.set_title("what each is paid", loc="left", fontsize=10, color=MUTED)
    print(names, save(figure, "math-one-step.png"))


def along_the_move() -> None:
    """Draw the loss along a move, and what the slope at its start, its middle and all along it say of the fall."""
    s = np.linspace(0, 1, 200)
    curve = 1.6 - 1.3 * s + 0.9 * s**2 - 0.16 * s**3

    def at(t: float) -> float:
        return float(np.interp(t, s, curve))

    def slope(t: float) -> float:
        return (at(min(t + 0.003, 1)) - at(max(t - 0.003, 0))) / (min(t + 0.003, 1) - max(t - 0.003, 0))

    figure, ax = plt.subplots(figsize=(7.2, 3.5), layout="constrained")
    ax.plot(s, curve, color=INK, lw=2.2)
    for t, colour, words in ((0.0, BAD, "slope at the start (first)"), (0.5, GOOD, "slope in the middle (whole, step)")):
        fall = -slope(t)
        ax.plot([0, 1], [at(0), at(0) - fall], color=colour, lw=1.6, ls=(0, (5, 3)))
        ax.plot(1, at(0) - fall, "o", color=colour, ms=6)
        ax.text(1.03, at(0) - fall + (0.07 if t else 0), f"{words}: {fall:.2f}", va="center", color=colour)
    ax.plot([0, 1], [at(0), at(1)], "o", color=INK, ms=6)
    ax.text(1.03, at(1) - 0.02, f"the fall: {at(0) - at(1):.2f}", va="center", fontweight="bold")
    ax.plot(0.5, at(0.5), "o", color=GOOD, ms=6)
    ax.set(
        xlim=(-0.04, 1.02), xticks=[0, 0.5, 1], xlabel="how far along the move of this step", ylabel="validation loss", yticks=[]
    )
    ax.set_xticklabels(["w", "the middle", "w′"])
    print(save(figure, "math-along-the-move.png"))


def late_pushes() -> None:
    """Draw how Adam lets one gradient through: at once, later, and in all."""
    beta, steps = 0.9, 60
    kappa = (1 - beta) * beta ** np.arange(steps)
    spent = np.cumsum(kappa)
    window = int(np.argmax(spent >= 0.99)) + 1
    figure, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    ax.bar(range(steps), kappa, color=[BAD] + [GOOD] * (steps - 1), width=0.8)
    ax.set(xlabel="steps after the sample was used", ylabel="part of its push", xlim=(-1, steps), ylim=(0, 0.112))
    ax.text(1.2, 0.0965, 'a tenth at once: all that method="step" pays', color=BAD, va="center")
    ax.text(9.5, 0.063, "the rest later, through momentum:\nwhole credit follows it", color=GOOD, va="center")
    ax.axvline(window - 0.5, color=MUTED, lw=1, ls=(0, (4, 3)), ymax=0.42)
    ax.text(window - 0.5, 0.052, f"99 % spent after {window} steps:\nthe use is settled", color=MUTED, ha="center", va="center")
    print(window, save(figure, "math-late-pushes.png"))


def books(run: Path, name: str = "arithmetic") -> None:
    """Draw the measured fall of a run's loss beside the samples' credits, added up over the steps."""
    rows = [row for row in inrun.Ledger.open(run).accounts().to_pylist() if row["validation"].split("#")[0] == name]
    steps = sorted({row["step"] for row in rows})

    def added(*columns: str) -> Any:
        by_step = [np.mean([sum(row[c] for c in columns) for row in rows if row["step"] == step]) for step in steps]
        return np.cumsum(by_step)

    fall = added("loss_before") - added("loss_after")
    figure, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    ax.plot(steps, fall, color=REST, lw=7, alpha=0.55, solid_capstyle="round")
    ax.plot(steps, added("data"), color=GOOD, lw=2)
    ax.plot(steps, added("decay"), color=BAD, lw=2)
    ax.plot(steps, added("residual"), color=INK, lw=1.2, ls=(0, (4, 2)))
    end = steps[-1] + 1
    ax.text(end, fall[-1] + 0.12, f"measured fall {fall[-1]:.3f}", color=MUTED, va="center")
    ax.text(end, fall[-1] - 0.12, f"samples {added('data')[-1]:+.3f}", color=GOOD, va="center")
    ax.text(end, 0.14, f"residual {added('residual')[-1]:+.4f}".replace("-", "−"), va="center")
    ax.text(end, -0.14, f"weight decay {added('decay')[-1]:+.3f}".replace("-", "−"), color=BAD, va="center")
    ax.set(xlim=(0, steps[-1]), xlabel="step", ylabel="added up since the beginning", ylim=(-0.3, None))
    print(save(figure, "math-books.png"))


def skills(run: Path) -> None:
    """Draw the totals of the tutorial's run: domains against skills."""
    table = inrun.Ledger.open(run).scores(by="domain").to_pylist()
    names, domains = ["arithmetic", "cooking", "programming"], ["sums", "puzzles", "recipes", "code", "noise"]
    figure, axes = plt.subplots(1, 3, figsize=(9.4, 2.7), layout="constrained", sharey=True, sharex=True)
    for ax, name in zip(axes, names, strict=True):
        totals = {row["group"]: row["total"] for row in table if row["validation"] == name}
        values = [totals[domain] for domain in domains]
        ax.barh(domains, values, color=[GOOD if v > 0 else BAD for v in values], height=0.62)
        for place, value in enumerate(values):
            shift, side = (0.06, "left") if value > 0 else (-0.06, "right")
            ax.text(value + shift, place, f"{value:+.2f}".replace("-", "−"), va="center", ha=side, color=MUTED, fontsize=9)
        ax.axvline(0, color=REST, lw=1)
        ax.set_title(name, loc="left", fontweight="bold", fontsize=11)
        ax.set(xlim=(-1.2, 3.6), xticks=[])
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(length=0)
        ax.set_ylim(4.6, -0.6)
    print(save(figure, "tutorial-skills.png"))


def main(run: Path) -> None:
    """Draw all of them."""
    one_step()
    along_the_move()
    late_pushes()
    books(run)
    skills(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
