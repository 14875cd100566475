"""The slow truth of one optimizer step: exact and sampled Shapley values of the real game. Shares no code with the engine."""

from inrun.truth.agreement import Agreement, agreement
from inrun.truth.game import StepGame
from inrun.truth.values import Values, enumerate_values, sample_values

__all__ = ["Agreement", "StepGame", "Values", "agreement", "enumerate_values", "sample_values"]
