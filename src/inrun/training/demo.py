"""The smallest honest run: a small GPT on the text of the Python installation, scored while it trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from inrun.engine import Accountant
from inrun.training.corpus import Sample, as_tokens, demo_corpus
from inrun.training.gpt import GPT, GPTConfig, next_token_loss


@dataclass(frozen=True)
class DemoConfig:
    """Size of the demo."""

    size: int = 128
    per_domain: int = 320
    noise: int = 96
    batch: int = 16
    epochs: int = 3
    lr: float = 1e-3
    #: Adam's very first steps are sign steps, which no first-order score describes; a warm-up keeps them small.
    warm_up: int = 30
    seed: int = 0


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    samples: list[Sample]
    #: Per validation set, one score per training sample.
    scores: dict[str, list[float]]
    first_losses: dict[str, float]
    last_losses: dict[str, float]
    steps: int

    def by_domain(self, validation: str) -> dict[str, tuple[float, float, float]]:
        """Return per domain the total, the mean per sample and the share of negative samples, largest mean first."""
        groups: dict[str, list[float]] = defaultdict(list)
        for sample, score in zip(self.samples, self.scores[validation], strict=True):
            groups[sample.domain].append(score)
        rows = {d: (sum(v), sum(v) / len(v), sum(x < 0 for x in v) / len(v)) for d, v in groups.items()}
        return dict(sorted(rows.items(), key=lambda item: -item[1][1]))

    def ranked(self, validation: str) -> list[tuple[float, Sample]]:
        """Return (score, sample), best first."""
        pairs = zip(self.scores[validation], self.samples, strict=True)
        return sorted(pairs, key=lambda pair: -pair[0])


def run_demo(config: DemoConfig, tell: Callable[[int, int, float], None] = lambda step, total, loss: None) -> DemoResult:
    """Train and score; ``tell`` is called with the step, the number of steps and the training loss."""
    torch.manual_seed(config.seed)
    samples, held_out = demo_corpus(config.size, config.per_domain, config.noise, config.seed)
    tokens = as_tokens(samples)
    validation = {name: as_tokens(rows) for name, rows in held_out.items()}
    model = GPT(GPTConfig(vocab=256, context=config.size, width=96, layers=3, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    accountant = Accountant(
        model,
        optimizer,
        validation={name: (lambda m, rows=rows: next_token_loss(m, rows)) for name, rows in validation.items()},
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.warm_up))
    per_epoch = len(samples) // config.batch
    total = per_epoch * config.epochs
    first: dict[str, float] = {}
    for epoch in range(config.epochs):
        order = torch.randperm(len(samples))
        for index in range(per_epoch):
            ids = order[index * config.batch : (index + 1) * config.batch]
            with accountant.step(ids):
                loss = next_token_loss(model, tokens[ids])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            first = first or accountant.last.losses
            tell(epoch * per_epoch + index + 1, total, float(loss.detach()))
    scores = {name: [0.0] * len(samples) for name in validation}
    for row in accountant.scores().to_pylist():
        scores[row["validation"]][row["sample_id"]] = row["score"]
    with torch.no_grad():
        last = {name: float(next_token_loss(model, rows)) for name, rows in validation.items()}
    accountant.close()
    return DemoResult(samples, scores, first, last, total)
