"""A training run with checkpoints that may be killed at any moment; run in forked processes by test_kill."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

import inrun
from inrun.ledger import Ledger
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, validation

STEPS, EVERY = 48, 5


class NaiveLedger:
    """What one would write first: append rows, know nothing of checkpoints. The control that must fail."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record) -> None:
        rows = [
            {"step": record.step, "id": int(i), "c": float(c)}
            for values in record.contributions.values()
            for i, c in zip(record.sample_ids, values, strict=True)
        ]
        with open(self.path, "a") as f:
            f.write("".join(json.dumps(r) + "\n" for r in rows))


def save(path: Path, state: dict) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(folder: Path, naive: bool = False, method: str = "whole") -> None:
    """Go on from the last checkpoint, or begin, until all steps are done; then leave a file ``done``."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    checkpoint, books = folder / "checkpoint.pt", folder / "run"
    model = tiny(dropout=0.1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    if naive:
        ledger = NaiveLedger(folder / "naive.jsonl")
    elif (books / "run.json").exists():
        ledger = Ledger.resume(books, None if state is None else state["accountant"]["ledger"], flush_every=30)
    else:
        ledger = Ledger(books, flush_every=30)
    accountant = inrun.Accountant(model, optimizer, validation(), method=method, ledger=ledger, audit_every=3)
    torch.manual_seed(1)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        accountant.load_state_dict(state["accountant"])
        torch.set_rng_state(state["random"])
    for step in range(accountant.steps_done, STEPS):
        with accountant.step() as open_step:
            for part in range(2):  # an accumulation window: a kill in the middle must drop all of it
                with open_step.microbatch([10 * (step % 7) + part, 10 * (step % 7) + part + 2]):
                    (next_token_loss(model, batch(2, 2 * step + part)) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            save(
                checkpoint,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "accountant": accountant.state_dict(),
                    "random": torch.get_rng_state(),
                },
            )
    accountant.close()
    if not naive:
        ledger.close()
    (folder / "done").touch()
