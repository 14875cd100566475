"""From where a recorded step is looked at: a state of the run that was saved, or one between two that were.

========== ==========================================================================
before     the newest checkpoint that is not later than the step
nearest    the checkpoint with the least steps in between, earlier or later
interpolate the straight line between the checkpoints around the step, at its place in time
========== ==========================================================================

The optimizer's moments are taken as the optimizer uses them, with their bias corrected, and get the correction of the step that is
looked at: its count of updates is the step's own. Before the first checkpoint stands the state that the seed gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from inrun.errors import TrainingError
from inrun.replay.source import RecordedStep
from inrun.training.checkpoint import Checkpoint
from inrun.training.config import TrainConfig
from inrun.training.models import build_model, decay_groups

#: Adam's moments, and which of the betas each decays by.
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}


@dataclass(frozen=True)
class Anchor:
    """A state of the run that can be restored: a checkpoint, or (None) the beginning, which the seed gives."""

    step: int
    checkpoint: Checkpoint | None


def anchors_of(checkpoints: Sequence[Checkpoint]) -> list[Anchor]:
    """Return the states to look from, oldest first; the beginning is always one of them."""
    found = [Anchor(c.step, c) for c in checkpoints]
    return found if found[0].step == 0 else [Anchor(0, None), *found]


@dataclass(frozen=True)
class Viewpoint:
    """Where one step is looked at: at ``first``, or at ``share`` of the way from there to ``second``."""

    first: int
    second: int | None
    share: float


def viewpoint_of(step: int, at: Sequence[int], mode: str) -> Viewpoint:
    """Return from where a step is looked at, given the steps of the anchors."""
    before = bisect_right(at, step) - 1
    after = before + 1 if before + 1 < len(at) else None
    if mode == "before" or after is None or at[before] == step:
        return Viewpoint(before, None, 0.0)
    if mode == "nearest":
        return Viewpoint(before if step - at[before] <= at[after] - step else after, None, 0.0)
    return Viewpoint(before, after, (step - at[before]) / (at[after] - at[before]))


@dataclass(frozen=True)
class Snapshot:
    """One anchor in memory, parameter by parameter."""

    weights: list[Tensor]
    #: Moments; empty before the first update.
    moments: list[dict[str, Tensor]]
    updates: int
    #: Random numbers of the CPU as the seed leaves them; a checkpoint has its own.
    random: Tensor


class Shelf:
    """Loads anchors, and keeps the two that were asked for last."""

    def __init__(self, config: TrainConfig, vocab: int, model: nn.Module) -> None:
        """``model`` tells the shape; its weights are left as they are."""
        self.config, self.vocab, self.model = config, vocab, model
        self._kept: dict[int, Snapshot] = {}

    def load(self, anchor: Anchor) -> Snapshot:
        """Return the state of an anchor; nobody may write to it."""
        found = self._kept.pop(anchor.step, None) or self._load(anchor)
        self._kept[anchor.step] = found  # the newest entry is the last one asked for
        while len(self._kept) > 2:
            self._kept.pop(next(iter(self._kept)))
        return found

    def _load(self, anchor: Anchor) -> Snapshot:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            model = build_model(self.config.model, self.vocab).to(self.config.device)
            optimizer = torch.optim.AdamW(decay_groups(model, self.config.optimizer.weight_decay))
            random = torch.get_rng_state()
            if anchor.checkpoint is not None:
                self._read(anchor.checkpoint, model, optimizer)
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise TrainingError(
                f"the run had diverged by step {anchor.step}: the weights of its checkpoint are not finite, and nothing can be "
                "looked at from there. Replay the steps long before it with --limit-steps"
            )
        states = [optimizer.state.get(p, {}) for p in model.parameters()]
        return Snapshot(
            weights=[p.detach() for p in model.parameters()],
            moments=[{name: state[name] for name in MOMENTS if name in state} for state in states],
            updates=max((int(state["step"]) for state in states if state), default=0),
            random=random,
        )

    @staticmethod
    def _read(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            checkpoint.load_model(model)
            checkpoint.load_optimizer(optimizer)
        except (OSError, SafetensorError, TrainingError) as error:
            if checkpoint.folder.is_dir():
                raise TrainingError(f"{checkpoint.folder} cannot be read: {error}") from error
            raise TrainingError(
                f"{checkpoint.folder} is gone: a run in progress removes its old checkpoints. Replay again, and keep them with "
                "checkpoints.keep=null"
            ) from error


class Stage:
    """A model and its optimizer, put into states of the run."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, shelf: Shelf) -> None:
        """Only contents are replaced: an accountant may be attached to both."""
        self.model, self.optimizer, self.shelf = model, optimizer, shelf
        self.parameters = list(model.parameters())
        groups = [(p, g) for g in optimizer.param_groups for p in g["params"]]
        self._betas: dict[nn.Parameter, tuple[float, float]] = {p: g["betas"] for p, g in groups}

    @torch.no_grad()
    def put(self, recorded: RecordedStep, anchors: Sequence[Anchor], view: Viewpoint) -> bool:
        """Go where a step is looked at; return whether that is the very state it was taken from."""
        first = self.shelf.load(anchors[view.first])
        second = None if view.second is None else self.shelf.load(anchors[view.second])
        for i, parameter in enumerate(self.parameters):
            if second is None:
                parameter.copy_(first.weights[i])
            else:
                torch.lerp(first.weights[i], second.weights[i], view.share, out=parameter.detach())
        here = anchors[view.first].step == recorded.step
        if here:
            self._put_random(anchors[view.first], first)
        if second is None and not first.updates and recorded.updates and view.first + 1 < len(anchors):
            # The beginning knows nothing of moments; the scale of gradients is the next checkpoint's rather than none at all.
            self._put_moments(self.shelf.load(anchors[view.first + 1]), None, 0.0, recorded.updates)
        else:
            self._put_moments(first, second, view.share, recorded.updates)
        return here

    @staticmethod
    def _put_random(anchor: Anchor, snapshot: Snapshot) -> None:
        if anchor.checkpoint is None:
            torch.set_rng_state(snapshot.random)
        else:
            anchor.checkpoint.load_random()  # of all devices

    def _put_moments(self, first: Snapshot, second: Snapshot | None, share: float, updates: int) -> None:
        parts = [(s, x) for s, x in ((first, 1.0 - share), (second, share)) if s is not None and s.updates and x]
        whole = sum(x for _, x in parts)
        for i, parameter in enumerate(self.parameters):
            known = [(s, x / whole) for s, x in parts if s.moments[i]]
            if not known or not updates:
                self.optimizer.state.pop(parameter, None)
                continue
            state: dict[str, Tensor] = {"step": torch.tensor(float(updates))}
            for name, which in MOMENTS.items():
                beta = self._betas[parameter][which]
                weights = [x * (1.0 - beta**updates) / (1.0 - beta**s.updates) for s, x in known]
                state[name] = sum((s.moments[i][name] * w for (s, _), w in zip(known, weights, strict=True)), torch.tensor(0.0))
            self.optimizer.state[parameter] = state

    def remembered(self) -> Tensor:
        """Return a copy of what the optimizer remembers of earlier gradients, as one vector."""
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        return torch.cat([torch.zeros(0), *(s["exp_avg"].flatten().cpu() for s in states if "exp_avg" in s)])

    @torch.no_grad()
    def furthest(self, anchor: Anchor) -> float:
        """Return the largest difference of a weight from an anchor's; 0 where all are equal bit for bit."""
        saved = self.shelf.load(anchor).weights
        return max(float((p - w).abs().max()) for p, w in zip(self.parameters, saved, strict=True) if p.numel())
