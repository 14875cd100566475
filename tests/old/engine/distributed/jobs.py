"""What the jobs of several processes run: conditions by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from guards import AGREED, GUARDS, dying
from plays import Play, play_part
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from inrun.training.gpt import GPT, GPTConfig
from tiny import tiny

DDP = DistributedDataParallel


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)


def rough(p: Any) -> torch.optim.Optimizer:
    """Moves so far that curvature is a large part of a step."""
    return torch.optim.SGD(p, lr=0.5, momentum=0.9)


def slow(p: Any) -> torch.optim.Optimizer:
    """Moves so little that no step is cut into pieces."""
    return torch.optim.AdamW(p, lr=5e-4, weight_decay=0.1)


def ddp(**options: Any) -> Callable[[nn.Module], Any]:
    return functools.partial(DDP, **options)


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


BLOCKS = {"sketch": 256, "audit_every": 0}
UNUSED = ddp(find_unused_parameters=True)
ACCUMULATED = ((2, 3), (3, 1))
RAGGED = ((3, 2), (2, 0))
PLAYS = [
    Play("first", {"method": "first"}, steps=3),
    Play("first, bucket views, in place", {"method": "first"}, wrap=ddp(gradient_as_bucket_view=True), zero_in_place=True),
    Play("lookahead, static graph", {"method": "lookahead"}, wrap=ddp(static_graph=True), optimizer=sgd),
    Play("midpoint, no_sync", {"method": "midpoint"}, sizes=ACCUMULATED, no_sync=True),
    Play("midpoint, bucket views, accumulated", {"method": "midpoint"}, sizes=ACCUMULATED, wrap=ddp(gradient_as_bucket_view=True)),
    Play("second, ragged", {"method": "second"}, sizes=RAGGED, no_sync=True, padded=True),
    Play("first, inner module, points", {"method": "first", "extra": ("norm",)}, inner=True, points=True),
    Play("project", {"method": "first", "update": "secant", "bitwise": True}),
    Play("whole", {}, steps=3),
    Play(
        "whole, in blocks",
        {"sketch": 256, "audit_every": 0},
        steps=27,
        optimizer=sgd,
        sizes=((2, 1),),
        model=one_block,
        padded=True,
    ),
    Play("whole, exact, no_sync", {"credit_memory": "exact"}, sizes=ACCUMULATED, no_sync=True),
    Play("whole, resumed", {"sketch": 256}, steps=5, optimizer=slow, worlds=(2, 2), resume_after=2, sizes=((2, 1), (2, 0))),
    Play("whole, from two to one", {"sketch": 256}, steps=5, optimizer=slow, worlds=(2, 1), resume_after=2, sizes=((2, 1),)),
    Play("whole, exact, from one to two", {"credit_memory": "exact"}, steps=4, worlds=(1, 2), resume_after=1, optimizer=sgd),
    Play("unused", {"method": "midpoint"}, wrap=UNUSED, model=SomeUnused, sizes=((3, 2),), apart=True),
    Play("unused, whole", {"sketch": 256}, wrap=UNUSED, model=SomeUnused, sizes=((2, 3),), apart=True, zero_in_place=True),
    Play("wrong", {"method": "first"}, wrong=2.0, clip=None, steps=1, optimizer=sgd),
]
COMPILED = [
    Play("compile(DDP)", {"method": "first"}, wrap=lambda m: torch.compile(DDP(m), backend="aot_eager"), model=one_block, steps=2),
    Play("DDP(compile)", {"method": "first"}, wrap=lambda m: DDP(torch.compile(m, backend="aot_eager")), model=one_block, steps=2),
    Play("unused", {"method": "midpoint"}, wrap=ddp(find_unused_parameters=True), model=SomeUnused, sizes=((3, 2),), apart=True),
    Play(
        "unused, whole",
        {"sketch": 256},
        wrap=ddp(find_unused_parameters=True),
        model=SomeUnused,
        sizes=((2, 3),),
        apart=True,
        zero_in_place=True,
    ),
]


def sharded(again: bool = True, policy: Any = None, compiled: bool = False) -> Callable[[nn.Module], Any]:
    """Apply fully_shard to blocks and model."""

    def wrap(model: Any) -> Any:
        options = {"reshard_after_forward": again, **({} if policy is None else {"mp_policy": policy})}
        for block in model.blocks:
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


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


SHARDED = [
    Play("fsdp first", {"method": "first"}, wrap=sharded()),
    Play("fsdp first, not resharded", {"method": "first"}, wrap=sharded(again=False), optimizer=sgd, zero_in_place=True),
    Play("fsdp lookahead, untied", {"method": "lookahead"}, wrap=sharded(), model=functools.partial(tiny, tied=False)),
    Play("fsdp midpoint", {"method": "midpoint"}, wrap=sharded(again=False), sizes=((3, 2),)),
    Play("fsdp midpoint, accumulated", {"method": "midpoint"}, wrap=sharded(), sizes=ACCUMULATED, no_sync=True),
    Play("fsdp second", {"method": "second", "hessian": "differences"}, wrap=sharded()),
    Play("fsdp points", {"method": "first", "extra": ("norm",)}, wrap=sharded(), points=True),
    Play("fsdp checkpointed", {"method": "first"}, wrap=sharded(), model=checkpointed, optimizer=sgd),
    Play("fsdp whole", {"sketch": 256}, wrap=sharded(), steps=4, optimizer=slow),
    Play(
        "fsdp whole, resumed",
        {"sketch": 256},
        wrap=sharded(False),
        steps=4,
        optimizer=slow,
        worlds=(2, 2),
        resume_after=1,
        sizes=((2, 1),),
    ),
]


#: Long enough for steps that owe to older uses what they pay later.
LONG = [
    Play(
        "fsdp whole, in blocks",
        {"sketch": 256, "audit_every": 0},
        wrap=sharded(),
        steps=27,
        optimizer=sgd,
        sizes=((2, 1),),
        model=one_block,
        padded=True,
    )
]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COARSE = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SECOND = {"method": "second", "hessian": "differences"}
SINGLE = functools.partial(tiny, dtype=torch.float32)
#: In single precision, as people train.
IN_SINGLE = [
    Play("whole, float32", {"sketch": 256}, model=SINGLE, steps=4),
    Play("first, float32", {"method": "first"}, model=SINGLE, steps=5),
]


def in_each_other(model: Any) -> Any:
    """Apply fully_shard to the layers of blocks, to blocks and to the model."""
    for block in model.blocks:
        for layer in (block.qkv, block.norm1):
            fully_shard(layer, mp_policy=HALF)
    return sharded(policy=HALF)(model)


#: In these, figures are those of rounded weights.
ROUNDED = [
    Play("fsdp first, bfloat16", {"method": "first"}, wrap=sharded(policy=HALF), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp lookahead, bfloat16", {"method": "lookahead"}, wrap=sharded(policy=HALF), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp midpoint, bfloat16", {"method": "midpoint"}, wrap=sharded(policy=HALF), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp second, bfloat16", SECOND, wrap=sharded(policy=HALF), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp second, bfloat16, kept whole", SECOND, wrap=sharded(False, HALF), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp second, bfloat16, nested", SECOND, wrap=in_each_other, model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp second, bfloat16, reduced so", SECOND, wrap=sharded(policy=COARSE), model=SINGLE, optimizer=sgd, steps=2),
    Play("fsdp second, bfloat16, rough", SECOND, wrap=sharded(policy=HALF), model=SINGLE, optimizer=rough, steps=3, clip=None),
    Play("fsdp whole, bfloat16", {"sketch": 256}, wrap=sharded(policy=HALF), model=SINGLE, optimizer=sgd, steps=2),
]
BLOCKWISE = [
    Play("fsdp compiled", {"method": "first"}, wrap=sharded(compiled=True), optimizer=sgd, steps=2),
    Play("fsdp compiled, whole", {"sketch": 256}, wrap=sharded(False, compiled=True), steps=2),
]
FOUR = [
    Play("four, ddp", {"method": "midpoint"}, sizes=((2, 1, 1, 2), (1, 2, 0, 1)), no_sync=True),
    Play("four, ddp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2),), steps=4),
    Play("four, fsdp", {"method": "first"}, sizes=((2, 1, 1, 2),), wrap=sharded()),
    Play("four, fsdp, whole", {"sketch": 256}, sizes=((2, 1, 1, 2),), wrap=sharded(False), steps=4),
]


def played(plays: list[Play]) -> dict[str, Callable[[int, int], Any]]:
    return {p.name: functools.partial(play_part, p) for p in plays}


JOBS: dict[str, dict[str, Callable[[int, int], Any]]] = {
    "ddp": played(PLAYS + IN_SINGLE),
    "compiled": played(COMPILED),
    "fsdp": played(SHARDED + ROUNDED),
    "fsdp compiled": played(BLOCKWISE + LONG),
    "four": {p.name: functools.partial(play_part, p, of=4) for p in FOUR},
}
BY_NAME = {p.name: p for p in (*PLAYS, *IN_SINGLE, *COMPILED, *SHARDED, *ROUNDED, *BLOCKWISE, *LONG, *FOUR)}
JOBS["guards"] = {name: run for name, (run, _) in (*GUARDS.items(), *AGREED.items())}
JOBS |= {f"dies {how}": {"dies": dying(how)} for how in ("in the forward", "before the optimizer", "sleeps")}
JOBS["dies, sharded"] = {"dies": dying("in the forward", sharded=True)}
