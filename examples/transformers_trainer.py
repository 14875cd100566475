"""transformers' Trainer: one line before ``trainer.train()``."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import inrun
from inrun.integrations.transformers import attach

torch.manual_seed(0)


def rows(n: int, noisy: bool = False) -> list[dict[str, list[int]]]:
    """Count upwards from a random number; or noise."""
    starts = torch.randint(0, 40, (n, 1))
    tokens = torch.randint(0, 60, (n, 16)) if noisy else starts + torch.arange(16)
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


def main() -> Dataset:
    """Train, and return the dataset with its scores."""
    folder = tempfile.mkdtemp()
    train, held_out = Dataset.from_list(rows(24) + rows(24, noisy=True)), Dataset.from_list(rows(4))
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        logging_steps=4,
        save_steps=6,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=train)
    scores = attach(trainer, validation={"counting": held_out}, ledger=folder + "/books")  # the line
    trainer.train()  # after a kill: trainer.train(resume_from_checkpoint=True)

    scored = scores.scored().sort("score")  # columns score and times_used
    print("lowest scores, rows", scored.with_format("numpy")["score"][:3], "; coverage", scores.accountant.coverage.scored_share)
    print(inrun.Ledger.open(folder + "/books").scores().num_rows, "samples in the books; `inrun report` makes a page of them")
    return scores.scored()


if __name__ == "__main__":
    main()
