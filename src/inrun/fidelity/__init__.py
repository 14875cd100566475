"""How true the scores are: methods of the engine beside the real one-step game, on anybody's model."""

from inrun.fidelity.beside import beside
from inrun.fidelity.study import CHOICES, ChoiceResult, FidelityReport, fidelity
from inrun.fidelity.utility import UtilityReport, utility_agreement

__all__ = ["CHOICES", "ChoiceResult", "FidelityReport", "UtilityReport", "beside", "fidelity", "utility_agreement"]
