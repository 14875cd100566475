"""Why do in-run scores find changed labels worse than influence functions do? Variants of the first-order score on one run.

    python benchmarks/mislabel_why.py --data ../shared/data --seed 100 --start clean      (about a minute of one core)

The small net of ``inrun reproduce mislabel`` is trained once. Two tables of inner products ⟨∇ℓ_n, ∇L⟩ are kept: those of a step's
own samples at every step (the in-run score with the SGD proxy is their sum over a sample's steps), and those of *all* samples at
some steps (TracIn). Then parts of the score are left out, one at a time: a variant's AUROC says what that part did. Seeds from 100
on are not among those of docs/evidence.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from inrun.experiments.image_training import Net, Subject, Training, adam, make_subject
from inrun.experiments.images import corrupt, load_images
from inrun.experiments.mislabel import auroc, within_label
from inrun.experiments.recipes import Work

Vector = npt.NDArray[np.float64]
#: Validation images come in so many parts of 150; the other test images are one more part.
PARTS, SIZE = 4, 150
#: Damping of the curvature, over the mean squared norm of a gradient.
DAMPING = 0.1


@dataclass
class Own:
    """One step: its rate, its samples, and their inner products by part of network and validation images, ``[n, 3, 5]``."""

    rate: float
    samples: npt.NDArray[np.int64]
    dots: npt.NDArray[np.float32]
    preconditioned: npt.NDArray[np.float32] | None
    norms: npt.NDArray[np.float32]

    @property
    def scores(self) -> Vector:
        """Return rate · ⟨∇ℓ_n, ∇L⟩ with all validation images, ``[n]``."""
        return self.rate * self.dots[:, :, :PARTS].sum(1).mean(1).astype(np.float64)


@dataclass
class Everyone:
    """All samples at the weights of one step: inner products, and the Gram matrix of their gradients in its eigenbasis."""

    rate: float
    dots: npt.NDArray[np.float32]
    values: Vector
    basis: Vector
    coordinates: Vector

    @property
    def scores(self) -> Vector:
        """Return rate · ⟨∇ℓ_n, ∇L⟩, ``[n]``."""
        return self.rate * self.dots[:, :, :PARTS].sum(1).mean(1).astype(np.float64)

    def without(self, top: int) -> Vector:
        """Return the scores without the ``top`` directions in which gradients differ most."""
        return self.rate * (self.basis[:, :-top] @ self.coordinates[:-top])

    def divided(self) -> Vector:
        """Return the scores divided by the (damped) curvature of the gradients: an influence function."""
        damped = self.values + DAMPING * self.values.mean()
        return self.rate * (self.basis @ (self.coordinates / damped))


class Watch:
    """Takes the gradients of samples and validation images of one network."""

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        self.subject, self.model = subject, model
        self.names = [name for name, _ in model.named_parameters()]
        self.group = [0 if name == "head.bias" else 1 if name == "head.weight" else 2 for name in self.names]
        x, y = subject.task.validation
        parts = [(x[k * SIZE : (k + 1) * SIZE], y[k * SIZE : (k + 1) * SIZE]) for k in range(PARTS)]
        self.parts = [*parts, subject.task.test]

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return subject.training.loss(functional_call(model, weights, (x[None],)), y[None])

        self._each = vmap(grad(loss), in_dims=(None, 0, 0))

    def samples(self, chosen: Tensor) -> list[Tensor]:
        """Return the gradients of some samples, ``[n, entries]`` per parameter."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        x, y = self.subject.task.train
        pieces = [self._each(weights, x[c], y[c]) for c in chosen.split(125)]
        return [torch.cat([piece[name].flatten(1) for piece in pieces]) for name in self.names]

    def validation(self) -> list[list[Tensor]]:
        """Return the gradients of the mean loss of every part."""
        parameters = list(self.model.parameters())
        return [[g.flatten() for g in torch.autograd.grad(F.cross_entropy(self.model(x), y), parameters)] for x, y in self.parts]

    def dots(self, mine: list[Tensor], held: list[list[Tensor]], by: list[Tensor] | None = None) -> npt.NDArray[np.float32]:
        """Return inner products by part of the network and of the validation images, ``[n, 3, parts]``."""
        found = torch.zeros(len(mine[0]), 3, len(held))
        for j, (g, k) in enumerate(zip(mine, self.group, strict=True)):
            v = torch.stack([h[j] for h in held], 1)
            found[:, k] += g @ (v if by is None else v * by[j].unsqueeze(1))
        return found.numpy()

    def everyone(self, rate: float, held: list[list[Tensor]]) -> Everyone:
        """Look at all samples."""
        mine = self.samples(torch.arange(len(self.subject.task.ids)))
        flat = torch.cat(mine, 1)
        mean = torch.cat([sum(h[j] for h in held[:PARTS]) / PARTS for j in range(len(mine))])  # type: ignore[misc]
        values, basis = torch.linalg.eigh((flat @ flat.T).double())
        coordinates = basis.T @ (flat @ mean).double()
        return Everyone(rate, self.dots(mine, held), values.numpy(), basis.numpy(), coordinates.numpy())


def follow(subject: Subject, seed: int, every: int) -> tuple[list[Own], list[Everyone], tuple[float, float]]:
    """Train once; return what was seen of steps' own samples and of all, and the validation loss before and after."""
    model, training = subject.model(), subject.training
    optimizer, watch = adam(model, training), Watch(subject, model)
    before = float(subject.validation_loss(model).detach())
    x, y = subject.task.train
    own, everyone = [], []
    for t, (rate, chosen) in enumerate(training.batches(len(y), seed)):
        optimizer.param_groups[0]["lr"] = rate
        held, mine = watch.validation(), watch.samples(chosen)
        moments = [optimizer.state[p] for p in model.parameters()]
        by = None
        if t:
            correction = 1 - 0.999**t
            by = [1 / ((s["exp_avg_sq"] / correction).sqrt() + 1e-8).flatten() for s in moments]
        norms = torch.stack([g.square().sum(1) for g in mine]).sum(0).sqrt().numpy()
        through_adam = None if by is None else watch.dots(mine, held, by)
        own.append(Own(rate, chosen.numpy(), watch.dots(mine, held), through_adam, norms))
        if t % every == every // 2:
            everyone.append(watch.everyone(rate, held))
        training.loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return own, everyone, (before, float(subject.validation_loss(model).detach()))


def variants(own: list[Own], everyone: list[Everyone], labels: npt.NDArray[np.int64]) -> dict[str, Vector]:
    """Return the scores of every variant, ``[n]``."""
    n = len(labels)

    def summed(f: Callable[[Own], Vector]) -> Vector:
        return np.sum([np.bincount(s.samples, f(s), n) for s in own], axis=0)

    def of_parts(s: Own, weights: list[float]) -> Vector:
        return s.rate * (s.dots.sum(1) @ np.array(weights))

    def in_label(s: Own) -> Vector:
        mine = labels[s.samples]
        means = np.bincount(mine, s.scores, 10) / np.maximum(np.bincount(mine, minlength=10), 1)
        return s.scores - means[mine]

    epoch = -(-n // len(own[0].samples))
    found = {"in-run, first order (SGD proxy)": summed(lambda s: s.scores)}
    for k, part in enumerate(("bias of the last layer", "weights of the last layer", "all other layers")):
        found[f"  {part} alone"] = summed(lambda s, k=k: s.rate * s.dots[:, k, :PARTS].mean(1))  # type: ignore[misc]
    found |= {
        "  150 validation images": summed(lambda s: of_parts(s, [1, 0, 0, 0, 0])),
        "  2,000 validation images": summed(lambda s: of_parts(s, [*[0.075] * PARTS, 0.7])),
        "  all steps alike, whatever their rate": summed(lambda s: s.scores / s.rate),
        "  divided by the spread of its step": summed(lambda s: s.scores / s.scores.std()),
        "  through Adam's second moments": summed(
            lambda s: (
                np.zeros(len(s.samples)) if s.preconditioned is None else s.rate * s.preconditioned[:, :, :PARTS].sum(1).mean(1)
            )
        ),
        "  minus the mean of its label in the batch": summed(in_label),
        "  the first epoch alone": np.sum([np.bincount(s.samples, s.scores, n) for s in own[:epoch]], axis=0),
        f"all samples at the same {len(everyone)} steps (TracIn)": np.sum([e.scores for e in everyone], axis=0),
        "  divided by curvature (influence function)": np.sum([e.divided() for e in everyone], axis=0),
        "  divided by curvature, the last of them alone": everyone[-1].divided(),
        **{f"  without the top {k} directions": np.sum([e.without(k) for e in everyone], axis=0) for k in (9, 20, 100)},
        "minus the norm of the gradient": -summed(lambda s: s.norms.astype(np.float64)),
    }
    return found


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--start", choices=("clean", "features", "scratch"), default="clean")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    images = load_images(Work("mislabel", data=asked.data))
    task = corrupt(images, 1000, 0.1, PARTS * SIZE, asked.seed)
    training = Training(epochs=asked.epochs, decay_every=asked.epochs // 2)
    subject = make_subject(images, task, Net("small", asked.width), training, asked.start, asked.seed)
    own, everyone, (before, after) = follow(subject, asked.seed, asked.epochs)
    labels = task.train[1].numpy()
    print(f"start {asked.start}, seed {asked.seed}: validation loss {before:.3f} before, {after:.3f} after {asked.epochs} epochs")
    for name, scores in variants(own, everyone, labels).items():
        print(
            f"{name:55s} {auroc(scores, task.changed):.3f}   within labels {auroc(within_label(scores, labels), task.changed):.3f}"
        )
    middle = everyone[len(everyone) // 2]
    for what, x in (("squared inner products", middle.coordinates**2), ("squared gradients", middle.values)):
        print(f"share of {what} in the top 9 and 20 directions: {x[-9:].sum() / x.sum():.2f}, {x[-20:].sum() / x.sum():.2f}")


if __name__ == "__main__":
    main()
