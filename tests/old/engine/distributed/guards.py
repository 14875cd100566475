"""What must be refused, agreed upon, or named, with two processes."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from plays import sample_losses
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inrun
from tiny import batch, tiny


def closure(seed: int) -> Callable[[Any], torch.Tensor]:
    rows = batch(2, seed)
    return lambda model: sample_losses(model(rows), rows).mean()


class Run:
    """A model in DDP, its optimizer and accountant."""

    def __init__(self, validation: Any = None, wrap: bool = True, **options: Any) -> None:
        self.model = DistributedDataParallel(tiny()) if wrap else tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.accountant = inrun.Accountant(self.model, self.optimizer, validation or closure(9), **options)

    def step(
        self,
        ids: Any,
        seed: int,
        scale: float = 1.0,
        change: Callable[[Any], None] = lambda model: None,
        skip: bool = False,
        scaler: Any = None,
        dies: str = "",
    ) -> Any:
        rows = batch(3, seed)
        with self.accountant.step(ids) as step:
            if dies == "in the forward":
                os._exit(7)
            loss = sample_losses(self.model(rows), rows).mean() * scale
            (loss if scaler is None else scaler.scale(loss)).backward()
            change(self.model)
            if dies == "before the optimizer":
                os._exit(7)
            if dies == "sleeps":
                time.sleep(30)
            if skip:
                step.skip()
            elif scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
            self.optimizer.zero_grad()
        return self.accountant.last


def own_ids(rank: int) -> list[int]:
    return [10 * rank + j for j in range(3)]


def same_data(rank: int, world: int) -> Any:
    Run().step([0, 1, 2], seed=1)


def validation_on_one(rank: int, world: int) -> Any:
    Run({"math": closure(1), "code": closure(2)} if rank else {"math": closure(1)})


def validation_given_to_one(rank: int, world: int) -> Any:
    """Not even validation=: without it steps would be merged ones."""
    model = DistributedDataParallel(tiny())
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), *([] if rank else [closure(9)]))


def validation_fails(rank: int, world: int) -> Any:
    def broken(model: Any) -> torch.Tensor:
        raise KeyError("no such rows")

    Run(broken if rank else closure(1), credit="step").step(own_ids(rank), seed=rank)


def ids_too_few(rank: int, world: int) -> Any:
    Run().step(own_ids(rank)[: 2 if rank else 3], seed=rank)


def not_finite(rank: int, world: int) -> Any:
    run = Run()
    run.step(own_ids(rank), seed=rank)
    run.step(own_ids(rank), seed=rank, scale=float("nan") if rank else 1.0)
    return run.accountant.last.skipped


def scaled_out(rank: int, world: int) -> Any:
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)
    first = run.step(own_ids(rank), seed=rank, scaler=scaler).skipped
    second = run.step(own_ids(rank), seed=rank, scaler=scaler, scale=float("inf") if rank else 1.0).skipped
    return first, second


def clipped_by_value(rank: int, world: int) -> Any:
    def clip(model: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)

    Run(method="midpoint").step(own_ids(rank), seed=rank, change=clip)


def not_wrapped(rank: int, world: int) -> Any:
    Run(wrap=False)


def merged(rank: int, world: int) -> Any:
    model = DistributedDataParallel(tiny())
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1))


def came_apart(rank: int, world: int) -> Any:
    Run().step(own_ids(rank), seed=rank, skip=rank == 1)


def anothers_state(rank: int, world: int) -> Any:
    run = Run()
    states: list[Any] = [None] * world
    torch.distributed.all_gather_object(states, run.accountant.state_dict())
    run.accountant.load_state_dict(states[1 - rank])


def without_sync(rank: int, world: int) -> Any:
    """Gradients that were never averaged are nobody's mean."""
    run = Run(method="first")
    with run.model.no_sync():
        run.step(own_ids(rank), seed=rank)


def observed(rank: int, world: int) -> Any:
    """Weights with and without us, bit for bit."""

    def weights(scored: bool) -> list[torch.Tensor]:
        run = Run(bitwise=True)
        if not scored:
            run.accountant.close()
        for seed in range(3):
            if scored:
                run.step(own_ids(rank), seed=10 * seed + rank)
                continue
            rows = batch(3, 10 * seed + rank)
            sample_losses(run.model(rows), rows).mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [p.detach().clone() for p in run.model.parameters()]

    return all(map(torch.equal, weights(True), weights(False)))


def shown(rank: int, world: int) -> Any:
    """Asked together in the middle of a block, scores are those that closing leaves; asked alone, the rest is not in them."""
    folder = f"{sys.argv[4]}/shown"
    run = Run(ledger=folder, sketch=256, audit_every=0)
    with mock.patch("inrun.old.engine.credit.keeper.AT_ONCE", 2):  # blocks begin early
        for seed in range(6):
            run.step(own_ids(rank), seed=10 * seed + rank)
    pending = run.accountant._run.credit.owed.steps  # type: ignore[union-attr]
    run.accountant.ledger.flush_if_open()
    torch.distributed.barrier()  # who asks alone sees of others what they have written
    alone, together = run.accountant.scores(), run.accountant.scores(together=True)
    run.accountant.close()
    torch.distributed.barrier()
    final = run.accountant.scores()
    largest = max(map(abs, final["score"].to_pylist()))

    def off(table: Any) -> float:
        assert table["sample_id"].to_pylist() == final["sample_id"].to_pylist() == sorted(own_ids(0) + own_ids(1))
        pairs = zip(table["score"].to_pylist(), final["score"].to_pylist(), strict=True)
        return max(abs(a - b) for a, b in pairs) / largest

    return pending > 0, sum(together["pending"].to_pylist()) == 36, off(together) < 1e-5, off(alone) > 1e-3


def compressed(rank: int, world: int) -> Any:
    """Gradients that are reduced in half precision are nobody's fault."""
    told = []
    for credit in ("step", "whole"):
        run = Run(credit=credit)
        run.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        told.append(run.step(own_ids(rank), seed=rank).skipped)
    return told


def synced(rank: int, world: int) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3))
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), closure(9), process_group=torch.distributed.group.WORLD)


def sharded_run(**options: Any) -> Run:
    run = Run.__new__(Run)
    run.model = tiny()
    for block in run.model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(run.model)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    run.accountant = inrun.Accountant(run.model, run.optimizer, closure(9), **options)
    return run


def split(rank: int, world: int) -> Any:
    """Of a split model the direction that a step holds is what is here of it, not the whole."""
    run = sharded_run(method="first")
    parameters = list(run.model.parameters())
    with run.accountant.step(own_ids(rank)) as step:
        held = {p: v.shape for p, v in step.game.directions.raw.items()}
        step.skip()
    run.accountant.close()
    here = {p: (1, *p.to_local().shape) for p in parameters}
    return held == here, 2 * sum(map(math.prod, held.values())) <= sum(p.numel() for p in parameters) + len(parameters) * 64


def sharded_without_rows(rank: int, world: int) -> Any:
    run = sharded_run()
    with run.accountant.step() as step, step.microbatch([] if rank else [1]):
        pass


def sharded_exact(rank: int, world: int) -> Any:
    sharded_run(credit_memory="exact")


def sharded_muon(rank: int, world: int) -> Any:
    run = sharded_run()
    run.accountant.close()
    matrices = [p for p in run.model.parameters() if p.dim() == 2]
    inrun.Accountant(run.model, torch.optim.Muon(matrices, lr=0.1), closure(9))


def tensor_parallel(rank: int, world: int) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), closure(9))


#: By name: what runs, and what every rank must say.
GUARDS: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "same data": (same_data, "ConfigurationError: all 2 ranks were given the same sample ids in step 0.*DistributedSampler"),
    "validation on one rank": (
        validation_on_one,
        "ConfigurationError: validation sets differ.*rank 0 has math, rank 1 has math, co",
    ),
    "validation= on one rank": (
        validation_given_to_one,
        "^ConfigurationError: validation sets differ.*rank 0 has validation, rank 1 has none. Every rank gives every set",
    ),
    "validation fails on one rank": (validation_fails, "rank 1: KeyError: 'no such rows'|^KeyError"),
    "too few ids on one rank": (ids_too_few, "rank 1: IdsError|^IdsError"),
    "clipped by value": (clipped_by_value, "OptimizerError: between backward and optimizer.step"),
    "not wrapped": (not_wrapped, "ConfigurationError: torch.distributed runs with 2 processes.*process_group="),
    "synced": (synced, "ConfigurationError: 1 is a SyncBatchNorm: samples of different processes meet"),
    "merged": (merged, "ConfigurationError: no validation= in a run of 2 processes"),
    "came apart": (came_apart, "ProcessError: the ranks came apart: rank 0 is at optimizer.step.*rank 1 is at the end"),
    "another's state": (anothers_state, "ConfigurationError: this is rank . of 2, and the saved state is that of rank . of 2"),
    "sharded, a rank without rows": (
        sharded_without_rows,
        "StepError: rank 1 has a batch without rows in step 0: with full",
    ),
    "sharded, exact": (sharded_exact, 'ConfigurationError: credit_memory="exact".*fully_shard'),
    "sharded, Muon": (sharded_muon, "OptimizerError: Muon looks at a whole matrix"),
    "tensor parallel": (tensor_parallel, "ConfigurationError: 0.weight is a DTensor.*tensor parallel plans"),
    "without sync": (without_sync, "ConservationError: at step 0 some gradient flows through no sample's rows"),
}
#: By name: what runs, and what every rank must return.
AGREED: dict[str, tuple[Callable[[int, int], Any], Any]] = {
    "observed": (observed, True),
    "shown": (shown, (True, True, True, True)),
    "split": (split, (True, True)),
    "compressed": (compressed, [None, None]),
    "not finite on one rank": (not_finite, "gradient or contributions are not finite"),
    "scaled out": (scaled_out, (None, "gradient is not finite and the optimizer did not step")),
}


def dying(how: str, sharded: bool = False) -> Callable[[int, int], Any]:
    def condition(rank: int, world: int) -> Any:
        run = sharded_run() if sharded else Run()
        run.step(own_ids(rank), seed=rank)
        began = time.monotonic()
        try:
            run.step(own_ids(rank), seed=rank, dies=how if rank == 1 else "")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            run.accountant.close()  # settles what is here, and waits for nobody
            return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
        return {}

    return condition
