"""``datamodels``: which linear function of the samples that were trained on tells the utility best?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from inrun.baselines.registry import Ids, register
from inrun.baselines.retraining import Mask, Vector
from inrun.baselines.subsets import Drawing, Drawn
from inrun.errors import ConfigurationError

Regression = Literal["lasso", "ridge"]
#: Parts of the subsets that take turns at being predicted, when the penalty is chosen.
FOLDS = 5


@register(
    "datamodels",
    "weights of a sparse linear model that predicts the utility from the training subset",
    unit="utility",
    takes=Drawing,
)
def datamodels(
    sample_ids: Ids,
    validation: Mapping[str, Any],
    *,
    regression: Regression = "lasso",
    strength: float | None = None,
    **drawing: Any,
) -> dict[str, Vector]:
    """Fit V(S) ≈ c + Σ β over S by a penalised regression on random subsets (Ilyas et al. 2022), by scikit-learn.

    Scores are β. Where all subsets have the same size, a constant can move from c into all of β: the penalty decides, so that
    ridge has scores that sum to 0. With ``draw="coins"`` they are determined, with more noise.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers.
        regression: ``lasso``, as in the paper, or ``ridge``.
        strength: The penalty, scikit-learn's ``alpha``; None chooses it by cross-validation, for each validation set.
        drawing: How subsets are drawn and trained, see ``subsets.Drawing``; ``empirical_influence`` with the same and ``cells``
            shares them.
    """
    if regression not in ("lasso", "ridge"):
        raise ConfigurationError(f"datamodels: unknown regression {regression!r}; available: lasso, ridge")
    if strength is not None and not 0 <= strength < np.inf:
        raise ConfigurationError(f"datamodels: strength={strength}; it must be a finite number, 0 or more, or None to choose it")
    how = Drawing(**drawing)
    if strength is None and how.subsets < 2 * FOLDS:
        raise ConfigurationError(
            f"datamodels: {how.subsets} subsets are too few to choose a penalty; draw {2 * FOLDS} or more, or give strength"
        )
    _fit(regression, strength)  # if scikit-learn is missing, it is said before the training runs
    drawn = Drawn("datamodels", sample_ids, how)
    masks, found = drawn.masks, drawn.utilities(validation)
    return {name: _weights(masks, v, regression, strength) for name, v in found.items()}


def _weights(masks: Mask, v: Vector, regression: Regression, strength: float | None) -> Vector:
    """Return the weights of samples, ``[n]``, for subsets ``[m, n]`` and their utilities ``[m]``."""
    if np.ptp(v) == 0:  # a utility that nothing changes has no penalties to choose from
        return np.zeros(masks.shape[1])
    fitted = _fit(regression, strength).fit(masks.astype(np.float64), v)
    return np.asarray(fitted.coef_, np.float64)


def _fit(regression: Regression, strength: float | None) -> Any:
    """Return scikit-learn's regression, not fitted."""
    try:
        from sklearn import linear_model  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError("datamodels needs scikit-learn: pip install 'inrun[baselines]'") from error
    if regression == "lasso":
        if strength is None:
            return linear_model.LassoCV(cv=FOLDS, max_iter=10_000)
        return linear_model.Lasso(strength, max_iter=10_000)
    return linear_model.RidgeCV(np.logspace(-3, 6, 28)) if strength is None else linear_model.Ridge(strength)
