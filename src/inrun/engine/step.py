"""One optimizer step: what is observed of it, in the order in which it happens.

with accountant.step(ids):       Step.__enter__: the method works out what it must know before the forward; the tape begins
    loss = ...                   the tape taps the functions in which parameters meet data
    loss.backward()              layouts are read where they are new; taps leave their numbers in probes
    clip_grad_norm_(...)
    optimizer.step()             Step.before_optimizer: probes are read, the clip factor, the copy of the weights
                                 Step.after_optimizer: the move
                                 Step.__exit__: validation gradients along the move; the uses enter the window
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.ids import check_ids
from inrun.engine.reading import Reading, read_probes
from inrun.engine.rows import Samples
from inrun.errors import ConfigurationError, CoverageError, IdsError, InrunError, OptimizerError, StepError
from inrun.ledger.record import Skip

if TYPE_CHECKING:
    from inrun.engine.run import Run


class Microbatch:
    """One forward and backward inside a step, ``with step.microbatch(ids):``."""

    def __init__(self, step: Step, ids: Any) -> None:
        self.step = step
        self.ids, documents = sample_rows(ids)
        self.samples = Samples(len(self.ids), documents)
        self.reading: Reading | None = None
        self._open = self.failed = False

    def __enter__(self) -> Microbatch:
        self.step.open(self)
        run = self.step.run
        longest = None
        if self.samples.documents is not None:
            longest = int(torch.bincount(self.samples.documents[self.samples.documents >= 0]).max())
        request = run.scorer.request(self.samples.n, longest, self.step.audited)
        for s in run.parameters.scored:
            s.leaf.reader.begin(request)  # type: ignore[union-attr]
        self.request = request
        run.layouts.begin(self.samples, self.step.fresh)
        run.tape.begin(self.samples.n)
        if run.sharded is not None:
            run.sharded.begin(request.directions)
        run.tape.__enter__()
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.failed = error is not None
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Stop observing, and read what the backward left."""
        if not self._open:
            return
        self._open = False
        run = self.step.run
        run.tape.__exit__(None, None, None)
        taps = [*run.tape.taps.every, *run.tape.taps.recomputed]
        try:
            if not failed and run.tape.failed is not None:
                raise run.tape.failed
            if not failed:
                self.reading = read_probes(run.parameters, self.request)
                self.reading.ids = self.ids
                run.note_taps(taps)
        finally:
            run.tape.end()
            run.layouts.end()
            if run.sharded is not None:
                run.sharded.end()


def sample_rows(ids: Any) -> tuple[Tensor, Tensor | None]:
    """Return the ids of samples ``[n]``, and for packed documents the sample of every position ``[rows, t]``.

    A run of one id in a row is one use of that document; −1 is padding.
    """
    found = check_ids(ids)
    if found.dim() == 1:
        return found, None
    begins = torch.ones_like(found, dtype=torch.bool)
    begins[:, 1:] = found[:, 1:] != found[:, :-1]
    begins &= found >= 0
    numbers = begins.reshape(-1).long().cumsum(0).view_as(found) - 1
    return found[begins], torch.where(found >= 0, numbers, -1)


class Step:
    """One optimizer step; made by ``accountant.step``."""

    def __init__(self, run: Run, ids: Any, audited: bool, fresh: bool) -> None:
        self.run, self.audited, self.fresh = run, audited, fresh
        self.number = run.steps_done
        self.microbatches: list[Microbatch] = []
        self._given = None if ids is None else Microbatch(self, ids)
        self.clips: dict[int, Tensor] = {}
        self.rates: dict[int, float | None] = {}
        self.stepped: set[int] = set()
        self._entered = False
        self.skipped: Skip | None = None
        #: Samples by process.
        self.counts: list[int] = []

    # For users

    def __enter__(self) -> Step:
        if self._entered:
            raise StepError("this step was entered already. Make a new one with accountant.step().")
        self._entered = True
        self.run.begin(self)
        try:
            self.run.mover.begin()
            self.run.scorer.begin(self.number)
            if self._given is not None:
                self._given.__enter__()
        except BaseException:
            self._leave(failed=True)
            raise
        return self

    def microbatch(self, ids: Any) -> Microbatch:
        """Observe one forward and backward of a step that accumulates several: ``with step.microbatch(ids):``."""
        if self._given is not None:
            raise StepError("this step was given its ids. Give them to the microbatches only: accountant.step() without ids.")
        return Microbatch(self, ids)

    def skip(self) -> None:
        """Drop the step: it will not be scored. Call it where the loop drops a batch, before ``optimizer.step()``."""
        if self.stepped:
            raise StepError("step.skip() after optimizer.step(): the step has had its effect.")
        self.skipped = Skip.DROPPED

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._leave(failed=True)
            self._tell(error)
            return
        failed = True
        try:
            stepped = "dropped" if self.skipped is Skip.DROPPED else f"after {len(self.stepped)} optimizers"
            with self.run.parameters.processes.barrier(f"the end ({stepped})", self.number) as meeting:
                self._close_microbatch()
                meeting.number = len(self.ids)
            self.counts = meeting.numbers
            self._finish()
            failed = False
        finally:
            self._leave(failed)

    def _tell(self, error: BaseException) -> None:
        """Leave word for ranks that will miss this one; raise where it is another one that is missing."""
        processes = self.run.parameters.processes
        processes.announce(error)
        lost = processes.explain(error)
        if lost is not None:
            raise lost from error

    # For the run

    def open(self, micro: Microbatch) -> None:
        """Begin a microbatch; the one before has ended."""
        if self.run.open_step is not self:
            raise StepError("this step is not open. Open its microbatches inside its `with` block.")
        self._close_microbatch()
        if self.stepped:
            raise StepError("the optimizer has stepped already. Open a new step for the next backward.")
        processes = self.run.parameters.processes
        if processes.sharded:
            with processes.barrier(f"microbatch {len(self.microbatches)}", self.number) as meeting:
                meeting.number = micro.samples.n
            if 0 in meeting.numbers:
                raise StepError(
                    f"rank {meeting.numbers.index(0)} has a batch without rows in step {self.number}. With fully_shard every rank "
                    "needs a row in every backward: take a smaller or padded batch."
                )
        self.microbatches.append(micro)

    def _close_microbatch(self) -> None:
        if self.microbatches:
            self.microbatches[-1].close()

    @property
    def readings(self) -> list[Reading]:
        """Return what the backwards left."""
        return [m.reading for m in self.microbatches if m.reading is not None]

    def before_optimizer(self, index: int) -> None:
        """Right before an optimizer steps: read the factor of its gradients, and copy its weights."""
        run, processes = self.run, self.run.parameters.processes
        some = run.parameters.of(index)
        with processes.barrier(f"optimizer.step() ({index})", self.number) as meeting:
            if run.tape.taps.recomputing:
                raise StepError("optimizer.step() was called inside the backward. Call it after the backward.")
            self._close_microbatch()
            if self.skipped is Skip.DROPPED:
                raise StepError("optimizer.step() after step.skip(). Leave the `with` block first.")
            if index in self.stepped:
                raise StepError("optimizer.step() was called twice in one step. Open a new step for each update.")
            steps = any(s.grad is not None for s in some)
            if any(m.failed for m in self.microbatches):
                raise StepError(
                    "a microbatch of this step failed, and parts of its gradients may be there. Leave the step, call "
                    "optimizer.zero_grad(), and begin a new one."
                )
            self._check_groups(run.optimizers[index])
            if steps and not self.microbatches:
                raise StepError("the step had no microbatch. Give ids to accountant.step(), or open step.microbatch(ids).")
            meeting.number = len(self._missed(some))
        if not steps:
            return
        if any(meeting.numbers):
            self._check_coverage(some)
        if processes.several and self.number == 0 and not self.clips:
            self._check_ids()
        with torch.no_grad():
            self.clips[index] = run.scorer.clip(self.readings, index)
        self.rates[index] = learning_rate(run.optimizers[index])
        if len(self.clips) == 1:
            run.scorer.before_move(self.number, self.readings, self.clips)
        if self.audited:
            run.scorer.check(self.readings, index, self.clips[index])
        run.mover.before(run.optimizers[index], index)

    def after_optimizer(self, index: int) -> None:
        """Right after it stepped: describe the move."""
        if index in self.clips:
            self.run.mover.after(self.run.optimizers[index], index)
            self.stepped.add(index)

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for parameters that were frozen or not there when the accountant was made, or have changed their group."""
        parameters = self.run.parameters
        places = {id(s.parameter): s.number for s in parameters.scored}
        known = {id(leaf.parameter) for leaf in parameters.leaves}
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                late = p.grad is not None and id(p) not in known
                if late or places.get(id(p), number) != number:
                    name = next((name for name, q in self.run.tape.model.named_parameters() if q is p), "a parameter")
                    what = "got gradient, and was frozen or not there" if late else "is not in the parameter group that it was in"
                    raise OptimizerError(f"{name} {what} when the accountant was made. Close it, and make a new one.")

    def _missed(self, some: Any) -> list[str]:
        left = [s for s in some if s.grad is not None and s.place not in self.run.covered]
        # An optimizer that was left zeros moves the parameter on by momentum and decay.
        return [s.name for s in left if bool(s.grad.any())]

    def _check_ids(self) -> None:
        ids = self.ids.tolist()
        if ids and all(x == ids for x in self.run.parameters.processes.gather_objects(ids)):
            raise ConfigurationError(
                f"all {self.run.parameters.processes.world} ranks were given the same sample ids in step {self.number}. Give every "
                "rank its own samples (a DistributedSampler), with ids that count over the whole dataset."
            )

    def _check_coverage(self, some: Any) -> None:
        """Raise for parameters whose gradient comes through no tap of any process."""
        for places in self.run.parameters.processes.gather_objects(sorted(self.run.covered)):
            self.run.covered |= set(places)
        missed = self._missed(some)
        if missed:
            raise CoverageError(
                f"{', '.join(missed[:5])}{' ...' if len(missed) > 5 else ''} received gradient through no function that is tapped "
                "(a custom autograd function or compiled code). Leave it out with parameters=, or compute it with torch functions."
            )

    def _finish(self) -> None:
        run = self.run
        if self.skipped is Skip.DROPPED:
            run.record_skipped(self)
            return
        if not self.microbatches:
            raise StepError("the step had no microbatch. Give ids to accountant.step(), or open step.microbatch(ids).")
        if not self.stepped:
            grads = [s.grad for s in run.parameters.scored if s.grad is not None]
            invalid = any(not bool(torch.isfinite(g).all()) for g in grads)
            if grads and not run.parameters.processes.any("the end (not stepped)", self.number, invalid):
                raise StepError(
                    "the step ended without optimizer.step(). Call it inside the `with` block, so that scores get its learning "
                    "rate and clip factor; or call step.skip()."
                )
            self.skipped = Skip.NO_STEP
            run.record_skipped(self)
            return
        run.score(self)

    def _leave(self, failed: bool) -> None:
        for micro in self.microbatches:
            micro.close(failed=True)
        try:
            if failed:
                self.run.abandon(self)
        finally:
            self.run.end(self)
            # Step and microbatches refer to each other: what they hold of the backwards would wait for the garbage collector.
            self._given = None
            self.microbatches.clear()

    @property
    def total(self) -> int:
        """Return the number of samples of all processes."""
        return sum(self.counts)

    @property
    def row_numbers(self) -> Tensor | None:
        """Return the numbers of this process's samples among those of all; None for a process alone."""
        processes = self.run.parameters.processes
        if not processes.several:
            return None
        return torch.arange(self.counts[processes.rank]) + sum(self.counts[: processes.rank])

    @property
    def ids(self) -> Tensor:
        """Return the ids of all samples, in order."""
        parts = [m.ids for m in self.microbatches]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group, if it is known on the host."""
    lr = optimizer.param_groups[0].get("lr")
    return None if lr is None or (isinstance(lr, Tensor) and lr.device.type != "cpu") else float(lr)


__all__ = ["Microbatch", "Step", "IdsError", "InrunError"]
