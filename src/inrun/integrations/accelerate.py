"""Accelerate: the loop stays yours, with ``accelerator.accumulate``; the accountant may be made before or after ``prepare``.

``inrun.Accountant`` itself takes what ``prepare`` returned: it looks inside the optimizer's wrapper, and a forward that was wrapped
for autocast is called as it is. What :func:`attach` adds is the step that spans several batches of an accumulation, state in
Accelerate's checkpoints, and names for what cannot be scored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inrun.engine import Accountant
from inrun.integrations.data import ID_FIELD
from inrun.integrations.saved import load_states, save_state
from inrun.integrations.scoring import Scoring
from inrun.integrations.strategies import check_accelerator, check_placement, check_prepared


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    validation: Any,
    *,
    resume_from: str | Path | None = None,
    **options: Any,
) -> AcceleratedScores:
    """Score the samples of a loop that is written with Accelerate.

    Args:
        accelerator: The ``accelerate.Accelerator``.
        model: The model, as it was before ``prepare`` or as ``prepare`` returned it.
        optimizer: The optimizer, or several, from either side of ``prepare``.
        validation: As for :class:`inrun.Accountant`.
        resume_from: The folder of an earlier ``accelerator.save_state`` whose books go on; call ``accelerator.load_state`` first.
        options: What :class:`inrun.Accountant` takes.

    Example::

        scores = attach(accelerator, model, optimizer, validation)
        for batch in loader:
            with accelerator.accumulate(model), scores.batch(batch.pop("sample_id")):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    """
    return AcceleratedScores(accelerator, model, optimizer, validation, resume_from, options)


class AcceleratedScores:
    """What :func:`attach` returns: one batch at a time, scores at any time."""

    def __init__(
        self, accelerator: Any, model: nn.Module, optimizer: Any, validation: Any, resume_from: Any, options: dict[str, Any]
    ) -> None:
        """Make the accountant, and let it be saved with Accelerate's checkpoints."""
        check_accelerator(accelerator)
        check_placement(model)
        check_prepared(accelerator, model)
        self._accelerator, self._scoring = accelerator, Scoring(options)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        saved = None if resume_from is None else functools.partial(load_states, Path(resume_from))
        # Before prepare the model is not wrapped yet.
        self._scoring.begin(model, optimizers, validation, saved, inside=True)
        self._hook = accelerator.register_save_state_pre_hook(self._save)

    @contextlib.contextmanager
    def batch(self, ids: Any) -> Iterator[None]:
        """Observe one batch: forward, backward and the prepared optimizer's ``step()``, inside ``accelerator.accumulate(model)``.

        The step of the books ends with the batch in which gradients are synchronised, that is, in which the optimizer really steps.
        """
        with self._scoring.microbatch(ids):
            yield
        if self._accelerator.sync_gradients:
            self._scoring.finish()

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        """Write the accountant's state beside what ``accelerator.save_state`` writes."""
        save_state(Path(folder), self._scoring.state(), self._scoring.processes)

    @property
    def accountant(self) -> Accountant:
        """Return the accountant."""
        return self._scoring.accountant

    def figures(self) -> dict[str, float]:
        """Return a few numbers of the last step, for ``accelerator.log``."""
        return self._scoring.figures()

    def scores(self) -> Any:
        """Return one row per sample and validation set, as an Arrow table."""
        return self._scoring.scores()

    def scored(self, dataset: Any, id_column: str = ID_FIELD) -> Any:
        """Return a ``datasets.Dataset`` with columns ``score`` and ``times_used``."""
        return self._scoring.scored(dataset, id_column)

    def close(self) -> None:
        """Settle what is open and let go of the model; scores stay readable."""
        self._hook.remove()
        self._scoring.close()
