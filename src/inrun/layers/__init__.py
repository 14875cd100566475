"""Contract one layer with a direction: the registry and the rules it holds."""

from inrun.layers import embedding, linear, norm  # noqa: F401 - importing registers the rules
from inrun.layers.fallback import FallbackRule, float_tensors, unused_parameters
from inrun.layers.registry import Kept, KeptRowSums, Rule, find_rule, register, register_finder, registered
from inrun.layers.rows import Layout, by_sample
from inrun.layers.tap import ExpandTap, Observer, Tap

__all__ = [
    "ExpandTap",
    "FallbackRule",
    "Kept",
    "KeptRowSums",
    "Layout",
    "Observer",
    "Rule",
    "Tap",
    "by_sample",
    "find_rule",
    "float_tensors",
    "register",
    "register_finder",
    "registered",
    "unused_parameters",
]
