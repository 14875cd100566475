"""What an accountant says of its run: scores, accounts, coverage, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.analysis import Summary, summarise, summarise_run
from inrun.engine.options import Coverage, CoverageRow
from inrun.engine.processes import Communication, Processes
from inrun.engine.record import credits_of_all
from inrun.engine.run import Run
from inrun.engine.whole import WholeScorer
from inrun.errors import LedgerError
from inrun.ledger import Ledger, LedgerReader, LedgerWriter, MemoryLedger
from inrun.ledger.live import live_reader
from inrun.ledger.record import SettledCredits

if TYPE_CHECKING:
    from inrun.fidelity import FidelityReport
    from inrun.figures import Plots


class Answers:
    """The part of an accountant that answers questions; it changes nothing."""

    model: nn.Module
    method: str
    ledger: LedgerWriter
    _run: Run
    _processes: Processes
    _detach: weakref.finalize[Any, Any]

    @property
    def steps_done(self) -> int:
        """Return how many steps were recorded, which is the number of the next one."""
        return self._run.steps_done

    @property
    def closed(self) -> bool:
        """Whether it has let go of the model."""
        return not self._detach.alive

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers."""
        return list(self._run.optimizers)

    @property
    def coverage(self) -> Coverage:
        """Return which parameters are scored."""
        scored = {s.name for s in self._run.parameters.scored}
        rows = [CoverageRow(leaf.name, leaf.name in scored, leaf.parameter.numel()) for leaf in self._run.parameters.leaves]
        return Coverage(tuple(rows))

    def about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        scorer = self._run.scorer
        return {
            "method": self.method,
            **({"sketch": scorer.sketcher.size} if isinstance(scorer, WholeScorer) else {}),
            "validation": scorer.validation.names,
            "optimizers": [type(o).__name__ for o in self._run.optimizers],
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "coverage": {"share": self.coverage.scored_share},
        }

    def open_credits(self, together: bool = False) -> list[SettledCredits]:
        """Return the credit so far of uses whose window is open, as if they were settled now.

        Args:
            together: Of all processes, which must all ask; else of this process's samples.
        """
        self._run.history.flush()
        credits = self._run.credits_on_host(self._run.scorer.open_credits())
        return credits_of_all(self._processes, credits) if together and not self.closed else credits

    def scores(
        self,
        validation: Any = None,
        view: str = "plain",
        *,
        top: int | None = None,
        bottom: int | None = None,
        by: str | None = None,
        together: bool = False,
    ) -> Any:
        """Return one row per sample and validation set as an Arrow table.

        ``score`` is the credit so far, ``step_score`` the sum of the steps' own parts, ``pending`` the number of uses whose
        window is open.

        Args:
            validation: A set, several, or None for all.
            view: How a use is seen: one of :data:`inrun.ledger.scores.VIEWS`.
            top: Only so many highest scores of every set, the highest first.
            bottom: Only so many lowest, the lowest first.
            by: A column of the registered samples: one row per ``group`` and set.
            together: All processes ask at once, so that the open uses of all are counted. Who asks alone sees of the samples of
                others what they have written; with a ledger in memory there are only this process's samples.
        """
        asked = {"validation": validation, "view": view, "top": top, "bottom": bottom, "by": by}
        scores = self._readable("scores")
        together = together and isinstance(self.ledger, Ledger) and not self.closed
        credits = self.open_credits(together)
        if together and isinstance(self.ledger, Ledger):
            with self._processes.barrier("scores", self.steps_done):  # what is read is what all have written
                self.ledger.flush_if_open()
        if isinstance(self.ledger, (LedgerReader, MemoryLedger)):
            return scores(**asked, open_credits=credits)
        if asked != {"validation": None, "view": "plain", "top": None, "bottom": None, "by": None}:
            raise LedgerError(
                f"the ledger {type(self.ledger).__name__} answers scores() alone; arguments are for inrun's own ledgers."
            )
        return scores()

    def _readable(self, what: str) -> Callable[..., Any]:
        found = getattr(self.ledger, what, None)
        if found is None:
            raise LedgerError(f"the ledger {type(self.ledger).__name__} only writes. Ask the place it writes to.")
        self._run.history.flush()
        return found  # type: ignore[no-any-return]

    @property
    def plot(self) -> Plots:
        """Return the figures: ``plot.groups()``, ``.samples()``, ``.over_time()``, ``.agreement(a, b)``, ``.books()``."""
        from inrun.figures import Plots

        return Plots(lambda: live_reader(self.ledger, self.open_credits()))

    def summary(self) -> Summary:
        """Return what the accounts say of the run so far; ``print`` shows a page per validation set."""
        uses = getattr(self.ledger, "uses", None)
        accounts = self._readable("accounts")
        if isinstance(self.ledger, LedgerReader):
            return summarise_run(self.ledger)
        return summarise(accounts(), self.method, uses() if callable(uses) else None)

    @property
    def communication(self) -> Communication:
        """Return what the accountant exchanged with other processes since the last step began."""
        return self._processes.communication()

    def held_bytes(self) -> int:
        """Return the memory that scoring holds between steps, in bytes."""
        return self._run.scorer.nbytes() + self._run.mover.nbytes()

    def validation_loss(self, name: str | None = None) -> tuple[str, Callable[[nn.Module], Tensor]]:
        """Return the name of a validation set (default: the first) and its loss at the next step as a function of any model."""
        return self._run.scorer.validation.function(name, self.steps_done)

    def fidelity(self, sample_losses: Callable[[nn.Module], Tensor], **options: Any) -> FidelityReport:
        """Compare methods with the Shapley values of the next step; see :func:`inrun.fidelity.beside`."""
        from inrun.fidelity import beside

        return beside(self, sample_losses, **options)  # type: ignore[arg-type]

    def save(self, folder: str) -> None:
        """Write the contributions and accounts held in memory to a folder, as a ledger."""
        if not isinstance(self.ledger, MemoryLedger):
            raise LedgerError(f"the ledger {type(self.ledger).__name__} is not held in memory; it has its own place.")
        self._run.history.flush()
        self.ledger.save(folder, {**self.about(), "steps": self.steps_done})
