"""Which form a layer contracts in: one deterministic cost model, so that a resumed run rounds the same way.

For a weight ``[p, q]`` and n samples of t positions (m validation rows of t' positions in a merged pass, k columns), beyond the
weight gradient itself, in floating-point operations; a byte moved counts as many as the device does in that time (F):

=========  ==============================================  =======================================================
form       beyond the weight gradient                      what it needs
=========  ==============================================  =======================================================
shared     n·k·p·q · 3·itemsize·F                          v, and the layer's backward is ours
project    n·k·p·q · 2t                                    v
gram       n·m·t·t' · 2(p + q)  (and 3 passes over t·t')   validation rows of the same pass, one gain for the tensor
=========  ==============================================  =======================================================

In a merged pass ``shared`` and ``project`` first form v from the validation rows, 2·m·t'·p·q; gram never does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

#: Floating-point operations a device does while it moves one byte that is in its cache. CPU: measured on one core as 1.1 to 3.7
#: (float32, 256 x 256 to 1024 x 256, 6 to 64 positions); with 2, project and shared meet at 12 positions, as they did.
FLOPS_PER_BYTE = {"cpu": 2.0, "cuda": 60.0}
FORMS = ("project", "shared", "gram")


@dataclass(frozen=True)
class Contraction:
    """The sizes of one contraction: a weight ``[p, q]``, n samples of t positions, m validation rows of as many, k columns."""

    n: int
    t: int
    p: int
    q: int
    k: int = 1
    #: 0 where v is known beforehand (a separate validation pass).
    m: int = 0

    def cost(self, form: str, dtype: torch.dtype, device: str) -> float:
        """Return the floating-point operations (and bytes, as operations) of a form beyond the weight gradient."""
        per_byte = FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cuda"])
        entries = float(self.p * self.q)
        made = 2.0 * self.m * self.t * entries
        if form == "shared":
            return made + self.n * self.k * entries * 3.0 * dtype.itemsize * per_byte
        if form == "project":
            return made + self.n * self.k * entries * 2.0 * self.t
        pairs = float(self.n * self.m * self.t * self.t)
        return pairs * 2.0 * (self.p + self.q) + pairs * 3.0 * dtype.itemsize * per_byte

    def cheapest(self, allowed: Collection[str], dtype: torch.dtype, device: str) -> str:
        """Return the form of the least cost among those allowed; the first of ``FORMS`` where two are even."""
        return min((form for form in FORMS if form in allowed), key=lambda form: self.cost(form, dtype, device))
