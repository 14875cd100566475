"""Which samples a step takes: a function of seed and step alone, so that a resumed run needs no other position."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Order:
    """Shuffled epochs over sample ids; a batch may reach over the end of an epoch into the next."""

    def __init__(self, ids: Ids, size: int, seed: int) -> None:
        """``size`` samples per step."""
        self.ids, self.size, self.seed = ids, size, seed
        self._epoch, self._shuffled = -1, ids

    def _of_epoch(self, epoch: int) -> Ids:
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.ids)
        return self._shuffled

    def batch(self, step: int) -> Ids:
        """Return the ids of one step."""
        at, left, parts = step * self.size, self.size, []
        while left:
            epoch, place = divmod(at, len(self.ids))
            part = self._of_epoch(epoch)[place : place + left]
            parts.append(part)
            at, left = at + len(part), left - len(part)
        return np.concatenate(parts)


def draw(ids: Ids, count: int, seed: int, name: str, step: int) -> Ids:
    """Draw validation samples for one step; all of them if there are no more."""
    if count <= 0 or count >= len(ids):
        return ids
    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), step])
    return ids[np.sort(generator.choice(len(ids), count, replace=False))]
