"""The runs that are compared: wrappers, methods, optimizers, kinds of accumulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ranks_runs import Case
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from inrun.training.gpt import GPT, GPTConfig
from tiny import tiny


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)


def slow(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=5e-4, weight_decay=0.1)


def ddp(**options: Any) -> Callable[[nn.Module], Any]:
    return functools.partial(DistributedDataParallel, **options)


class SomeUnused(nn.Module):
    """A branch that only batches with many rows go through."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = tiny(), nn.Linear(23, 23, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(rows)
        return out + self.branch(out) if len(rows) > 2 else out


def one_block() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(23, 12, 8, 1, 2, 0.0, True)).double()


class Checkpointed(GPT):
    """Blocks are run again in the backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def checkpointed() -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(GPTConfig(23, 12, 8, 2, 2, 0.0, True)).double()


def sharded(again: bool = True, policy: Any = None) -> Callable[[nn.Module], Any]:
    """Apply fully_shard to blocks and model."""

    def wrap(model: Any) -> Any:
        options = {"reshard_after_forward": again, **({} if policy is None else {"mp_policy": policy})}
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


ACCUMULATED, RAGGED = ((2, 3), (3, 1)), ((3, 2), (2, 0))
UNUSED = ddp(find_unused_parameters=True)
SINGLE = functools.partial(tiny, dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

DDP = [
    Case("first", {"method": "first"}),
    Case("first, inner module, points", {"method": "first"}, inner=True, points=True, steps=2),
    Case("step, static graph", {"method": "step"}, wrap=ddp(static_graph=True), optimizer=sgd),
    Case("step, unused", {"method": "step"}, wrap=UNUSED, model=SomeUnused, sizes=((3, 2),), apart=True),
    Case("second, ragged", {"method": "second"}, sizes=RAGGED, no_sync=True, padded=True, steps=2),
    Case("whole", {}),
    Case("whole, sketched, bucket views, in place", {"sketch": 256}, wrap=ddp(gradient_as_bucket_view=True), zero_in_place=True),
    Case("whole, exact, no_sync", {"sketch": "exact"}, sizes=ACCUMULATED, no_sync=True, optimizer=sgd),
    Case("whole, long", {"sketch": 256, "audit_every": 0}, sgd, ((2, 1),), 27, model=one_block, padded=True),
]
MORE_DDP = [
    Case("first, bucket views, in place", {"method": "first"}, wrap=ddp(gradient_as_bucket_view=True), zero_in_place=True),
    Case("step, no_sync", {"method": "step"}, sizes=ACCUMULATED, no_sync=True),
    Case("step, bucket views, accumulated", {"method": "step"}, sizes=ACCUMULATED, wrap=ddp(gradient_as_bucket_view=True)),
    Case("whole, static graph", {"sketch": 256}, wrap=ddp(static_graph=True)),
    Case("whole, unused", {"sketch": 256}, wrap=UNUSED, model=SomeUnused, sizes=((2, 3),), apart=True, zero_in_place=True),
    Case("whole, checkpointed", {"sketch": 256}, model=checkpointed),
    Case("bitwise", {"bitwise": True}),
]
CONTROL = Case("never averaged", {"method": "first"}, clip=None, steps=1, optimizer=sgd, never_sync=True)
RESUMED = [
    Case("resumed", {"sketch": 256}, slow, ((2, 1), (2, 0)), 5, worlds=(2, 2), resume_after=2),
    Case("from two to one", {"sketch": 256}, slow, ((2, 1),), 5, worlds=(2, 1), resume_after=2),
    Case("exact, from one to two", {"sketch": "exact"}, sgd, steps=4, worlds=(1, 2), resume_after=1),
]
FSDP = [
    Case("fsdp first", {"method": "first"}, wrap=sharded()),
    Case("fsdp first, kept whole, in place", {"method": "first"}, sgd, wrap=sharded(False), zero_in_place=True),
    Case("fsdp step, accumulated", {"method": "step"}, wrap=sharded(), sizes=ACCUMULATED, no_sync=True),
    Case("fsdp points", {"method": "first"}, wrap=sharded(), points=True, steps=2),
    Case("fsdp whole", {}, wrap=sharded()),
    Case("fsdp whole, sketched", {"sketch": 256}, slow, wrap=sharded(), steps=5),
]
MORE_FSDP = [
    Case("fsdp step, untied", {"method": "step"}, wrap=sharded(), model=functools.partial(tiny, tied=False)),
    Case("fsdp checkpointed", {"sketch": 256}, sgd, wrap=sharded(), model=checkpointed),
    Case("fsdp whole, kept whole", {"sketch": 256}, sgd, ((3, 2),), wrap=sharded(False), steps=12),
    Case("fsdp first, bfloat16", {"method": "first"}, sgd, wrap=sharded(policy=HALF), model=SINGLE, steps=2, tolerance=2e-2),
    Case("fsdp whole, bfloat16", {"sketch": 256}, sgd, wrap=sharded(policy=HALF), model=SINGLE, steps=2, tolerance=2e-2),
]
FOUR = [
    Case("four, ddp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2), (1, 2, 0, 1)), steps=4, no_sync=True),
    Case("four, fsdp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2),), wrap=sharded(False), steps=4),
    Case("four, fsdp, first", {"method": "first"}, sizes=((2, 1, 1, 2),), wrap=sharded()),
]
BY_NAME = {c.name: c for c in (*DDP, *MORE_DDP, CONTROL, *RESUMED, *FSDP, *MORE_FSDP, *FOUR)}
