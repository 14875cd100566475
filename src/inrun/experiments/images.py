"""Images with labels, some of them changed: CIFAR-10 from files, or scikit-learn's digits where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.errors import ConfigurationError
from inrun.experiments.cifar_batches import TEST, TRAIN, read_batches
from inrun.experiments.recipes import Work

NPZ, FOLDER = "cifar10_subset.npz", "cifar-10-batches-py"
#: Of the official files the first images of each class are taken, in their order: the rule by which the npz was made.
TRAIN_PER_CLASS, TEST_PER_CLASS = 500, 200
CLASSES = 10
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

Array = npt.NDArray[np.int64]
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """A data set: images ``[n, c, h, w]``, normalised, and labels ``[n]``."""

    name: str
    train: Part
    test: Part
    #: Whether a mirror image has the same label: so for photographs, not for digits.
    mirrors: bool
    note: str

    @property
    def shape(self) -> tuple[int, int]:
        """Channels, and pixels of an edge."""
        return self.train[0].shape[1], self.train[0].shape[2]


def load_images(work: Work) -> Images:
    """Read CIFAR-10 from the folder of data; digits where there is none."""
    if work.data is None:
        return _digits()
    if (work.data / NPZ).exists():
        with np.load(work.data / NPZ) as arrays:
            return _cifar(arrays["train_x"], arrays["train_y"], arrays["test_x"], arrays["test_y"])
    for folder in (work.data, work.data / FOLDER):
        if (folder / TRAIN[0]).exists():
            return _cifar(
                *_first(*read_batches(folder, TRAIN), TRAIN_PER_CLASS), *_first(*read_batches(folder, TEST), TEST_PER_CLASS)
            )
    raise ConfigurationError(
        f"{work.data} has neither {NPZ} nor the official batches ({TRAIN[0]} ..., or {FOLDER}/), which {work.name} reads; "
        "give --data a folder that has them, or leave --data out: scikit-learn's digits serve instead"
    )


def _first(x: npt.NDArray[np.uint8], y: Array, per_class: int) -> tuple[npt.NDArray[np.uint8], Array]:
    """Return the first images of every class, in their order."""
    chosen = np.sort(np.concatenate([np.flatnonzero(y == k)[:per_class] for k in range(CLASSES)]))
    return x[chosen], y[chosen]


def _cifar(train_x: npt.NDArray[np.uint8], train_y: Array, test_x: npt.NDArray[np.uint8], test_y: Array) -> Images:
    def scaled(x: npt.NDArray[np.uint8]) -> Tensor:
        pixels = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
        mean, std = torch.tensor(_CIFAR_MEAN).view(3, 1, 1), torch.tensor(_CIFAR_STD).view(3, 1, 1)
        return ((pixels - mean) / std).contiguous()

    note = f"Data: CIFAR-10, {len(train_x):,} training and {len(test_x):,} test images (the first of every class)."
    return Images("cifar10", (scaled(train_x), _labels(train_y)), (scaled(test_x), _labels(test_y)), True, note)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            "without --data the images are scikit-learn's digits: pip install scikit-learn, or give --data"
        ) from error
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    pixels = torch.from_numpy((x[order].reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32))
    labels = _labels(y[order])
    note = (
        "Data: no --data was given, so these are scikit-learn's digits (1,797 images of 8x8 pixels), not CIFAR-10: the "
        "paper's figures beside them are of another task."
    )
    return Images("digits", (pixels[:1297], labels[:1297]), (pixels[1297:], labels[1297:]), False, note)


def _labels(y: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(y, np.int64))


@dataclass(frozen=True)
class Corrupted:
    """A training set some of whose labels were changed, and the clean images around it; no image is in two parts."""

    #: Images and the labels that are trained on.
    train: Part
    #: Which labels are wrong, ``[n]``.
    changed: npt.NDArray[np.bool_]
    #: Training images that are not in the set, clean: for the network that training starts from.
    others: Part
    #: Test images whose loss defines value.
    validation: Part
    #: The other test images, for accuracy.
    test: Part

    @property
    def ids(self) -> Array:
        """Sample ids, ``[n]``."""
        return np.arange(len(self.changed))


def corrupt(images: Images, samples: int, share: float, validation: int, seed: int) -> Corrupted:
    """Draw a training set and change some labels, each to one of the nine others.

    Args:
        images: To draw from.
        samples: Images in the set.
        share: Of labels that are changed.
        validation: Test images that define value; the rest measure accuracy.
        seed: Of all draws.
    """
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(images.train[1]))
    if not 0 < samples < len(order) or not 0 < validation < len(images.test[1]):
        raise ConfigurationError(
            f"cannot take {samples} samples and {validation} validation images of {images.name}, which has {len(order)} for "
            f"training and {len(images.test[1])} for testing; there must be some left"
        )
    changed = np.zeros(samples, bool)
    changed[rng.permutation(samples)[: round(share * samples)]] = True
    x, truth = _taken(images.train, order[:samples])
    moved = torch.from_numpy(rng.integers(1, CLASSES, samples) * changed)
    held = rng.permutation(len(images.test[1]))
    return Corrupted(
        train=(x, (truth + moved) % CLASSES),
        changed=changed,
        others=_taken(images.train, order[samples:]),
        validation=_taken(images.test, held[:validation]),
        test=_taken(images.test, held[validation:]),
    )


def _taken(part: Part, positions: Sequence[int] | Array) -> Part:
    index = torch.as_tensor(np.asarray(positions))
    return part[0][index], part[1][index]
