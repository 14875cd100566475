"""Images for experiments: what is read, what is drawn, and what a pickle may not do."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from inrun.errors import ConfigurationError
from inrun.experiments.cifar_batches import read_batches, read_pickle
from inrun.experiments.image_nets import build_net
from inrun.experiments.images import corrupt, load_images
from inrun.experiments.recipes import Work

#: Beside the repository, or beside a folder of its worktrees.
DATA = next(
    (p / "shared" / "data" for p in Path(__file__).parents if (p / "shared/data/cifar10_subset.npz").exists()), Path("none")
)
has_data = pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data with cifar10_subset.npz")


def old_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote the official ones: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value if len(value) > 255 else b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR(" + number(3) + text(b"|") + b"NNN"
    dtype += number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR("
    array += (
        number(1)
        + b"("
        + number(pixels.shape[0])
        + number(pixels.shape[1])
        + b"t"
        + dtype
        + b"\x89"
        + text(pixels.tobytes())
        + b"tb"
    )
    listed = b"]q\x02(" + b"".join(b"K" + bytes([k]) for k in labels) + b"e"
    return b"\x80\x02}q\x01(" + text(b"data") + array + text(b"labels") + listed + text(b"batch_label") + text(b"x") + b"u."


def test_reads_batches_as_they_are_distributed(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    (tmp_path / "old").write_bytes(old_pickle(pixels, [1, 2, 3, 9]))
    for protocol in (3, 4):
        (tmp_path / f"new{protocol}").write_bytes(pickle.dumps({"data": pixels, "labels": [1, 2, 3, 9]}, protocol))
    for name in ("old", "new3", "new4"):
        images, labels = read_batches(tmp_path, (name,))
        assert np.array_equal(images, pixels.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1)) and labels.tolist() == [1, 2, 3, 9]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_runs_nothing(protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Evil(), "labels": []}, protocol))
    with pytest.raises(ConfigurationError, match="cannot be read as a CIFAR-10 batch"):
        read_batches(tmp_path, ("data_batch_1",))
    assert capsys.readouterr().out == ""


def test_refusals_say_what(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the name builtins.print"):
        read_pickle(pickle.dumps(Evil(), 4))
    with pytest.raises(ValueError, match="an array of object"):
        read_pickle(pickle.dumps(np.array([{}], object), 4))
    with pytest.raises(ValueError):
        read_pickle(pickle.dumps({"a": 1}, 4)[:-1])
    with pytest.raises(ValueError, match="broken pickle"):
        read_pickle(b"\x80\x02h\x05.")
    with pytest.raises(ConfigurationError, match="has neither cifar10_subset.npz nor the official batches"):
        load_images(Work("mislabel", data=tmp_path))


def test_digits_serve_without_data() -> None:
    images = load_images(Work("mislabel"))
    assert images.name == "digits" and "no --data was given" in images.note and not images.mirrors
    assert images.train[0].shape == (1297, 1, 8, 8) and float(images.train[0].abs().max()) == 1.0


def test_parts_are_apart_and_labels_change() -> None:
    images = load_images(Work("mislabel"))
    task = corrupt(images, 200, 0.1, 100, seed=3)
    again, other = corrupt(images, 200, 0.1, 100, seed=3), corrupt(images, 200, 0.1, 100, seed=4)
    assert torch.equal(task.train[1], again.train[1]) and not torch.equal(task.train[0], other.train[0])
    assert task.changed.sum() == 20
    assert len(task.others[1]) == 1097 and len(task.validation[1]) + len(task.test[1]) == 500
    key = {x.numpy().tobytes(): int(y) for x, y in zip(*images.train, strict=True)}
    true = np.array([key[x.numpy().tobytes()] for x in task.train[0]])
    assert np.array_equal(true != task.train[1].numpy(), task.changed)
    with pytest.raises(ConfigurationError, match="there must be some left"):
        corrupt(images, 1297, 0.1, 100, seed=0)


@pytest.mark.parametrize(
    ("kind", "shape", "width", "parameters"), [("small", (3, 32), 16, 34_826), ("resnet18", (3, 32), 64, 11_181_642)]
)
def test_nets_are_what_they_say(kind: str, shape: tuple[int, int], width: int, parameters: int) -> None:
    net = build_net(kind, shape, width, seed=0)
    assert sum(p.numel() for p in net.parameters()) == parameters
    x = torch.randn(3, shape[0], shape[1], shape[1], generator=torch.Generator().manual_seed(0))
    assert net(x).shape == (3, 10) and torch.allclose(net.head(net.features(x)), net(x))
    assert torch.allclose(net(x)[:1], net(x[:1]), atol=1e-5)  # rows are their own
    assert torch.equal(net.head.weight, build_net(kind, shape, width, seed=0).head.weight)


@has_data
def test_cifar_is_the_original() -> None:
    images = load_images(Work("mislabel", data=DATA))
    assert images.name == "cifar10" and images.shape == (3, 32) and images.mirrors
    assert images.train[0].shape[0] == 5000 and torch.bincount(images.test[1]).tolist() == [200] * 10
    first = images.train[0][0, :, 0, 0] * torch.tensor([0.2470, 0.2435, 0.2616]) + torch.tensor([0.4914, 0.4822, 0.4465])
    assert torch.allclose(first * 255, torch.tensor([59.0, 62.0, 63.0]), atol=1e-3)


@has_data
def test_official_batches_give_the_same_subset(tmp_path: Path) -> None:
    with np.load(DATA / "cifar10_subset.npz") as arrays:
        parts = [(arrays[f"{part}_x"], arrays[f"{part}_y"]) for part in ("train", "test")]
    names = [[f"data_batch_{k}" for k in range(1, 6)], ["test_batch"]]
    (tmp_path / "cifar-10-batches-py").mkdir()
    for (x, y), files in zip(parts, names, strict=True):
        flat = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        for name, rows in zip(files, np.array_split(np.arange(len(x)), len(files)), strict=True):
            content = {"data": np.ascontiguousarray(flat[rows]), "labels": y[rows].tolist()}
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content, 4))
    batches, subset = load_images(Work("mislabel", data=tmp_path)), load_images(Work("mislabel", data=DATA))
    assert all(torch.equal(a, b) for a, b in zip(batches.train + batches.test, subset.train + subset.test, strict=True))


def arrays(**other: object) -> dict[str, object]:
    x, y = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 10
    return {"train_x": x, "train_y": y, "test_x": x, "test_y": y, **other}


ODD = {
    "floats": ({"train_x": np.zeros((20, 32, 32, 3), np.float32)}, r"images float32 \[20, 32, 32, 3\].*must be uint8"),
    "channels first": ({"test_x": np.zeros((20, 3, 32, 32), np.uint8)}, r"images uint8 \[20, 3, 32, 32\]"),
    "flat": ({"train_x": np.zeros((20, 3072), np.uint8)}, r"\[20, 3072\]"),
    "labels missing": ({"train_y": np.arange(19) % 10}, r"labels int64 \[19\]"),
    "label 10": ({"train_y": np.arange(20) % 11}, "from 0 to 9"),
    "label -1": ({"test_y": np.arange(20) % 10 - 1}, "from 0 to 9"),
    "label 0.5": ({"test_y": np.arange(20) / 2}, "labels float64"),
    "objects": ({"train_y": np.array([{}] * 20)}, "cannot be read"),
    "nothing": ({"train_x": np.zeros((0, 32, 32, 3), np.uint8), "train_y": np.zeros(0, np.int64)}, r"\[0\]"),
}


@pytest.mark.parametrize("case", ODD)
def test_arrays_that_are_no_images_are_one_error(case: str, tmp_path: Path) -> None:
    other, words = ODD[case]
    np.savez(tmp_path / "cifar10_subset.npz", **arrays(**other))
    with pytest.raises(ConfigurationError, match=words):
        load_images(Work("mislabel", data=tmp_path))


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", b"no zip", None])
def test_a_file_that_is_no_npz_is_one_error(body: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "cifar10_subset.npz"
    if body is None:
        np.savez(path, **{name: x for name, x in arrays().items() if name != "test_y"})
    else:
        path.write_bytes(body)
    with pytest.raises(ConfigurationError, match=r"cifar10_subset.npz cannot be read: .*expected are arrays train_x, train_y"):
        load_images(Work("mislabel", data=tmp_path))


def test_other_images_of_the_same_name_do_not_get_the_cells_of_the_first(tmp_path: Path) -> None:
    work = Work("mislabel", data=tmp_path, cells=tmp_path / "cells")
    np.savez(tmp_path / "cifar10_subset.npz", **arrays())
    load_images(work)
    work.cell({}, lambda: 1)
    load_images(work)
    np.savez(tmp_path / "cifar10_subset.npz", **arrays(train_y=np.arange(20)[::-1] % 10))
    with pytest.raises(ConfigurationError, match="results made from another cifar10"):
        load_images(work)
