"""Whose row is it? Verified, not assumed.

Σ_n g_n = G holds for any assignment of rows to samples, so no sum can tell a tensor that is sequence-first, gathered
or partitioned from one that is batch-first. Instead the forward is run again, without gradient, with one sample's
inputs exchanged: only that sample's rows may move at every observed module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inrun.engine.quiet import Arguments, BufferGuard, devices_of, forked_random, modes
from inrun.engine.sites import Site
from inrun.errors import RowOwnershipError
from inrun.layers import Layout, float_tensors

if TYPE_CHECKING:
    from inrun.engine.capture import Capture

log = logging.getLogger("inrun")
Pattern = tuple[Any, ...]


def pattern_of(shape: torch.Size, n: int) -> Pattern:
    """Reduce a shape to what matters for ownership: which dimensions equal n or 1, and whether n divides the first."""
    kinds = tuple("n" if size == n else "1" if size == 1 else "*" for size in shape)
    return (kinds, len(shape) > 0 and shape[0] % n == 0)


@dataclass
class Entry:
    """One observed call: the shape of its leading tensor and one fingerprint per leading row."""

    #: None for an output of the model itself.
    site: Site | None
    shape: torch.Size
    rows: Tensor
    #: Which output of a module without a rule this is; None for an input.
    output: int | None = None


def fingerprint(x: Tensor) -> Tensor:
    """Return one number per leading row, different (almost surely) if any entry of the row differs."""
    flat = x.detach().reshape(x.shape[0], -1).double()
    generator = torch.Generator().manual_seed(flat.shape[1])
    weights = torch.rand(flat.shape[1], generator=generator, dtype=torch.float64).add_(0.5).to(x.device)
    return flat @ weights


class Recorder:
    """Replaces scoring while a forward is run to see which rows move."""

    def __init__(self, disturb: int | None = None, row: int = 0, expand: tuple[set[int], int] | None = None) -> None:
        """Optionally disturb row ``row`` of the output of call ``disturb``, or expand the outputs of some calls."""
        self.entries: list[Entry] = []
        self.disturb, self.row, self.expand = disturb, row, expand

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and note what it was given (for a module without a rule: what it returned)."""
        if site.is_fallback:
            out = site.original(*args, **kwargs)
            for index, x in enumerate(float_tensors(out)):
                if x.dim() > 0:
                    self.entries.append(Entry(site, x.shape, fingerprint(x), index))
            return out
        lead = site.lead(args, kwargs)
        if lead is None or lead.dim() == 0:
            raise RowOwnershipError(f"{site.name} was called without a tensor that has rows")
        index = len(self.entries)
        self.entries.append(Entry(site, lead.shape, fingerprint(lead)))
        out = site.original(*args, **kwargs)
        if index == self.disturb:
            out = out.clone()
            out[self.row] += 1.0 + out[self.row].abs().max()
        if self.expand is not None and index in self.expand[0]:
            batched = lead.shape[0] == 1
            out = (out if batched else out.unsqueeze(0)).expand(self.expand[1], *out.shape[1 if batched else 0 :])
        return out


class Ownership:
    """Finds and remembers the layout of every observed call."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], capture: Capture, check: bool) -> None:
        """``check=False`` takes the user's word that the leading dimension is the sample."""
        self.model, self.forward, self.capture, self.check = model, forward, capture, check
        self.known: dict[tuple[Site, Pattern, int], Layout] = {}
        self.verified_sites: set[tuple[Site, bool]] = set()
        self.guard = BufferGuard(model)

    def layout(self, site: Site, shape: torch.Size, n: int, root: Arguments | None) -> Layout:
        """Return the layout of a call, verifying the model's forward if this pattern of shapes is new."""
        if n == 1:
            return "rows"
        key = (site, pattern_of(shape, n), min(n, 2))
        if key not in self.known:
            if not self.check:
                return by_shape(site, shape, n)
            found = self._verify(site, n, root)
            if key not in found:
                raise RowOwnershipError(
                    f"{site.name} was called with shape {tuple(shape)}, which the same forward did not show when it was "
                    "run again to verify the rows; its calls must depend on shapes only"
                )
            return found[key]
        return self.known[key]

    def verify_once(self, site: Site, n: int, root: Arguments | None) -> None:
        """Verify the forward that reaches a module without a rule, the first time."""
        if n > 1 and self.check and (site, True) not in self.verified_sites:
            self._verify(site, n, root)

    def _verify(self, site: Site, n: int, root: Arguments | None) -> dict[tuple[Site, Pattern, int], Layout]:
        if root is None:
            raise RowOwnershipError(
                f"{site.name} was called outside the forward of the model given to the Accountant, so its rows cannot be "
                "verified. Give the Accountant the module whose forward you call, or pass check_rows=False to vouch that "
                "the leading dimension of every module's input is the sample."
            )
        found, certain = self._examine(n, root)
        if certain:
            self.known.update(found)
            self.verified_sites.update((s, True) for s in self.capture.sites)
        return found

    def _record(self, arguments: Arguments, recorder: Recorder) -> tuple[list[Entry], list[Entry]]:
        """Run the model's forward without gradient or trace; return its observed calls and its outputs."""
        capture = self.capture
        micro, root = capture.micro, capture.root_call
        capture.recorder, capture.micro = recorder, None
        args, kwargs = arguments
        try:
            with (
                torch.no_grad(),
                forked_random(0, devices_of(self.model)),
                modes(self.model, None, batch_norm_eval=True),
                self.guard.hold(),
            ):
                out = self.forward(*args, **kwargs)
        finally:
            capture.recorder, capture.micro, capture.root_call = None, micro, root
        outputs = [Entry(None, x.shape, fingerprint(x) if x.dim() else x.new_zeros(0)) for x in float_tensors(out)]
        return recorder.entries, outputs

    def _examine(self, n: int, root: Arguments) -> tuple[dict[tuple[Site, Pattern, int], Layout], bool]:
        """Classify every call of one forward; the flag tells whether the exchange of a sample could be seen."""
        base, outputs = self._record(root, Recorder())
        broken = next((e for e in base if not bool(torch.isfinite(e.rows).all())), None)
        if broken is not None:
            name = broken.site.name if broken.site is not None and broken.site.name else "the model itself"
            raise RowOwnershipError(
                f"activations at {name} are not finite, so that it cannot be told which rows belong to which sample: the weights "
                "or the inputs of this first step have infinities or NaN. Begin from weights that are finite."
            )
        layouts: list[Layout | None] = [None] * len(base)
        seen = False
        for sample in sorted({0, n // 2, n - 1}):
            other = exchange_sample(root, n, sample)
            if other is None:
                continue
            seen = True
            moved_entries, _ = self._record(other, Recorder())
            if [(e.site, e.shape) for e in base] != [(e.site, e.shape) for e in moved_entries]:
                raise RowOwnershipError(
                    "the modules the forward calls change when one sample is exchanged; rows cannot be assigned to samples"
                )
            for i, (before, after) in enumerate(zip(base, moved_entries, strict=True)):
                layouts[i] = classify(before, moved_rows(before.rows, after.rows), n, sample) or layouts[i]
        known_rows = [i for i, x in enumerate(layouts) if x is not None]
        for i, entry in enumerate(base):
            if layouts[i] is None:
                layouts[i] = self._constant_layout(i, entry, n, root, (base, outputs), known_rows, seen)
        free = {i for i, x in enumerate(layouts) if x == "free"}
        if free:
            self._check_expansion(free, n, root, base, outputs)
        found: dict[tuple[Site, Pattern, int], Layout] = {}
        for entry, layout in zip(base, layouts, strict=True):
            assert layout is not None
            assert entry.site is not None
            key = (entry.site, pattern_of(entry.shape, n), min(n, 2))
            if found.setdefault(key, layout) != layout:
                raise RowOwnershipError(f"{entry.site.name} is called with rows laid out in two ways in one forward")
        if not seen:
            log.info("inrun: all samples of this batch are equal, rows will be verified at a later step")
        return found, seen

    def _constant_layout(
        self,
        index: int,
        entry: Entry,
        n: int,
        root: Arguments,
        plain: tuple[list[Entry], list[Entry]],
        known: list[int],
        seen: bool,
    ) -> Layout:
        """Decide about an input that no sample moves: disturb one row of the output and see whose rows move.

        Position indices of shape [t] with t = n look like one row per sample; a disturbed position moves all samples.
        """
        assert entry.site is not None
        if entry.output is not None:
            if seen:  # refused when gradient comes through it
                entry.site.shared_outputs.add(entry.output)
            return "rows"
        if entry.shape[0] != n:
            return "free"
        if not seen:
            return "rows"
        base, outputs = plain
        after, after_outputs = self._record(root, Recorder(disturb=index, row=0))
        pairs = [(base[i], after[i]) for i in known if i < len(after)]
        pairs += [(b, a) for b, a in zip(outputs, after_outputs, strict=True) if b.shape and b.shape[0] % n == 0]
        moved = [moved_rows(b.rows, a.rows) for b, a in pairs if a.shape == b.shape]
        moved = [m for m in moved if bool(m.any())]
        if not moved:
            raise RowOwnershipError(
                f"{entry.site.name} gets an input of shape {tuple(entry.shape)} that no sample changes, and nothing shows whether "
                f"its {n} rows are samples; call it with another leading size than the batch, or let the model return its logits"
            )
        return "rows" if all(_only_block(m, n, 0) for m in moved) else "free"

    def _check_expansion(self, free: set[int], n: int, root: Arguments, base: list[Entry], outputs: list[Entry]) -> None:
        """See that giving batch-free outputs one copy per sample changes no shape elsewhere."""
        names = ", ".join(sorted({site.name for i in free if (site := base[i].site) is not None}))
        try:
            after, after_outputs = self._record(root, Recorder(expand=(free, n)))
        except Exception as error:
            raise RowOwnershipError(_free_message(names, n) + f" (the expanded forward failed: {error})") from error
        same = len(after) == len(base) and all(
            a.site is b.site and a.shape == b.shape and not bool(moved_rows(b.rows, a.rows).any())
            for a, b in zip(after, base, strict=True)
        )
        if not same or [e.shape for e in after_outputs] != [e.shape for e in outputs]:
            raise RowOwnershipError(_free_message(names, n))


def _free_message(names: str, n: int) -> str:
    return (
        f"{names} runs once for the whole batch instead of once per sample, and its output cannot be given one copy per "
        f"sample without changing the model; call it with inputs of leading size {n} (for example position ids [n, t])"
    )


def by_shape(site: Site, shape: torch.Size, n: int) -> Layout:
    """Guess the layout from the shape alone (rows not verified)."""
    if shape[0] == n:
        return "rows"
    return "flat" if shape[0] % n == 0 and shape[0] > n else "free"


def moved_rows(before: Tensor, after: Tensor) -> Tensor:
    """Tell which rows differ beyond rounding."""
    scale = before.abs().mean() + 1e-300
    return (before - after).abs() > 1e-6 * (before.abs() + 1e-3 * scale)


def _only_block(moved: Tensor, n: int, sample: int) -> bool:
    block = moved.numel() // n
    others = torch.cat([moved[: sample * block], moved[(sample + 1) * block :]])
    return not bool(others.any())


def classify(entry: Entry, moved: Tensor, n: int, sample: int) -> Layout | None:
    """Return the layout of a call of which one sample's rows may move, None if nothing moved; raise if others did."""
    if not bool(moved.any()):
        return None
    size = entry.shape[0]
    if size % n == 0 and _only_block(moved, n, sample):
        return "rows" if size == n else "flat"
    assert entry.site is not None
    module = entry.site.module
    hint = ""
    if getattr(module, "batch_first", True) is False:
        hint = " It has batch_first=False: rebuild it with batch_first=True."
    raise RowOwnershipError(
        f"rows at {entry.site.name or 'the model itself'} ({type(module).__name__}) do not separate by sample: exchanging "
        f"one of {n} samples moved {int(moved.sum())} of {size} leading rows of a tensor of shape {tuple(entry.shape)}. "
        "Put the sample first (sequence-first, gathered, window-partitioned and packed tensors cannot be scored)." + hint
    )


def exchange_sample(root: Arguments, n: int, sample: int) -> Arguments | None:
    """Return the arguments with one sample replaced by another; None if all samples are equal."""
    leaves, structure = pytree.tree_flatten(root)
    mine = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]
    for source in (s for s in range(n) if s != sample):
        if any(m and not torch.equal(x[sample], x[source]) for x, m in zip(leaves, mine, strict=True)):
            swapped = [_with_row(x, sample, x[source]) if m else x for x, m in zip(leaves, mine, strict=True)]
            return pytree.tree_unflatten(swapped, structure)
    flipped = [_with_row(x, sample, x[sample].flip(0)) if m and x.dim() > 1 else x for x, m in zip(leaves, mine, strict=True)]
    changed = any(m and not torch.equal(x, y) for x, y, m in zip(leaves, flipped, mine, strict=True))
    return pytree.tree_unflatten(flipped, structure) if changed else None


def _with_row(x: Tensor, row: int, value: Tensor) -> Tensor:
    x = x.detach().clone()
    x[row] = value
    return x
