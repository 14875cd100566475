"""What a call of the model was given, for a look at the rows that is taken after it."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict, deque
from typing import Any

from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.old.engine.quiet import Arguments
from inrun.torch_private import version_of


class Given:
    """The arguments of a call of the model, as they were before it: containers may be consumed, tensors written to."""

    def __init__(self, arguments: Arguments) -> None:
        """Note them, at every step: containers are made anew, tensors stay what they are."""
        self._versions: list[tuple[Tensor, int]] = []
        args, kwargs = arguments
        self.arguments: Arguments = (tuple(map(self._note, args)), {k: self._note(x) for k, x in kwargs.items()})

    def _note(self, x: Any) -> Any:
        kind = type(x)
        if isinstance(x, Tensor):
            if kind is Tensor and not x.is_inference():
                self._versions.append((x, version_of(x)))
        elif kind is dict:
            return {k: self._note(v) for k, v in x.items()}
        elif kind is list or kind is tuple:
            return kind(map(self._note, x))
        elif isinstance(x, (dict, UserDict, deque)):
            with contextlib.suppress(Exception):  # what cannot be copied is looked at as the forward left it
                return copy.copy(x)
        return x

    def check(self) -> None:
        """Raise if a tensor was written to since."""
        shapes = [tuple(x.shape) for x, version in self._versions if version_of(x) != version]
        if shapes:
            raise RowOwnershipError(
                f"the model's forward changes its input in place (of shape {shapes[0]}) and took a way that no look at the rows "
                "had shown, so that it cannot be run again to verify them; write to a copy (x = x.clone())"
            )
