"""Where people already train: transformers' Trainer, TRL, Lightning and Accelerate, each by one line added to their loop.

Nothing here computes a score. A trainer calls in pieces, and each file says in which order its pieces come; :mod:`.scoring` turns
them into the steps of an accountant, :mod:`.data` brings the ids of samples from the dataset to the step.
"""
