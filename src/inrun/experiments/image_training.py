"""Training on images: the paper's recipe, once for all methods, whether scored, watched or run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.experiments.image_nets import ResNet18, SmallNet, build_net
from inrun.experiments.images import Corrupted, Images, Part

Around = Callable[[Tensor], AbstractContextManager[object]]
After = Callable[[int, torch.optim.Optimizer], None]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """Adam with label smoothing, weight decay and a rate that falls in steps."""

    epochs: int = 8
    batch: int = 64
    lr: float = 1e-3
    smoothing: float = 0.1
    weight_decay: float = 1e-4
    #: The rate is multiplied by 0.1 after this many epochs, again and again.
    decay_every: int = 4

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss that is trained on."""
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch."""
        return self.lr * 0.1 ** (epoch // self.decay_every)

    def batches(self, n: int, seed: int) -> Iterator[tuple[float, Tensor]]:
        """Yield the rate and the positions of every step."""
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(self.epochs):
            for chosen in torch.randperm(n, generator=generator).split(self.batch) if n else ():
                yield self.rate(epoch), chosen

    def steps(self, n: int) -> int:
        """Return the number of steps for n samples."""
        return self.epochs * -(-n // self.batch)


def adam(model: nn.Module, training: Training) -> torch.optim.Adam:
    """Return the optimizer of the recipe."""
    return torch.optim.Adam(model.parameters(), lr=training.lr, weight_decay=training.weight_decay, fused=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: Part,
    training: Training,
    seed: int,
    around: Around = lambda chosen: nullcontext(),
    after: After = lambda step, optimizer: None,
) -> None:
    """Train a model in place.

    Args:
        model: In training mode all along.
        optimizer: Of its parameters.
        part: Images and labels.
        training: The recipe.
        seed: Of the order of the samples.
        around: Makes what each step runs in, from the positions of its samples.
        after: Called after every step with the number of steps done.
    """
    x, labels = part
    model.train()
    for step, (rate, chosen) in enumerate(training.batches(len(labels), seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with around(chosen):
            training.loss(model(x[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        after(step + 1, optimizer)


def accuracy(model: nn.Module, part: Part) -> float:
    """Return the share of images whose label is the model's first guess."""
    model.eval()
    with torch.no_grad():
        return float((model(part[0]).argmax(1) == part[1]).double().mean())


def mean_loss(model: nn.Module, part: Part) -> Tensor:
    """Return the plain cross-entropy of images, without smoothing."""
    return F.cross_entropy(model(part[0]), part[1])


def _learn_clean(model: nn.Module, part: Part, training: Training, mirrors: bool, seed: int) -> None:
    """Train on clean images that are shifted, and mirrored where a mirror image means the same, by one draw per batch."""
    optimizer = adam(model, training)
    generator = torch.Generator().manual_seed(seed)
    edge = part[0].shape[2]
    most = max(1, edge // 8)
    for rate, chosen in training.batches(len(part[1]), seed):
        optimizer.param_groups[0]["lr"] = rate
        down, right, flip = (int(torch.randint(0, k, (), generator=generator)) for k in (2 * most + 1, 2 * most + 1, 2))
        x = F.pad(part[0][chosen], (most,) * 4)[:, :, down : down + edge, right : right + edge]
        training.loss(model(x.flip(3) if mirrors and flip else x), part[1][chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Net:
    """Which network, and how the one that training starts from was made."""

    kind: str = "small"
    width: int = 8
    #: Epochs over the clean other images; the last third at a tenth of the rate.
    start_epochs: int = 20


#: Clean images are many, whatever the size of the corrupted set.
START_BATCH = 64


@dataclass(frozen=True)
class Subject:
    """A corrupted set, a network, and the weights that every training run starts from."""

    task: Corrupted
    net: Net
    shape: tuple[int, int]
    training: Training
    state: State

    def model(self) -> SmallNet | ResNet18:
        """Return the network at its start."""
        model = build_net(self.net.kind, self.shape, self.net.width, 0)
        model.load_state_dict(self.state)
        return model

    def trained(self, positions: npt.NDArray[np.int64], seed: int) -> nn.Module:
        """Return the network trained on the samples at some positions alone."""
        model = self.model()
        index = torch.as_tensor(positions)
        part = self.task.train[0][index], self.task.train[1][index]
        train(model, adam(model, self.training), part, self.training, seed)
        return model

    def sample_loss(self, model: nn.Module, k: int | Tensor) -> Tensor:
        """Return the training loss of the k-th sample; k may be mapped over."""
        index = torch.as_tensor(k).reshape(1)
        return self.training.loss(model(self.task.train[0][index]), self.task.train[1][index])

    def validation_loss(self, model: nn.Module) -> Tensor:
        """Return the validation loss that defines value."""
        return mean_loss(model, self.task.validation)


def make_subject(images: Images, task: Corrupted, net: Net, training: Training, start: str, seed: int) -> Subject:
    """Put a subject together.

    Args:
        images: Where the task was drawn from.
        task: The corrupted set.
        net: The network.
        training: The recipe.
        start: "clean" trains on the other, clean images first; "features" does so, and gives the network a new last layer, as
            weights from another task need one; "scratch" starts from random weights.
        seed: Of weights and of the clean training.
    """
    model = build_net(net.kind, images.shape, net.width, seed)
    if start in ("clean", "features"):
        batch = max(training.batch, START_BATCH)
        recipe = replace(training, epochs=net.start_epochs, decay_every=max(1, -(-2 * net.start_epochs // 3)), batch=batch)
        _learn_clean(model, task.others, recipe, images.mirrors, seed)
    elif start != "scratch":
        raise ValueError(f"start is {start!r}; it is clean, features or scratch")
    if start == "features":
        model.head.load_state_dict(build_net(net.kind, images.shape, net.width, seed + 1).head.state_dict())
    return Subject(task, net, images.shape, training, {name: w.detach().clone() for name, w in model.state_dict().items()})
