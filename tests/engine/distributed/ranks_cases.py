"""The runs that are compared: wrappers, methods, optimizers, kinds of accumulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from ranks_runs import Case, ddp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from inrun.training.gpt import GPT, GPTConfig
from tiny import tiny


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)


def slow(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=5e-4, weight_decay=0.1)


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


def sharded(again: bool = True, policy: Any = None, compiled: bool = False) -> Callable[[nn.Module, Any], Any]:
    """Apply fully_shard to blocks and model."""

    def wrap(model: Any, group: Any) -> Any:
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        options = {"mesh": mesh, "reshard_after_forward": again, **({} if policy is None else {"mp_policy": policy})}
        for block in model.blocks:
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


ACCUMULATED, RAGGED = ((2, 3), (3, 1)), ((3, 2), (2, 0))
SHARDED = sharded()
UNUSED = ddp(find_unused_parameters=True)
SINGLE = functools.partial(tiny, dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

DDP = [
    Case("first", {"method": "first"}),
    Case("first, inner module, points", {"method": "first"}, inner=True, points=True, steps=2),
    Case("step, static graph", {"method": "step"}, wrap=ddp(static_graph=True), optimizer=sgd),
    Case("step, unused", {"method": "step"}, wrap=UNUSED, model=SomeUnused, sizes=((3, 2),), apart=True),
    Case("second, ragged", {"method": "second"}, sizes=RAGGED, no_sync=True, padded=True, steps=2),
    Case("whole, sketched, bucket views, in place", {"sketch": 256}, wrap=ddp(gradient_as_bucket_view=True), zero_in_place=True),
    Case("whole, exact, no_sync", {"sketch": "exact"}, sizes=ACCUMULATED, no_sync=True, optimizer=sgd),
    Case("whole, long", {"sketch": 256, "audit_every": 0}, sgd, ((2, 1),), 27, model=one_block, padded=True),
]
MORE_DDP = [
    Case("whole", {}),
    Case("first, bucket views, in place", {"method": "first"}, wrap=ddp(gradient_as_bucket_view=True), zero_in_place=True),
    Case("step, no_sync", {"method": "step"}, sizes=ACCUMULATED, no_sync=True),
    Case("step, bucket views, accumulated", {"method": "step"}, sizes=ACCUMULATED, wrap=ddp(gradient_as_bucket_view=True)),
    Case("whole, static graph", {"sketch": 256}, wrap=ddp(static_graph=True)),
    Case("whole, unused", {"sketch": 256}, wrap=UNUSED, model=SomeUnused, sizes=((2, 3),), apart=True, zero_in_place=True),
    Case("whole, checkpointed", {"sketch": 256}, model=checkpointed),
    Case("bitwise", {"bitwise": True}),
    Case("compile(DDP)", {"method": "first"}, wrap=lambda m, g: torch.compile(ddp()(m, g), backend="aot_eager"), model=one_block),
    Case("DDP(compile)", {}, wrap=lambda m, g: ddp()(torch.compile(m, backend="aot_eager"), g), model=one_block, steps=2),
    Case("single precision", {"sketch": 256}, sgd, model=SINGLE, apart=True, tolerance=5e-6),
]
CONTROL = Case("never averaged", {"method": "first"}, clip=None, steps=1, optimizer=sgd, never_sync=True)
RESUMED = [
    Case("resumed", {"sketch": 256}, slow, ((2, 1), (2, 0)), 5, worlds=(2, 2), resume_after=2),
    Case("fsdp, resumed", {"sketch": 256}, sgd, wrap=SHARDED, steps=5, worlds=(2, 2), resume_after=2),
    Case("from two to one", {"sketch": 256}, slow, ((2, 1),), 5, worlds=(2, 1), resume_after=2),
    Case("exact, from one to two", {"sketch": "exact"}, sgd, steps=4, worlds=(1, 2), resume_after=1),
    Case("fsdp, from two to one", {"sketch": 256}, sgd, wrap=SHARDED, steps=5, worlds=(2, 1), resume_after=2),
    Case("fsdp, from one to two", {}, slow, wrap=SHARDED, steps=4, worlds=(1, 2), resume_after=1),
    Case("fsdp, first, from two to one", {"method": "first"}, wrap=SHARDED, steps=3, worlds=(2, 1), resume_after=0),
]
#: Two processes that go on, and two that never stopped.
UNBROKEN = [dataclasses.replace(c, name=f"{c.name}, unbroken", worlds=None) for c in RESUMED[:2]]
RESUMED_FOUR = [
    Case("from two to four", {"sketch": 256}, slow, ((2, 1, 1, 2),), 5, worlds=(2, 4), resume_after=2),
    Case("fsdp, from two to four", {"sketch": 256}, sgd, ((2, 1, 1, 2),), 5, wrap=SHARDED, worlds=(2, 4), resume_after=2),
    Case("fsdp, from four to two", {}, slow, ((2, 1, 1, 2),), 4, wrap=SHARDED, worlds=(4, 2), resume_after=1),
]
FSDP = [
    Case("fsdp first", {"method": "first"}, wrap=SHARDED),
    Case("fsdp step, accumulated", {"method": "step"}, wrap=SHARDED, sizes=ACCUMULATED, no_sync=True),
    Case("fsdp whole, sketched", {"sketch": 256}, slow, wrap=SHARDED, steps=5),
]
MORE_FSDP = [
    Case("fsdp first, kept whole, in place", {"method": "first"}, sgd, wrap=sharded(False), zero_in_place=True),
    Case("fsdp points", {"method": "first"}, wrap=SHARDED, points=True, steps=2),
    Case("fsdp whole", {}, wrap=SHARDED),
    Case("fsdp step, untied", {"method": "step"}, wrap=SHARDED, model=functools.partial(tiny, tied=False)),
    Case("fsdp first, compiled", {"method": "first"}, sgd, wrap=sharded(compiled=True), steps=2),
    Case("fsdp whole, compiled", {"sketch": 256}, wrap=sharded(False, compiled=True), steps=2),
    Case("fsdp checkpointed", {"sketch": 256}, sgd, wrap=SHARDED, model=checkpointed),
    Case("fsdp whole, kept whole", {"sketch": 256}, sgd, ((3, 2),), wrap=sharded(False), steps=12),
    Case("fsdp first, bfloat16", {"method": "first"}, sgd, wrap=sharded(policy=HALF), model=SINGLE, steps=2, tolerance=2e-2),
    Case("fsdp whole, bfloat16", {"sketch": 256}, sgd, wrap=sharded(policy=HALF), model=SINGLE, steps=2, tolerance=2e-2),
]
FOUR = [
    Case("four, ddp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2), (1, 2, 0, 1)), steps=4, no_sync=True),
    Case("four, fsdp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2),), wrap=sharded(False), steps=4),
    Case("four, fsdp, first", {"method": "first"}, sizes=((2, 1, 1, 2),), wrap=SHARDED),
]
BY_NAME = {c.name: c for c in (*DDP, *MORE_DDP, CONTROL, *RESUMED, *UNBROKEN, *RESUMED_FOUR, *FSDP, *MORE_FSDP, *FOUR)}
