"""Recurrent networks train as the framework's own: dropout between layers draws the same masks, packed sequences too."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import inrun


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        in_order = bool((lengths.diff() <= 0).all())
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 2, 4], [7, 5, 5, 1]])
def test_training_with_dropout_is_the_frameworks(kind: type[nn.RNNBase], both_ways: bool, lengths: list[int]) -> None:
    x = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for scored in (False, True):
        torch.manual_seed(0)
        model = Packed(kind(6, 5, 3, batch_first=True, dropout=0.4, bidirectional=both_ways)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda m: m(x, torch.tensor(lengths)).square().sum()  # noqa: E731
        accountant = inrun.Accountant(model, optimizer, loss, method="first") if scored else None
        torch.manual_seed(3)
        for _ in range(2):
            with accountant.step(range(4)) if accountant else contextlib.nullcontext():
                loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-14)
