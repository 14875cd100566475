"""Loops with Accelerate against plain ones: prepared before or after, accumulated, in bfloat16, saved and resumed."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import inrun
from inrun.errors import ConfigurationError, TrainingError
from integrations.tiny_text import (
    Recorder,
    difference,
    in_parts,
    llama,
    plain_loop,
    rows_of,
    same_books,
    token_losses,
    validation_of,
    weights,
)

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from inrun.integrations.accelerate import attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, HELD, LR = rows_of(10, 1), rows_of(2, 2), 1e-2
#: Batches of two, accumulated by two: the last step has one batch, since the loader ends.
STEPS = 3


def accelerator_of(precision: str) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return token_losses(model(input_ids=rows).logits, rows) / rows[:, 1:].numel()


def train(order: str, precision: str, books: Any, dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], Any]:
    accelerator, model = accelerator_of(precision), llama(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    data = inrun.with_ids([{"rows": row} for row in ROWS])
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    scores = None
    if order == "before":
        scores = attach(accelerator, model, optimizer, validation_of(HELD), ledger=books, **options)
    wrapped, wrapper, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert wrapper is not optimizer
    if order == "after":
        scores = attach(accelerator, wrapped, wrapper, validation_of(HELD), ledger=books, **options)
    for batch in loader:
        ids = batch.pop("sample_id")
        with accelerator.accumulate(wrapped):
            with scores.batch(ids) if scores is not None else torch.enable_grad():
                accelerator.backward(loss_of(wrapped, batch["rows"]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                wrapper.step()
            schedule.step()
            wrapper.zero_grad()
    if scores is not None:
        assert scores.accountant.coverage.scored_share == 1.0
        assert set(scores.figures()) == {f"inrun/validation/{x}" for x in ("loss", "paid", "helpful")}
        scores.close()
    return weights(model), scores


@pytest.mark.parametrize("options", [{}, {"method": "first"}], ids=["whole", "first"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_prepare_in_either_order_equals_a_plain_loop(order: str, precision: str, options: dict[str, Any]) -> None:
    low = precision == "bf16"
    dtype = torch.float32 if low else torch.float64
    books = Recorder()
    alone, _ = train("never", precision, None, dtype)
    scored, _ = train(order, precision, books, dtype, **options)
    assert difference(alone, scored) < (1e-5 if low else 1e-9)
    assert [len(ids) for ids in books.ids()] == [4, 4, 2]

    def loss(model: Any, ids: list[int], of_step: list[list[int]]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(input_ids=ROWS[torch.tensor(ids)]).logits
        return token_losses(logits, ROWS[torch.tensor(ids)]) / (2 * len(ids) * (ROWS.shape[1] - 1))

    def validation(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(input_ids=HELD).logits
        return token_losses(logits, HELD) / HELD[:, 1:].numel()

    model = llama(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rates = [LR * (1 - 0.3 * t) for t in range(STEPS)]
    expected = plain_loop(model, optimizer, in_parts(books.ids(), 2), loss, validation, rates, **options)
    same_books(books, expected)
    assert difference(weights(model), scored) < 1e-5


def test_resumed_equals_unbroken(tmp_path: Path) -> None:
    def run(resume: Path | None, until: int) -> tuple[list[Tensor], Any]:
        accelerator, model = accelerator_of("no"), llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        if resume is not None:
            accelerator.load_state(str(resume))
        scores = attach(accelerator, model, optimizer, validation_of(HELD), resume_from=resume, ledger=tmp_path / "books")
        for number in range(0 if resume is None else 4, 8):
            accelerator.gradient_state._set_sync_gradients(number % 2 == 1)
            ids = [number, (number + 3) % 10]
            with scores.batch(ids):
                accelerator.backward(loss_of(model, ROWS[torch.tensor(ids)]))
                optimizer.step()
            optimizer.zero_grad()
            if number == 3 and resume is None:
                accelerator.save_state(str(tmp_path / "state"))
        scores.close()
        return weights(model), scores.scores()

    final, unbroken = run(None, 8)
    assert not list((tmp_path / "state").glob("custom_checkpoint*"))
    again, resumed = run(tmp_path / "state", 8)
    assert resumed.equals(unbroken)
    assert difference(final, again) == 0
    with pytest.raises(TrainingError, match="has no inrun-0.json"):
        attach(accelerator_of("no"), llama(), torch.optim.SGD(llama().parameters()), validation_of(HELD), resume_from=tmp_path)


def test_a_plain_accountant_takes_the_prepared_optimizer() -> None:
    accelerator, model = accelerator_of("no"), llama()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = accelerator.prepare(model, inner)
    accountant = inrun.Accountant(model, optimizer, validation_of(HELD))
    assert accountant.optimizers == [inner]
    with accountant.step(range(4)):
        accelerator.backward(loss_of(model, ROWS[:4]))
        optimizer.step()
    assert accountant.last.contributions["validation"].abs().min() > 0
    accountant.close()


def test_unsupported_strategies_are_named() -> None:
    fake = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value="MEGATRON_LM"), parallelism_config=None)
    with pytest.raises(ConfigurationError, match="Megatron-LM"):
        attach(fake, llama(), torch.optim.SGD(llama().parameters()), validation_of(HELD))
