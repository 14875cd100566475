"""Baselines: the other ways to say what samples were worth, each one call with the same table as our own scores.

    table = inrun.baselines.run("gradient_cosine", ids, {"math": loss}, model=model, sample_loss=sample_loss)

Nothing here shares code with the engine, so that agreement means something. Importing a file registers its baseline; what it
needs beside the core install, torch included, it imports when it is run.
"""

from inrun.baselines.registry import BASELINES, Baseline, register, run

# Importing registers a baseline; this is the order in which they are listed.
# isort: off
from inrun.baselines import random  # noqa: F401
from inrun.baselines import gradient_cosine  # noqa: F401
from inrun.baselines import data_shapley  # noqa: F401
from inrun.baselines import empirical_influence  # noqa: F401
from inrun.baselines import datamodels  # noqa: F401
from inrun.baselines import leave_one_out  # noqa: F401
from inrun.baselines import knn_shapley  # noqa: F401
from inrun.baselines import bm25  # noqa: F401
from inrun.baselines import tracin_cp  # noqa: F401
from inrun.baselines import influence_function  # noqa: F401
from inrun.baselines import trak  # noqa: F401
from inrun.baselines import less  # noqa: F401
from inrun.baselines import loss_at_end  # noqa: F401
from inrun.baselines import mean_loss  # noqa: F401
# isort: on

__all__ = ["BASELINES", "Baseline", "register", "run"]
