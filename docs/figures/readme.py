"""Draw the README's figure from the books of `inrun demo`: who lowered the loss, by skill, and the samples at both ends.

inrun demo
python docs/figures/readme.py runs/demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from style import BAD, GOOD, INK, LINE, MUTED, REST, save

import inrun

TITLES = {"reference": "Skill: predict the reference manual", "code": "Skill: predict code"}
#: Domains of the demo, as a reader would call them.
WORDS = {"reference": "reference manual", "noise": "planted noise", "scrambled": "scrambled text", "tables": "codec tables"}


def losses(run: Path, name: str) -> tuple[float, float, int]:
    """Return the first and the last validation loss that the run measured on its held-out rows, and how many steps it had."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line["validation"][name] for line in lines if line.get("validation")]
    return found[0], found[-1], lines[-1]["step"]


def staircase(ax: Any, run: Path, name: str) -> None:
    """Draw the loss from start to end, one bar per domain."""
    first, last, steps = losses(run, name)
    groups = inrun.Ledger.open(run).scores(name, by="domain").to_pylist()
    groups.sort(key=lambda row: -row["total"])
    bars = [(WORDS.get(row["group"], row["group"]), row["total"], row["samples"]) for row in groups]
    rest = first - last - sum(total for _, total, _ in bars)
    level, lowest, labels = first, first, ["before training"]
    ax.axvline(last, color=LINE, lw=1, zorder=0)
    ax.axvline(first, color=LINE, lw=1, zorder=0)
    ax.plot([first, first], [-0.36, 0.36], color=INK, lw=3, solid_capstyle="butt")
    ax.text(first - 0.07, 0, f"{first:.2f}", va="center", ha="right", fontweight="bold")
    for place, (label, total, samples) in enumerate([*bars, ("all else", rest, 0)], 1):
        colour = REST if not samples else GOOD if total > 0 else BAD
        ax.barh(place, -total, left=level, height=0.66, color=colour)
        ax.plot([level, level], [place - 1 + 0.33, place - 0.33], color=REST, lw=0.8)
        right = max(level, level - total)
        ax.text(right + 0.05, place, f"{-total:+.2f}".replace("-", "−"), va="center", color=colour if samples else MUTED)
        labels.append(f"{label} ({samples})" if samples else label)
        level -= total
        lowest = min(lowest, level)
    end = len(bars) + 2
    ax.plot([level, level], [end - 1 + 0.33, end + 0.36], color=INK, lw=0.8)
    ax.plot([last, last], [end - 0.36, end + 0.36], color=INK, lw=3, solid_capstyle="butt")
    ax.text(last + 0.07, end, f"{last:.2f}", va="center", fontweight="bold")
    ax.set_yticks(range(end + 1), [*labels, f"after {steps} steps"])
    ax.get_yticklabels()[0].set_fontweight("bold")
    ax.get_yticklabels()[-1].set_fontweight("bold")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(end + 0.7, -0.7)
    ax.set_xlim(lowest - 0.12, first + 0.62)
    ax.set_title(TITLES[name], loc="left", fontsize=12, fontweight="bold", pad=8)
    ax.set_xlabel("validation loss (nats per byte)", fontsize=9)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="x", labelsize=8.5, color=LINE)


def shown(text: str, width: int) -> str:
    """Return a text on one line, cut to a width; a dollar sign is no formula."""
    line = " ".join(text.split())
    return (line if len(line) <= width else line[: width - 1] + "…").replace("$", r"\$")


def samples(ax: Any, run: Path, name: str, n: int = 3) -> None:
    """List the highest and the lowest samples of a set, with their text."""
    ax.set(xlim=(0, 1), ylim=(2 * n + 1.5, -0.6))
    ax.axis("off")
    ledger = inrun.Ledger.open(run)
    ends = [("helped most", GOOD, ledger.scores(name, top=n)), ("hurt most", BAD, ledger.scores(name, bottom=n))]
    y = 0.0
    for words, colour, table in ends:
        ax.text(0, y, f"Samples that {words} in predicting {name}", fontweight="bold", va="center")
        for row in sorted(table.to_pylist(), key=lambda row: -abs(row["score"])):
            y += 0.84
            box = FancyBboxPatch((0, y - 0.35), 1, 0.7, boxstyle="square,pad=0", fc="#f4f6f8", ec="none", clip_on=False)
            ax.add_patch(box)
            score = f"{row['score']:+.3f}".replace("-", "−")
            ax.text(0.062, y, score, color=colour, va="center", ha="right", fontsize=9.5, fontweight="bold")
            ax.text(0.078, y, WORDS.get(row["domain"], row["domain"]), color=MUTED, va="center", fontsize=9)
            ax.text(0.2, y, shown(row["text"], 117), va="center", fontsize=8.3, family="DejaVu Sans Mono", color=INK)
        y += 1.12


def main(run: Path) -> None:
    """Draw, save, and say where."""
    figure = plt.figure(figsize=(11, 6.9))
    grid = figure.add_gridspec(1, 2, wspace=0.38, left=0.168, right=0.985, top=0.815, bottom=0.445)
    figure.text(0.015, 0.955, "Who taught the model what?", fontsize=19, fontweight="bold", va="center")
    line = "One training run of a small GPT, two validation sets. "
    line += "Every sample has a credit, and the credits add up to the fall of the loss."
    figure.text(0.015, 0.905, line, fontsize=10.5, color=MUTED, va="center")
    for column, name in enumerate(TITLES):
        staircase(figure.add_subplot(grid[0, column]), run, name)
    samples(figure.add_axes((0.015, 0.01, 0.97, 0.345)), run, "code")
    print(save(figure, "who-taught-what.png", dpi=140))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
