"""The smallest honest run: a small GPT on the text of the Python installation, scored while it trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inrun.demo.texts import VALIDATED, demo_texts, write_texts
from inrun.errors import ConfigurationError
from inrun.training.config import TrainConfig, make_config
from inrun.training.loop import Result, Status
from inrun.training.session import train

#: The file that tells a demo's folder from others, which are never replaced.
MARK = "demo-corpus.jsonl"


@dataclass(frozen=True)
class DemoConfig:
    """Size of the demo."""

    run: str = "runs/demo"
    steps: int = 280
    #: Characters of a document, which is one sample.
    size: int = 128
    per_domain: int = 200
    held_out: int = 48
    planted: int = 60
    seed: int = 0

    def training(self) -> TrainConfig:
        """Return what `inrun train` would be told."""
        sets = {name: {"split": "val", "where": {"domain": name}, "rows": 8, "folds": 4} for name in VALIDATED}
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
                "scoring": {"audit_every": 1, "sketch": 2048},  # whole credit; few numbers do for so small a model
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
