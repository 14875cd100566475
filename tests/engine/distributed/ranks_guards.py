"""What two processes must refuse, agree upon, or name: every condition runs on both ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from ranks_runs import sample_losses
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inrun
from inrun.engine.options import Options
from tiny import batch, tiny


def closure(seed: int) -> Callable[[Any], torch.Tensor]:
    rows = batch(2, seed)
    return lambda model: sample_losses(model(rows), rows).mean()


def sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def adamw(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=1e-3)


class Run:
    """A wrapped model, its optimizer and accountant."""

    def __init__(
        self, validation: Any = None, wrap: Any = DistributedDataParallel, model: Any = None, optimizer: Any = adamw, **options: Any
    ) -> None:
        self.model = wrap(model or tiny())
        self.optimizer = optimizer(list(self.model.parameters()))
        self.accountant = inrun.Accountant(self.model, self.optimizer, validation or closure(9), **options)

    def step(self, rank: int, seed: int = 0, ids: Any = None, scale: float = 1.0, change: Any = None, scaler: Any = None) -> Any:
        rows = batch(3, 10 * seed + rank)
        with self.accountant.step(ids or [10 * rank + j for j in range(3)]) as step:
            loss = sample_losses(self.model(rows), rows).mean() * scale
            (loss if scaler is None else scaler.scale(loss)).backward()
            if change is not None:
                change(step, self.model)
            if scaler is not None:
                scaler.step(self.optimizer)
                scaler.update()
            elif step.skipped is None:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return self.accountant.last


# Refused


def same_ids(rank: int, world: int) -> Any:
    Run().step(rank, ids=[0, 1, 2])


def other_sets(rank: int, world: int) -> Any:
    Run({"math": closure(1), "code": closure(2)} if rank else {"math": closure(1)})


def other_arguments(rank: int, world: int) -> Any:
    Run(parameters=["blocks.*"] if rank else None, audit_every=1 + rank)


def argument_of_one(rank: int, world: int) -> Any:
    Run(optimizer=(lambda p: torch.optim.LBFGS(p)) if rank else adamw)


def validation_fails(rank: int, world: int) -> Any:
    def broken(model: Any) -> torch.Tensor:
        raise KeyError("no such rows")

    Run(broken if rank else None, method="step").step(rank)


def too_few_ids(rank: int, world: int) -> Any:
    Run().step(rank, ids=[8, 9] if rank else [0, 1, 2])


def clipped_by_value(rank: int, world: int) -> Any:
    Run(method="step").step(rank, change=lambda _, model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4))


def dropped_by_one(rank: int, world: int) -> Any:
    Run().step(rank, change=lambda step, _: step.skip() if rank else None)


def state_of_another(rank: int, world: int) -> Any:
    run = Run()
    states: list[Any] = [None] * world
    torch.distributed.all_gather_object(states, run.accountant.state_dict())
    run.accountant.load_state_dict(states[1 - rank])


def synced(rank: int, world: int) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3))
    options = Options(process_group=torch.distributed.group.WORLD)
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), closure(9), options=options)


def no_rows(rank: int, world: int) -> Any:
    run = Run(wrap=sharded)
    with run.accountant.step() as step, step.microbatch([] if rank else [1]):
        pass


def second(rank: int, world: int) -> Any:
    Run(wrap=sharded, method="second")


def muon(rank: int, world: int) -> Any:
    Run(wrap=sharded, optimizer=lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.1), method="step")


def divided(rank: int, world: int) -> Any:
    Run(wrap=sharded, optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9)).step(rank)


def tensor_parallel(rank: int, world: int) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), closure(9))


#: By name: what runs, and what every rank must raise.
REFUSED: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "the same ids": (same_ids, "ConfigurationError: all 2 ranks were given the same sample ids in step 0.*DistributedSampler"),
    "other sets": (other_sets, "rank 0 has validation=.'math'.; rank 1 has validation=.'math', 'code'"),
    "other arguments": (other_arguments, "rank 0 has parameters=None, audit_every=1; rank 1 has parameters=.'blocks.*'., audit_"),
    "an argument of one": (
        argument_of_one,
        "making the accountant.*failed on another rank.*rank 1: OptimizerErr|^OptimizerErr",
    ),
    "validation fails on one": (validation_fails, "rank 1: KeyError: 'no such rows'|^KeyError"),
    "too few ids on one": (too_few_ids, "rank 1: (RowOwnership|Ids)Error|^(RowOwnership|Ids)Error"),
    "clipped by value": (clipped_by_value, "ConservationError: step 0: .*value clipping"),
    "dropped by one": (dropped_by_one, "ProcessError: the ranks came apart: rank 0 is at optimizer.step.*rank 1 is at the end"),
    "the state of another": (state_of_another, "ConfigurationError: this is rank . of 2, and the given states are those of: rank "),
    "SyncBatchNorm": (synced, "ConfigurationError: 1 is a SyncBatchNorm: samples of different processes meet"),
    "split, no rows on one": (no_rows, "StepError: rank 1 has a batch without rows in step 0. With fully_shard"),
    "split, second": (second, 'method="second" needs a Hessian-vector product, which fully_shard has none of'),
    "split, Muon": (muon, "Muon looks at a whole tensor"),
    "split, RMSprop with momentum": (divided, "RMSprop with momentum is not scored under fully_shard"),
    "tensor parallel": (tensor_parallel, "ConfigurationError: 0.weight is a DTensor.*Tensor parallel plans"),
}


# Agreed


def observed(rank: int, world: int) -> Any:
    """Weights with and without us, bit for bit."""

    def weights(scored: bool) -> list[torch.Tensor]:
        run = Run(bitwise=True)
        if not scored:
            run.accountant.close()
        for seed in range(3):
            if scored:
                run.step(rank, seed)
                continue
            rows = batch(3, 10 * seed + rank)
            sample_losses(run.model(rows), rows).mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [p.detach().clone() for p in run.model.parameters()]

    return all(map(torch.equal, weights(True), weights(False)))


def shown(rank: int, world: int) -> Any:
    """Scores that ranks ask for together are those that closing leaves; who asks alone does not know the others' open uses."""
    run = Run(ledger=f"{sys.argv[4]}/shown", sketch=256)
    for seed in range(4):
        run.step(rank, seed)
    run.accountant.ledger.flush_if_open()
    torch.distributed.barrier()
    alone, together = run.accountant.scores(), run.accountant.scores(together=True)
    run.accountant.close()
    torch.distributed.barrier()
    final = run.accountant.scores()["score"].to_pylist()
    pending = sum(together["pending"].to_pylist())
    return len(final), pending, together["score"].to_pylist() == final, alone["score"].to_pylist() == final


def compressed(rank: int, world: int) -> Any:
    """Gradients that are averaged in half precision pass the audits."""
    found = []
    for method in ("step", "whole"):
        run = Run(model=tiny(dtype=torch.float32), method=method)
        run.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        found.append(run.step(rank).skipped)
    return found


def not_finite(rank: int, world: int) -> Any:
    run = Run()
    run.step(rank)
    return run.step(rank, 1, scale=float("nan") if rank else 1.0).skipped


def scaled(rank: int, world: int) -> Any:
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)
    return [run.step(rank, s, scaler=scaler, scale=float("inf") if rank and s else 1.0).skipped for s in range(2)]


#: By name: what runs, and what every rank must return.
AGREED: dict[str, tuple[Callable[[int, int], Any], Any]] = {
    "weights are those of plain training": (observed, True),
    "scores asked together": (shown, (6, 24, True, False)),
    "compressed gradients": (compressed, [None, None]),
    "not finite on one": (not_finite, "gradient or contributions are not finite"),
    "scaled out on one": (scaled, [None, "gradient is not finite and the optimizer did not step"]),
}
GUARDS: dict[str, Callable[[int, int], Any]] = {name: run for name, (run, _) in (*REFUSED.items(), *AGREED.items())}


def dying(how: str, wrap: Any = DistributedDataParallel) -> Callable[[int, int], Any]:
    """Rank 1 does not come to the optimizer's step."""

    def leave(*_: Any) -> None:
        time.sleep(30.0) if how == "sleeps" else os._exit(7)

    def condition(rank: int, world: int) -> Any:
        run = Run(wrap=wrap)
        run.step(rank)
        began = time.monotonic()
        try:
            run.step(rank, 1, change=leave if rank == 1 else None)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            run.accountant.close()
            return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
        return {}

    return condition


DYING: dict[str, Callable[[int, int], Any]] = {
    "dies": dying("dies"),
    "sleeps": dying("sleeps"),
    "dies, split": dying("dies", sharded),
}
