"""Lightning against a plain loop, against itself without us, and broken and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import ConfigurationError, IdsError, StepError
from integrations.tiny_text import Recorder, difference, in_parts, plain_loop, same_books, weights

lightning = pytest.importorskip("lightning.pytorch")
from inrun.integrations.lightning import Scores  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y, LR = X[:, :3].sin(), 0.05
HELD = X[:2] + 0.5


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def validation(model: nn.Module) -> Tensor:
    return (model(HELD) - HELD[:, :3].cos()).square().mean()


class Whole(lightning.LightningModule):
    """One optimizer, stepped by Lightning."""

    def __init__(self, momentum: bool = False) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


class Itself(Whole):
    def loss(self, batch: Any) -> Tensor:
        return (self(batch["x"]) - batch["y"]).square().mean()


class Manual(Whole):
    """Two batches per update, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class Twice(Manual):
    """Two updates per batch."""

    scores: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            with self.scores.update() if self.scores is not None else torch.enable_grad():
                self.manual_backward(self.loss(batch))
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()


def loader(shuffle: bool) -> Any:
    data = inrun.with_ids([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(data, batch_size=2, shuffle=shuffle, generator=generator)


def fit(module: Any, scores: Any, folder: Path, checkpoint: Any = None, callbacks: Any = (), **options: Any) -> list[Tensor]:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    common = {"max_epochs": 1, "default_root_dir": folder, "enable_checkpointing": bool(callbacks), "log_every_n_steps": 1}
    trainer = lightning.Trainer(callbacks=[*([scores] if scores else []), *callbacks], **{**quiet, **common, **options})
    trainer.fit(module, loader(shuffle=not callbacks), ckpt_path=checkpoint)
    if scores is not None:
        assert {"inrun/validation/loss", "inrun/validation/paid"} <= set(trainer.logged_metrics)
    return weights(module)


AUTOMATIC = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
CASES: dict[str, tuple[type, str | None, dict[str, Any], dict[str, Any]]] = {
    "automatic": (Whole, "net", AUTOMATIC, {}),
    "automatic, first": (Whole, "net", AUTOMATIC, {"method": "first"}),
    "automatic, the module itself": (Itself, None, AUTOMATIC, {}),
    "manual": (Manual, "net", {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop_and_lightning_without_us(name: str, tmp_path: Path) -> None:
    cls, where, options, scoring = CASES[name]
    alone = fit(cls(), None, tmp_path, **options)
    books = Recorder()
    scores = Scores(validation, model=where, ledger=books, **scoring)
    module = cls()
    scored = fit(module, scores, tmp_path, **options)
    assert difference(alone, scored) < 1e-9
    assert scores.accountant.coverage.scored_share == 1.0
    assert len(books.records) == 3

    def loss(model: Any, ids: list[int], of_step: list[list[int]]) -> Tensor:
        return (model(X[ids]) - Y[ids]).square().mean() / 2

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rates = [LR, LR, LR / 10]
    expected = plain_loop(model, optimizer, in_parts(books.ids(), 2), loss, validation, rates, clip=0.5, **scoring)
    same_books(books, expected)
    assert difference(weights(model), scored) < 1e-9


def test_several_updates_in_a_batch(tmp_path: Path) -> None:
    alone = fit(Twice(), None, tmp_path)
    books, module = Recorder(), Twice()
    module.scores = Scores(validation, model="net", ledger=books)
    scored = fit(module, module.scores, tmp_path)
    assert difference(alone, scored) < 1e-9
    ids = books.ids()
    assert len(ids) == 12
    assert ids[::2] == ids[1::2]


@pytest.mark.parametrize("cls", [Whole, Manual])
def test_resumed_equals_unbroken(cls: type, tmp_path: Path) -> None:
    def run(checkpoint: Any) -> tuple[list[Tensor], Any]:
        scores = Scores(validation, model="net", ledger=tmp_path / "books", audit_every=2)
        saver = lightning.callbacks.ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1, every_n_epochs=1)
        final = fit(cls(), scores, tmp_path, checkpoint, [saver], max_epochs=2)
        return final, scores.scores()

    final, unbroken = run(None)
    again, resumed = run(tmp_path / "saved" / "epoch=0.ckpt")
    assert unbroken["times_used"].to_numpy().sum() == 24
    assert difference(final, again) == 0
    assert resumed.equals(unbroken)


def test_what_cannot_be_scored_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdsError, match=r"keys \['sample_id', 'x', 'y'\]. has no ids of its samples at ids='id'.*with_ids"):
        fit(Whole(), Scores(validation, model="net", ids="id"), tmp_path)
    with pytest.raises(ConfigurationError, match="model='body' is no module of Whole, which has net"):
        fit(Whole(), Scores(validation, model="body"), tmp_path)
    for name in ("DeepSpeedStrategy", "ModelParallelStrategy"):
        trainer = type("T", (), {"strategy": type(name, (), {})()})()
        with pytest.raises(ConfigurationError, match=name):
            Scores(validation).on_train_start(trainer, Whole())


def test_an_exception_leaves_the_books_whole(tmp_path: Path) -> None:
    class Fails(Whole):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    scores = Scores(validation, model="net")
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(Fails(), scores, tmp_path)
    assert scores.accountant.steps_done == 2
    assert scores.scores()["times_used"].to_numpy().sum() == 4


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.SGD(p, lr=0.1)], ids=["lbfgs", "sgd"])
def test_only_closures_that_run_once_are_taken(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    accountant = inrun.Accountant(model, optimizer, validation, method="first")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        with pytest.raises(StepError, match="ran its closure twice"), accountant.step(range(12)):
            optimizer.step(closure)
    else:
        with accountant.step(range(12)):
            assert float(optimizer.step(closure)) > 0
        assert accountant.last.contributions["validation"].abs().sum() > 0
    accountant.close()
