"""What cannot be scored is named in one sentence, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inrun
from conditions import Net, loss_of, net, rows, validation
from inrun.errors import ConfigurationError, ConservationError, CoverageError, CreditError, OptimizerError, StepError


def accountant_of(model: nn.Module, optimizer: Any = None, **options: Any) -> inrun.Accountant:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return inrun.Accountant(model, optimizer, validation, **({"credit": "step"} | options))


def foreign(base: type, name: str, module: str) -> type:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("name", "module"),
    [("AdamW8bit", "bitsandbytes.optim.adamw"), ("PagedAdamW", "bitsandbytes.optim.adamw"), ("AdamW4bit", "torchao.optim.adam")],
)
def test_optimizers_of_few_bits(name: str, module: str) -> None:
    model = net()
    optimizer = foreign(torch.optim.AdamW, name, module)(model.parameters(), lr=0.01)
    with pytest.raises(OptimizerError, match=rf"{name}.*full precision.*update=\"sgd\""):
        accountant_of(model, optimizer)
    accountant_of(model, optimizer, update="sgd").close()


def test_fused_head_of_liger() -> None:
    model = net()

    def lce_forward(self: Net, tokens: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, tokens)

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    model.__class__ = type("Net", (Net,), {"forward": lce_forward})
    with pytest.raises(ConfigurationError, match="Liger.*fused_linear_cross_entropy=False"):
        accountant_of(model)


class Headless(Net):
    """Returns hidden states; the loss multiplies by the head's weight itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("credit", ["step", "whole"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_that_takes_the_weight_of_the_head(credit: str, tied: bool) -> None:
    """Untied, the head is missed; tied, its table is scored as a table alone, which only sums can tell."""
    torch.manual_seed(0)
    model = Headless().double()
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    def fused(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(m(tokens[:, :-1]), m.head.weight).flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: fused(m, rows(2, 9)), credit=credit, audit_every=0)
    with (
        pytest.raises((CoverageError, ConservationError, CreditError), match=r"words.weight|head.weight"),
        accountant.step(range(4)),
    ):
        fused(model, rows(4, 1)).backward()
        optimizer.step()


def test_optimizers_inside_the_backward() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    accountant = accountant_of(model, list(optimizers.values()))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(StepError, match="inside the backward.*after the backward"), accountant.step(range(4)):
        loss_of(model, rows(4, 1)).backward()
    model = net()
    model.head.weight._in_backward_optimizers = [1]
    with pytest.raises(ConfigurationError, match="inside the backward"):
        accountant_of(model)


def test_tensor_parallel_parameters() -> None:
    model = net()
    model.head.weight.placements = ("Shard(dim=0)",)
    with pytest.raises(ConfigurationError, match=r"words.weight is a DTensor \(Shard\(dim=0\)\).*fully_shard on a mesh"):
        accountant_of(model)


def test_partitioned_parameters() -> None:
    model = net()
    model.head.weight.ds_id = 3
    with pytest.raises(ConfigurationError, match=r"words.weight is partitioned by DeepSpeed ZeRO-3.*fully_shard"):
        accountant_of(model)


def test_pipeline_stages() -> None:
    stage = type("PipelineStage", (), {"__module__": "torch.distributed.pipelining.stage"})()
    with pytest.raises(ConfigurationError, match="pipeline stage.*DistributedDataParallel"):
        inrun.Accountant(stage, torch.optim.SGD(net().parameters(), lr=0.1), lambda m: m)
