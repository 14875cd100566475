"""How well scores tell the samples that the demo planted from real ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from inrun.analysis.queries import CLEAR, scores
from inrun.demo.texts import COPY, NOISE, SCRAMBLED
from inrun.ledger import LedgerReader

#: How scores are seen when planted samples are looked for: every step counts the same, early ones are not larger.
VIEW = "standardised"


@dataclass(frozen=True)
class Found:
    """How well scores tell planted samples from real ones: those whose score is negative beyond its standard error."""

    planted: int
    samples: int
    flagged: int
    hits: int
    #: How many of the lowest-scoring samples are planted, looking at as many as were planted.
    among_lowest: int
    #: The chance that a planted sample scores below a real one.
    separation: float

    @property
    def precision(self) -> float:
        """Return the share of planted samples among the flagged."""
        return self.hits / self.flagged if self.flagged else 0.0

    @property
    def recall(self) -> float:
        """Return the share of the planted samples that are flagged."""
        return self.hits / self.planted if self.planted else 0.0


def find_planted(reader: LedgerReader, sources: tuple[str, ...] = (NOISE, SCRAMBLED)) -> Found:
    """Hold the scores in the view ``VIEW``, averaged over the validation sets, against what was planted."""
    samples = reader.samples()
    assert samples is not None
    ids = samples["sample_id"].to_numpy()
    order = np.argsort(ids)
    source = samples["source"].to_numpy(zero_copy_only=False)[order]
    planted, real = np.isin(source, sources), ~np.isin(source, (NOISE, SCRAMBLED, COPY))
    table = scores(reader, view=VIEW)
    names = sorted(set(table["validation"].to_pylist()))
    total, variance, used = np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids), bool)
    for name in names:
        part = table.filter(pc.equal(table["validation"], name))
        place = np.searchsorted(ids[order], part["sample_id"].to_numpy())
        used[place] = True
        total[place] += part["score"].to_numpy() / len(names)
        variance[place] += (np.nan_to_num(part["standard_error"].to_numpy(zero_copy_only=False).astype(float)) / len(names)) ** 2
    lowest = np.argsort(np.where(used, total, np.inf), kind="stable")[: int((planted & used).sum())]
    flagged = used & (total + CLEAR * np.sqrt(variance) < 0)
    return Found(
        planted=int((planted & used).sum()),
        samples=int(used.sum()),
        flagged=int(flagged.sum()),
        hits=int((flagged & planted).sum()),
        among_lowest=int(planted[lowest].sum()),
        separation=_separation(total[used & planted], total[used & real]),
    )


def _separation(low: np.ndarray, high: np.ndarray) -> float:
    """Return the share of pairs in which the first is smaller; ties count half."""
    if not len(low) or not len(high):
        return float("nan")
    ranked = np.sort(high)
    above = len(ranked) - np.searchsorted(ranked, low, side="right")
    level = np.searchsorted(ranked, low, side="right") - np.searchsorted(ranked, low, side="left")
    return float((above + 0.5 * level).sum() / (len(low) * len(high)))
