"""The columns of a ledger's tables."""

from __future__ import annotations

import pyarrow as pa

CONTRIBUTIONS = pa.schema(
    [("step", pa.int64()), ("sample_id", pa.int64()), ("validation", pa.string()), ("contribution", pa.float32())]
)
#: ``step`` and ``row`` are those of the use; ``error`` is the standard error of the credit's estimate.
CREDITS = pa.schema(
    [
        ("step", pa.int64()),
        ("row", pa.int32()),
        ("sample_id", pa.int64()),
        ("validation", pa.string()),
        ("credit", pa.float32()),
        ("error", pa.float32()),
        ("paid", pa.float32()),
    ]
)
ACCOUNTS = pa.schema(
    [
        ("step", pa.int64()),
        ("validation", pa.string()),
        ("loss_before", pa.float64()),
        ("loss_after", pa.float64()),
        ("data", pa.float64()),
        ("spread", pa.float64()),
        ("momentum", pa.float64()),
        ("decay", pa.float64()),
        ("residual", pa.float64()),
        ("lr", pa.float64()),
        ("clip", pa.float64()),
        ("n_samples", pa.int64()),
        ("skipped", pa.string()),
        # One number per optimizer; ``lr`` and ``clip`` are the first one's. Books written before these columns have nulls here.
        ("lr_by_optimizer", pa.list_(pa.float64())),
        ("clip_by_optimizer", pa.list_(pa.float64())),
        # Of runs that keep whole credit: momentum from before scoring began, and points of the quadrature along the move.
        ("inherited", pa.float64()),
        ("points", pa.int64()),
        # What entries moved whose batch gradient is nothing but floating-point cancellation.
        ("rounding", pa.float64()),
        # Where the fall was measured: the tensors with the largest Σ|credit| of the step's own samples, and their shares.
        ("tensors", pa.list_(pa.string())),
        ("tensor_shares", pa.list_(pa.float64())),
    ]
)
SCORES = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("validation", pa.string()),
        ("score", pa.float64()),
        ("standard_error", pa.float64()),
        ("times_used", pa.int64()),
        ("first_step", pa.int64()),
        ("last_step", pa.int64()),
        ("step_score", pa.float64()),
        ("pending", pa.int64()),
        ("estimate_error", pa.float64()),
    ]
)
