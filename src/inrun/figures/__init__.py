"""A figure per common question, by the plotting library that is there. Needs no torch and no model: it reads a ledger."""

from inrun.figures.plots import Plots

__all__ = ["Plots"]
