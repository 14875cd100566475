"""Norms whose inputs are bfloat16 and small: statistics are those of single precision, ε too, as the kernels have it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import inrun
from reference import contributions, gradients, sample_gradients

D, N, LR = 64, 4, 0.1
NORMS: dict[str, Callable[[], nn.Module]] = {
    "RMS norm, its default eps": lambda: nn.RMSNorm(D),
    "RMS norm, an eps": lambda: nn.RMSNorm(D, eps=1e-5),
    "layer norm": lambda: nn.LayerNorm(D),
    "Llama": lambda: LlamaRMSNorm(D),
    "Gemma": lambda: GemmaRMSNorm(D),
}


class Small(nn.Module):
    """Inputs of the norm have a size of 0.02, whose square is far below bfloat16's precision."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, D), norm, nn.Linear(D, 50)
        nn.init.normal_(self.table.weight, std=0.02)
        self.table.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens)))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_small_inputs(name: str, weights: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Small(NORMS[name]()).to(weights)
    tokens, labels, held = (torch.randint(0, 50, (N, 8)) for _ in range(3))

    def loss(model: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
            out = model(rows)
        return F.cross_entropy(out.float().flatten(0, 1), labels.flatten(), reduction="sum") / tokens.numel()

    plain = copy.deepcopy(model)
    own = [p for p in plain.parameters() if p.requires_grad]
    each = sample_gradients(lambda j: loss(plain, tokens[j : j + 1], labels[j : j + 1]), N, own)
    truth = contributions(each, [torch.full_like(p, LR) for p in own], gradients(loss(plain, held, labels), own)).float()

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    with inrun.Accountant(model, optimizer, lambda m: loss(m, held, labels), method="first", audit_every=1) as accountant:
        with accountant.step(range(N)):
            loss(model, tokens, labels).backward()
            optimizer.step()
        found = accountant.last.contributions["validation"].float()
    assert (found - truth).norm() < 2e-2 * truth.norm(), (found, truth)
