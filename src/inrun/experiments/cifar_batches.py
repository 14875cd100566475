"""CIFAR-10 as it is distributed: Python pickles, read as data.

A pickle is a program, and loading one runs whatever it names. Here its opcodes are walked by a machine that knows only those
that build dictionaries, lists, tuples, strings, numbers and NumPy arrays, and refuses everything else, so that a file that is
not what it seems can do nothing.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.errors import ConfigurationError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
TRAIN, TEST = tuple(f"data_batch_{k}" for k in range(1, 6)), ("test_batch",)

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
#: Opcodes whose argument is the value. Strings of Python 2 (the files are that old) are bytes, which pickletools shows as latin-1.
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
_OLD_STRINGS = {"BINSTRING", "SHORT_BINSTRING"}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}
_PUT, _GET = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "class",
    "numpy dtype": "dtype",
}
_MARK = object()


class _Name:
    """A name of NumPy's that the file uses; never looked up."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Dtype:
    def __init__(self, text: Any) -> None:
        self.dtype = np.dtype(text.decode() if isinstance(text, bytes) else text)
        if self.dtype.kind not in "uif":
            raise ValueError(f"an array of {self.dtype}")


class _Array:
    value: npt.NDArray[Any] | None = None


class _Machine:
    """A stack, a memo, and the opcodes that only make data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            self.do(opcode.name, argument)
        raise ValueError("it does not end")

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _OLD_STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name in _PUT:
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GET:
            stack.append(self.memo[argument])
        elif name in ("APPENDS", "APPEND"):
            items = self.since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name in ("SETITEMS", "SETITEM"):
            items = self.since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_named(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(f"{module} {attribute}"))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_made(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        else:
            raise ValueError(f"opcode {name}")

    def since_mark(self) -> list[Any]:
        at = next(k for k in reversed(range(len(self.stack))) if self.stack[k] is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items


def _named(name: str) -> _Name:
    if name not in _NAMES:
        raise ValueError(f"the name {name.replace(' ', '.')}")
    return _Name(_NAMES[name])


def _made(called: Any, arguments: tuple[Any, ...]) -> _Array | _Dtype:
    if not isinstance(called, _Name) or called.kind == "class":
        raise ValueError("a call of something that is not NumPy's")
    return _Array() if called.kind == "array" else _Dtype(arguments[0])


def _build(made: Any, state: Any) -> None:
    if isinstance(made, _Dtype):
        return  # byte order and alignment of a one-byte type say nothing; others carry theirs in the name
    if not isinstance(made, _Array):
        raise ValueError("a state for something that is not NumPy's")
    _, shape, kind, fortran, raw = state
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * kind.dtype.itemsize:
        raise ValueError("an array whose bytes do not fit its shape")
    made.value = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if fortran else "C")


def read_pickle(data: bytes) -> Any:
    """Return the data in a pickle: containers, strings, numbers and arrays; strings of Python 2 as bytes.

    Raises:
        ValueError: If it holds anything else; it says what.
    """
    try:
        found = _Machine().run(data)
    except (IndexError, KeyError, StopIteration, AttributeError, TypeError) as error:
        raise ValueError(f"a broken pickle ({type(error).__name__})") from error
    return _resolved(found)


def _resolved(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _resolved(value) for key, value in found.items()}
    return found.value if isinstance(found, _Array) else found


def read_batches(folder: Path, names: tuple[str, ...]) -> tuple[Bytes, Labels]:
    """Return the images ``[n, 32, 32, 3]`` and labels ``[n]`` of some batch files, in their order."""
    images, labels = zip(*_each(folder, names), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _each(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[Bytes, Labels]]:
    for name in names:
        try:
            batch = read_pickle((folder / name).read_bytes())
            fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
            pixels = np.asarray(fields["data"], np.uint8).reshape(-1, 3, 32, 32)
            labels = np.asarray(fields["labels"], np.int64)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"{folder / name} cannot be read as a CIFAR-10 batch: {error}; expected are the official data_batch_1 to _5 and "
                "test_batch of the Python version, or cifar10_subset.npz"
            ) from error
        if len(pixels) != len(labels):
            raise ConfigurationError(f"{folder / name} has {len(pixels)} images and {len(labels)} labels")
        yield np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels
