"""transformers' Trainer against a plain loop on the same order of data, against itself without us, and broken and resumed."""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import inrun
from inrun.errors import ConfigurationError, IdsError, TrainingError
from integrations.tiny_text import (
    Recorder,
    difference,
    in_parts,
    items,
    llama,
    plain_loop,
    rows_of,
    same_books,
    token_losses,
    validation_of,
    weights,
)

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
from transformers import Trainer, TrainingArguments  # noqa: E402

from inrun.integrations.transformers import attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, HELD = rows_of(12, 1), rows_of(2, 2)
STEPS, LR = 3, 1e-2


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return items(ROWS)[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([{**item, "sample_id": 100 + i} for i, item in enumerate(items(ROWS))])


def arrow(**columns: Any) -> Any:
    return datasets.Dataset.from_list([{**item, "note": "text"} for item in items(ROWS)]).add_column("extra", list(range(12)))


def trainer_of(folder: Path, model: Any, dataset: Any = None, cls: type = Trainer, **options: Any) -> Any:
    common = {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": LR,
        "weight_decay": 0.1,
        "report_to": [],
        "optim": "adamw_torch",
    }
    quiet = {
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**common, **quiet, **options})
    return cls(model, args, train_dataset=arrow() if dataset is None else dataset)


def adamw(model: Any) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR)


def reference(ids: list[list[int]], size: int, base: int = 0, dtype: Any = torch.float64, autocast: bool = False, **options: Any):
    def loss(model: Any, mine: list[int], of_step: list[list[int]]) -> Tensor:
        rows = ROWS[torch.tensor(mine) - base]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=rows).logits
        total = sum(len(part) for part in of_step) * (rows.shape[1] - 1)
        return token_losses(logits, rows) / total

    def validation(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=HELD).logits
        return token_losses(logits, HELD) / HELD[:, 1:].numel()

    model = llama(dtype=dtype)
    rates = [LR * (1 - t / STEPS) for t in range(STEPS)]
    books = plain_loop(model, adamw(model), in_parts(ids, size), loss, validation, rates, **options)
    return books, weights(model)


#: name: dataset, first id, options of the Trainer, options of the accountant
CASES: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    "plain": (None, 0, {}, {}),
    "accumulated": (None, 0, {"gradient_accumulation_steps": 2}, {}),
    "accumulated, step": (None, 0, {"gradient_accumulation_steps": 2}, {"method": "step"}),
    "columns kept": (None, 0, {"remove_unused_columns": False}, {}),
    "torch dataset, a worker": (Items, 0, {"dataloader_num_workers": 1}, {}),
    "stream with ids": (Stream, 100, {}, {}),
    "bf16": (None, 0, {"bf16": True}, {"method": "first"}),
    "checkpointing": (None, 0, {"gradient_checkpointing": True}, {}),
}


#: Both are parts of what "accumulated" and "checkpointing" test; `step` is in test_trl.py, too.
SLOW = ("plain", "accumulated, step")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES])
def test_equals_a_plain_loop_and_the_trainer_without_us(name: str, tmp_path: Path) -> None:
    make, base, options, scoring = CASES[name]
    low = name == "bf16"
    dtype = torch.float32 if low else torch.float64
    dataset = make() if make is not None else arrow().remove_columns(["note", "extra"] if name == "columns kept" else [])
    alone = llama(dtype=dtype)
    trainer_of(tmp_path / "a", alone, dataset, **options).train()
    model, books = llama(dtype=dtype), Recorder()
    trainer = trainer_of(tmp_path / "b", model, dataset, **options)
    scores = attach(trainer, validation_of(HELD), ledger=books, **scoring)
    trainer.train()
    assert difference(weights(model), weights(alone)) < (1e-5 if low else 1e-9)
    assert len(books.records) == STEPS
    assert scores.accountant.coverage.scored_share == 1.0
    expected, final = reference(books.ids(), 2, base, dtype, low, **scoring)
    same_books(books, expected)
    assert difference(weights(model), final) < 1e-5  # the loss of transformers is rounded to float32


def test_rows_as_validation_logs_and_scores_on_the_dataset(tmp_path: Path) -> None:
    held = datasets.Dataset.from_list(items(HELD))
    dataset = arrow().add_column("doc", [50 + i for i in range(12)])
    trainer = trainer_of(tmp_path, llama(), dataset)
    scores = attach(trainer, {"held": held, "by hand": validation_of(HELD)}, id_column="doc")
    trainer.train()
    found = scores.scored()
    table = {
        (s, v): x for s, v, x in zip(*(scores.scores()[c].to_pylist() for c in ("sample_id", "validation", "score")), strict=True)
    }
    for row in found:
        if row["times_used"]:
            assert row["score_held"] == pytest.approx(row["score_by hand"], rel=1e-6)
            assert row["score_held"] == table[row["doc"], "held"]
        else:
            assert row["score_held"] != row["score_held"]  # NaN
    assert sum(found["times_used"]) == 2 * STEPS
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all({"inrun/held/loss", "inrun/held/paid", "inrun/held/helpful"} <= set(entry) for entry in logs)
    assert scores.scored(arrow())["times_used"] == [0] * 12  # no column doc: ids are positions, and none of them was used


METHODS = [{}, *(pytest.param({"method": name}, marks=pytest.mark.slow) for name in ("step", "first", "second"))]


@pytest.mark.parametrize("options", METHODS, ids=["whole", "step", "first", "second"])
def test_resumed_equals_unbroken(options: dict[str, Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "gradient_accumulation_steps": 2}

    def run(resume: Any) -> tuple[Any, list[Tensor]]:
        model = llama()
        trainer = trainer_of(tmp_path / "run", model, **saving)
        scores = attach(trainer, validation_of(HELD), ledger=tmp_path / "books", audit_every=2, **options)
        trainer.train(resume_from_checkpoint=resume)
        return scores.scores(), weights(model)

    unbroken, final = run(None)
    files = {f.name for f in (tmp_path / "run" / "checkpoint-2").iterdir() if f.name.startswith("inrun")}
    keeps = options.get("method") not in ("first", "second")
    assert files == {"inrun-0.json", *(["inrun-0.safetensors"] if keeps else [])}
    shutil.rmtree(tmp_path / "run" / "checkpoint-5")
    again, resumed = run(True if options else str(tmp_path / "run" / "checkpoint-2"))  # the newest is checkpoint-4
    assert again.equals(unbroken)
    assert difference(final, resumed) == 0
    assert inrun.Ledger.open(tmp_path / "books").scores().equals(unbroken)


def test_checkpoints_without_our_state_are_named(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = trainer_of(tmp_path, llama(), **saving)
    attach(trainer, validation_of(HELD), ledger=tmp_path / "books")
    trainer.train()
    (tmp_path / "checkpoint-2" / "inrun-0.json").unlink()
    again = trainer_of(tmp_path, llama(), **saving)
    attach(again, validation_of(HELD), ledger=tmp_path / "books")
    with pytest.raises(TrainingError, match="checkpoint-2 has no inrun-0.json.*Resume from .*checkpoint-1"):
        again.train(resume_from_checkpoint=True)
    damaged = tmp_path / "checkpoint-1" / "inrun-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(TrainingError, match="inrun-0.safetensors is damaged"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class DropsIds(Trainer):
    def get_train_dataloader(self) -> Any:
        plain = self.train_dataset.remove_columns([c for c in self.train_dataset.column_names if c not in ("input_ids", "labels")])
        return torch.utils.data.DataLoader(plain, batch_size=2, collate_fn=self.data_collator)


def stack(xs: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {k: torch.tensor([x[k] for x in xs]) for k in xs[0]}


class OwnCollator(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            Items(), batch_size=2, collate_fn=lambda xs: {k: torch.tensor([x[k] for x in xs]) for k in xs[0]}
        )


@pytest.mark.parametrize("cls", [DropsIds, OwnCollator])
def test_dropped_ids_name_the_argument_that_keeps_them(cls: type, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama(), cls=cls)
    attach(trainer, validation_of(HELD))
    with pytest.raises(IdsError, match=r"'sample_id'.*remove_unused_columns=False"):
        trainer.train()


def test_texts_as_ids_and_missing_validation_are_named(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    with pytest.raises(ConfigurationError, match="validation=None"):
        attach(trainer, None)
    attach(trainer, validation_of(HELD), id_column="note")
    with pytest.raises(IdsError, match="'note' holds 'text'; ids are integers"):
        trainer.train()


def test_options_that_the_accountant_does_not_take_are_named_before_training(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    before = dict(vars(trainer))
    with pytest.raises(
        ConfigurationError, match="credit=, refresh= is no option of inrun.Accountant. Accepted are method, sketch,"
    ):
        attach(trainer, validation_of(HELD), credit="step", refresh=10)
    assert vars(trainer) == before


def strategy(kind: str, **more: Any) -> Any:
    none = {"distributed_type": types.SimpleNamespace(value=kind), "parallelism_config": None}
    return types.SimpleNamespace(**{**none, **more})


@pytest.mark.parametrize(
    ("accelerator", "match"),
    [
        (
            strategy("DEEPSPEED", state=types.SimpleNamespace(deepspeed_plugin=types.SimpleNamespace(zero_stage=3))),
            "DeepSpeed .ZeRO-3.*no process holds a whole weight.*DDP or FSDP2",
        ),
        (strategy("MEGATRON_LM"), "Megatron-LM .tensor and pipeline parallel"),
        (strategy("MULTI_GPU", parallelism_config=types.SimpleNamespace(tp_size=2)), "tensor parallelism .tp_size=2"),
        (strategy("MULTI_GPU", parallelism_config=types.SimpleNamespace(tp_size=1, cp_size=4)), "context parallelism .cp_size=4"),
    ],
)
def test_unsupported_strategies_are_named(accelerator: Any, match: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    trainer.accelerator = accelerator
    with pytest.raises(ConfigurationError, match=match):
        attach(trainer, validation_of(HELD))


def test_models_that_are_spread_out_are_named(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    trainer.model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ConfigurationError, match="several devices .0, 1: device_map"):
        attach(trainer, validation_of(HELD))
    trainer.model.hf_device_map = None
    trainer.model._tp_size = 2
    with pytest.raises(ConfigurationError, match="tensor parallelism .tp_plan=, 2 processes"):
        attach(trainer, validation_of(HELD))


def test_detached_trainers_are_as_they_were(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    scores = attach(trainer, validation_of(HELD))
    with pytest.raises(ConfigurationError, match="attached already"):
        attach(trainer, validation_of(HELD))
    scores.detach()
    assert vars(trainer) == before
    assert trainer.callback_handler.callbacks == callbacks
    attach(trainer, validation_of(HELD))
    trainer.train()


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    class Fails(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1 and self.fail:
                raise RuntimeError("out of memory")
            return super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, llama(), cls=Fails)
    trainer.fail = True
    scores = attach(trainer, validation_of(HELD))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert scores.accountant.steps_done == 1
    trainer.fail = False
    trainer.train()
    assert scores.accountant.steps_done == STEPS
