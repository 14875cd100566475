"""One step of a real model: what every method says, beside the Shapley values of the game that it is derived for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine import Accountant
from inrun.errors import ConfigurationError
from inrun.fidelity.rewind import rewound
from inrun.fidelity.utility import UtilityReport, utility_agreement
from inrun.methods import PROXY
from inrun.truth import StepGame, agreement, enumerate_values, sample_values

Progress = Callable[[int, int], None] | bool | None
#: The methods that score a step by itself. Whole credit is paid over later steps, and no game of one step is its truth.
STEP_METHODS = ("step", *PROXY)
#: The games: what moves the weights when only some of the samples take part.
GAMES = {"real": "the step of the real optimizer", "sgd": "the paper's step of plain SGD"}


@dataclass(frozen=True)
class Truth:
    """The Shapley values of a game, with their standard errors, and their sum."""

    shapley: list[float]
    standard_errors: list[float]
    total: float


@dataclass(frozen=True)
class MethodResult:
    """One method beside the Shapley values of a game."""

    method: str
    game: str
    contributions: list[float]
    spearman: float
    pearson: float
    rmse: float
    #: |Σ c_n − truth's total| / Σ |c_n|.
    residual: float


@dataclass(frozen=True)
class FidelityReport:
    """What was found at one step; ``str()`` gives a table."""

    step: int
    validation: str
    n: int
    #: How the truths were evaluated: over all subsets, or so many permutations.
    evaluated: str
    #: By game, see :data:`GAMES`.
    truths: dict[str, Truth]
    results: list[MethodResult]
    utility: UtilityReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __getitem__(self, method: str) -> MethodResult:
        """Return the result of a method."""
        for result in self.results:
            if result.method == method:
                return result
        raise KeyError(f"{method}: tried were {', '.join(r.method for r in self.results)}")

    def _truths(self) -> list[str]:
        return [
            f"{name}: {GAMES[name]}, {self.evaluated}; total {t.total:+.3e}, largest standard error "
            f"{max(t.standard_errors, default=0.0):.1e}"
            for name, t in self.truths.items()
        ]

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"step {self.step}, {self.validation}, {self.n} samples", *self._truths()]
        lines.append(f"{'':<10}{'game':<6}{'Spearman':>9}{'Pearson':>9}{'RMSE':>10}{'|Σc − truth|/Σ|c|':>20}")
        lines += [
            f"{r.method:<10}{r.game:<6}{r.spearman:>9.3f}{r.pearson:>9.3f}{r.rmse:>10.2e}{100 * r.residual:>18.2f} %"
            for r in self.results
        ]
        if self.utility is not None:
            lines.append(str(self.utility))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        from inrun.notebook import block, lines, table

        header = ("method", "game", "Spearman", "Pearson", "RMSE", "|Σc − truth| / Σ|c|")
        rows = [(r.method, r.game, r.spearman, r.pearson, r.rmse, f"{100 * r.residual:.2f} %") for r in self.results]
        said = self._truths() + ([] if self.utility is None else [str(self.utility)])
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
    max_norm: float | None = None,
) -> Tensor:
    """Run one scored step and put everything back; return the contributions ``[n]``."""
    if method not in STEP_METHODS:
        raise ConfigurationError(
            f"method is {method!r}. Accepted are {', '.join(STEP_METHODS)}. Whole credit is paid over later steps."
        )
    with rewound(model, optimizers), torch.no_grad():
        n = len(sample_losses(model))
    sketch = "exact" if method == "step" else None
    with rewound(model, optimizers), Accountant(model, list(optimizers), validation, method, sketch, audit_every=0) as accountant:
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
    methods: Sequence[str] = STEP_METHODS,
    game: str | None = None,
    max_norm: float | None = None,
    permutations: int = 300,
    exact: bool = False,
    subsets: int = 0,
    seed: int = 0,
    step: int = 0,
    name: str = "validation",
    progress: Progress = None,
) -> FidelityReport:
    """Compare methods with the Shapley values of the next step of this model and optimizer; nothing is changed.

    Args:
        model: The model, without an accountant (``accountant.fidelity`` takes care of that).
        optimizer: Its optimizer or optimizers, in the state from which the step would be made.
        validation: ``model -> scalar loss``.
        sample_losses: ``model -> [n]``: each sample's part of the batch loss; their sum is what is trained on.
        methods: "step", "first" and "second", or some of them.
        game: Judge all methods by one game: "real" (the optimizer's step) or "sgd" (the paper's, w ← w − lr·G). None judges
            "first" and "second" by the SGD game, which they are derived for, and "step" by the real one.
        max_norm: The training loop's ``clip_grad_norm_``.
        permutations: Permutations of the truth, in antithetic pairs.
        exact: Enumerate all subsets instead (at most 16 samples).
        subsets: Compare the Taylor utilities with the true utility on so many random subsets, in the first of the games.
        seed: Of permutations and subsets.
        step: For the report.
        name: Of the validation set, for the report.
        progress: Called with done and total subsets of each truth; True shows a bar.
    """
    if game is not None and game not in GAMES:
        raise ConfigurationError(f"game is {game!r}. Accepted are {', '.join(GAMES)}, and None for each method's own.")
    if not methods:
        raise ConfigurationError(f"methods is empty. Accepted are {', '.join(STEP_METHODS)}.")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    scores = {m: score_once(model, optimizers, validation, sample_losses, m, max_norm) for m in methods}
    games = {m: game or ("sgd" if m in PROXY else "real") for m in scores}
    truths: dict[str, Truth] = {}
    utility = None
    for played in dict.fromkeys(games.values()):
        with rewound(model, optimizers):
            scene = StepGame(model, optimizers, validation, sample_losses, max_norm=max_norm, proxy=played == "sgd")
            found = enumerate_values(scene, progress) if exact else sample_values(scene, permutations, seed, progress=progress)
            truths[played] = Truth(found.values.tolist(), found.standard_errors.tolist(), found.total)
            if subsets and utility is None:
                utility = utility_agreement(scene, subsets, seed)
    results = []
    for method, c in scores.items():
        truth = truths[games[method]]
        met = agreement(c, truth.shapley)
        off = abs(float(c.sum()) - truth.total) / max(float(c.abs().sum()), 1e-300)
        results.append(MethodResult(method, games[method], c.tolist(), met.spearman, met.pearson, met.rmse, off))
    return FidelityReport(
        step=step,
        validation=name,
        n=len(next(iter(scores.values()))),
        evaluated="all subsets" if exact else f"{permutations} permutations",
        truths=truths,
        results=results,
        utility=utility,
    )
