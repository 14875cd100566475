"""Whole credit: every push that moved the weights belongs to a sample, until the optimizer has forgotten it."""
