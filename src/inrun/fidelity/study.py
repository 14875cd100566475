"""One step of a real model: what every method says, beside the Shapley values of the real game."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.fidelity.rewind import rewound
from inrun.fidelity.utility import UtilityReport, utility_agreement
from inrun.engine import Accountant
from inrun.methods import METHODS
from inrun.truth import Agreement, StepGame, agreement, enumerate_values, sample_values

Progress = Callable[[int, int], None] | bool | None


def usual_choices(sgd: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the (method, update) pairs that are tried unless others are named, as the registry of methods has them.

    ``midpoint:gauss2`` is midpoint with that quadrature.

    Args:
        sgd: For the game of plain SGD, where all updates are one: every method that makes sense there, once.
    """
    if sgd:
        return tuple((name, "sgd") for name, method in METHODS.items() if "sgd" not in method.refuses)
    return tuple(
        (name if variant is None else f"{name}:{variant}", update)
        for update in UPDATES
        for name, method in METHODS.items()
        if update in method.studied_with
        for variant in (None, *method.studied_variants)
    )


@dataclass(frozen=True)
class ChoiceResult:
    """One method and update beside the truth."""

    method: str
    update: str
    contributions: list[float]
    spearman: float
    pearson: float
    rmse: float
    #: |Σ c_n − truth's total| / Σ |c_n|.
    residual: float

    @property
    def name(self) -> str:
        """Return ``method+update``."""
        return f"{self.method}+{self.update}"


@dataclass(frozen=True)
class FidelityReport:
    """What was found at one step; ``str()`` gives a table."""

    step: int
    validation: str
    n: int
    #: "exact" or the number of permutations.
    truth: str
    shapley: list[float]
    standard_errors: list[float]
    total: float
    results: list[ChoiceResult]
    utility: UtilityReport | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        results = [vars(r) for r in self.results]
        return {**vars(self), "results": results, "utility": None if self.utility is None else vars(self.utility)}

    def __getitem__(self, name: str) -> ChoiceResult:
        """Return the result of ``method+update``."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"{name}: tried were {', '.join(r.name for r in self.results)}")

    def __str__(self) -> str:
        """Return the table."""
        noise = max(self.standard_errors, default=0.0)
        lines = [
            f"step {self.step}, {self.validation}, {self.n} samples; truth: {self.truth}, total {self.total:+.3e}, "
            f"largest standard error {noise:.1e}",
            f"{'':<18}{'Spearman':>9}{'Pearson':>9}{'RMSE':>10}{'|Σc − truth|/Σ|c|':>20}",
        ]
        lines += [
            f"{r.name:<18}{r.spearman:>9.3f}{r.pearson:>9.3f}{r.rmse:>10.2e}{100 * r.residual:>18.2f} %" for r in self.results
        ]
        if self.utility is not None:
            lines.append(str(self.utility))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        from inrun.notebook import block, lines, table

        header = ("method", "Spearman", "Pearson", "RMSE", "|Σc − truth| / Σ|c|")
        rows = [(r.name, r.spearman, r.pearson, r.rmse, f"{100 * r.residual:.2f} %") for r in self.results]
        noise = max(self.standard_errors, default=0.0)
        said = [f"Truth: {self.truth}; in all {self.total:+.3e}, largest standard error {noise:.1e}."]
        said += [] if self.utility is None else [str(self.utility)]
        return block(f"Fidelity at step {self.step}, {self.validation}, {self.n} samples", table(header, rows), lines(said))

    def save_picture(self, path: str) -> None:
        """Draw the scatter of every method against the truth as PNG (needs matplotlib)."""
        from inrun.fidelity.picture import draw_scatter

        draw_scatter(self, path)


def score_once(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    validation: Callable[[nn.Module], Tensor],
    sample_losses: Callable[[nn.Module], Tensor],
    method: str,
    update: str,
    max_norm: float | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Run one scored step and put everything back; return the contributions ``[n]``."""
    with rewound(model, optimizers), torch.no_grad():
        n = len(sample_losses(model))
    method, _, quadrature = method.partition(":")
    if not quadrature and method in METHODS and METHODS[method].adaptive:
        quadrature = "midpoint"  # the rule itself is studied, not what mends it
    chosen = {"method": method, "update": update, "quadrature": quadrature or None, "audit_every": 0, **options}
    with rewound(model, optimizers), Accountant(model, list(optimizers), validation, **chosen) as accountant:
        accountant.hush()  # one line per method tried would drown the table
        with accountant.step(range(n)):
            sample_losses(model).sum().backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for optimizer in optimizers:
                optimizer.step()
        return accountant.last.contributions["validation"].detach().double().cpu()


def fidelity(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    validation: Callable[[nn.Module], Tensor],
    sample_losses: Callable[[nn.Module], Tensor],
    *,
    choices: Sequence[tuple[str, str]] | None = None,
    max_norm: float | None = None,
    permutations: int = 300,
    exact: bool = False,
    proxy: bool = False,
    subsets: int = 0,
    seed: int = 0,
    step: int = 0,
    name: str = "validation",
    progress: Progress = None,
    options: Mapping[str, Any] | None = None,
) -> FidelityReport:
    """Compare methods with the real game of the next step of this model and optimizer; nothing is changed.

    Args:
        model: The model, without an accountant (``accountant.fidelity`` takes care of that).
        optimizer: Its optimizer or optimizers, in the state from which the step would be made.
        validation: ``model -> scalar loss``.
        sample_losses: ``model -> [n]``: each sample's part of the batch loss; their sum is what is trained on.
        choices: (method, update) pairs to try; default: :func:`usual_choices`.
        max_norm: The training loop's ``clip_grad_norm_``.
        permutations: Permutations of the truth, in antithetic pairs.
        exact: Enumerate all subsets instead (at most 16 samples).
        proxy: Hold them against the paper's SGD game (w ← w − lr·G) instead of the optimizer's.
        subsets: Compare the Taylor utilities with the true utility on so many random subsets.
        seed: Of permutations and subsets.
        step: For the report.
        name: Of the validation set, for the report.
        progress: Called with done and total subsets of the truth; True shows a bar.
        options: More arguments for the accountants.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    estimates = [
        (method, update, score_once(model, optimizers, validation, sample_losses, method, update, max_norm, options or {}))
        for method, update in (usual_choices() if choices is None else choices)
    ]
    with rewound(model, optimizers):
        game = StepGame(model, optimizers, validation, sample_losses, max_norm=max_norm, proxy=proxy)
        truth = enumerate_values(game, progress) if exact else sample_values(game, permutations, seed, progress=progress)
        utility = utility_agreement(game, subsets, seed) if subsets else None
    results = []
    for method, update, c in estimates:
        found: Agreement = agreement(c, truth.values)
        off = abs(float(c.sum()) - truth.total) / max(float(c.abs().sum()), 1e-300)
        results.append(ChoiceResult(method, update, c.tolist(), found.spearman, found.pearson, found.rmse, off))
    return FidelityReport(
        step=step,
        validation=name,
        n=game.n,
        truth="all subsets" if exact else f"{permutations} permutations",
        shapley=truth.values.tolist(),
        standard_errors=truth.standard_errors.tolist(),
        total=truth.total,
        results=results,
        utility=utility,
    )
