"""``random``: numbers that know nothing of the samples, the floor for everything else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.baselines.registry import Ids, register


@register("random", "independent normal numbers that know nothing of the samples", unit="standard normal")
def random(sample_ids: Ids, validation: Mapping[str, Any], *, seed: int = 0) -> dict[str, npt.NDArray[np.float64]]:
    """Draw one number per sample; a set's numbers depend on the seed and its name, not on the other sets."""
    return {name: np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(len(sample_ids)) for name in validation}
