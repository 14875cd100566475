"""One small training run, played by one process or by one of several: the same global batches, the same figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import inrun
from tiny import batch, tiny

#: Rows of every slice of the global batch, by microbatch: slice r is the part of rank r.
EVEN: tuple[tuple[int, ...], ...] = ((3, 3),)


@dataclass(frozen=True)
class Play:
    """What is trained, and how it is scored."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)
    sizes: tuple[tuple[int, ...], ...] = EVEN
    steps: int = 2
    clip: float | None = 0.5
    #: Applied to the model by a rank of several: returns what is called.
    wrap: Callable[[nn.Module], Any] = DistributedDataParallel
    model: Callable[[], nn.Module] = tiny
    no_sync: bool = False
    #: Ids repeat over ranks, as samplers that pad do.
    padded: bool = False
    #: Given to the Accountant: what is called, or the module inside.
    inner: bool = False
    points: bool = False
    zero_in_place: bool = False
    #: How many processes train until the step ``resume_after``, and afterwards, from what was saved there.
    worlds: tuple[int, int] | None = None
    resume_after: int = 0
    #: One process runs a microbatch for every slice.
    apart: bool = False
    #: A factor on local losses: the control that must fail.
    wrong: float = 1.0


def sample_losses(logits: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def rows_of(play: Play, step: int, micro: int, part: int) -> Tensor:
    return batch(play.sizes[micro][part], 1000 + 100 * step + 10 * micro + part)


def ids_of(play: Play, step: int, micro: int, part: int) -> list[int]:
    n = play.sizes[micro][part]
    first = 100 * micro + (0 if play.padded and part else 10 * part)
    return [first + j + (0 if step < 2 else 5) for j in range(n)]


def loss_of(model: Any, play: Play, step: int, micro: int, parts: list[int], of: int) -> Tensor:
    """The mean over slices of their means; a slice without rows has a loss of 0."""
    rows = torch.cat([rows_of(play, step, micro, p) for p in parts])
    each = sample_losses(model(rows), rows)
    losses = [x.mean() if len(x) else x.sum() for x in each.split([play.sizes[micro][p] for p in parts])]
    return torch.stack(losses).sum() * play.wrong / of / len(play.sizes)


def validation_of(play: Play, parts: list[int], of: int) -> dict[str, Any]:
    """Every slice has validation rows of its own; the loss is the mean over slices."""

    def loss(seed: int) -> Callable[[Any], Tensor]:
        def closure(model: Any) -> Tensor:
            found = [sample_losses(model(rows), rows) for rows in (batch(2, seed + p) for p in parts)]
            return torch.stack(found).mean(0) if play.points else torch.stack(found).mean()

        return closure

    return {"a": loss(50), "b": loss(70)} if not play.points else {"a": loss(50)}


class Books:
    """A ledger in memory that several accountants write, one after the other."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, str], float] = {}
        self.errors: list[float] = []
        self.accounts = 0

    def _add(self, ids: Any, values: dict[str, Any]) -> None:
        for name, column in values.items():
            for i, x in zip(ids.tolist(), column.tolist(), strict=True):
                self.scores[i, name] = self.scores.get((i, name), 0.0) + x

    def write(self, record: Any) -> None:
        self.accounts += len(record.accounts)
        if record.accounts and self.whole:
            self.settle(list(record.settled))
        else:
            self._add(record.sample_ids, record.contributions)

    def settle(self, settled: list[Any]) -> None:
        for s in settled:
            self._add(s.sample_ids, s.credits)
            self.errors += [float(x) for v in s.errors.values() for x in v]

    whole = False


def train(play: Play, rank: int, world: int, of: int, books: Books, before: Any, steps: range) -> tuple[list[Any], Any]:
    """Train for some steps: alone with all ``of`` slices, or as one of ``world`` with the own one."""
    parts = list(range(of)) if world == 1 else [rank]
    model = play.model()
    if before is not None:
        model.load_state_dict(before["model"])
    called = model if world == 1 else play.wrap(model)
    optimizer = play.optimizer(called.parameters())
    if before is not None:
        optimizer.load_state_dict(before["optimizer"])
    group: Any = {}
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        alone = torch.distributed.new_subgroups(1)[0] if world == 1 else None
        group = {"process_group": alone or torch.distributed.group.WORLD} if alone or play.inner else {}
    accountant = inrun.Accountant(
        model if play.inner else called,
        optimizer,
        validation_of(play, parts, of),
        ledger=books,
        **{"audit_every": 1, **play.options},
        **group,
    )
    books.whole = accountant.credit == "whole"
    if before is not None:
        accountant.load_state_dict(before["accountant"])
    found_steps = []
    for step in steps:
        with accountant.step() as opened:
            for micro in range(len(play.sizes)):
                last = micro == len(play.sizes) - 1
                quiet = without_sync(called) if world > 1 and play.no_sync and not last else contextlib.nullcontext()
                for some in [[p] for p in parts] if play.apart else [parts]:
                    ids = [i for p in some for i in ids_of(play, step, micro, p)]
                    with opened.microbatch(ids), quiet:
                        loss_of(called, play, step, micro, some, of if world == 1 else 1).backward()
            if play.clip is not None:
                torch.nn.utils.clip_grad_norm_(called.parameters(), play.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not play.zero_in_place)
        found = accountant.last
        found_steps.append(
            {
                "world": world,
                "ids": found.sample_ids,
                "contributions": found.contributions,
                "accounts": found.accounts,
                "losses": found.losses,
                "clip": found.clip,
                "norms": found.norms,
                "bytes": accountant.communication.payload,
            }
        )
    shown = Books()
    shown.settle(accountant.open_credits(together=True))
    state = {
        "shown": shown.scores,
        "accountant": accountant.state_dict(),
        "model": {k: full(x) for k, x in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    accountant.close(settle=steps.stop == play.steps)
    return found_steps, state


def play_part(play: Play, rank: int, world: int, of: int = 2) -> dict[str, Any]:
    """Train, perhaps in two parts with different numbers of processes."""
    books = Books()
    parts = [(world, range(play.steps))] if world == 1 or play.worlds is None else []
    if not parts and play.worlds is not None:
        parts = list(zip(play.worlds, (range(play.resume_after + 1), range(play.resume_after + 1, play.steps)), strict=True))
    steps: list[Any] = []
    state: Any = None
    for there, some in parts:
        kept = books if there == world or rank == 0 else Books()
        found, state = train(play, rank, there, of, kept, state, some)
        steps += found
        if play.worlds is not None and play.worlds[0] != play.worlds[1] and there != parts[-1][0]:
            mine, every = state["accountant"], [None] * world
            if there > 1:
                torch.distributed.all_gather_object(every, mine)
            state["accountant"] = every if there > 1 else [mine]
    return {
        "steps": steps,
        "scores": [(i, v, s) for (i, v), s in books.scores.items()],
        "errors": books.errors,
        "weights": list(state["model"].values()),
        "shown": state["shown"],
    }


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
    whole = p.full_tensor() if hasattr(p, "full_tensor") else p
    return whole.detach().clone()


def assembled(found: list[dict[str, Any]], play: Play) -> dict[str, Any]:
    """Put the parts of all ranks together as one process has them: microbatch by microbatch, slice by slice."""
    steps = []
    for of_ranks in zip(*(x["steps"] for x in found), strict=True):
        if of_ranks[0]["world"] == 1:
            steps.append(of_ranks[0])
            continue
        of_parts = [[row[j] for row in play.sizes] for j in range(len(found))]

        def joined(values: list[Tensor], of_parts: list[list[int]] = of_parts) -> Tensor:
            pieces = [v.split(sizes) for v, sizes in zip(values, of_parts, strict=True)]
            return torch.cat([p[micro] for micro in range(len(play.sizes)) for p in pieces])

        names = of_ranks[0]["contributions"]
        steps.append(
            {
                **of_ranks[0],
                "ids": joined([x["ids"] for x in of_ranks]),
                "contributions": {k: joined([x["contributions"][k] for x in of_ranks]) for k in names},
                "norms": None if of_ranks[0]["norms"] is None else joined([x["norms"] for x in of_ranks]),
            }
        )
    scores: dict[tuple[int, str], float] = {}
    for x in found:
        for i, name, score in x["scores"]:
            scores[i, name] = scores.get((i, name), 0.0) + score
    errors = sorted(e for x in found for e in x["errors"])
    shown: dict[tuple[int, str], float] = {}
    for x in found if steps[-1]["world"] > 1 else found[:1]:
        for key, score in x["shown"].items():
            shown[key] = shown.get(key, 0.0) + score
    return {**found[0], "steps": steps, "scores": [(i, v, s) for (i, v), s in scores.items()], "errors": errors, "shown": shown}


def batch_gaps(whole: dict[str, Any], one: dict[str, Any]) -> list[float]:
    """How far contributions of several processes are from those of one, step by step, relative to the norm of the batch's."""

    def gap(a: Tensor, b: Tensor) -> float:
        return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))

    pairs = zip(whole["steps"], one["steps"], strict=True)
    return [max(gap(a["contributions"][name], b["contributions"][name]) for name in b["contributions"]) for a, b in pairs]


FIGURES = ("loss_before", "loss_after", "data", "spread", "optimizer", "momentum", "decay", "residual", "inherited")


def differences(whole: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """How far figures of several processes are from those of one, relative to the largest."""
    found = {"batch": max(batch_gaps(whole, one)), "contributions": 0.0, "accounts": 0.0, "clip": 0.0, "losses": 0.0, "norms": 0.0}
    for a, b in zip(whole["steps"], one["steps"], strict=True):
        assert a["ids"].tolist() == b["ids"].tolist()
        for name, expected in b["contributions"].items():
            scale = expected.abs().max()
            found["contributions"] = max(found["contributions"], float((a["contributions"][name] - expected).abs().max() / scale))
            for figure in FIGURES:
                mine, other = (getattr(x["accounts"][name], figure, None) for x in (a, b))
                assert (mine is None) == (other is None), figure
                if other is not None:
                    size = abs(b["accounts"][name].spread) + 1e-12
                    size = abs(other) if figure.startswith("loss") else size
                    found["accounts"] = max(found["accounts"], abs(mine - other) / size)
            found["losses"] = max(found["losses"], abs(a["losses"][name] - b["losses"][name]))
        found["clip"] = max(found["clip"], max(abs(x - y) for x, y in zip(a["clip"], b["clip"], strict=True)))
        if b["norms"] is not None:
            found["norms"] = max(found["norms"], float((a["norms"] - b["norms"]).abs().max() / b["norms"].max()))
    of = {(i, v): s for i, v, s in one["scores"]}
    mine = {(i, v): s for i, v, s in whole["scores"]}
    assert set(of) == set(mine)
    size = max(abs(s) for s in of.values())
    found["scores"] = max(abs(mine[key] - of[key]) for key in of) / size
    assert set(one["shown"]) == set(whole["shown"])
    if one["shown"]:
        size = max(map(abs, one["shown"].values()))
        found["shown"] = max(abs(whole["shown"][key] - x) for key, x in one["shown"].items()) / size
    if one["errors"]:
        pairs = zip(sorted(one["errors"]), whole["errors"], strict=True)
        found["errors"] = max(abs(a - b) for a, b in pairs) / max(1e-30, *one["errors"])
    found["weights"] = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(whole["weights"], one["weights"], strict=True)
    )
    return found
