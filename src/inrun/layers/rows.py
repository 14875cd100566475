"""Which rows of a tensor belong to which sample.

Rules see every tensor in one normal form, ``[n, t, features]``: n samples, t positions. How the leading
dimensions of a module's tensors map to samples is its *layout*:

``rows``  the leading dimension is the sample, ``[n, ...]``
``flat``  samples are laid end to end in the leading dimension, ``[n·t, ...]``
``free``  the tensor has no sample dimension (position embeddings): every sample shares it
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Layout = Literal["rows", "flat", "free"]


def by_sample(x: Tensor, n: int, feature_dims: int) -> Tensor:
    """View ``x`` as ``[n, t, *features]``; the last ``feature_dims`` dimensions are features.

    Works for the layouts ``rows`` and ``flat`` alike, since both keep a sample's entries together.
    """
    features = x.shape[x.dim() - feature_dims :]
    return x.reshape(n, -1, *features)
