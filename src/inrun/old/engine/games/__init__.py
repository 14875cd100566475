"""The games that a step can be scored by: the step game, its merged form, and whole credit."""

from inrun.old.engine.games.game import Game, Scene, Skipped
from inrun.old.engine.games.merged_game import MergedGame
from inrun.old.engine.games.step_game import StepGame
from inrun.old.engine.games.whole_game import WholeGame

__all__ = ["Game", "MergedGame", "Scene", "Skipped", "StepGame", "WholeGame"]
