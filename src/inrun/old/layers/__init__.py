"""Map one layer's inputs and output gradient to per-sample gradients: the registry and the rules it holds."""

from inrun.old.layers import (  # noqa: F401 - importing registers the rules
    bilinear,
    channels,
    convolution,
    embedding,
    experts,
    linear,
    norm,
    recurrent,
)
from inrun.old.layers.fallback import FallbackRule, RecordedCall, Replay, unused_parameters
from inrun.old.layers.layout import Layout
from inrun.old.layers.merged import Merged, MergedAsk, MergedCall, MergedOwned
from inrun.old.layers.opaque import OwnedOpaque, TappedOpaque, key_of
from inrun.old.layers.packed import Packed, PackedReplay, Packing, add_up, packed
from inrun.old.layers.read_gradients import ReadRule
from inrun.old.layers.registry import LayerRule, find_rule, nbytes_of, register, register_finder, registered
from inrun.old.layers.seam import Ask, Call, Output, Owned, Tapped
from inrun.old.layers.shapes import Formed, GradientShape, LookUp, Outer, Parts
from inrun.old.layers.sketch import SketchPlan, fold, from_bits, segment_sums

__all__ = [
    "Ask",
    "Call",
    "FallbackRule",
    "Formed",
    "GradientShape",
    "LayerRule",
    "Layout",
    "LookUp",
    "Merged",
    "MergedAsk",
    "MergedCall",
    "MergedOwned",
    "Outer",
    "Output",
    "Owned",
    "OwnedOpaque",
    "Packed",
    "PackedReplay",
    "Packing",
    "Parts",
    "ReadRule",
    "RecordedCall",
    "Replay",
    "SketchPlan",
    "Tapped",
    "add_up",
    "TappedOpaque",
    "find_rule",
    "fold",
    "from_bits",
    "key_of",
    "nbytes_of",
    "packed",
    "register",
    "register_finder",
    "registered",
    "segment_sums",
    "unused_parameters",
]
