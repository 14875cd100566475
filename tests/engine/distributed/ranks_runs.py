"""One small training run, by one process or by one of several: the same global batches, the same figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from inrun.engine.accountant import Accountant
from inrun.engine.options import Options
from inrun.training.parallel import split_like
from tiny import batch, tiny

#: Figures of accounts that are compared.
FIGURES = ("loss_before", "loss_after", "data", "decay", "inherited", "rounding", "residual", "spread", "abs_sum")


def ddp(**options: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, group: DistributedDataParallel(model, process_group=group, **options)


DDP = ddp()


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is scored."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)
    #: Rows of every slice of the global batch, by microbatch: slice r is the part of rank r.
    sizes: tuple[tuple[int, ...], ...] = ((3, 3),)
    steps: int = 3
    clip: float | None = 0.5
    #: Applied by ranks of several to the model, with their group (None: all ranks); returns what is called.
    wrap: Callable[[nn.Module, Any], Any] = DDP
    model: Callable[[], nn.Module] = tiny
    no_sync: bool = False
    #: Ids repeat over ranks, as samplers that pad do.
    padded: bool = False
    #: The Accountant gets the module inside the wrapper.
    inner: bool = False
    points: bool = False
    zero_in_place: bool = False
    #: One process runs a microbatch for every slice.
    apart: bool = False
    #: Gradients are never averaged: the control that must fail.
    never_sync: bool = False
    #: How many processes train until the step ``resume_after``, and afterwards, from what was saved there.
    worlds: tuple[int, int] | None = None
    resume_after: int = 0
    tolerance: float = 1e-9


def sample_losses(logits: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def rows_of(case: Case, step: int, micro: int, part: int) -> Tensor:
    return batch(case.sizes[micro][part], 1000 + 100 * step + 10 * micro + part)


def ids_of(case: Case, step: int, micro: int, part: int) -> list[int]:
    first = 100 * micro + (0 if case.padded and part else 10 * part) + (0 if step < 2 else 5)
    return [first + j for j in range(case.sizes[micro][part])]


def loss_of(model: Any, case: Case, step: int, micro: int, parts: list[int], of: int) -> Tensor:
    """The mean over slices of their means; a slice without rows has a loss of 0."""
    rows = torch.cat([rows_of(case, step, micro, p) for p in parts])
    each = sample_losses(model(rows), rows)
    losses = [x.mean() if len(x) else x.sum() for x in each.split([case.sizes[micro][p] for p in parts])]
    return torch.stack(losses).sum() / of / len(case.sizes)


def validation_of(case: Case, parts: list[int]) -> dict[str, Any]:
    """Every slice has validation rows of its own; the loss is the mean over slices."""

    def loss(seed: int) -> Callable[[Any], Tensor]:
        def closure(model: Any) -> Tensor:
            found = [sample_losses(model(rows), rows) for rows in (batch(2, seed + p) for p in parts)]
            return torch.stack(found).mean(0) if case.points else torch.stack(found).mean()

        return closure

    return {"a": loss(50)} if case.points else {"a": loss(50), "b": loss(70)}


class Books:
    """A ledger in memory that several accountants write, one after the other."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, str], float] = {}
        self.accounts = 0
        self.whole = False

    def _add(self, ids: Any, values: dict[str, Any]) -> None:
        for name, column in values.items():
            for i, x in zip(ids.tolist(), column.tolist(), strict=True):
                self.scores[i, name] = self.scores.get((i, name), 0.0) + x

    def write(self, record: Any) -> None:
        self.accounts += len(record.accounts)
        if self.whole:
            self.settle(list(record.settled))
        else:
            self._add(record.sample_ids, record.contributions)

    def settle(self, settled: list[Any]) -> None:
        for s in settled:
            self._add(s.sample_ids, s.credits)


def train(
    case: Case, rank: int, world: int, books: Books, before: Any = None, steps: range | None = None, of: int = 2
) -> tuple[list[Any], Any]:
    """Train for some steps as one of ``world``, each with as many of the ``of`` slices."""
    steps = range(case.steps) if steps is None else steps
    parts = list(range(rank * of // world, (rank + 1) * of // world))
    running = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    group = None
    if world == 1 and running > 1:
        group = torch.distributed.new_subgroups(1)[0]
    elif world < running:
        group = torch.distributed.new_group(list(range(world)), use_local_synchronization=True)
    model = case.model()
    if before is not None:
        model.load_state_dict(before["model"])
    called = model if world == 1 else case.wrap(model, group)
    optimizer = case.optimizer(called.parameters())
    if before is not None:
        load_optimizer(optimizer, before["optimizer"])
    if case.inner:
        group = torch.distributed.group.WORLD
    elif world > 1:
        group = None
    accountant = Accountant(
        model if case.inner else called,
        optimizer,
        validation_of(case, parts),
        ledger=books,
        **{"audit_every": 1, **case.options},
        options=Options(process_group=group),
    )
    books.whole = accountant.method == "whole"
    if before is not None:
        accountant.load_state_dict(before["accountant"])
    found = []
    for step in steps:
        with accountant.step() as opened:
            for micro in range(len(case.sizes)):
                quiet = world > 1 and (case.never_sync or (case.no_sync and micro < len(case.sizes) - 1))
                for some in [[p] for p in parts] if case.apart else [parts]:
                    ids = [i for p in some for i in ids_of(case, step, micro, p)]
                    with opened.microbatch(ids), without_sync(called) if quiet else contextlib.nullcontext():
                        loss_of(called, case, step, micro, some, of // world).backward()
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(called.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not case.zero_in_place)
        last = accountant.last
        found.append(
            {
                "world": world,
                "ids": last.sample_ids,
                "contributions": last.contributions,
                "accounts": last.accounts,
                "losses": last.losses,
                "clip": last.clip,
                "skipped": last.skipped,
            }
        )
    more = steps.stop < case.steps
    state = {
        "accountant": accountant.state_dict() if more else None,
        "model": {k: full(x) for k, x in model.state_dict().items()},
        "optimizer": full_state(optimizer) if more else None,
    }
    accountant.close(**({"settle": False} if more else {}))
    return found, state


def play(case: Case, rank: int, world: int, of: int = 2) -> dict[str, Any]:
    """Train, perhaps in two parts with different numbers of processes. Of one process all ranks do the same."""
    books = Books()
    parts = [(world, range(case.steps))]
    if world > 1 and case.worlds is not None:
        parts = list(zip(case.worlds, (range(case.resume_after + 1), range(case.resume_after + 1, case.steps)), strict=True))
    steps: list[Any] = []
    state: Any = None
    for there, some in parts:
        found: list[Any] = [None] * len(some)
        if there == 1 or rank < there:
            found, state = train(case, rank if there > 1 else 0, there, books if rank < there else Books(), state, some, of)
        steps += found
        if some.stop < case.steps and there != case.worlds[1]:  # type: ignore[index]
            every: list[Any] = [None] * world
            torch.distributed.all_gather_object(every, state)
            state = {**every[0], "accountant": [x["accountant"] for x in every[:there]]}
    weights = [] if state is None else list(state["model"].values())
    return {"steps": steps, "scores": books.scores, "weights": weights, "accounts": books.accounts}


def full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    whole = {i: {k: full(x) if isinstance(x, Tensor) else x for k, x in s.items()} for i, s in state["state"].items()}
    return {**state, "state": whole}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load whole state into an optimizer whose parameters may be split."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    split = {i: {k: split_like(x, parameters[i]) for k, x in s.items() if x is not None} for i, s in state["state"].items()}
    optimizer.load_state_dict({**state, "state": split})


@contextlib.contextmanager
def without_sync(called: Any) -> Any:
    """Accumulate without averaging, as DDP and fully_shard do it."""
    if hasattr(called, "no_sync"):
        with called.no_sync():
            yield
        return
    called.set_requires_gradient_sync(False)
    yield
    called.set_requires_gradient_sync(True)


def full(p: Tensor) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def assembled(found: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Put the parts of all ranks together as one process has them: microbatch by microbatch, slice by slice."""
    steps = []
    for of_all in zip(*(x["steps"] for x in found), strict=True):
        world = of_all[0]["world"]
        if world == 1:
            steps.append(of_all[0])
            continue
        of_ranks, each = of_all[:world], len(case.sizes[0]) // world

        # The rows of every rank by microbatch, a microbatch at a time.
        sizes = [[sum(row[j * each : (j + 1) * each]) for row in case.sizes] for j in range(world)]

        def joined(values: list[Tensor], sizes: list[list[int]] = sizes) -> Tensor:
            pieces = [v.split(some) for v, some in zip(values, sizes, strict=True)]
            return torch.cat([part for of_micro in zip(*pieces, strict=True) for part in of_micro])

        for x in of_ranks[1:]:  # what is of all is the same on all, bit for bit
            for what in ("accounts", "losses", "clip", "skipped"):
                assert repr(x[what]) == repr(of_ranks[0][what]), (what, x[what], of_ranks[0][what])
        names = of_ranks[0]["contributions"]
        whole = {k: joined([x["contributions"][k] for x in of_ranks]) for k in names}
        steps.append({**of_ranks[0], "ids": joined([x["ids"] for x in of_ranks]), "contributions": whole})
    scores: dict[tuple[int, str], float] = {}
    for x in found:
        for key, score in x["scores"].items():
            scores[key] = scores.get(key, 0.0) + score
    return {**found[0], "steps": steps, "scores": scores, "accounts": [x["accounts"] for x in found]}


def differences(whole: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """How far figures of several processes are from those of one, relative to the largest."""
    found = {"contributions": 0.0, "accounts": 0.0, "clip": 0.0, "losses": 0.0}
    for a, b in zip(whole["steps"], one["steps"], strict=True):
        assert a["ids"].tolist() == b["ids"].tolist() and a["skipped"] == b["skipped"]
        for name, expected in b["contributions"].items():
            off = (a["contributions"][name] - expected).abs().max() / expected.abs().max()
            found["contributions"] = max(found["contributions"], float(off))
            mine, other = a["accounts"][name], b["accounts"][name]
            assert (mine is None) == (other is None)
            size = 0.0 if other is None else sum(abs(getattr(other, f, 0.0) or 0.0) for f in ("spread", "abs_sum"))
            for figure in FIGURES if other is not None else ():
                x, y = getattr(mine, figure, None), getattr(other, figure, None)
                assert (x is None) == (y is None), figure
                if y is not None and x is not None:
                    scale = abs(y) if figure.startswith("loss") else size
                    found["accounts"] = max(found["accounts"], abs(x - y) / (scale + 1e-12))
            found["losses"] = max(found["losses"], abs(a["losses"][name] - b["losses"][name]))
        found["clip"] = max(found["clip"], max(abs(x - y) for x, y in zip(a["clip"], b["clip"], strict=True)))
    assert set(one["scores"]) == set(whole["scores"])
    size = max(map(abs, one["scores"].values()))
    found["scores"] = max(abs(whole["scores"][key] - x) for key, x in one["scores"].items()) / size
    pairs = zip(whole["weights"], one["weights"], strict=True)
    found["weights"] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)
    return found
