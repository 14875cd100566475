"""Ids from datasets of every kind through collators, and scores back onto datasets."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from inrun.errors import IdsError
from inrun.integrations.data import BatchIds, KeepIds, add_scores, with_id_column

datasets = pytest.importorskip("datasets")


def arrow() -> Any:
    return datasets.Dataset.from_dict({"x": [[i, i] for i in range(5)], "y": list(range(5))})


def ids_in(dataset: Any, column: str = "id") -> list[int]:
    return [int(dataset[i][column]) for i in range(len(dataset))]


#: A dataset, and the ids that it should have.
DATASETS: dict[str, tuple[Any, list[int]]] = {
    "without": (lambda: arrow(), [0, 1, 2, 3, 4]),
    "with its own": (lambda: arrow().add_column("id", [7, 5, 9, 1, 3]), [7, 5, 9, 1, 3]),
    "shuffled": (lambda: arrow().add_column("id", [7, 5, 9, 1, 3]).select([4, 0]), [3, 7]),
    "as tensors": (lambda: arrow().with_format("torch"), [0, 1, 2, 3, 4]),
    "some columns shown": (lambda: arrow().with_format("numpy", columns=["x"]), [0, 1, 2, 3, 4]),
    "hidden ids": (lambda: arrow().add_column("id", [7, 5, 9, 1, 3]).with_format("torch", columns=["x"]), [7, 5, 9, 1, 3]),
    "a transform": (lambda: arrow().with_transform(lambda batch: {"x": batch["x"]}), [0, 1, 2, 3, 4]),
    "a list": (lambda: [{"x": 1}, {"x": 2}], [0, 1]),
    "a list with ids": (lambda: [{"x": 1, "id": 8}, {"x": 2, "id": 6}], [8, 6]),
}


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_has_ids(name: str) -> None:
    make, expected = DATASETS[name]
    dataset = make()
    found = with_id_column(dataset, "id")
    assert ids_in(found) == expected
    assert "x" in found[0]
    assert ("id" in make()[0]) == ("id" in dataset[0])  # what was given is as it was


def test_items_that_are_no_dictionaries_are_named() -> None:
    with pytest.raises(IdsError, match="items of the training dataset are tuple.*dictionaries"):
        with_id_column([(1, 2)], "id")


def test_collators_keep_ids() -> None:
    seen: list[Any] = []

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(items)
        return {"x": torch.tensor([item["x"] for item in items])}

    batch = KeepIds(collate, "id", "keep it")([{"x": 1, "id": 8}, {"x": 2, "id": torch.tensor(6)}])
    assert all("id" not in item for item in seen)
    assert pickle.loads(pickle.dumps(batch["id"])).ids.tolist() == [8, 6]  # noqa: S301 - as a worker sends it
    assert isinstance(batch["id"], BatchIds)
    streamed = KeepIds(collate, "id", "keep it", as_tensor=True)([{"x": 1, "id": 8}])
    assert streamed["id"].tolist() == [8]
    with pytest.raises(IdsError, match=r"'id' was dropped before the collator .items have \['x'\].*keep it"):
        KeepIds(collate, "id", "keep it")([{"x": 1}])
    with pytest.raises(IdsError, match="holds 'a'; ids are integers"):
        KeepIds(collate, "id", "keep it")([{"x": 1, "id": "a"}])


def scores(**columns: list[Any]) -> pa.Table:
    return pa.table(columns)


def test_scores_come_back_to_their_rows() -> None:
    table = scores(sample_id=[3, 1], validation=["a", "a"], score=[0.5, -1.0], times_used=[2, 1])
    found = add_scores(arrow(), table, "id").with_format("numpy")
    np.testing.assert_array_equal(found["score"][:], [np.nan, -1.0, np.nan, 0.5, np.nan])
    assert found["times_used"][:].tolist() == [0, 1, 0, 2, 0]
    own = add_scores(arrow().add_column("id", [3, 3, 8, 1, 0]), table, "id").with_format("numpy")
    np.testing.assert_array_equal(own["score"][:], [0.5, 0.5, np.nan, -1.0, np.nan])
    two = scores(sample_id=[3, 3], validation=["a", "b"], score=[0.5, 2.0], times_used=[2, 2])
    assert {"score_a", "score_b", "times_used"} < set(add_scores(arrow(), two, "id").column_names)
    none = scores(sample_id=pa.array([], pa.int64()), validation=pa.array([], pa.string()), score=pa.array([], pa.float64()))
    assert add_scores(arrow(), none.append_column("times_used", pa.array([], pa.int64())), "id")["times_used"][:] == [0] * 5
    with pytest.raises(IdsError, match="takes a datasets.Dataset; got list"):
        add_scores([1], table, "id")
