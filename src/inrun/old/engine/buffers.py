"""Memory that is reused from step to step: fresh pages for what is kept would cost more than filling them."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor


class Buffers:
    """Named buffers, and lists of them that are dealt out in order within a step."""

    def __init__(self) -> None:
        """Start empty."""
        self._named: dict[Hashable, Tensor] = {}
        self._lists: dict[Hashable, list[Tensor]] = {}
        self._dealt: dict[Hashable, int] = {}
        self._used: set[Hashable] = set()

    def begin_step(self) -> None:
        """Free what the last step had no use for (Adam's first step, an audit), and deal out from the beginning again."""
        self._lists = {key: buffers[: self._dealt[key]] for key, buffers in self._lists.items() if key in self._dealt}
        self._named = {key: buffer for key, buffer in self._named.items() if key in self._used}
        self._dealt.clear()
        self._used.clear()

    def named(self, key: Hashable, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the buffer of this name, of the shape and device of ``like``; its content is what was written last."""
        dtype = dtype or like.dtype
        self._used.add(key)
        found = self._named.get(key)
        if found is None or found.shape != like.shape or found.dtype != dtype or found.device != like.device:
            found = self._named[key] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return found

    def next(self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next buffer of a list, as a new tensor object; it is this caller's until the step ends."""
        place = self._dealt.get(key, 0)
        self._dealt[key] = place + 1
        buffers = self._lists.setdefault(key, [])
        if place == len(buffers):
            buffers.append(torch.empty(0, dtype=dtype, device=device))
        found, count = buffers[place], math.prod(shape)
        if found.numel() < count or found.dtype != dtype or found.device != device:
            found = buffers[place] = torch.empty(count, dtype=dtype, device=device)
        return found[:count].view(shape)

    def nbytes(self) -> int:
        """Return the memory held."""
        return sum(b.nbytes for b in self._named.values()) + sum(b.nbytes for x in self._lists.values() for b in x)

    def free(self) -> None:
        """Give all memory back."""
        self._named, self._lists, self._dealt, self._used = {}, {}, {}, set()
