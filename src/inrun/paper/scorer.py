"""The paper's algorithms around a training step: ids and losses in, Shapley values to a ledger."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inrun.errors import ConfigurationError, IdsError, LedgerError, StepError
from inrun.ledger import Ledger, LedgerWriter, MemoryLedger
from inrun.ledger.record import Skip, StepRecord
from inrun.paper.capture import Capture
from inrun.paper.ghost import FORMS
from inrun.paper.layers import find_layers
from inrun.paper.step import OpenStep

log = logging.getLogger("inrun")
#: The name of the validation rows in the ledger.
VALIDATION = "validation"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ScoredStep:
    """The result of one step.

    Attributes:
        step: Its number, counted from 0.
        sample_ids: ``[n]``, on the host.
        contributions: ``[n]``; positive means that the sample lowered the validation loss, in units
            of that loss. Zeros where the step is not scored.
        validation_loss: That of the validation rows, at the weights before the step.
        clip: The factor between the batch gradient and what the optimizer used.
        forms: "gram" or "formed" by parameter name; empty for the direct computation.
        skipped: Why the step is not scored, or None.
    """

    step: int
    sample_ids: Tensor
    contributions: Tensor
    validation_loss: float
    clip: float
    forms: dict[str, str]
    skipped: str | None


class GhostScorer:
    """In-Run Data Shapley as the paper computes it, with the validation rows inside the batch.

    A sample's contribution is that of Theorem 1 or 2, with the learning rate of each parameter and
    the measured clip factor; momentum, weight decay and preconditioning are left out, as in the
    paper. ``.grad`` gets the gradient of the training rows alone.

    ::

        scorer = GhostScorer(model, optimizer)
        with scorer.step(ids, validation_rows=m):
            losses = loss_per_row(model(torch.cat([rows, validation_rows])))
            loss = scorer.loss(losses[:n].mean(), losses[n:].mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scorer.last.contributions

    Args:
        model: The module that is trained: eager, in one process.
        optimizer: Its optimizer.
        order: 1 (Theorem 1) or 2 (Theorem 2). In second order, attention runs with the kernel that
            can be differentiated twice, which changes training by rounding.
        form: How gradients are contracted: "gram" (products of positions with positions), "formed"
            (the validation gradient is formed), "auto" (by cost, for each parameter), or "direct"
            (one backpropagation per sample, for every layer; needs the samples' losses).
        ledger: Where contributions go: None for memory, a folder, or an object with
            ``write(record)``.

    Attributes:
        ledger: Where contributions go.
        steps_done: Steps recorded so far, which is the number of the next one. Set it to go on
            with a ledger.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        order: int = 1,
        form: str = "auto",
        ledger: LedgerWriter | str | os.PathLike[str] | None = None,
    ) -> None:
        """Check what is given; hooks are placed during steps only."""
        _check_options(model, optimizer, order, form, ledger)
        self._model, self._optimizer, self._order, self._form = model, optimizer, order, form
        if form != "direct":
            find_layers(model)
        self._owns_ledger = isinstance(ledger, (str, os.PathLike))
        self.ledger = self._open_ledger(ledger)
        self.steps_done = 0
        self._open: OpenStep | None = None
        self._last: ScoredStep | None = None
        #: Shapes for which the rows were seen to be kept apart.
        self._checked: set[Any] = set()
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
            log.warning("inrun: dropout also drops in validation rows, and draws other numbers")

    def _open_ledger(self, ledger: LedgerWriter | str | os.PathLike[str] | None) -> LedgerWriter:
        about = {
            "method": "first" if self._order == 1 else "second",
            "update": "sgd",
            "credit": "step",
            "validation": [VALIDATION],
            "paper": {"form": self._form},
            "optimizers": [type(self._optimizer).__name__],
            "model": type(self._model).__name__,
        }
        if isinstance(ledger, (str, os.PathLike)):
            return Ledger(os.fspath(ledger), about=about)
        return MemoryLedger(about) if ledger is None else ledger

    @contextlib.contextmanager
    def step(self, ids: Any, *, validation_rows: int) -> Iterator[None]:
        """Observe one step: forward, backward and ``optimizer.step()`` run inside the context.

        Args:
            ids: Integers, one per training row.
            validation_rows: How many rows follow them in the batch, m ≥ 1.
        """
        if self._open is not None:
            raise StepError("a step is open; leave it before the next one")
        with contextlib.ExitStack() as stack:
            step = self._begin(stack, _check_ids(ids), _check_rows(validation_rows))
            stack.callback(setattr, self, "_open", None)
            self._open = step
            yield
            self._finish(step)

    def _begin(self, stack: contextlib.ExitStack, ids: Tensor, m: int) -> OpenStep:
        """Place the hooks of a step, for as long as the stack is open."""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        second, capture = self._order == 2, None
        if self._form != "direct":
            _refuse_batch_norm(self._model)
            capture = Capture(find_layers(self._model), len(ids) + m, through_inputs=second)
            stack.enter_context(capture)
        if second:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others differentiate once
        options = (capture, ids, self._form, self._order, self._checked)
        step = OpenStep(self._optimizer, parameters, *options)
        stack.callback(self._optimizer.register_step_pre_hook(step.before_update).remove)
        return step

    def loss(self, train_loss: Tensor, validation_loss: Tensor) -> Tensor:
        """Return train_loss + validation_loss, to be backpropagated as it is, or scaled.

        Args:
            train_loss: The loss that is trained on, of the training rows only: a scalar, or every
                sample's share of it ``[n]`` (required by ``form="direct"``; their sum is the loss).
            validation_loss: The loss that defines value, of the validation rows only: a scalar.
        """
        if self._open is None:
            raise StepError("scorer.loss() is called outside a step; open one with scorer.step()")
        return self._open.merge(train_loss, validation_loss)

    @property
    def last(self) -> ScoredStep:
        """Return the result of the last finished step."""
        if self._last is None:
            raise StepError("no step has finished yet")
        return self._last

    def _finish(self, step: OpenStep) -> None:
        """Write a step that has run to its end."""
        if step.loss is None or step.products is None:
            raise StepError("the step ended without scorer.loss(...).backward(); call it inside")
        values, clip = step.values, step.clip
        if values is None or clip is None:
            raise StepError("the step ended without optimizer.step(); call it inside the step")
        loss, skipped = float(step.loss.validation.detach()), None
        if not step.loss.validation.isfinite():
            skipped = Skip.VALIDATION_LOSS.text()
        elif not values.isfinite().all():
            skipped = Skip.CONTRIBUTIONS.text()
        if skipped is not None:
            log.warning("inrun: step %d is not scored: %s", self.steps_done, skipped)
            values = torch.zeros_like(values)
        chosen = step.products.forms
        forms = {name: chosen[p] for name, p in self._model.named_parameters() if p in chosen}
        result = ScoredStep(self.steps_done, step.ids, values, loss, clip, forms, skipped)
        self.ledger.write(self._record(result))
        self._last, self.steps_done = result, self.steps_done + 1

    def _record(self, result: ScoredStep) -> StepRecord:
        """Return a step as the ledger takes it."""
        values, scored = result.contributions.double().cpu(), result.skipped is None
        lr = float(self._optimizer.param_groups[0]["lr"])
        account = {
            "step": result.step,
            "validation": VALIDATION,
            "loss_before": result.validation_loss,
            "data": float(values.sum()) if scored else None,
            "spread": float(values.abs().sum()) if scored else None,
            "lr": lr,
            "clip": result.clip,
            "n_samples": len(values),
            "skipped": result.skipped,
            "lr_by_optimizer": [lr],
            "clip_by_optimizer": [result.clip],
        }
        contributions = {VALIDATION: values.float().numpy()} if scored else {}
        return StepRecord(result.step, result.sample_ids.numpy(), contributions, [account])

    def close(self) -> None:
        """Close the ledger if the scorer opened it."""
        if self._owns_ledger and isinstance(self.ledger, Ledger):
            self.ledger.close()


def _check_options(model: Any, optimizer: Any, order: Any, form: Any, ledger: Any) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"got a {type(model).__name__} and a {type(optimizer).__name__}; accepted are a "
            "torch.nn.Module and a torch.optim.Optimizer"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        name = type(model).__name__
        raise ConfigurationError(f"{name} is not supported; accepted are plain eager modules")
    if order not in (1, 2) or isinstance(order, bool):
        raise ConfigurationError(f"order is {order!r}; accepted are 1 and 2")
    if form not in (*FORMS, "direct"):
        raise ConfigurationError(f"form is {form!r}; accepted are {', '.join(FORMS)} and direct")
    is_path = isinstance(ledger, (str, os.PathLike))
    if ledger is not None and not is_path and not callable(getattr(ledger, "write", None)):
        name = type(ledger).__name__
        raise LedgerError(f"ledger is {name}; accepted are a folder or an object with write()")
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigurationError(
            f"{foreign} parameters of the optimizer are not in the model; give the module that "
            "holds all of them, or an optimizer of its own for the others"
        )


def _check_ids(ids: Any) -> Tensor:
    """Return ids as int64 on the host, ``[n]``."""
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__len__"):
        kind = type(ids).__name__
        raise IdsError(f"sample ids are {kind}; accepted are integers, one per training row")
    try:
        found = ids.detach() if isinstance(ids, Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise IdsError(f"sample ids must be integers of 64 bits ({error})") from error
    if found.dim() != 1 or len(found) == 0:
        shape = tuple(found.shape)
        raise IdsError(f"sample ids have shape {shape}; accepted is [n], one per training row")
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise IdsError(f"sample ids have dtype {found.dtype}; accepted are integers")
    return found.to("cpu", torch.int64, copy=True)


def _check_rows(m: Any) -> int:
    """Return the number of validation rows."""
    if isinstance(m, bool) or not isinstance(m, int) or m < 1:
        raise StepError(f"validation_rows is {m!r}; accepted is an integer, 1 or more")
    return m


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None):
            raise StepError(
                f"batch norm '{name}' in training mode mixes training and validation rows. Put it "
                "into eval mode, or take a group norm instead"
            )
