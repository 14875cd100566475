"""What the jobs of several processes run: conditions by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ranks_cases import CONTROL, DDP, FOUR, FSDP, MORE_DDP, MORE_FSDP, RESUMED, RESUMED_FOUR, UNBROKEN
from ranks_exchanges import EXCHANGES
from ranks_guards import DYING, GUARDS
from ranks_runs import Case, play

Job = dict[str, Callable[[int, int], Any]]


def played(cases: list[Case], of: int = 2) -> Job:
    return {c.name: functools.partial(play, c, of=of) for c in cases}


JOBS: dict[str, Job] = {
    "fast": {**EXCHANGES, **GUARDS, **played([*DDP, CONTROL, *FSDP])},
    **{name: {"left": run} for name, run in DYING.items()},
    "more ddp": played(MORE_DDP),
    "more fsdp": played(MORE_FSDP),
    "resumed": played([*RESUMED, *UNBROKEN]),
    "four": played([*FOUR, *RESUMED_FOUR], of=4),
}
