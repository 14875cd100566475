"""Find mislabelled images: train a small CNN with scores and look at the lowest ones.

Eight-by-eight images of ten patterns with noise; one label in ten is wrong. A wrong label pushes the weights where the
validation loss rises, so that its credit is negative.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import inrun

torch.manual_seed(0)
PATTERNS = (torch.rand(10, 1, 8, 8) > 0.5).float()


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy images and their true labels."""
    labels = torch.randint(0, 10, (n,))
    return PATTERNS[labels] + 0.4 * torch.randn(n, 1, 8, 8), labels


def main() -> float:
    """Train, and return the share of wrong labels among the lowest scores."""
    x, truth = images(400)
    labels, wrong = truth.clone(), torch.randperm(400)[:40]
    labels[wrong] = (truth[wrong] + torch.randint(1, 10, (40,))) % 10
    held_x, held_labels = images(100)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = inrun.with_ids(list(zip(x, labels, strict=True)))  # (image, label, id)
    loader = torch.utils.data.DataLoader(data, batch_size=40, shuffle=True)

    accountant = inrun.Accountant(model, optimizer, validation=lambda m: F.cross_entropy(m(held_x), held_labels))
    for _ in range(4):
        for image, label, ids in loader:
            with accountant.step(ids):
                F.cross_entropy(model(image), label).backward()
                optimizer.step()
                optimizer.zero_grad()
    accountant.close()

    scores = accountant.scores()
    lowest = sorted(zip(scores["score"].to_pylist(), scores["sample_id"].to_pylist(), strict=True))[: len(wrong)]
    found = len({i for _, i in lowest} & set(wrong.tolist())) / len(wrong)
    print(f"of the {len(wrong)} lowest scores {100 * found:.0f} % are wrong labels; by chance {100 * len(wrong) / 400:.0f} %")
    return found


if __name__ == "__main__":
    main()
