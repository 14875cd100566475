"""What the figures of the documentation share: colours, fonts, saving. Figures are on white, for light and dark pages alike."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from PIL import Image

mpl.use("Agg")

IMAGES = Path(__file__).parent.parent / "images"
GOOD, BAD, INK, MUTED, LINE, REST = "#0b5fa5", "#c2500a", "#18212d", "#55606f", "#dde2e8", "#9aa5b1"

mpl.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": LINE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "svg.hashsalt": "inrun",
        "svg.fonttype": "path",
    }
)


def save(figure: Any, name: str, dpi: int = 160) -> Path:
    """Write a figure to docs/images, as SVG or PNG by its name, with the same bytes for the same figure."""
    path = IMAGES / name
    if path.suffix == ".svg":
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        path.write_text(re.sub(r" +\n", "\n", text.getvalue()), encoding="utf-8")
    else:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=dpi, format="png")
        Image.open(drawn).convert("RGB").quantize(48).save(path, optimize=True)  # few colours: a small file
    plt.close(figure)
    return path
