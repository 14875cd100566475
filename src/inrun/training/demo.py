"""The smallest honest run: a small GPT on the text of the Python installation, scored while it trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from inrun.analysis.queries import CLEAR, scores
from inrun.errors import ConfigurationError
from inrun.ledger import LedgerReader
from inrun.training.config import TrainConfig, make_config
from inrun.training.corpus import COPY, NOISE, SCRAMBLED, demo_texts, write_texts
from inrun.training.loop import Result, Status
from inrun.training.session import train

#: How scores are seen when planted samples are looked for: every step counts the same, early ones are not larger.
VIEW = "standardised"
#: The file that tells a demo's folder from others, which are never replaced.
MARK = "demo-corpus.jsonl"


@dataclass(frozen=True)
class DemoConfig:
    """Size of the demo."""

    run: str = "runs/demo"
    steps: int = 480
    #: Characters of a document, which is one sample.
    size: int = 128
    per_domain: int = 200
    held_out: int = 48
    planted: int = 60
    seed: int = 0

    def training(self) -> TrainConfig:
        """Return what `inrun train` would be told."""
        sets = {name: {"split": "val", "where": {"domain": name}, "rows": 8, "folds": 4} for name in ("reference", "code")}
        return make_config(
            {
                "run": self.run,
                "seed": self.seed,
                "steps": self.steps,
                "threads": 1,  # so small a model is slower with two
                "data": {"paths": [str(Path(self.run) / MARK)], "cache": str(Path(self.run) / "tokens")},
                "tokenizer": {"kind": "bytes"},
                "model": {"context": self.size, "width": 64, "layers": 2, "heads": 4},
                "optimizer": {"lr": 1e-3, "final_lr": 1e-4, "warmup": min(80, self.steps // 4)},
                "validation": sets,
                "scoring": {"method": "midpoint", "audit_every": 10},
                "checkpoints": {"every": max(self.steps // 2, 1), "keep": 0},
                "logging": {"every": 10, "evaluate_every": max(self.steps // 8, 1), "evaluate_rows": 48},
            }
        )


def run_demo(
    config: DemoConfig, tell: Callable[[Status], None] = lambda status: None, stop: Callable[[], bool] = lambda: False
) -> Result:
    """Write the corpus, train and score. A demo that is in the folder already is replaced, anything else is not."""
    run = Path(config.run)
    if run.exists() and any(run.iterdir()):
        if not (run / MARK).is_file():
            raise ConfigurationError(f"{config.run!r} holds something that is not a demo; give another folder with --run")
        shutil.rmtree(run)
    write_texts(demo_texts(config.size, config.per_domain, config.held_out, config.planted, config.seed), run / MARK)
    return train(config.training(), tell=tell, stop=stop)


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
