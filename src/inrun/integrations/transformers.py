"""transformers' Trainer: ``attach(trainer, validation=...)``, one line before ``trainer.train()``.

What the Trainer calls, and what happens there::

    train(resume_from_checkpoint)     notes from where the run goes on
    get_train_dataloader()            ids: the dataset's column, or positions; kept through column removal and collator
    on_train_begin                    model and optimizer are ready: the accountant is made (or put where the checkpoint stands)
    training_step(model, inputs)      one microbatch: takes the ids out of the inputs, forward and backward under observation
    on_optimizer_step                 the step is over, recorded or skipped
    log(logs)                         a few numbers of the last step beside the loss
    on_save                           the accountant's state and the ledger's mark, into the checkpoint
    on_train_end                      what is open is settled

All of it is set on the trainer that is given, never on its class, so that it works for any subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from inrun.engine import Accountant
from inrun.engine.folds import Folds
from inrun.errors import ConfigurationError, IdsError
from inrun.integrations.data import ID_FIELD, KeepIds, ids_of, is_stream, with_id_column
from inrun.integrations.saved import load_states, save_state
from inrun.integrations.scoring import Scoring, Undo
from inrun.integrations.strategies import check_accelerator, check_placement

#: Said where ids do not arrive.
KEEPS = (
    "TrainingArguments(remove_unused_columns=False) keeps it; a get_train_dataloader() of your own must use self.data_collator and "
    "self.train_dataset"
)

#: Set on a trainer that has scores attached.
MARK = "_inrun_attached"
#: Trainers of TRL that multiply by the head's weight without calling the head.
FUSED = {"SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"}


def attach(trainer: Any, validation: Any, *, id_column: str = ID_FIELD, **options: Any) -> TrainerScores:
    """Score every training sample of a ``transformers.Trainer`` (or subclass) while it trains.

    Args:
        trainer: The trainer, before ``train()``.
        validation: As for :class:`inrun.Accountant`: a callable ``model -> loss``, or several by name. Instead of a callable you
            may give rows as the trainer's eval dataset has them (a dataset, a list of items); their loss is
            ``trainer.compute_loss``, the mean over rows. All rows are used at every step: give few.
        id_column: The column of the training dataset that has sample ids (integers); without it ids are positions in the dataset.
        options: What :class:`inrun.Accountant` takes: ``ledger``, ``method``, ``sketch``, ``audit_every``...

    Returns:
        The scores: ``.scores()`` (also while training), ``.scored(dataset)`` (a dataset with its scores), ``.accountant``.
    """
    fused = {c.__name__ for c in type(trainer).__mro__} & FUSED
    if fused:
        raise ConfigurationError(
            f"{type(trainer).__name__} computes its loss past the head (lm_head.weight, without calling the module); take "
            "inrun.integrations.trl.attach, which calls it"
        )
    return TrainerScores(trainer, validation, id_column, options)


class TrainerScores:
    """What :func:`attach` returns: the scores of a trainer's run."""

    #: What keeps the ids in the batch, for messages.
    keeps = KEEPS

    def __init__(self, trainer: Any, validation: Any, id_column: str, options: dict[str, Any]) -> None:
        """Set on the trainer what scoring needs; :meth:`detach` takes it off."""
        self.trainer, self.id_column = trainer, id_column
        self._scoring = Scoring(options)
        self._resume_from: Path | None = None
        self._undo = Undo()
        self.check()
        check_validation(validation)
        self._validation = validation
        self._undo.set(trainer, MARK, True)
        self._callback = _Boundaries(self)
        for name in ("train", "get_train_dataloader", "training_step", "log"):
            self._wrap(name)
        trainer.add_callback(self._callback)
        self._undo.add(lambda: trainer.remove_callback(self._callback))

    def _wrap(self, name: str) -> None:
        """Put a method of ours in front of one of the trainer's."""
        original, ours = getattr(self.trainer, name), getattr(self, f"_{name}")

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        self._undo.set(self.trainer, name, wrapped)

    def check(self) -> None:
        """Raise for what cannot be scored, as far as it is known before training."""
        if hasattr(self.trainer, MARK):
            raise ConfigurationError("this trainer has scores attached already; detach() them first")
        check_accelerator(self.trainer.accelerator)
        check_placement(self.trainer.model)

    # Where the trainer calls

    def _train(self, original: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Note from where the run goes on."""
        self._resume_from = self._checkpoint(resume_from_checkpoint)
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self._scoring.failed(error)
            raise

    def _checkpoint(self, given: Any) -> Path | None:
        if given is None or given is False:
            return None
        if given is True:
            given = get_last_checkpoint(self.trainer.args.output_dir)
        return None if given is None else Path(given)

    def _get_train_dataloader(self, original: Callable[[], Any]) -> Any:
        """Let the trainer make its loader from a dataset with ids and a collator that keeps them."""
        trainer = self.trainer
        dataset, collate, columns = trainer.train_dataset, trainer.data_collator, trainer._signature_columns
        if dataset is None:
            return original()
        trainer._set_signature_columns_if_needed()
        try:
            trainer.train_dataset = self.numbered(dataset)
            sent = is_stream(dataset) or bool(trainer.accelerator.dispatch_batches)  # by the first process, to the others
            trainer.data_collator = self.keeping(collate, as_tensor=sent)
            trainer._signature_columns = [*trainer._signature_columns, self.id_column]
            return original()
        finally:
            trainer.train_dataset, trainer.data_collator, trainer._signature_columns = dataset, collate, columns

    def numbered(self, dataset: Any) -> Any:
        """Return the training dataset with ids."""
        return with_id_column(dataset, self.id_column)

    def keeping(self, collate: Callable[[Any], Any], as_tensor: bool) -> KeepIds:
        """Return the trainer's collator, keeping ids."""
        return KeepIds(collate, self.id_column, self.keeps, as_tensor)

    def begin(self) -> None:
        """Make the accountant: the trainer has its model and optimizer, and has loaded its checkpoint."""
        trainer = self.trainer
        check_accelerator(trainer.accelerator)
        saved = None if self._resume_from is None else functools.partial(load_states, self._resume_from)
        self._scoring.begin(trainer.model_wrapped, [trainer.optimizer], self._losses(), saved)

    def _training_step(self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Observe one microbatch."""
        if self.id_column not in inputs:
            raise IdsError(
                f"the batch has no {self.id_column!r}, the ids of its samples, so that nobody can be scored; {self.keeps}"
            )
        ids = ids_of(inputs.pop(self.id_column))
        with self._scoring.microbatch(self.ids_of_rows(ids, inputs)):
            return original(model, inputs, *args, **kwargs)

    def ids_of_rows(self, ids: Tensor, inputs: Any) -> Tensor:
        """Return the ids of the rows (or positions) that the model sees, of those of the batch."""
        return ids

    def _log(self, original: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add numbers of the last step to the logs of training."""
        if "loss" in logs:
            logs.update(self._scoring.figures())
        return original(logs, *args, **kwargs)

    def save(self, folder: Path) -> None:
        """Write the accountant's state into a checkpoint of the trainer."""
        if self._scoring.begun and not self.trainer.args.save_only_model:
            save_state(folder, self._scoring.state(), self._scoring.processes)

    # Validation

    def _losses(self) -> Any:
        """Return the validation losses as the accountant takes them."""
        given = self._validation
        if isinstance(given, Mapping):
            return {name: self._loss(each) for name, each in given.items()}
        return self._loss(given)

    def _loss(self, given: Any) -> Any:
        if isinstance(given, Folds) or callable(given):
            return given
        held = vars(self.trainer).pop("_eval_dataloaders", None)  # a loader that is kept for evaluation is not ours, nor ours its
        try:
            with torch.random.fork_rng():  # loaders draw a seed, which training must not miss
                batches = self._whole(given)
        finally:
            vars(self.trainer).pop("_eval_dataloaders", None)
            if held is not None:
                self.trainer._eval_dataloaders = held
        return RowsLoss(self.batch_loss, batches, self.trainer.accelerator.process_index, self.trainer.accelerator.num_processes)

    def _whole(self, given: Any) -> list[dict[str, Any]]:
        """Return all validation batches, as one process has them: a loader that is split over processes repeats rows at its end."""
        trainer = self.trainer
        if trainer.accelerator.num_processes == 1:
            return [dict(batch) for batch in trainer.get_eval_dataloader(given)]
        undo = Undo()
        undo.set(trainer.accelerator, "prepare", lambda loader: loader)
        try:
            return [dict(trainer._prepare_inputs(batch)) for batch in trainer.get_eval_dataloader(given)]
        finally:
            undo.all()

    def batch_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a validation batch as the trainer computes it."""
        loss: Tensor = self.trainer.compute_loss(model, batch)
        return loss

    # What comes out

    @property
    def accountant(self) -> Accountant:
        """Return the accountant; it is made when training begins."""
        return self._scoring.accountant

    def scores(self) -> Any:
        """Return one row per sample and validation set, as an Arrow table."""
        return self._scoring.scores()

    def scored(self, dataset: Any = None) -> Any:
        """Return the dataset (default: the one trained on) with columns ``score`` and ``times_used``.

        With several validation sets there is a column ``score_NAME`` for each.
        """
        return self._scoring.scored(self.trainer.train_dataset if dataset is None else dataset, self.id_column)

    def end(self) -> None:
        """Training has ended: settle what is open. Scores stay readable."""
        self._scoring.close()

    def detach(self) -> None:
        """Leave the trainer as it was. Scores stay readable."""
        self._scoring.close()
        self._undo.all()


class RowsLoss:
    """The mean loss over rows that are held, as a validation loss; of several processes, each has some of the batches.

    Args (of the constructor):
        batch_loss: The mean loss of a batch.
        batches: All batches.
        rank: This process.
        world: How many there are.
    """

    def __init__(
        self,
        batch_loss: Callable[[nn.Module, dict[str, Any]], Tensor],
        batches: list[dict[str, Any]],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Hold the batches of this process; none at all is an error."""
        if not batches:
            raise ConfigurationError("the validation rows are empty; give at least one")
        self._batch_loss = batch_loss
        rows = [next(len(x) for x in batch.values() if isinstance(x, Tensor) and x.dim() > 0) for batch in batches]
        mine = range(rank, len(batches), world)
        # A process that has fewer runs one for nothing: where parameters are split, all must run as many.
        idle = [0] * (-(-len(batches) // world) - len(mine))
        self._batches = [batches[i] for i in (*mine, *idle)]
        self._weights = [world * n / sum(rows) for n in (*(rows[i] for i in mine), *idle)]

    def __call__(self, model: nn.Module) -> Tensor:
        """Return world · Σ (own batches) rows · loss / Σ (all batches) rows: the mean over processes is that of all rows."""
        losses = [self._batch_loss(model, dict(batch)) * weight for batch, weight in zip(self._batches, self._weights, strict=True)]
        return torch.stack(losses).sum()


def check_validation(validation: Any) -> None:
    """Raise where nothing was given to hold samples against."""
    if validation is None:
        raise ConfigurationError(
            "validation=None; give a callable model -> loss, rows such as trainer.eval_dataset.select(range(8)), or several by name"
        )


class _Boundaries(TrainerCallback):  # type: ignore[misc]
    """Where steps end, and where checkpoints are written."""

    def __init__(self, scores: TrainerScores) -> None:
        self._scores = scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scores.begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scores._scoring.finish()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scores.save(Path(self._scores.trainer._get_output_dir(trial=None)) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scores.end()
