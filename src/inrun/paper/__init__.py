"""The algorithms of "Data Shapley in One Training Run" (ICLR 2025), to be read beside the paper.

===================================================  =======================================
paper                                                here
===================================================  =======================================
Section 4.1, Theorems 1 and 2                        ``theorems``
Section 4.2, the direct computation                  ``direct``
Section 4.2 and Appendix D.1, ghost dot product      ``ghost``
Section 4.2, the remark on other layers              ``layers``
Appendix D.2, gradient-Hessian-gradient product      ``hessian``
Appendix D.3, one backpropagation, book-keeping      ``capture``, ``backpropagation``
===================================================  =======================================

(Appendix D is "Technical Details".) :class:`GhostScorer` runs them around a training step, with the
ids, the ledger and the signs of :class:`inrun.Accountant`. To train, use the accountant: it needs
less memory and covers more layers and optimizers. Nothing else depends on this package.

The sign differs from the paper's formulas: positive means that the sample *lowered* the validation
loss, as in the paper's experiments.

Limits: eager models in one process, one backward per step, and the first dimension of every
layer's input and output is the batch. Tested in float32 and float64, on CPU only.
"""

from inrun.paper.scorer import GhostScorer, ScoredStep

__all__ = ["GhostScorer", "ScoredStep"]
