"""The samples of a token store: pieces of documents, one context long, with ids that never change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.corpus.store import CODED, TokenStore
from inrun.corpus.tokenizers import Tokenizer
from inrun.errors import ConfigurationError, IdsError

Ints = npt.NDArray[np.int64]
#: Characters of a sample's text, and tokens that surely hold them: a token has at least one of at most four bytes of a character.
TEXT, TEXT_TOKENS = 400, 1600
#: Chunks that are decoded together.
ROWS = 4096


class Chunks:
    """Pieces of up to ``context`` + 1 consecutive tokens of one document.

    Neighbours overlap by one token: a chunk predicts ``context`` tokens, and every token of a document but the first, its end
    included, is predicted exactly once. The id of a chunk is its number in the whole store at this context, so a selection keeps
    the ids, and they are the same at every start.

    Args:
        store: The tokens.
        context: Tokens that the model sees at once.
        documents: Numbers of the documents to take, as :func:`select` gives them; all by default.

    Attributes:
        ids: Ids of the chunks selected, ascending, ``[n]``.
        total: Number of chunks in the whole store.
    """

    def __init__(self, store: TokenStore, context: int, documents: npt.ArrayLike | None = None) -> None:
        """Number the chunks; see the class."""
        if isinstance(context, bool) or not isinstance(context, int | np.integer) or context < 1:
            raise ConfigurationError(f"context is {context!r}; it must be an integer of at least 1")
        self.store, self.context = store, int(context)
        counts = -(-(np.diff(store.offsets) - 1) // self.context)
        self._first: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.total = int(self._first[-1])
        self.ids = self._selected(counts, documents)

    def _selected(self, counts: Ints, documents: npt.ArrayLike | None) -> Ints:
        if documents is None:
            return np.arange(self.total, dtype=np.int64)
        chosen = np.unique(np.asarray(documents, np.int64))
        if len(chosen) and not (chosen[0] >= 0 and chosen[-1] < self.store.count):
            raise ConfigurationError(f"documents are numbered 0 to {self.store.count - 1}; {chosen[0]} to {chosen[-1]} were chosen")
        marked = np.zeros(self.store.count, bool)
        marked[chosen] = True
        return np.flatnonzero(np.repeat(marked, counts)).astype(np.int64, copy=False)

    def __len__(self) -> int:
        """Return the number of chunks selected."""
        return len(self.ids)

    def document_of(self, ids: npt.ArrayLike) -> Ints:
        """Return the number of each chunk's document, ``[n]``."""
        found = np.asarray(ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise IdsError(f"chunk ids have shape {list(found.shape)} and type {found.dtype}; accepted are integers, [n]")
        if found.size and not (found.min() >= 0 and found.max() < self.total):
            raise IdsError(f"chunks are numbered 0 to {self.total - 1}; {found.min()} to {found.max()} were asked for")
        return np.searchsorted(self._first, found.astype(np.int64), side="right") - 1

    def _spans(self, ids: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Return where chunks begin in the store, and how many tokens they have."""
        documents = self.document_of(ids)
        starts = self.store.offsets[documents] + (np.asarray(ids, np.int64) - self._first[documents]) * self.context
        return starts, np.minimum(self.store.offsets[documents + 1] - starts, self.context + 1)

    def lengths(self, ids: npt.ArrayLike) -> Ints:
        """Return the tokens of each chunk, 2 to ``context`` + 1; one less are predicted."""
        return self._spans(ids)[1]

    def batch(self, ids: npt.ArrayLike) -> Ints:
        """Return the tokens of chunks, ``[n, context + 1]``, with -1 behind the end of short ones."""
        starts, lengths = self._spans(ids)
        return self.store.gather(starts, lengths, self.context + 1)

    def codes(self, name: str, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Return the code of a column for each chunk, as in ``store.column(name)``; -1 where nothing is known."""
        return self.store.column(name)[0][self.document_of(ids)]

    def samples(self, ids: npt.ArrayLike | None = None, tokenizer: Tokenizer | None = None) -> pa.Table:
        """Return what is known about chunks, as ``ledger.register_samples`` takes it; columns without any value are left out.

        Args:
            ids: Chunks; all that are selected by default. For millions use :meth:`sample_tables`.
            tokenizer: Decodes the texts; the store's own by default.

        Returns:
            sample_id, document (its id), chunk (its number in the document), domain, source, owner, tokens, text (400 characters).
        """
        chosen = self.ids if ids is None else np.asarray(ids, np.int64)
        documents = self.document_of(chosen)
        known = self.store.documents(documents, ["id", "domain", "source", "owner"])
        columns = {
            "sample_id": pa.array(chosen),
            "document": known["id"],
            "chunk": pa.array(chosen - self._first[documents]),
            **{name: known[name] for name in ("domain", "source", "owner")},
            "tokens": pa.array(self.lengths(chosen)),
            "text": self._texts(chosen, tokenizer or self.store.tokenizer()),
        }
        return pa.table({name: column for name, column in columns.items() if not len(chosen) or column.null_count < len(column)})

    def sample_tables(self, rows: int = 50_000, tokenizer: Tokenizer | None = None) -> Iterator[pa.Table]:
        """Yield :meth:`samples` of all selected chunks, some rows at a time."""
        tokenizer = tokenizer or self.store.tokenizer()
        for begin in range(0, len(self.ids), rows):
            yield self.samples(self.ids[begin : begin + rows], tokenizer)

    def _texts(self, ids: Ints, tokenizer: Tokenizer) -> pa.ChunkedArray:
        starts, lengths = self._spans(ids)
        width = min(self.context + 1, TEXT_TOKENS)
        lengths = np.minimum(lengths, width)
        parts = []
        for begin in range(0, len(ids), ROWS):  # in parts: Python's texts take several times the room of Arrow's
            some = slice(begin, begin + ROWS)
            rows = self.store.gather(starts[some], lengths[some], width)
            texts = [tokenizer.decode(row[:length])[:TEXT] for row, length in zip(rows, lengths[some], strict=True)]
            parts.append(pa.array(texts, pa.string()))
        return pa.chunked_array(parts, pa.string())


def select(
    store: TokenStore,
    split: str | Sequence[str] | None = None,
    where: Mapping[str, str | Sequence[str]] | None = None,
) -> Ints:
    """Return the numbers of the documents whose split and other metadata are among those given.

    Args:
        store: The documents.
        split: One split or several; None takes all.
        where: For domain, source, owner or split: a value or several.

    Raises:
        ConfigurationError: A column or value that no document has.
    """
    chosen = np.ones(store.count, bool)
    for name, given in ([] if split is None else [("split", split)]) + list((where or {}).items()):
        if name not in CODED:
            raise ConfigurationError(f"data cannot be chosen by {name!r}; accepted are {', '.join(CODED)}")
        codes, values = store.column(name)
        wanted = [given] if isinstance(given, str) else list(given)
        unknown = [value for value in wanted if value not in values]
        if unknown or not wanted:
            raise ConfigurationError(f"no document has the {name} {_shown(unknown, name)}; there are {_shown(values, name)}")
        chosen &= np.isin(codes, [values.index(value) for value in wanted])
    return np.flatnonzero(chosen).astype(np.int64, copy=False)


def _shown(values: Sequence[object], name: str) -> str:
    shown = ", ".join(repr(value) for value in values[:20])
    return (shown + (f" and {len(values) - 20} more" if len(values) > 20 else "")) or f"no values of {name}"
