"""Lightning: a callback. ``model="net"`` names the module whose call is the forward."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.integrations.lightning import Scores


class Classifier(pl.LightningModule):
    """A small network on points in the plane."""

    def __init__(self) -> None:
        """Build the network."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        """Return the loss; the ids in the batch are for the callback."""
        x, y, _ = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> int:
    """Train, and return how many samples have a score."""
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    held_x = torch.randn(16, 2)
    held_y = (held_x[:, 0] * held_x[:, 1] > 0).long()

    scores = Scores(lambda net: F.cross_entropy(net(held_x), held_y), model="net", ids=-1)
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[scores],
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(inrun.with_ids(list(zip(x, y, strict=True))), batch_size=8, shuffle=True)
    trainer.fit(Classifier(), loader)
    print(scores.accountant.summary())
    return scores.scores().num_rows


if __name__ == "__main__":
    main()
