"""What the baselines that train again share: drawing subsets, evaluating them in parallel, and keeping what was evaluated.

A *utility* trains on the samples at some positions of ``sample_ids`` and returns one number per validation set, higher = better.
Everything here asks it through :class:`Retraining`, in tasks that do not depend on each other: numbers are the same for any
``jobs``, as far as the utility is a function of its two arguments. (Sums in torch depend on the number of threads, and worker
processes have fewer: call ``torch.set_num_threads`` inside the utility where the last bit matters.)
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from inrun.baselines.registry import Ids
from inrun.errors import ConfigurationError, ValidationError
from inrun.files import Files, make_folder_durably, write_durably

#: Takes positions in ``sample_ids``, ``[m]`` ascending, perhaps none, and a seed below 2³²; returns a number per validation set.
Utility = Callable[[npt.NDArray[np.int64], int], Mapping[str, float]]
#: Takes what is being done, how much of it is done, and how much there is.
Tell = Callable[[str, int, int], None]
Draw = Literal["size", "coins"]
Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

#: What a task's seed is drawn from beside the user's, so that no two baselines draw the same by accident.
SUBSETS, PERMUTATIONS, LEAVE_ONE_OUT = range(3)


@dataclass(frozen=True)
class Checked:
    """A utility whose answers are numbers for the validation sets that were named."""

    utility: Utility
    names: frozenset[str]

    def __call__(self, positions: npt.NDArray[np.int64], seed: int) -> dict[str, float]:
        """Return the utility of a set of positions, whatever their order."""
        found = self.utility(np.sort(positions), seed)
        where = f"utility of {len(positions)} samples with seed {seed}"
        if not isinstance(found, Mapping) or found.keys() != self.names:
            shown = f"numbers for {_listed(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise ValidationError(f"{where}: got {shown}; it must return one number for each of {_listed(self.names)}, by name")
        numbers = {name: _number(where, name, value) for name, value in found.items()}
        wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
        if wrong:
            raise ValidationError(
                f"{where}: {wrong[0]!r} is {numbers[wrong[0]]}; return a finite number also where training diverges"
            )
        return numbers


def _number(where: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise ValidationError(
            f"{where}: {name!r} is a {type(value).__name__}, not a number ({error}); return one number"
        ) from error


class Task(Protocol):
    """A part of the work that needs no other."""

    @property
    def key(self) -> dict[str, Any]:
        """All that the result depends on, beside the utility and the sample ids, as plain data."""

    def __call__(self, utility: Checked) -> dict[str, Any]:
        """Return plain data by validation set."""


@dataclass(frozen=True, eq=False)
class Subset:
    """The utility of one subset: ``mask`` is True for the samples that are trained on, ``[n]``."""

    mask: Mask
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        """A subset's key does not say who asks, so that baselines share what was evaluated."""
        return {"subset": digest(np.flatnonzero(self.mask)), "size": int(self.mask.sum()), "seed": self.seed}

    def __call__(self, utility: Checked) -> dict[str, Any]:
        """Return the utility by validation set."""
        return utility(np.flatnonzero(self.mask), self.seed)


@dataclass(frozen=True)
class Retraining:
    """How tasks are evaluated.

    Attributes:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers; its values are not used.
        utility: Trains and measures.
        jobs: Processes; 1 stays in this one, −1 takes one per core.
        cells: Folder where every finished task is kept, so that an interrupted run goes on. One folder per utility: a cell knows
            the samples, the subset and the seed, not what the utility did with them. None keeps nothing.
        tell: Hears of progress, kept tasks included.
    """

    sample_ids: Ids
    validation: Mapping[str, Any]
    utility: Utility
    jobs: int = 1
    cells: Path | None = None
    tell: Tell | None = None

    def utilities(self, what: str, subsets: Sequence[Subset]) -> dict[str, Vector]:
        """Return the utilities of m subsets by validation set, ``[m]`` each."""
        found = self.evaluate(what, subsets)
        return {name: np.array([numbers[name] for numbers in found], np.float64) for name in self.validation}

    def evaluate(self, what: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Return the results of tasks in their order: kept ones as they were kept, the others computed and kept."""
        if self.jobs == 0:
            raise ConfigurationError("jobs is 0; give a number of processes, or -1 for one per core")
        utility = Checked(self.utility, frozenset(self.validation))
        cells = [self._cell(task) for task in tasks]
        found = [None if cell is None else cell.read(utility.names) for cell in cells]
        pending = [k for k, result in enumerate(found) if result is None]
        done = len(tasks) - len(pending)
        self._say(what, done, len(tasks))
        with closing(_all(self.jobs, [(k, tasks[k], utility, cells[k]) for k in pending])) as results:
            for k, result in results:
                found[k] = result
                done += 1
                self._say(what, done, len(tasks))
        return [result for result in found if result is not None]

    def _say(self, what: str, done: int, total: int) -> None:
        if self.tell is not None:
            self.tell(what, done, total)

    def _cell(self, task: Task) -> Cell | None:
        return None if self.cells is None else Cell(Path(self.cells), {"samples": digest(self.sample_ids), **task.key})


@dataclass(frozen=True)
class Cell:
    """The file of one task in the folder of cells, named by a hash of the task's key."""

    folder: Path
    key: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where it is kept."""
        text = json.dumps(self.key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self, names: frozenset[str]) -> dict[str, Any] | None:
        """Return what was found; None if nothing was, or nothing that can be read."""
        try:
            kept = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(kept, dict) or kept.get("key") != self.key or not isinstance(kept.get("found"), dict):
            return None
        found: dict[str, Any] = kept["found"]
        if found.keys() != names:
            raise ConfigurationError(
                f"{self.path} was kept for {_listed(found)}, not for {_listed(names)}; give each utility a folder of its own"
            )
        return found

    def write(self, found: dict[str, Any]) -> None:
        """Keep what was found; several processes may do so."""
        files = Files()
        make_folder_durably(files, self.folder)
        write_durably(files, self.path, json.dumps({"key": self.key, "found": found}).encode(), shared=True)


def digest(numbers: Ids) -> str:
    """Return a hash of integers in their order."""
    return hashlib.sha256(np.ascontiguousarray(numbers, "<i8").tobytes()).hexdigest()


def derived_seed(*parts: int) -> int:
    """Return a seed below 2³², as all libraries take it, that differs for different parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def random_subsets(n: int, subsets: int, share: float, draw: Draw, seed: int) -> list[Subset]:
    """Draw subsets of n samples; the k-th depends on the seed, k, the share and the draw, so that more can be added later.

    Args:
        n: Number of samples, at least 2.
        subsets: How many subsets.
        share: The part of the samples that is trained on, between 0 and 1.
        draw: ``size`` takes round(share · n) samples, from 1 to n − 1; ``coins`` takes each with probability ``share``.
        seed: Of the draws and, with k, of the training runs.
    """
    if n < 2 or subsets < 1 or not 0 < share < 1 or draw not in ("size", "coins"):
        raise ConfigurationError(
            f"cannot draw subsets={subsets} with share={share} and draw={draw!r} of {n} samples; there must be at least "
            "2 samples and 1 subset, a share between 0 and 1, and draw 'size' or 'coins'"
        )
    size = min(max(round(share * n), 1), n - 1)
    found = []
    for k in range(subsets):
        rng = np.random.default_rng([seed, SUBSETS, k])
        mask = rng.random(n) < share if draw == "coins" else rng.permutation(n) < size
        found.append(Subset(mask, derived_seed(seed, SUBSETS, k)))
    return found


def _all(jobs: int, calls: list[tuple[int, Task, Checked, Cell | None]]) -> Generator[tuple[int, dict[str, Any]]]:
    """Work on all calls, and yield results as they come."""
    if jobs == 1 or len(calls) < 2:
        yield from (_work(*call) for call in calls)
        return
    try:
        import joblib  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(f"jobs={jobs} needs joblib: pip install 'inrun[baselines]'. Without it there is jobs=1") from error
    # max_nbytes: large arrays would arrive in workers as read-only maps of a file, and a utility that changes them would work with
    # one job and not with two. So a task carries the utility with its data: 12 MB take 0.04 s, little beside a training run.
    pool = joblib.Parallel(jobs, backend="loky", return_as="generator_unordered", max_nbytes=None)
    results = pool(joblib.delayed(_work)(*call) for call in calls)
    try:
        for result in results:  # noqa: UP028 (yield from would hand an interruption to joblib before the finally below)
            yield result
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that results were not used: they are kept, and who interrupted us knows
            results.close()


def _work(k: int, task: Task, utility: Checked, cell: Cell | None) -> tuple[int, dict[str, Any]]:
    """Do a task and keep its result; in the worker, so that it is kept even if the parent dies meanwhile."""
    found = task(utility)
    if cell is not None:
        cell.write(found)
    return k, found


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names, key=str)) or "no validation set"
