"""BM25 against its formula by hand."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from math import log

import numpy as np
import pytest

from inrun.baselines import run
from inrun.errors import ConfigurationError, ValidationError

TEXTS = ["the cat sat on the mat", "The dog chased the cat, the cat!", "rain in Spain"]
QUERIES = ["the cat", "cat cat rain", "nothing known here", ""]


def by_hand(query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    documents = [text.lower().replace(",", "").replace("!", "").split() for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    found = []
    for document in documents:
        counts, total = Counter(document), 0.0
        for word in query.split():
            having = sum(word in d for d in documents)
            f = counts[word]
            idf = log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            total += idf * f / (f + k1 * (1 - b + b * len(document) / mean))
        found.append(total)
    return found


def score(queries: list[str], **options: float) -> list[float]:
    return run("bm25", [0, 1, 2], queries, texts=TEXTS, **options)["score"].to_pylist()


def test_scores_are_those_of_the_formula() -> None:
    for query in QUERIES:
        assert score([query]) == pytest.approx(by_hand(query), rel=1e-12)
    assert score(QUERIES) == pytest.approx(np.mean([by_hand(q) for q in QUERIES], axis=0), rel=1e-12)
    assert score(["the cat"], k1=0.9, b=0.4) == pytest.approx(by_hand("the cat", 0.9, 0.4), rel=1e-12)
    # By numbers, once: "rain" is in one of three documents, and one of the three words of a document (mean length 16/3).
    assert score(["rain"]) == pytest.approx([0, 0, log(1 + 2.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 3 / (16 / 3)))])


def test_other_constants_give_other_scores() -> None:
    """The control."""
    assert score(["the cat"]) != pytest.approx(by_hand("the cat", 1.2, 0.75), rel=1e-3)
    assert score(["the cat"]) != pytest.approx(by_hand("the cat", 1.5, 0.5), rel=1e-3)


def test_sets_keep_their_names_and_ids_their_order() -> None:
    table = run("bm25", [9, 4, 7], {"b": ["rain"], "a": ["dog"]}, texts=TEXTS)
    rows = {(r["validation"], r["sample_id"]): r["score"] for r in table.to_pylist()}
    assert [key for key, value in rows.items() if value > 0] == [("a", 4), ("b", 7)]


def test_it_is_silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        score(["the cat"])
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_edges() -> None:
    assert run("bm25", [1, 2], ["a cat"], texts=["", "."])["score"].to_pylist() == [0.0, 0.0]
    assert run("bm25", [1, 2], ["a cat"], texts=["", "cat"])["score"][1].as_py() > 0
    assert run("bm25", [1, 2], ("猫 über",), texts=["Über alles", "no"])["score"].to_pylist()[0] > 0


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for validation, texts, error, words in (
        (["x"], TEXTS[:2], ConfigurationError, "2 texts for 3"),
        ("one text", TEXTS, ValidationError, "'validation' is one text"),
        ([], TEXTS, ValidationError, "a list of 0"),
        ([1], TEXTS, ValidationError, "a list of 1"),
        (["x"], [1, 2, 3], ValidationError, "texts is a list of 3"),
    ):
        with pytest.raises(error, match=words):
            run("bm25", [0, 1, 2], validation, texts=texts)
    for options in ({"k1": -1.0}, {"b": 1.5}, {"k1": float("nan")}, {"b": -0.1}):
        with pytest.raises(ConfigurationError, match="k1 must be a finite number, 0 or more, and b from 0 to 1"):
            score(["x"], **options)
    assert score(["the cat"], k1=1.5, b=1.0) == pytest.approx(by_hand("the cat", 1.5, 1.0), rel=1e-12)  # the limits are allowed
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'inrun\[baselines\]'"):
        score(["x"])
