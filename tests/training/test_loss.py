"""The one next-token loss: padding does not count, and precision is kept or raised, never lowered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inrun.training.gpt import GPT, GPTConfig
from inrun.training.loss import PADDING, next_token_loss, row_losses, token_losses

ROWS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, PADDING, PADDING]])


def model() -> GPT:
    return GPT(GPTConfig(vocab=11, context=4, width=8, layers=1, heads=2))


def test_padding_does_not_count():
    m = model().double()
    expected = [F.cross_entropy(m(row[None, :-1])[0], row[1:], reduction="sum") for row in (ROWS[0], ROWS[1, :3])]
    losses, counts = token_losses(m, ROWS)
    assert counts.tolist() == [4, 2]
    torch.testing.assert_close(losses, torch.stack(expected))
    torch.testing.assert_close(next_token_loss(m, ROWS), sum(expected) / 6)
    torch.testing.assert_close(row_losses(m, ROWS).mean(), next_token_loss(m, ROWS))


@pytest.mark.parametrize(
    ("dtype", "taken_in"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_precision(dtype, taken_in):
    assert next_token_loss(model().to(dtype), ROWS).dtype == taken_in
