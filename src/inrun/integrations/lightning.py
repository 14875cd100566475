"""Lightning: ``Trainer(callbacks=[Scores(validation, ids="sample_id")])``, automatic and manual optimization.

What Lightning calls, and what happens there::

    load_state_dict              the books of a checkpoint, before anything else is there
    on_train_start               optimizers are ready and restored: the accountant is made
    on_train_batch_start         a microbatch is opened for the ids of the batch (and a step, if none is open)
        optimizer.step(closure)  forward and backward run inside, once: that is no line search
    on_before_optimizer_step     gradients are there, the update will be tried
    on_train_batch_end           the microbatch is over; so is the step, if the update was tried
    state_dict                   the accountant's state, for the checkpoint: of several processes, the first has those of all
    on_train_end                 what is open is settled
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from inrun.engine import Accountant
from inrun.engine.processes import Processes
from inrun.errors import ConfigurationError, IdsError
from inrun.integrations.data import ID_FIELD, ids_of
from inrun.integrations.saved import pack_state, unpack_state
from inrun.integrations.scoring import Scoring, State, Undo
from inrun.integrations.strategies import check_lightning

#: Where a checkpoint has the states of several processes.
RANKS = "ranks"


def _own_states(saved: dict[str, Any], processes: Processes) -> State:
    """Return what a process goes on from: its own state, or those of all where their number was another."""
    states: list[dict[str, Any]] = saved.get(RANKS, [saved])
    return states[processes.rank] if len(states) == processes.world else states


class Scores(Callback):  # type: ignore[misc]
    """Scores the training samples of a Lightning run.

    Args:
        validation: As for :class:`inrun.Accountant`: ``model -> loss``, or several by name; it gets the module that is scored.
        model: The attribute of your LightningModule whose call is the forward, such as "net"; None for the LightningModule itself
            (its ``training_step`` then calls ``self(x)``).
        ids: Where a batch has the ids of its samples: a key of a dictionary, a place in a tuple (-1: the last, as
            :func:`inrun.with_ids` gives them), or a function of the batch.
        options: What :class:`inrun.Accountant` takes: ``ledger``, ``method``, ``sketch``...
    """

    def __init__(
        self,
        validation: Any,
        *,
        model: str | None = None,
        ids: str | int | Callable[[Any], Any] = ID_FIELD,
        **options: Any,
    ) -> None:
        """Hold the options; the accountant is made when training starts."""
        self._validation, self._model, self._ids = validation, model, ids
        self._scoring, self._undo = Scoring(options), Undo()
        self._saved: dict[str, Any] | None = None
        self._batch_ids: Any = None
        self._open: Any = None
        #: Whether an optimizer has stepped (or was held back) since the step was opened.
        self._tried = False
        #: Whether a step was recorded since the batch began.
        self._recorded = False

    # Where Lightning calls

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember where the books go on."""
        self._saved = state_dict or None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the accountant."""
        check_lightning(trainer.strategy)
        state, self._saved = self._saved, None
        self._undo.all()
        if self._model is None and isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel):
            self._undo.set(trainer.strategy, "_forward_redirection", _StandIn(trainer.strategy._forward_redirection))
        self._scoring.begin(
            self._scored_module(pl_module),
            trainer.optimizers,
            self._validation,
            None if state is None else functools.partial(_own_states, state),
            inside=True,  # DDP is around the LightningModule, not around what is scored
        )

    def _scored_module(self, pl_module: Any) -> nn.Module:
        if self._model is None:
            return pl_module  # type: ignore[no-any-return]
        try:
            found: nn.Module = pl_module.get_submodule(self._model)
        except AttributeError as error:
            have = ", ".join(name for name, _ in pl_module.named_children())
            raise ConfigurationError(
                f"model={self._model!r} is no module of {type(pl_module).__name__}, which has {have}"
            ) from error
        return found

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to observe."""
        self._batch_ids, self._recorded = self._ids_of(batch), False
        self._begin_part()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take note that the step has its gradients."""
        self._tried = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the step, if it was made."""
        self._end_part()
        if self._tried:
            self._end_update()
        if self._recorded and trainer.global_step % max(trainer.log_every_n_steps, 1) == 0:
            pl_module.log_dict(self._scoring.figures())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Drop the step that failed."""
        part, self._open, self._tried = self._open, None, False
        if part is not None:
            part.__exit__(type(exception), exception, exception.__traceback__)
        self._scoring.failed(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's checkpoint: plain data and tensors.

        Lightning asks all processes and writes what the first returns: that has the states of all.
        """
        if not self._scoring.begun:
            return {}
        state, processes = self._scoring.state(), self._scoring.processes
        if not processes.several:
            return state
        return {RANKS: [unpack_state(each) for each in found]} if (found := processes.gather_bytes(pack_state(state))) else {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Settle what is open."""
        self.close()

    # Parts and updates

    def _begin_part(self) -> None:
        self._open = self._scoring.microbatch(self._batch_ids)
        self._open.__enter__()

    def _end_part(self) -> None:
        part, self._open = self._open, None
        if part is not None:
            part.__exit__(None, None, None)

    def _end_update(self) -> None:
        self._tried, self._recorded = False, True
        self._scoring.finish()

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Mark one update, where a ``training_step`` with manual optimization makes several.

        Write ``with scores.update():`` around the forward, ``manual_backward`` and ``optimizer.step()`` of each; one update per
        batch, or one in several batches, needs no mark.
        """
        if self._open is None:
            self._begin_part()
        yield
        self._end_part()
        if self._tried:
            self._end_update()

    def _ids_of(self, batch: Any) -> Any:
        where = self._ids
        if callable(where):
            return where(batch)
        try:
            return ids_of(batch[where])
        except (KeyError, IndexError, TypeError) as error:
            have = f"keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise IdsError(
                f"the batch ({have}) has no ids of its samples at ids={where!r}, so that nobody can be scored. "
                "inrun.with_ids(dataset) "
                'gives every item one: "sample_id" of a dictionary, the last entry of a tuple (ids=-1); or give ids=a function of '
                "the "
                "batch"
            ) from error

    # What comes out

    @property
    def accountant(self) -> Accountant:
        """Return the accountant; it is made when training starts."""
        return self._scoring.accountant

    def scores(self) -> Any:
        """Return one row per sample and validation set, as an Arrow table."""
        return self._scoring.scores()

    def scored(self, dataset: Any, id_column: str = ID_FIELD) -> Any:
        """Return a ``datasets.Dataset`` with columns ``score`` and ``times_used``."""
        return self._scoring.scored(dataset, id_column)

    def close(self) -> None:
        """Settle what is open and let go of the model; scores stay readable."""
        self._undo.all()
        self._scoring.close()


class _StandIn:
    """How ``training_step`` gets through DDP's forward, where the LightningModule itself is scored.

    Lightning lets DDP call the LightningModule with a forward that is ``training_step`` for once. To an accountant, a call of the
    scored module is its forward, before which it may take validation gradients: through the very forward that is not there. So DDP
    calls another module instead.
    """

    def __init__(self, redirection: Any) -> None:
        """``redirection`` is Lightning's, whose hooks are kept."""
        self._redirection = redirection

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module inside, through the wrapper."""
        inside = wrapper_module._modules

        def method(*given: Any, **named: Any) -> Any:
            inside["module"] = original_module
            out = getattr(original_module, method_name)(*given, **named)
            self._redirection.on_after_inner_forward(wrapper_module, original_module)
            return out

        inside["module"] = _Calls(method)
        try:
            out = wrapper_module(*args, **kwargs)
        finally:
            inside["module"] = original_module
        self._redirection.on_after_outer_forward(wrapper_module, original_module)
        return out


class _Calls(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)
