"""A loop in the manner of nanoGPT: random windows of one long text, with ids mapped to chunks of it.

There is no dataset of samples: a window begins anywhere. Cut the text into chunks as long as a window, and let a window's id be the
chunk in which its middle lies: every chunk is then used as often as any other, and has a score. Half of this text is noise.
"""

from __future__ import annotations

import torch

import inrun
from inrun.training.gpt import GPT, GPTConfig, next_token_loss

BLOCK, BATCH, CHUNKS = 32, 12, 40
torch.manual_seed(0)


def text(chunks: int, noisy: bool) -> torch.Tensor:
    """Count upwards in steps of 3, from a random number for every chunk; or noise."""
    starts = torch.randint(0, 50, (chunks, 1))
    counted = (starts + 3 * torch.arange(BLOCK)) % 50
    return (torch.randint(0, 50, (chunks, BLOCK)) if noisy else counted).flatten()


def main() -> tuple[float, float]:
    """Train, and return the mean score of chunks that count and of chunks of noise."""
    data = torch.cat([text(CHUNKS // 2, noisy=False), text(CHUNKS // 2, noisy=True)])
    held_out = text(4, noisy=False).view(4, BLOCK)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(data) - BLOCK, (BATCH,))
        windows = torch.stack([data[i : i + BLOCK] for i in starts])
        return windows, (starts + BLOCK // 2) // BLOCK  # the chunk of the middle

    model = GPT(GPTConfig(vocab=50, context=BLOCK, width=32, layers=2, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    accountant = inrun.Accountant(model, optimizer, validation=lambda m: next_token_loss(m, held_out))
    for _ in range(40):
        rows, ids = get_batch()
        with accountant.step(ids):
            next_token_loss(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    accountant.close()

    scores = dict(zip(*(accountant.scores()[c].to_pylist() for c in ("sample_id", "score")), strict=True))
    counting = [score for chunk, score in scores.items() if chunk < CHUNKS // 2]
    noise = [score for chunk, score in scores.items() if chunk >= CHUNKS // 2]
    means = sum(counting) / len(counting), sum(noise) / len(noise)
    print(f"mean credit of a chunk that counts {means[0]:+.4f}, of noise {means[1]:+.4f} (nats of validation loss)")
    return means


if __name__ == "__main__":
    main()
