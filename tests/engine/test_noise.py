"""Noise is not credited to samples; and where credits far exceed the fall for another reason, tensors and samples are named."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.analysis import Summary

#: The parameters whose gradient is nothing but rounding: BatchNorm takes the mean away again.
NOISE = {"0.bias", "3.bias"}


class Trained:
    """A CNN with convolution biases in front of BatchNorm, trained by Adam."""

    def __init__(self, method: str, steps: int = 40, **options: object) -> None:
        torch.manual_seed(1)
        x = torch.randn(256, 3, 8, 8)
        y = (8 * x[:, 0].mean((1, 2))).clamp(-1.9, 1.9).add(2).long()
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def validation(model: nn.Module) -> Tensor:
            return F.cross_entropy(model(x[:64]), y[:64])

        with inrun.Accountant(model, optimizer, validation, method=method, **options) as accountant:  # type: ignore[arg-type]
            for _ in range(steps):
                rows = torch.randint(64, 256, (16,))
                with accountant.step(rows):
                    F.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        self.scores = accountant.scores()["score"].to_numpy()
        self.accounts = accountant.ledger.accounts().to_pandas()  # type: ignore[attr-defined]
        self.summary: Summary = accountant.summary()


@pytest.mark.parametrize("audit_every", [None, 0])
@pytest.mark.parametrize("method", ["whole", "step"])
def test_a_bias_in_front_of_batch_norm_scores_nobody(
    method: str, audit_every: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without audits; what the noise moved is an account, and the accounts add up."""
    with caplog.at_level(logging.WARNING, "inrun"):
        found = Trained(method, audit_every=audit_every)
    assert np.abs(found.scores).max() < 0.2
    assert found.accounts["rounding"].abs().sum() > 1e-5
    assert not any("nearly cancel" in record.message for record in caplog.records)
    (s,) = found.summary.sets
    assert not s.exceeds and s.rounding is not None and "rounding error" in str(found.summary)
    parts = [getattr(s, part) for part in ("data", "momentum", "decay", "inherited", "rounding", "residual")]
    assert sum(p for p in parts if p is not None) == pytest.approx(s.fall, abs=1e-6)
    assert s.residual_to_fall is not None and s.residual_to_fall < 0.02


@pytest.mark.parametrize("method", ["whole", "step"])
def test_control_noise_that_is_not_told_apart_is_named(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scores of thousands of nats, a residual of 1e-9 of Σ|c|: once this was called balanced."""
    monkeypatch.setattr("inrun.engine.rounding.ROUNDINGS", 0.0)
    with caplog.at_level(logging.WARNING, "inrun"):
        found = Trained(method)
    assert np.abs(found.scores).max() > 100
    (s,) = found.summary.sets
    assert s.relative_residual is not None and s.relative_residual < 1e-6 and s.state == "cancelling" and s.exceeds
    assert {x.name for x in s.largest_tensors[:2]} == NOISE and len(s.largest_samples) == 3
    said = [record.message for record in caplog.records if "nearly cancel" in record.message]
    assert len(said) == 1 and all(name in said[0] for name in NOISE) and "by sample" in said[0]
    page = str(found.summary)
    for words in ("times what the loss fell", "largest tensors: ", "largest samples: ", "|residual| / |fall| = "):
        assert words in page, words
    assert "books balance" not in page and all(name in found.summary._repr_html_() for name in NOISE)


@pytest.mark.parametrize("method", ["whole", "step", "first", "second"])
def test_samples_that_pull_against_each_other_are_named_with_the_tensor(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two labels for one input: large gradients of opposite signs, and a small difference that the model learns."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"calm": nn.Linear(4, 1, bias=False), "torn": nn.Linear(4, 1, bias=False)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    x = torch.randn(8, 4).double()

    def loss(model: nn.Module, some: Tensor, y: Tensor) -> Tensor:
        return (model["calm"](some) * 1e-3 + model["torn"](some) - y).square().mean()  # type: ignore[index]

    y = torch.full((8, 1), 0.1).double()
    batch, sides = torch.cat([x, x]), torch.cat([y + 200, y - 200])
    with (
        caplog.at_level(logging.WARNING, "inrun"),
        inrun.Accountant(model, optimizer, lambda m: loss(m, x, y), method=method, audit_every=1) as accountant,
    ):
        for _ in range(8):
            with accountant.step(range(16)):
                loss(model, batch, sides).backward()
                optimizer.step()
                optimizer.zero_grad()
    (s,) = accountant.summary().sets
    assert s.exceeds and s.state == "cancelling" and s.largest_tensors[0].name == "torn.weight"
    assert s.largest_tensors[0].share > 0.99 and not s.rounding
    totals = {x.sample_id: x.total for x in s.largest_samples}
    first = next(iter(totals))
    assert totals[first] == pytest.approx(-totals[(first + 8) % 16], rel=0.02)
    assert sum("torn.weight" in record.message for record in caplog.records) == 1
