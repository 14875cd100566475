"""Norms whose inputs are bfloat16 and small: statistics are those of single precision, ε too, as the kernels have it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import inrun

D, N, T = 64, 4, 8
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
        out: Tensor = self.head(self.norm(self.table(tokens)))
        return out


def losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(len(tokens), -1).mean(1)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_small_inputs(name: str, weights: torch.dtype) -> None:
    model = Small(NORMS[name]()).to(weights)
    tokens, labels, held = (torch.randint(0, 50, (N, T)) for _ in range(3))
    plain = copy.deepcopy(model)
    own = [p for p in plain.parameters() if p.requires_grad]
    under = torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32)

    def taken(model: nn.Module, rows: slice) -> Tensor:
        with under:
            return losses(model, tokens[rows], labels[rows]).sum() / N

    def validation(model: nn.Module) -> Tensor:
        with under:
            return losses(model, held, labels).mean()

    v = torch.autograd.grad(validation(plain), own)
    one = [torch.autograd.grad(taken(plain, slice(i, i + 1)), own) for i in range(N)]
    truth = torch.stack([0.1 * sum((a.float() * b.float()).sum() for a, b in zip(g, v, strict=True)) for g in one])

    optimizer = torch.optim.SGD(own := [p for p in model.parameters() if p.requires_grad], lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation, method="first", update="sgd", audit_every=1)
    with accountant.step(range(N)):
        taken(model, slice(None)).backward()
        optimizer.step()
    assert own
    found = accountant.last.contributions["validation"].float()
    assert (found - truth).norm() < 2e-2 * truth.norm(), (found, truth)
