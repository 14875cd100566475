"""Numbers on their way to the host: one asynchronous copy per step, read a few steps later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
#: Steps after which a copy from a device is read. By then it has long arrived, and nobody waits for it.
LAG = 4


def lag_of(device: torch.device) -> int:
    """Return for how many steps results stay on their way; a CPU has them at once."""
    return 0 if device.type == "cpu" else LAG


class Transfer:
    """Named tensors, joined and copied to the host; None stays None."""

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        present = {name: x for name, x in tensors.items() if x is not None}
        self._shapes = {name: x.shape for name, x in present.items()}
        self._names = list(tensors)
        self._event: Any = None
        if not present:
            self._host = torch.zeros(0)
            return
        device = next(iter(present.values())).device
        parts = [x.detach().reshape(-1) for x in present.values()]
        joined = torch.cat([p if p.is_floating_point() else p.float() for p in parts])
        if device.type == "cpu":
            self._host = joined
            return
        self._host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=device.type == "cuda")
        self._host.copy_(joined, non_blocking=True)
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> dict[str, Array | None]:
        """Return the arrays in double precision; waits for the copy if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        flat = self._host.double().numpy()
        found: dict[str, Array | None] = dict.fromkeys(self._names)
        at = 0
        for name, shape in self._shapes.items():
            found[name] = flat[at : at + shape.numel()].reshape(tuple(shape))
            at += shape.numel()
        return found
