"""Accelerate: the loop stays yours, with ``prepare`` and ``accumulate``."""

from __future__ import annotations

import torch
from accelerate import Accelerator

import inrun
from inrun.integrations.accelerate import attach
from inrun.training.gpt import GPT, GPTConfig, next_token_loss


def main() -> int:
    """Train, and return how many samples have a score."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = GPT(GPTConfig(vocab=64, context=16, width=32, layers=2, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = inrun.with_ids([{"rows": row} for row in torch.randint(0, 64, (32, 16))])
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    held_out = torch.randint(0, 64, (2, 16))

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scores = attach(accelerator, model, optimizer, validation=lambda m: next_token_loss(m, held_out))
    for batch in loader:
        with accelerator.accumulate(model), scores.batch(batch["sample_id"]):
            accelerator.backward(next_token_loss(model, batch["rows"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scores.close()
    print(scores.accountant.summary())
    return scores.scores().num_rows


if __name__ == "__main__":
    main()
