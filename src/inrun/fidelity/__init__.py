"""How true the scores are: methods of the engine beside the Shapley values of a single step, on anybody's model."""

from inrun.fidelity.beside import beside
from inrun.fidelity.study import GAMES, STEP_METHODS, FidelityReport, MethodResult, Truth, fidelity, score_once
from inrun.fidelity.utility import UtilityReport, random_subsets, utility_agreement

__all__ = [
    "GAMES",
    "STEP_METHODS",
    "FidelityReport",
    "MethodResult",
    "Truth",
    "UtilityReport",
    "beside",
    "fidelity",
    "random_subsets",
    "score_once",
    "utility_agreement",
]
