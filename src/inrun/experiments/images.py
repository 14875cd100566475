"""Images with labels, some of them changed: CIFAR-10 from files, or scikit-learn's digits where there are none."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        return _stamped(work, *_read_npz(work.data / NPZ))
    for folder in (work.data, work.data / FOLDER):
        if (folder / TRAIN[0]).exists():
            train, test = read_batches(folder, TRAIN), read_batches(folder, TEST)
            return _stamped(work, *_first(*train, TRAIN_PER_CLASS), *_first(*test, TEST_PER_CLASS))
    raise ConfigurationError(
        f"{work.data} has neither {NPZ} nor the official batches ({TRAIN[0]} ..., or {FOLDER}/), which {work.name} reads; "
        "give --data a folder that has them, or leave --data out: scikit-learn's digits serve instead"
    )


def _read_npz(path: Path) -> tuple[Any, Any, Any, Any]:
    """Return images ``[n, h, w, 3]`` and labels ``[n]`` for training, and likewise for testing."""
    names = ("train_x", "train_y", "test_x", "test_y")
    try:
        if not zipfile.is_zipfile(path):  # numpy would leave it open
            raise ValueError("it is no zip archive")
        with np.load(path) as arrays:
            found = [np.asarray(arrays[name]) for name in names]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; expected are arrays {', '.join(names)}, as numpy.savez writes them"
        ) from error
    for x, y in (found[:2], found[2:]):
        square = x.ndim == 4 and x.shape[1] == x.shape[2] and x.shape[3] == 3
        classes = y.dtype.kind in "iu" and y.shape == x.shape[:1] and len(y) and y.min() >= 0 and y.max() < CLASSES
        if x.dtype != np.uint8 or not square or not classes:
            raise ConfigurationError(
                f"{path} has images {x.dtype} {list(x.shape)} with labels {y.dtype} {list(y.shape)}; images must be uint8 "
                f"[n, h, h, 3], labels integers [n] from 0 to {CLASSES - 1}"
            )
    return found[0], found[1], found[2], found[3]


def _stamped(work: Work, *arrays: npt.NDArray[Any]) -> Images:
    """Return the data set, once the cells that are kept are known to be of it."""
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(hashlib.sha256(np.ascontiguousarray(array, np.uint8).tobytes()).digest())
    images = _cifar(*arrays)
    work.made_from(images.name, hashed.hexdigest())
    return images


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
