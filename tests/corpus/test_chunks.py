"""Chunks: every token predicted once, ids that never change, selections by metadata."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_documents import write

import inrun
from inrun.corpus.chunks import Chunks, select
from inrun.corpus.documents import Fields
from inrun.corpus.store import TokenStore, build_store
from inrun.corpus.tokenizers import ByteTokenizer
from inrun.errors import ConfigurationError, DataError, IdsError

BYTES = ByteTokenizer()
ROWS = [
    {"id": "a", "text": "abcdefghij", "domain": "x", "split": "train"},
    {"id": "b", "text": "k", "domain": "y", "split": "train"},
    {"id": "c", "text": "lmnopqr", "domain": "x", "split": "val"},
    {"id": "d", "text": "stu"},
]


def make(folder, rows=ROWS) -> TokenStore:
    return build_store(write(folder / "a.jsonl", rows), Fields(), BYTES, folder / "cache")


def test_by_hand(tmp_path) -> None:
    chunks = Chunks(make(tmp_path), 4)
    assert chunks.ids.tolist() == list(range(7))
    assert chunks.ids.dtype == np.int64
    texts = [bytes(t for t in row if t >= 0 and t < 256).decode() for row in chunks.batch(chunks.ids)]
    assert texts == ["abcde", "efghi", "ij", "k", "lmnop", "pqr", "stu"]
    assert chunks.lengths(chunks.ids).tolist() == [5, 5, 3, 2, 5, 4, 4]
    assert chunks.batch([2]).tolist() == [[105, 106, 256, -1, -1]]
    assert chunks.batch([3, 3]).tolist() == [[107, 256, -1, -1, -1]] * 2
    assert chunks.document_of(chunks.ids).tolist() == [0, 0, 0, 1, 2, 2, 3]
    assert chunks.codes("domain", [6, 3, 0]).tolist() == [-1, 1, 0]
    assert chunks.batch([]).shape == (0, 5)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=8),
    context=st.integers(1, 50),
)
def test_every_token_is_predicted_once(tmp_path, texts: list[str], context: int) -> None:
    store = make(tmp_path, [{"text": t} for t in texts])
    chunks = Chunks(store, context)
    batch, documents = chunks.batch(chunks.ids), chunks.document_of(chunks.ids)
    assert batch.shape == (len(chunks), context + 1)
    for number, text in enumerate(texts):
        rows = batch[documents == number]
        predicted = [t for row in rows for t in row[1:] if t >= 0]
        assert [rows[0, 0], *predicted] == [*text.encode(), 256]
        assert all(a[-1] == b[0] for a, b in pairwise(rows))
    assert ((batch >= 0).sum(1) == chunks.lengths(chunks.ids)).all()
    assert (chunks.lengths(chunks.ids) >= 2).all()
    assert ((batch >= 0) == (np.arange(context + 1) < chunks.lengths(chunks.ids)[:, None])).all()


def test_a_selection_keeps_the_ids(tmp_path) -> None:
    store = make(tmp_path)
    whole, part = Chunks(store, 4), Chunks(store, 4, np.array([2, 0]))
    assert part.ids.tolist() == [0, 1, 2, 4, 5]
    assert len(part) == 5
    assert (part.batch(part.ids) == whole.batch(part.ids)).all()
    assert Chunks(store, 4, []).ids.tolist() == []
    assert Chunks(store, 4, [1, 1]).ids.tolist() == [3]


def test_select(tmp_path) -> None:
    store = make(tmp_path)
    assert select(store).tolist() == [0, 1, 2, 3]
    assert select(store, "train").tolist() == [0, 1]
    assert select(store, ["train", "val"]).tolist() == [0, 1, 2]
    assert select(store, where={"domain": "x"}).tolist() == [0, 2]
    assert select(store, "train", {"domain": ["x", "y"]}).tolist() == [0, 1]
    assert select(store, "val", {"domain": "y"}).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"split": "test"}, "no document has the split 'test'; there are 'train', 'val'"),
        ({"where": {"domain": ["x", "zz"]}}, "the domain 'zz'; there are 'x', 'y'"),
        ({"where": {"owner": "me"}}, "there are no values of owner"),
        ({"where": {"color": "red"}}, "domain, source, owner, split"),
        ({"where": {"domain": []}}, "there are 'x', 'y'"),
    ],
)
def test_select_what_is_not_there(tmp_path, arguments, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        select(make(tmp_path), **arguments)


def test_long_lists_of_values_are_cut(tmp_path) -> None:
    store = make(tmp_path, [{"text": "t", "domain": f"d{i}"} for i in range(50)])
    with pytest.raises(ConfigurationError, match="'d19' and 30 more"):
        select(store, where={"domain": "no"})


@pytest.mark.parametrize("context", [0, -1, True, 2.0, "4"])
def test_bad_contexts(tmp_path, context) -> None:
    with pytest.raises(ConfigurationError, match="context is"):
        Chunks(make(tmp_path), context)


@pytest.mark.parametrize("ids", [[7], [-1], [[0]], [0.5], ["a"], 3])
def test_bad_ids(tmp_path, ids) -> None:
    with pytest.raises(IdsError, match="chunk"):
        Chunks(make(tmp_path), 4).batch(ids)
    with pytest.raises(ConfigurationError, match="numbered 0 to 3"):
        Chunks(make(tmp_path), 4, [4])


def test_samples_are_ready_for_the_ledger(tmp_path) -> None:
    rows = [*ROWS, {"id": "long", "text": "é" * 3000, "domain": "</script>\u202e"}]
    chunks = Chunks(make(tmp_path, rows), 4096)
    table = chunks.samples()
    assert table.column_names == ["sample_id", "document", "chunk", "domain", "tokens", "text"]  # no source, no owner
    assert table["text"].to_pylist()[:4] == [r["text"] for r in ROWS]
    assert table["text"][4].as_py() == "é" * 400
    assert table["chunk"].to_pylist() == [0, 0, 0, 0, 0, 1]
    assert table["document"].to_pylist() == ["a", "b", "c", "d", "long", "long"]
    ledger = inrun.Ledger(tmp_path / "run")
    ledger.register_samples(table)
    for part in chunks.sample_tables(rows=2):
        ledger.register_samples(part)  # saying the same again is fine
    ledger.close()
    assert inrun.Ledger.open(tmp_path / "run").samples()["sample_id"].to_pylist() == chunks.ids.tolist()
    some = chunks.samples([5, 0])
    assert some["sample_id"].to_pylist() == [5, 0]
    assert chunks.samples([], BYTES).num_rows == 0


def test_reading_without_preadv_gives_the_same(tmp_path, monkeypatch) -> None:
    chunks = Chunks(make(tmp_path), 4)
    first = chunks.batch(chunks.ids)
    monkeypatch.delattr(os, "preadv")
    assert (chunks.batch(chunks.ids) == first).all()


def test_a_file_that_is_cut_in_use_is_said(tmp_path) -> None:
    chunks = Chunks(make(tmp_path), 4)
    os.truncate(chunks.store.folder / "tokens.bin", 20)
    with pytest.raises(DataError, match="was cut"):
        chunks.batch(chunks.ids)


def test_ids_are_the_same_in_a_store_opened_again(tmp_path) -> None:
    store = make(tmp_path)
    again = TokenStore.open(store.folder)
    a, b = Chunks(store, 3, [1, 2]), Chunks(again, 3, [1, 2])
    assert json.dumps(a.ids.tolist()) == json.dumps(b.ids.tolist())
    assert (a.batch(a.ids) == b.batch(b.ids)).all()


def test_a_document_of_no_tokens_has_no_chunks(tmp_path) -> None:
    class Silent(ByteTokenizer):
        fingerprint = "silent"

        def encode_batch(self, texts):
            return [ids[:0] if "-" in text else ids for ids, text in zip(super().encode_batch(texts), texts, strict=True)]

    path = write(tmp_path / "a.jsonl", [{"text": t} for t in ("-", "ab", "-", "-", "c", "-")])
    chunks = Chunks(build_store(path, Fields(), Silent(), tmp_path / "cache"), 1)
    assert chunks.document_of(chunks.ids).tolist() == [1, 1, 4]
    assert chunks.batch(chunks.ids).tolist() == [[97, 98], [98, 256], [99, 256]]
