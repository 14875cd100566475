"""The grammar of validation labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inrun.ledger.labels import Label, by_set, is_name, set_of, sets_of_accounts


@pytest.mark.parametrize(
    ("text", "label", "set_name"),
    [
        ("math", Label("math"), "math"),
        ("math#0", Label("math", 0, True), "math"),
        ("math#12", Label("math", 12, True), "math"),
        ("math[7]", Label("math", 7), "math[7]"),
        ("a b.c", Label("a b.c"), "a b.c"),
        # Not of the grammar: each is a name of its own, and none is taken for a fold.
        ("#3", Label("#3"), "#3"),
        ("math#", Label("math#"), "math#"),
        ("math#01", Label("math#01"), "math#01"),
        ("math#x", Label("math#x"), "math#x"),
        ("math[1]#2", Label("math[1]#2"), "math[1]#2"),
        ("math[-1]", Label("math[-1]"), "math[-1]"),
        ("", Label(""), ""),
    ],
)
def test_labels(text: str, label: Label, set_name: str) -> None:
    assert Label.parse(text) == label and str(label) == text
    assert label.set_name == set_of(text) == set_name


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert str(Label.parse(text)) == text


@given(st.text(st.characters(exclude_characters="#[]"), min_size=1), st.integers(0, 10**12), st.booleans())
def test_any_name_can_be_told_from_points_and_folds(name: str, number: int, is_fold: bool) -> None:
    assert is_name(name)
    assert Label.parse(str(Label(name, number, is_fold))) == Label(name, number, is_fold)
    assert Label.parse(name) == Label(name)


@pytest.mark.parametrize("name", ["", "a#0", "a[", "]", 3, None])
def test_what_cannot_be_a_name(name: object) -> None:
    assert not is_name(name)


def test_labels_are_grouped_by_set() -> None:
    labels = ["b#10", "b#2", "a[10]", "a[2]", "a", "b#0", "c"]
    assert by_set(labels) == {"a": ["a"], "a[10]": ["a[10]"], "a[2]": ["a[2]"], "b": ["b#0", "b#2", "b#10"], "c": ["c"]}


def test_a_step_skipped_before_its_points_were_known_speaks_of_all_of_them() -> None:
    found = sets_of_accounts({"p": False, "p[0]": True, "p[1]": True, "f": False, "f#0": True, "v": False})
    assert found == {"f": ["f", "f#0"], "p[0]": ["p[0]", "p"], "p[1]": ["p[1]", "p"], "v": ["v"]}
    assert list(sets_of_accounts({"p": True, "p[0]": True})) == ["p", "p[0]"]  # a set that has the name of the points


@pytest.mark.parametrize("label", [Label("v"), Label("v", 3), Label("v", 3, True)])
def test_what_is_written_is_read_again(label: Label) -> None:
    assert Label.parse(str(label)) == label
