"""What is given to a model beside rows of samples: positions that all samples share, rows chosen inside the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inrun import Accountant


class Positions(nn.Module):
    """Tokens and positions, both given by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(8, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(tokens) + self.places(places)))


def scores(places: Tensor, method: str, n: int = 4) -> Tensor:
    torch.manual_seed(0)
    model = Positions().double()
    tokens, held = torch.randint(0, 20, (n, 5)), torch.randint(0, 20, (3, 5))

    def loss(t: Tensor, p: Tensor) -> Tensor:
        return F.cross_entropy(model(t, p).flatten(0, 1), t.flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Accountant(model, optimizer, lambda m: loss(held, torch.arange(5)), method=method, sketch="exact") as accountant:
        with accountant.step(range(n)):
            loss(tokens, places).backward()
            optimizer.step()
        return accountant.last.contributions["validation"]


@pytest.mark.parametrize("method", ["first", "whole"])
@pytest.mark.parametrize("places", [torch.arange(5), torch.arange(5)[None]], ids=["[t]", "[1, t]"])
def test_positions_that_all_samples_share(places: Tensor, method: str) -> None:
    found, expected = scores(places, method), scores(torch.arange(5).expand(4, 5), method)
    assert float((found - expected).abs().max()) < 1e-12
    assert float((found - expected.roll(1)).abs().max()) > 1e-4  # the control


@pytest.mark.parametrize("ids", [[4, 4, 11, 19, 22, 25, 33, 38], list(range(8, 0, -1))], ids=["twice", "backwards"])
def test_rows_may_be_chosen_inside_the_step(ids: list[int]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    found = []
    for inside in (True, False):
        torch.manual_seed(1)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen = torch.tensor(ids)
        rows, targets = x[chosen], y[chosen]
        with Accountant(model, optimizer, lambda m: F.mse_loss(m(x), y), audit_every=1) as accountant:
            with accountant.step(chosen):
                (F.mse_loss(model(x[chosen]), y[chosen]) if inside else F.mse_loss(model(rows), targets)).backward()
                optimizer.step()
            found.append(accountant.last.contributions["validation"])
    assert torch.equal(*found)
