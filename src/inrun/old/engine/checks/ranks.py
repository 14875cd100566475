"""What the ranks of a run must agree on in a step, beside the numbers they add up."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from inrun.errors import ConfigurationError, StepError
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.processes import Meeting, Processes
from inrun.old.engine.sites import Scored


def fingerprint(microbatches: list[Microbatch]) -> int:
    """Return a number that tells the ids of this process's rows, 0 where there are hardly any."""
    ids = torch.cat([m.ids.reshape(-1) for m in microbatches] or [torch.zeros(0, dtype=torch.int64)])
    return zlib.crc32(ids.contiguous().numpy().tobytes()) if len(ids) > 1 else 0


def check_different_data(meeting: Meeting, place: int, step: int) -> None:
    """Raise on all ranks if all were given the same samples; ``place`` is that of the fingerprint, 0 where it was not taken."""
    if meeting.first(place) and meeting.same(place):
        raise ConfigurationError(
            f"all {len(meeting.all)} ranks were given the same sample ids in step {step}. Either every rank reads "
            "the same data (give the loader a DistributedSampler, and call its set_epoch), or ids are counted anew on every "
            "rank (they must be those of the whole dataset)."
        )


def check_rows_everywhere(processes: Processes, ids: Tensor, step: int) -> None:
    """Where directions are split over processes, a backward makes them whole on all: none may have nothing to score."""
    with processes.together("a microbatch", step) as meeting:
        meeting.own = [ids.numel()]
    without = [r for r, x in enumerate(meeting.all) if x[0] == 0]
    if without:
        raise StepError(
            f"rank {', '.join(map(str, without))} has a batch without rows in step {step}: with fully_shard every rank "
            "needs at least one. Pad the last batch (its rows count as further uses of their samples), or drop it on all ranks."
        )


def rounded_parameters(scored: list[Scored], microbatches: list[Microbatch], processes: Processes) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradient came through tensors of a lower precision than their own, on any rank.

    That are all where gradients are reduced in such a precision.
    """
    here = [processes.rounds() or any(s.parameter in m.coarse for m in microbatches) for s in scored]
    found = processes.summed("small", torch.tensor(here, dtype=torch.int32))
    return frozenset(s.parameter for s, count in zip(scored, found.tolist(), strict=True) if count)
