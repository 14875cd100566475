"""A rough run: whole credit adds up to the fall and no few steps own it; the step game's verdict names the steps that own it there.

On real text (slow, and only where it is at hand) a step overshoots right after the warm-up, and the next one, clipped to a
hundredth, brings the loss back. In made-up text rare bursts do the same on a smaller scale.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import inrun
from inrun.training.gpt import GPT, GPTConfig, next_token_loss
from inrun.training.models import decay_groups

MINIPILE = Path(__file__).resolve().parents[4] / "shared" / "data" / "minipile.jsonl.gz"
#: What the books of a rough run must keep: the sum against the fall, the top steps' share, and a step's residual against its Σ|c|.
SUM, TOP, SHARE, RESIDUAL = 0.02, 0.03, 0.25, 0.01


@dataclass(frozen=True)
class Recipe:
    """A run: text to train on, two texts to validate on, and its shape."""

    text: bytes
    held: dict[str, bytes]
    seed: int
    steps: int
    lr: float
    warmup: int
    batch: int
    context: int
    width: int
    heads: int

    def rows(self, text: bytes, n: int, draw: torch.Generator) -> Tensor:
        starts = torch.randint(0, len(text) - self.context, (n,), generator=draw).tolist()
        return torch.tensor([list(text[s : s + self.context]) for s in starts])

    def validation(self, name: str) -> Callable[[torch.nn.Module, int], Tensor]:
        """Four rows, drawn anew at every step."""

        def loss(model: torch.nn.Module, step: int) -> Tensor:
            return next_token_loss(model, self.rows(self.held[name], 4, torch.Generator().manual_seed(1000 * self.seed + step)))

        return loss


def train(recipe: Recipe, **options) -> inrun.Accountant:
    """Every use is of a sample of its own: ids tell the step."""
    torch.manual_seed(recipe.seed)
    model = GPT(GPTConfig(256, recipe.context, recipe.width, 2, recipe.heads))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=recipe.lr, betas=(0.9, 0.95))
    accountant = inrun.Accountant(model, optimizer, {name: recipe.validation(name) for name in recipe.held}, **options)
    draw = torch.Generator().manual_seed(recipe.seed)
    for t in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, (t + 1) / recipe.warmup)
        with accountant.step(range(t * recipe.batch, (t + 1) * recipe.batch)):
            next_token_loss(model, recipe.rows(recipe.text, recipe.batch, draw)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accountant


def by_step(accountant: inrun.Accountant, recipe: Recipe, name: str) -> tuple[float, np.ndarray]:
    """Return Σ score (settled and open), and Σ|score| by step of use."""
    table = accountant.scores()
    mine = np.array(table["validation"].to_pylist()) == name
    scores = table["score"].to_numpy()[mine]
    return float(scores.sum()), np.bincount(table["sample_id"].to_numpy()[mine] // recipe.batch, np.abs(scores))


def top_share(held: np.ndarray) -> float:
    return float(np.sort(held)[-math.ceil(TOP * len(held)) :].sum() / held.sum())


def accounts(accountant: inrun.Accountant, name: str) -> list[dict]:
    return [row for row in accountant.ledger.accounts().to_pylist() if row["validation"] == name]


def made_up() -> Recipe:
    """Words of a small made-up language with bursts of another alphabet, one in forty."""
    draw = random.Random(7)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]

    def text(length: int, bursts: float) -> bytes:
        parts, size = [], 0
        while size < length:
            if draw.random() < bursts:
                part = draw.choice("=#*0123456789") * draw.randint(30, 90)
            else:
                part = " ".join(words[int(len(words) * draw.random() ** 3)] for _ in range(12)) + "."
            parts.append(part)
            size += len(part)
        return "\n".join(parts).encode()

    held = {"words": text(20_000, 0.0), "mixed": text(20_000, 0.2)}
    return Recipe(text(100_000, 0.025), held, seed=0, steps=60, lr=5e-3, warmup=10, batch=8, context=48, width=32, heads=2)


def minipile(seed: int = 3) -> Recipe:
    """The recipe of the design, on bytes of real text."""
    with gzip.open(MINIPILE, "rt", encoding="utf-8") as file:
        documents = [json.loads(line) for line in itertools.islice(file, 0, None, 7)]

    def joined(split: str, domain: str | None = None) -> bytes:
        return " ".join(d["text"] for d in documents if d["split"] == split and domain in (None, d["domain"])).encode()

    held = {"wikipedia": joined("val", "wikipedia"), "code": joined("val", "code")}
    text = joined("train")[:3_000_000]
    return Recipe(text, held, seed=seed, steps=60, lr=2e-3, warmup=20, batch=16, context=128, width=96, heads=4)


@dataclass(frozen=True)
class Runs:
    """The same training three times: whole credit, the step game audited at every step, and audited as it likes."""

    recipe: Recipe
    whole: inrun.Accountant
    step: inrun.Accountant
    seldom: inrun.Accountant


@pytest.fixture(scope="module", params=["made_up", pytest.param("minipile", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest) -> Runs:
    if request.param == "minipile" and not MINIPILE.exists():
        pytest.skip(f"{MINIPILE} is not there")
    recipe = {"made_up": made_up, "minipile": minipile}[request.param]()
    return Runs(
        recipe,
        train(recipe, audit_every=1),
        train(recipe, method="midpoint", audit_every=1),
        train(recipe, method="midpoint"),
    )


def rough_steps(runs: Runs, name: str) -> list[int]:
    """Return the steps that hold a tenth of what the step game gave and took: at least four times an even share."""
    held = by_step(runs.step, runs.recipe, name)[1]
    return np.flatnonzero(held > 0.1 * held.sum()).tolist()


def test_the_run_is_rough(runs: Runs) -> None:
    """Else the tests below would say nothing: the step game books are far off, and a few steps own them."""
    assert any(rough_steps(runs, name) for name in runs.recipe.held)
    for name in runs.recipe.held:
        fall = sum(row["loss_before"] - row["loss_after"] for row in accounts(runs.step, name))
        assert abs(by_step(runs.step, runs.recipe, name)[0] - fall) > 0.25 * fall


def test_whole_credit_adds_up_to_the_fall(runs: Runs) -> None:
    for name in runs.recipe.held:
        rows = accounts(runs.whole, name)
        assert len(rows) == runs.recipe.steps and all(row["momentum"] is None for row in rows)
        fall = sum(row["loss_before"] - row["loss_after"] for row in rows)
        told = by_step(runs.whole, runs.recipe, name)[0] + sum(row["decay"] + row["inherited"] for row in rows)
        assert told == pytest.approx(fall, rel=SUM)


def test_no_few_steps_own_it(runs: Runs) -> None:
    for name in runs.recipe.held:
        assert top_share(by_step(runs.whole, runs.recipe, name)[1]) <= SHARE


@pytest.mark.parametrize("game", ["whole", "step"])
def test_every_step_explains_its_fall(runs: Runs, game: str) -> None:
    """More points are taken until the residual of a step is small, and not where one is enough."""
    for name in runs.recipe.held:
        rows = accounts(getattr(runs, game), name)
        assert {
            row["step"]: abs(row["residual"]) / row["spread"] for row in rows if abs(row["residual"]) > RESIDUAL * row["spread"]
        } == {}
        assert sum(row["points"] == 1 for row in rows) > len(rows) / 2
        assert max(row["points"] for row in rows) > 1


@pytest.mark.parametrize("audits", ["step", "seldom"])
def test_the_step_games_verdict_names_the_rough_steps(runs: Runs, audits: str) -> None:
    accountant = getattr(runs, audits)
    pages = dict(zip(runs.recipe.held, str(accountant.summary()).split("\n\n"), strict=True))
    for found in accountant.summary().sets:
        rough = rough_steps(runs, found.validation)
        assert set(rough) <= {o.step for o in found.outsized}
        assert all(f"step {step}: " in pages[found.validation] for step in rough)
        if rough:
            # More points make the books balance; that a few steps own them is said in the same breath.
            assert found.state != "balanced" or "Yet outsized steps hold" in found.verdict
            assert "lower learning rate" in pages[found.validation] or "longer warm-up" in pages[found.validation]
