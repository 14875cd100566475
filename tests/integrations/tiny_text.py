"""A tiny causal model and its data, built from a config, for every integration; and the loop that each is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun

VOCAB, LENGTH = 29, 8


def rows_of(n: int, seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


def llama(seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=tied, **sizes, **special)
    model = LlamaForCausalLM(config).to(dtype)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    return model


def items(rows: Tensor) -> list[dict[str, Any]]:
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of next tokens, in float32 as transformers has it; labels of −100 do not count."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def validation_of(rows: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: token_losses(model(input_ids=rows).logits, rows) / rows[:, 1:].numel()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


class Recorder:
    """Books that are a list: ids and contributions of every step."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def ids(self) -> list[list[int]]:
        return [[int(i) for i in r.sample_ids] for r in self.records]

    def contributions(self) -> list[Tensor]:
        return [torch.as_tensor(r.contributions["validation"]) for r in self.records]


def same_books(got: Recorder, expected: Recorder, tolerance: float = 1e-5) -> None:
    assert got.ids() == expected.ids()
    for a, b in zip(got.contributions(), expected.contributions(), strict=True):
        scale = float(b.abs().max())
        assert scale > 0
        assert float((a - b).abs().max()) <= tolerance * scale


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: list[list[list[int]]],
    loss: Callable[[nn.Module, list[int], list[list[int]]], Tensor],
    validation: Any,
    rates: list[float],
    clip: float | None = 1.0,
    books: Any = None,
    **options: Any,
) -> Any:
    """Train on given ids, step by step and microbatch by microbatch; ``loss(model, ids, of the step)`` is a microbatch's part."""
    books = Recorder() if books is None else books
    model.train()
    with inrun.Accountant(model, optimizer, validation, ledger=books, **options) as accountant:
        for parts, rate in zip(steps, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            with accountant.step() as step:
                for ids in parts:
                    with step.microbatch(ids):
                        loss(model, ids, parts).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            optimizer.zero_grad()
    return books


def in_parts(ids: list[list[int]], size: int) -> list[list[list[int]]]:
    """Cut the ids of every step into microbatches."""
    return [[step[j : j + size] for j in range(0, len(step), size)] for step in ids]
