"""The study beside a run: on the very model, optimizers and validation sets of an accountant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from inrun.engine import Accountant
from inrun.fidelity.study import STEP_METHODS, FidelityReport, Progress, fidelity


def beside(
    accountant: Accountant,
    sample_losses: Callable[[nn.Module], Tensor],
    *,
    validation: str | None = None,
    methods: Sequence[str] = STEP_METHODS,
    game: str | None = None,
    max_norm: float | None = None,
    permutations: int = 300,
    exact: bool = False,
    subsets: int = 0,
    seed: int = 0,
    progress: Progress = None,
) -> FidelityReport:
    """Hold methods against the Shapley values of an accountant's next step.

    The step is taken back: weights, optimizer state, gradients and random state stay as they are.

    Args:
        accountant: Of the run; between two steps.
        sample_losses: ``model -> [n]``, each sample's part of the batch loss of the step to look at.
        validation: Which validation set (default: the first).
        methods: "step", "first" and "second", or some of them.
        game: "real" or "sgd" for all methods; None for each method's own, see :func:`inrun.fidelity.fidelity`.
        max_norm: What the training loop gives to ``clip_grad_norm_``.
        permutations: Permutations of the truth; ``exact`` enumerates all subsets instead (at most 16 samples).
        exact: See ``permutations``.
        subsets: Compare Taylor utilities with the true utility on so many random subsets.
        seed: Of the permutations.
        progress: Called with done and total; True shows a bar.

    Returns:
        Spearman, Pearson, RMSE and residual of each method; ``str()`` is a table, ``save_picture`` draws the scatter.
    """
    name, loss = accountant.validation_loss(validation)
    with accountant.suspended():
        return fidelity(
            accountant.model,
            accountant.optimizers,
            loss,
            sample_losses,
            methods=methods,
            game=game,
            max_norm=max_norm,
            permutations=permutations,
            exact=exact,
            subsets=subsets,
            seed=seed,
            step=accountant.steps_done,
            name=name,
            progress=progress,
        )
