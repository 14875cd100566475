"""What every process of a job with a trainer runs: cases by name; the same functions, called in one process, are the references."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inrun
from integrations.tiny_text import Recorder, llama, rows_of, token_losses, validation_of, weights

warnings.filterwarnings("ignore")
LR = 1e-2
ROWS, HELD = rows_of(12, 1), rows_of(3, 2)
#: Samples have different numbers of tokens that count.
LABELS = ROWS.clone()
for _i in range(12):
    LABELS[_i, 1 : 1 + _i % 4] = -100


def shared(name: str) -> Path:
    """Return a folder that all processes see."""
    return Path(os.environ["JOB_SHARED"]) / name


def as_torchrun(rank: int, world: int) -> None:
    """Set what torchrun would have set; the process group is there already."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29999}
    os.environ |= {k: str(v) for k, v in found.items()} | {"MASTER_ADDR": "localhost"}


def wait() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def steps_of(books: Recorder) -> list[tuple[list[int], list[float]]]:
    return [(ids, c.tolist()) for ids, c in zip(books.ids(), books.contributions(), strict=True)]


# transformers


class Stream(torch.utils.data.IterableDataset):
    """Rows that are read from the beginning, with ids."""

    def __iter__(self) -> Any:
        pairs = zip(ROWS, LABELS, strict=True)
        return iter([{"input_ids": x.tolist(), "labels": y.tolist(), "sample_id": i} for i, (x, y) in enumerate(pairs)])


def trainer_of(folder: Path, model: nn.Module, rows: int, world: int, dataset: Any = None, **options: Any) -> Any:
    import datasets
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    items = [{"input_ids": x.tolist(), "labels": y.tolist()} for x, y in zip(ROWS[:rows], LABELS[:rows], strict=True)]
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    common = {
        "per_device_train_batch_size": 4 // world,
        "per_device_eval_batch_size": 2,
        "learning_rate": LR,
        "weight_decay": 0.1,
        "max_grad_norm": 0.3,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(str(folder), **{**quiet, **common, **options})
    assert args.world_size == world
    return Trainer(model, args, train_dataset=datasets.Dataset.from_list(items) if dataset is None else dataset)


def held_out() -> Any:
    import datasets

    return datasets.Dataset.from_list([{"input_ids": x.tolist(), "labels": x.tolist()} for x in HELD])


def ragged(rank: int, world: int) -> dict[str, Any]:
    """Eleven rows, two epochs, accumulated, clipped; books on disk by both, validation rows split over both."""
    from inrun.integrations.transformers import attach

    model = llama()
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(shared("ragged"), model, 11, world, **options)
    scores = attach(trainer, held_out(), ledger=shared("ragged books"), audit_every=1)
    trainer.train()
    reader = inrun.Ledger.open(shared("ragged books"))
    return {
        "weights": weights(model),
        "scores": scores.scores().to_pydict(),
        "ours": reader.contributions().to_pydict(),
        "accounts": reader.accounts().to_pydict(),
        "scored": scores.scored()["times_used"][:],
        "coverage": scores.accountant.coverage.scored_share,
        "logs": sorted(trainer.state.log_history[0]),
    }


def step_game(across: bool, **more: Any) -> Callable[[int, int], dict[str, Any]]:
    """Books in memory; ``across`` tells whether tokens are averaged over processes."""

    def run(rank: int, world: int) -> dict[str, Any]:
        from inrun.errors import ConfigurationError
        from inrun.integrations.transformers import attach

        model, books = llama(), Recorder()
        options = {"max_steps": 3, "gradient_accumulation_steps": 2, "average_tokens_across_devices": across, **more}
        trainer = trainer_of(shared("step"), model, 12, world, **options)
        attach(trainer, validation_of(HELD), ledger=books, method="step")
        trainer.train()
        found = {"weights": weights(model), "steps": steps_of(books)}
        if world > 1 and across and not more:
            trainer = trainer_of(shared("step"), llama(), 12, world, max_steps=1)
            scores = attach(trainer, validation_of(HELD))
            trainer.train()
            try:
                scores.scored()
            except ConfigurationError as error:
                found["refused"] = str(error)
        return found

    return run


def sharded_plugin(version: int = 2) -> Any:
    """Return how Accelerate splits parameters over processes."""
    from accelerate import FullyShardedDataParallelPlugin

    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    return FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **blocks)


def shard(accelerator: Any, plugin: Any) -> None:
    """Let an accelerator shard: Accelerate itself does so on GPUs only; on CPUs it takes DDP, whatever the plugin says."""
    from accelerate import DistributedType

    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state._shared_state["fsdp_plugin"] = plugin


def whole_weights(model: Any) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def sharding_trainer(folder: Path, world: int, **options: Any) -> Any:
    trainer = trainer_of(folder, llama(), 12, world, **options)
    shard(trainer.accelerator, sharded_plugin())
    trainer.is_fsdp_enabled = True
    return trainer


def sharded_trainer(rank: int, world: int) -> dict[str, Any]:
    from inrun.integrations.transformers import attach

    trainer = sharding_trainer(shared("sharded"), world, max_steps=3, gradient_accumulation_steps=2)
    books = Recorder()
    attach(trainer, held_out(), ledger=books, method="first")
    trainer.train()
    kinds = sorted({type(p).__name__ for p in trainer.model_wrapped.parameters()})
    return {"weights": whole_weights(trainer.model_wrapped), "steps": steps_of(books), "kinds": kinds}


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def resumable(rank: int, world: int, resume: Path | None = None, books: str = "resumed books") -> dict[str, Any]:
    from inrun.integrations.transformers import attach

    model = llama()
    folder = shared("resumed" if world > 1 else "one process") if resume is None else resume.parent
    trainer = trainer_of(folder, model, 12, world, **SAVING)
    scores = attach(trainer, validation_of(HELD), ledger=shared(books), audit_every=2)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {"weights": weights(model), "scores": scores.scores().to_pydict()}


#: Of a run that is killed.
LONG = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}


def killable(rank: int, world: int) -> dict[str, Any]:
    """A run that begins, or goes on from where ``JOB_RESUME`` says, and tells how far it is."""
    from transformers import TrainerCallback

    from inrun.integrations.transformers import attach

    class Tells(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0:
                shared("told").write_text(str(state.global_step))
            time.sleep(0.1)

    model = llama()
    trainer = trainer_of(shared("run"), model, 12, world, **LONG)
    trainer.add_callback(Tells())
    scores = attach(trainer, validation_of(HELD), ledger=shared("books"), audit_every=2)
    trainer.train(resume_from_checkpoint=os.environ.get("JOB_RESUME"))
    return {"weights": weights(model), "scores": scores.scores().to_pydict()}


def sharded_resumed(rank: int, world: int) -> dict[str, Any]:
    from inrun.integrations.transformers import attach

    def run(resume: Path | None) -> dict[str, Any]:
        trainer = sharding_trainer(shared("sharded run"), world, **SAVING)
        scores = attach(trainer, validation_of(HELD), ledger=shared("sharded books"), audit_every=2)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {"weights": whole_weights(trainer.model_wrapped), "scores": scores.scores().to_pydict()}

    return {"unbroken": run(None), "again": run(shared("sharded run") / "checkpoint-2")}


def resumed(rank: int, world: int) -> dict[str, Any]:
    """A run, and the run that goes on from its checkpoint; checkpoint and books are kept for another number of processes."""
    unbroken = resumable(rank, world)
    wait()
    if rank == 0:
        shutil.copytree(shared("resumed books"), shared("kept books"))
        shutil.copytree(shared("resumed") / "checkpoint-2", shared("kept") / "checkpoint-2")
        shutil.copytree(shared("kept"), shared("damaged"))
        (shared("damaged") / "checkpoint-2" / "inrun-1.json").unlink()
    wait()
    again = resumable(rank, world, shared("resumed") / "checkpoint-2")
    try:
        resumable(rank, world, shared("damaged") / "checkpoint-2")
        error = ""
    except inrun.errors.InrunError as found:
        error = f"{type(found).__name__}: {found}"
    return {"unbroken": unbroken, "again": again, "damaged": error}


# Accelerate


def accelerator_of(plugin: Any = None, steps: int = 2) -> Any:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    found = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    if plugin is not None:
        shard(found, plugin)
    return found


def mean_loss(model: Any, rows: Tensor) -> Tensor:
    return token_losses(model(input_ids=rows).logits, rows) / rows[:, 1:].numel()


def accelerated(order: str, sharded: bool = False, **options: Any) -> Callable[[int, int], dict[str, Any]]:
    def run(rank: int, world: int) -> dict[str, Any]:
        from inrun.integrations.accelerate import attach

        accelerator, model, books = accelerator_of(sharded_plugin() if sharded else None), llama(), Recorder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        loader = torch.utils.data.DataLoader(inrun.with_ids([{"rows": row} for row in ROWS[:10]]), batch_size=2)
        if order == "before":
            scores = attach(accelerator, model, optimizer, validation_of(HELD), ledger=books, **options)
        called, wrapper, loader = accelerator.prepare(model, optimizer, loader)
        if order == "after":
            scores = attach(accelerator, called, wrapper, validation_of(HELD), ledger=books, **options)
        for batch in loader:
            with accelerator.accumulate(called), scores.batch(batch["sample_id"]):
                accelerator.backward(mean_loss(called, batch["rows"]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(called.parameters(), 0.3)
                wrapper.step()
                wrapper.zero_grad()
        scores.close()
        kinds = sorted({type(p).__name__ for p in called.parameters()})
        return {"weights": whole_weights(called), "steps": steps_of(books), "called": type(called).__name__, "kinds": kinds}

    return run


def accelerated_resumed(rank: int, world: int) -> dict[str, Any]:
    from inrun.integrations.accelerate import attach

    def run(resume: Path | None) -> dict[str, Any]:
        accelerator, model = accelerator_of(steps=1), llama()
        called, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        if resume is not None:
            accelerator.load_state(str(resume))
        scores = attach(accelerator, called, optimizer, validation_of(HELD), resume_from=resume, ledger=shared("loop books"))
        for number in range(0 if resume is None else 2, 4):
            ids = [number + 5 * rank, (number + 3) % 12]
            with scores.batch(ids):
                accelerator.backward(mean_loss(called, ROWS[torch.tensor(ids)]))
                optimizer.step()
            optimizer.zero_grad()
            if number == 1 and resume is None:
                accelerator.save_state(str(shared("loop")))
        scores.close()
        return {"weights": weights(model), "scores": scores.scores().to_pydict()}

    return {"unbroken": run(None), "again": run(shared("loop"))}


# TRL


def sft(rank: int, world: int) -> dict[str, Any]:
    """Rows of different lengths, padded; the tied head is called."""
    import datasets
    from accelerate.state import AcceleratorState
    from trl import SFTConfig, SFTTrainer

    from inrun.integrations.trl import attach
    from integrations.test_trl import tokenizer

    AcceleratorState._reset_state(True)
    rows = datasets.Dataset.from_dict({"input_ids": [x[: 4 + i % 5].tolist() for i, x in enumerate(ROWS)]})
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    sizes = {"per_device_train_batch_size": 4 // world, "max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    args = SFTConfig(str(shared("sft")), learning_rate=LR, dataloader_pin_memory=False, optim="adamw_torch", **quiet, **sizes)
    model = llama()
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer())
    scores = attach(trainer, validation_of(HELD), ledger=shared(f"sft books {world}"))
    trainer.train()
    assert scores.accountant.coverage.scored_share == 1.0
    return {"weights": weights(model), "scores": scores.scores().to_pydict()}


def trl_args(kind: Any, name: str, world: int, **more: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    sizes = {"per_device_train_batch_size": 4 // world, "max_steps": 3, "max_grad_norm": 0.3}
    common = {"learning_rate": LR, "dataloader_pin_memory": False, "optim": "adamw_torch"}
    return kind(str(shared(name)), **quiet, **{**sizes, **common, **more})


def packed(rank: int, world: int) -> dict[str, Any]:
    """Several documents in a row, each with a score of its own; the tied head is called."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from inrun.integrations.trl import attach
    from integrations.test_trl import WORDS, tokenizer

    lengths = [2 + i % 5 for i in range(40)]
    rows = [rows_of(1, 100 + i, n)[0].tolist() for i, n in enumerate(lengths)]
    documents = datasets.Dataset.from_list([{"text": " ".join(WORDS[t] for t in row) + " </s>"} for row in rows])
    args = trl_args(SFTConfig, "packed", world, packing=True, max_length=12)
    model = llama()
    trainer = SFTTrainer(model, args, train_dataset=documents, processing_class=tokenizer())
    assert len(trainer.train_dataset) >= 12  # no row is taken twice
    scores = attach(trainer, validation_of(HELD), documents=documents, ledger=shared(f"packed books {world}"))
    trainer.train()
    used = scores.scored()["times_used"][:]
    coverage = scores.accountant.coverage.scored_share
    return {"weights": weights(model), "scores": scores.scores().to_pydict(), "used": used, "coverage": coverage}


def preferred(adapters: bool) -> Callable[[int, int], dict[str, Any]]:
    """DPO: two rows per sample, of the whole model or of adapters alone."""

    def run(rank: int, world: int) -> dict[str, Any]:
        import datasets
        from trl import DPOConfig, DPOTrainer

        from inrun.integrations.trl import attach
        from integrations.test_trl import WORDS, lora, tokenizer

        def text(seed: int, length: int) -> str:
            return " ".join(WORDS[t] for t in rows_of(1, seed, length)[0].tolist())

        rows = [
            {"prompt": text(i, 3), "chosen": f" {text(50 + i, 2 + i % 3)} </s>", "rejected": f" {text(90 + i, 4)} </s>"}
            for i in range(12)
        ]
        name = "dpo, lora" if adapters else "dpo"
        args = trl_args(DPOConfig, name, world, beta=0.5)
        model, reference = (lora(llama()), None) if adapters else (llama(), llama())
        dataset = datasets.Dataset.from_list(rows)
        trainer = DPOTrainer(model, reference, args, train_dataset=dataset, processing_class=tokenizer())
        scores = attach(trainer, validation_of(HELD), ledger=shared(f"{name} books {world}"))
        trainer.train()
        coverage = scores.accountant.coverage.scored_share
        return {"weights": weights(model), "scores": scores.scores().to_pydict(), "coverage": coverage}

    return run


# Lightning


def lightning_fit(cls: str, where: str | None, books: Any, checkpoint: Any = None, saved: Path | None = None, **more: Any) -> Any:
    """Train with strategy="ddp" on two devices: this process is one of them."""
    import lightning.pytorch as pl

    from inrun.integrations.lightning import Scores
    from integrations import test_lightning as tests

    scores = Scores(tests.validation, model=where, ledger=books, **more)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    saver = [] if saved is None else [pl.callbacks.ModelCheckpoint(saved, "{epoch}", save_top_k=-1, every_n_epochs=1)]
    common = {"max_epochs": 1 if saved is None else 2, "enable_checkpointing": saved is not None, "log_every_n_steps": 1}
    clipped = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2} if cls != "Manual" else {}
    trainer = pl.Trainer(
        strategy="ddp", devices=2, callbacks=[scores, *saver], default_root_dir=shared("lightning"), **quiet, **common, **clipped
    )
    module = getattr(tests, cls)()
    trainer.fit(module, tests.loader(shuffle=True), ckpt_path=checkpoint)
    assert "inrun/validation/paid" in trainer.logged_metrics
    return scores, module


def lightning_case(cls: str, where: str | None, **more: Any) -> Callable[[int, int], dict[str, Any]]:
    def run(rank: int, world: int) -> dict[str, Any]:
        books = Recorder()
        scores, module = lightning_fit(cls, where, books, **more)
        assert scores.accountant.coverage.scored_share == 1.0
        return {"weights": weights(module), "steps": steps_of(books)}

    return run


def lightning_resumed(rank: int, world: int) -> dict[str, Any]:
    def run(checkpoint: Path | None) -> dict[str, Any]:
        scores, module = lightning_fit("Whole", "net", shared("lightning books"), checkpoint, shared("saved"), audit_every=2)
        return {"weights": weights(module), "scores": scores.scores().to_pydict()}

    return {"unbroken": run(None), "again": run(shared("saved") / "epoch=0.ckpt")}


def named_errors(rank: int, world: int) -> dict[str, Any]:
    """What is refused where several processes train, with its message."""
    from inrun.errors import InrunError
    from inrun.integrations.accelerate import attach

    found = {}
    for name, version in (("FSDP1", 1), ("FSDP2 before prepare", 2)):
        accelerator, model = accelerator_of(sharded_plugin(version)), llama()
        try:
            attach(accelerator, model, torch.optim.SGD(model.parameters()), validation_of(HELD))
        except InrunError as error:
            found[name] = str(error)
    accelerator_of()
    return found


JOBS: dict[str, dict[str, Callable[[int, int], Any]]] = {
    "trainers": {
        "ragged": ragged,
        "across": step_game(True),
        "each by itself": step_game(False),
        "stream": step_game(True, dataset=Stream()),
        "dispatched": step_game(True, accelerator_config={"dispatch_batches": True}),
        "resumed": resumed,
        "sharded": sharded_trainer,
        "sharded resumed": sharded_resumed,
        "accelerate before": accelerated("before"),
        "accelerate after": accelerated("after", method="first"),
        "accelerate fsdp2": accelerated("after", sharded=True, method="first"),
        "accelerate fsdp2, whole": accelerated("after", sharded=True),
        "accelerate resumed": accelerated_resumed,
        "lightning": lightning_case("Whole", "net"),
        "lightning, the module itself": lightning_case("Itself", None, method="first"),
        "lightning, by hand": lightning_case("Manual", "net"),
        "lightning resumed": lightning_resumed,
        "errors": named_errors,
    },
    "trl": {"sft": sft, "packed": packed, "dpo": preferred(False), "dpo, lora": preferred(True)},
    "killable": {"killable": killable},
}


def _set_up() -> None:
    if torch.distributed.is_initialized():
        as_torchrun(torch.distributed.get_rank(), torch.distributed.get_world_size())


_set_up()
