"""What scores cost inside each trainer: one interleaved run, CPU and wall time per optimizer step.

Every trainer trains the same small Llama on the same rows, without scores, with ``method="first"`` and with whole credit, in turns;
rounds are repeated. The mean of all steps behind the warm-up counts, audits and settlement included. (``cost.py`` has the floor.)

    python benchmarks/integrations.py [--rounds 2] [--steps 149] [--only trainer,lightning]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

VOCAB, LENGTH, BATCH, WIDTH = 1024, 64, 8, 192
#: Steps before the first that counts: whole credit's window is 44 steps at β₁ = 0.9.
WARM_UP = 48
VARIANTS: dict[str, dict[str, Any] | None] = {"plain": None, "first": {"method": "first"}, "whole": {"method": "whole"}}


def model_of() -> Any:
    """Build the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=4 * LENGTH, **sizes, **special))


def rows(n: int, seed: int, length: int = LENGTH) -> Tensor:
    """Draw rows of tokens."""
    return torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


HELD = rows(1, 1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of next tokens, by the model itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def validation(model: nn.Module) -> Tensor:
    """Return the loss of one row."""
    logits = model(input_ids=HELD).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], HELD[0, 1:])


def _trainer_options(steps: int) -> dict[str, Any]:
    common = {"max_steps": steps, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "logging_steps": 1000}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False, "use_cpu": True}
    return {**common, **quiet}


def plain_loop(steps: int, options: dict[str, Any] | None) -> None:
    """Train in a loop of our own, for comparison."""
    import inrun

    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accountant = None if options is None else inrun.Accountant(model, optimizer, validation, **options)
    for t in range(steps):
        tokens = rows(BATCH, t)
        if accountant is None:
            loss_of(model, tokens).backward()
            optimizer.step()
        else:
            with accountant.step(range(BATCH)):
                loss_of(model, tokens).backward()
                optimizer.step()
        optimizer.zero_grad()
    if accountant is not None:
        accountant.close()


def trainer(steps: int, options: dict[str, Any] | None) -> None:
    """Train by transformers' Trainer."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from inrun.integrations.transformers import attach

    data = rows(4 * BATCH, 0).tolist()
    dataset = Dataset.from_dict({"input_ids": data, "labels": data})
    one = Trainer(model_of(), TrainingArguments(tempfile.mkdtemp(), **_trainer_options(steps)), train_dataset=dataset)
    if options is not None:
        attach(one, validation, **options)
    one.train()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=words[1], pad_token=words[2])


def sft(steps: int, options: dict[str, Any] | None, packed: bool = False) -> None:
    """Train by TRL's SFTTrainer; ``packed``: four documents in a row."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from inrun.integrations.trl import attach

    length = LENGTH // 4 if packed else LENGTH
    dataset = Dataset.from_dict({"input_ids": rows(4 * BATCH * LENGTH // length, 0, length).tolist()})
    args = SFTConfig(tempfile.mkdtemp(), bf16=False, packing=packed, max_length=LENGTH, **_trainer_options(steps))
    one = SFTTrainer(model_of(), args, train_dataset=dataset, processing_class=_tokenizer())
    if options is not None:
        attach(one, validation, documents=dataset if packed else None, **options)
    one.train()


def sft_packed(steps: int, options: dict[str, Any] | None) -> None:
    """Train by TRL's SFTTrainer on packed documents."""
    sft(steps, options, packed=True)


def dpo(steps: int, options: dict[str, Any] | None) -> None:
    """Train LoRA adapters by TRL's DPOTrainer, on as many tokens."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    from inrun.integrations.trl import attach

    def texts(seed: int) -> list[str]:
        return [" " + " ".join(f"w{i}" for i in row) for row in rows(4 * BATCH, seed, LENGTH // 2).tolist()]

    pairs = Dataset.from_dict({name: texts(seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))})
    model = get_peft_model(model_of(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = {**_trainer_options(steps), "per_device_train_batch_size": BATCH // 2}
    args = DPOConfig(tempfile.mkdtemp(), bf16=False, **settings)
    one = DPOTrainer(model, None, args, train_dataset=pairs, processing_class=_tokenizer())
    if options is not None:
        attach(one, validation, **options)
    one.train()


def lightning(steps: int, options: dict[str, Any] | None) -> None:
    """Train by Lightning."""
    import lightning.pytorch as pl

    import inrun
    from inrun.integrations.lightning import Scores

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch["tokens"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = inrun.with_ids([{"tokens": row} for row in rows(steps * BATCH, 0)])
    callbacks = [] if options is None else [Scores(validation, model="net", **options)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    one = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)
    one.fit(Module().train(), torch.utils.data.DataLoader(data, batch_size=BATCH))


def accelerate(steps: int, options: dict[str, Any] | None) -> None:
    """Train in a loop with Accelerate."""
    from accelerate import Accelerator

    from inrun.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = model_of()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scores = None if options is None else attach(accelerator, model, optimizer, validation, **options)
    for t in range(steps):
        with accelerator.accumulate(model):
            if scores is None:
                accelerator.backward(loss_of(model, rows(BATCH, t)))
                optimizer.step()
            else:
                with scores.batch(range(BATCH)):
                    accelerator.backward(loss_of(model, rows(BATCH, t)))
                    optimizer.step()
            optimizer.zero_grad()
    if scores is not None:
        scores.close()


RUNS: dict[str, Callable[[int, dict[str, Any] | None], None]] = {
    "plain loop": plain_loop,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "sft": sft,
    "sft, packed": sft_packed,
    "dpo, lora": dpo,
}


def seconds_per_step(
    run: Callable[[int, dict[str, Any] | None], None], steps: int, options: dict[str, Any] | None
) -> tuple[float, float]:
    """Return the mean CPU and wall time between two optimizer steps behind the warm-up."""
    stamps: list[tuple[float, float]] = []
    hook = register_optimizer_step_post_hook(lambda *_: stamps.append((time.process_time(), time.perf_counter())))
    try:
        run(steps, options)
    finally:
        hook.remove()
    (cpu, wall), (cpu_after, wall_after) = stamps[WARM_UP], stamps[-1]
    count = len(stamps) - 1 - WARM_UP
    return (cpu_after - cpu) / count, (wall_after - wall) / count


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=149)
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs")
    args = parser.parse_args()
    if args.steps < WARM_UP + 51:
        parser.error(f"--steps: at least {WARM_UP + 51}, of which {WARM_UP} warm up")
    warnings.simplefilter("ignore")
    logging.getLogger("inrun").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = [name for name in RUNS if name in args.only]
    mean = {(name, variant): (0.0, 0.0) for name in chosen for variant in VARIANTS}
    for turn in range(args.rounds):
        for name in chosen:
            for variant, options in VARIANTS.items():
                found = seconds_per_step(RUNS[name], args.steps, options)
                before = mean[name, variant]
                mean[name, variant] = (before[0] + found[0] / args.rounds, before[1] + found[1] / args.rounds)
                ms = f"{1000 * found[0]:7.1f} ms CPU {1000 * found[1]:7.1f} ms wall"
                print(f"round {turn}  {name:12} {variant:6} {ms}", file=sys.stderr, flush=True)
    print("| | plain, ms per step (CPU, wall) | first, of plain (CPU, wall) | whole credit, of plain (CPU, wall) |")
    print("|---|---|---|---|")
    for name in chosen:
        plain = mean[name, "plain"]
        ratios = [f"{mean[name, v][0] / plain[0]:.2f}, {mean[name, v][1] / plain[1]:.2f}" for v in ("first", "whole")]
        print(f"| {name} | {1000 * plain[0]:.0f}, {1000 * plain[1]:.0f} | {ratios[0]} | {ratios[1]} |")


if __name__ == "__main__":
    main()
