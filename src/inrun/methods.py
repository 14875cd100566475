"""The methods, by name: what a score of each is. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Summaries by name; the first is the default.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "whole": "whole credit: what a use did over all later steps, through the optimizer's memory",
        "step": "the step's own share of the real update",
        "first": "first order: Theorem 1 of the paper, with its SGD proxy",
        "second": "second order: Theorem 2 of the paper, with its SGD proxy",
    }
)
#: Methods of the paper, which take every step for one of plain SGD.
PROXY = ("first", "second")
