"""How true the scores are: methods of the engine beside the real one-step game, on anybody's model."""

from inrun.fidelity.beside import beside
from inrun.fidelity.study import ChoiceResult, FidelityReport, fidelity, score_once, usual_choices
from inrun.fidelity.utility import UtilityReport, random_subsets, utility_agreement

__all__ = [
    "ChoiceResult",
    "FidelityReport",
    "UtilityReport",
    "beside",
    "fidelity",
    "random_subsets",
    "score_once",
    "usual_choices",
    "utility_agreement",
]
