"""``bm25``: how much does a sample's text share with the validation texts, word by word? No model is asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError, ValidationError


@register("bm25", "Okapi BM25 of a sample's text for the validation texts", unit="BM25")
def bm25(
    sample_ids: Ids,
    validation: Mapping[str, Sequence[str]],
    *,
    texts: Sequence[str],
    k1: float = 1.5,
    b: float = 0.75,
) -> dict[str, npt.NDArray[np.float64]]:
    """Rank samples as documents for each validation text as a query, by bm25s (the variant of Lucene, in float64).

    With f the number of times that a document has word w, l its length in words, l̄ the mean length, N the number of documents and
    d the number of those that have w:

        score = Σ over the words w of the query, each as often as it is there,
                of ln(1 + (N − d + ½)/(d + ½)) · f / (f + k1 (1 − b + b l/l̄)).

    A score is the mean over the texts of a validation set. Words are runs of two or more letters, digits and underscores,
    in lower case; none is left out, for frequent words count little by themselves.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Texts by name.
        texts: Of the samples, ``[n]``.
        k1: How soon repeating a word stops helping.
        b: How much long documents are held back, from 0 to 1.
    """
    if not 0 <= k1 < np.inf or not 0 <= b <= 1:
        raise ConfigurationError(f"bm25 got k1={k1} and b={b}; k1 must be a finite number, 0 or more, and b from 0 to 1")
    if len(texts) != len(sample_ids):
        raise ConfigurationError(f"bm25 got {len(texts)} texts for {len(sample_ids)} sample_ids")
    queries = {name: _words(f"validation {name!r}", given) for name, given in validation.items()}
    words = _words("texts", texts)
    if not any(words):  # bm25s divides by the mean length
        return {name: np.zeros(len(texts)) for name in validation}
    index = _library().BM25(k1=k1, b=b, method="lucene", dtype="float64", auto_compile=False)
    index.index(words, show_progress=False)
    return {
        name: np.mean([index.get_scores_from_ids(index.get_tokens_ids(query)) for query in given], axis=0)
        for name, given in queries.items()
    }


def _words(what: str, texts: Any) -> list[list[str]]:
    """Return the words of texts; there must be some texts."""
    if isinstance(texts, str) or not len(texts) or not all(isinstance(text, str) for text in texts):
        shown = "one text" if isinstance(texts, str) else f"a {type(texts).__name__} of {len(texts)}"
        raise ValidationError(f"bm25: {what} is {shown}; it must be a list of one or more texts")
    found: list[list[str]] = _library().tokenize(list(texts), stopwords=None, return_ids=False, show_progress=False)
    return found


def _library() -> Any:
    try:
        import bm25s  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError("bm25 needs bm25s: pip install 'inrun[baselines]'") from error
    # It sets its own logger to DEBUG, which any handler at the root would print.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s
