"""A forward that is run to see which rows move: what every observed module was given, as one number per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.old.engine.sites import Site
from inrun.old.layers import Packing, RecordedCall
from inrun.old.layers.layout import Pattern, pattern_of
from inrun.old.layers.reads import Held, Reading, Tracked, UnreadableError
from inrun.old.layers.trees import float_tensors
from inrun.torch_private import leaves_behind, version_of


@dataclass
class Entry:
    """One observed call: the shape of its leading tensor and one fingerprint per leading row."""

    #: None for an output of the model itself.
    site: Site | None
    shape: torch.Size
    rows: Tensor
    #: Which output, or which argument, of a module without a rule this is; None for the input of one with a rule.
    output: int | None = None
    argument: int | None = None
    #: One fingerprint per index of the second dimension, where the samples may be there.
    columns: Tensor | None = None


@dataclass
class Constant:
    """What met a parameter and is taken for the same whatever the samples are."""

    problem: UnreadableError
    shape: torch.Size
    print: Tensor
    #: Whether the forward wrote to it afterwards: what is read is made again from it in the backward.
    written: bool = False


@dataclass
class Meeting:
    """One use of a parameter that is read, in which it was given one copy per sample, since a shape said so."""

    sites: set[Site]
    #: One fingerprint per sample of the tensor that it met, and per index of the other dimension that has n; None for none.
    rows: Tensor | None = None
    others: Tensor | None = None


def fingerprint(x: Tensor) -> Tensor:
    """Return one number per leading row, different (almost surely) if any entry of the row differs."""
    flat = x.detach().reshape(x.shape[0], -1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32 if x.is_floating_point() else torch.float64)
    generator = torch.Generator().manual_seed(flat.shape[1])
    weights = torch.rand(flat.shape[1], generator=generator, dtype=flat.dtype).add_(0.5).to(x.device)
    return (flat @ weights).double()


def disturb(x: Tensor) -> None:
    """Change every entry by another amount: what is the same for all would vanish in a softmax or a norm."""
    generator = torch.Generator().manual_seed(x.numel())
    amounts = torch.rand(x.shape, generator=generator).add_(0.5).to(x.device, x.dtype)
    x += amounts * (1.0 + x.abs().max())


class Recorder:
    """Replaces scoring while a forward is run to see which rows move."""

    def __init__(
        self,
        disturb: int | None = None,
        row: int = 0,
        expand: tuple[set[int], int] | None = None,
        bare: frozenset[int] = frozenset(),
        disturb_copy: bool = False,
        packing: Packing | None = None,
        disturb_spread: int | None = None,
        with_grad: bool = False,
        apart: frozenset[tuple[Site, Pattern]] = frozenset(),
        samples: int = 0,
        only: int | None = None,
    ) -> None:
        """Optionally disturb row ``row`` of the output of call ``disturb``, or expand the outputs of some calls.

        A leading dimension of 1 is expanded as a batch of one, but for the calls ``bare``.

        ``disturb_copy`` disturbs the copy of sample ``row`` in every expanded output, ``disturb_spread`` a sample's copy of
        every parameter that is read and meets the samples by broadcasting (or in the meeting ``only`` alone). ``with_grad`` runs
        the forward with gradient. Outputs of calls ``apart`` are handed out as what is read is, since they are worked on before
        they meet the ``samples``. With a ``packing``, what has positions is noted position by position instead of row by row.
        """
        self.packing, self.apart, self.samples = packing, apart, samples
        self.disturb_spread, self.only, self.with_grad = disturb_spread, only, with_grad
        #: Tensors beside parameters that are read which no sample may move, and the problem if one does.
        self.constants: list[Constant] = []
        self._watched: list[tuple[Held, Constant]] = []
        #: Where parameters that are read were given one copy per sample.
        self.meetings: list[Meeting] = []
        #: All that was done with parameters that are read, as far as shapes decided about it.
        self.readings: set[Reading] = set()
        #: Parameters that were handed out to be read, and those of them that were seen to meet the samples.
        self.handed: dict[tuple[Site, str], Tensor] = {}
        self.met: set[tuple[Site, str]] = set()
        #: Those that the model's outputs depend on although they were not.
        self.unfollowed: list[tuple[Site, str]] = []
        #: How many operations there were, by parameters.
        self.reads: Counter[Any] = Counter()
        self.disturb_copy = disturb_copy
        #: The forward has ended.
        self.over = False
        self.entries: list[Entry] = []
        #: The last call of every module without a rule.
        self.replayable: dict[Site, RecordedCall] = {}
        self.disturb, self.row, self.expand, self.bare = disturb, row, expand, bare

    def call(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and note what it was given."""
        if site.rule.reads:
            return original(*args, **kwargs)
        if site.rule.replays:
            return self._call_without_rule(site, original, args, kwargs)
        tracked = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tracked)), None)
        if tracked is not None:
            if tracked.track.made_apart is None or len(args) != 1 or kwargs or site.rule.whole:
                raise UnreadableError(tracked.track, f"a {type(site.module).__name__}")
            return original(tracked.track.plain)  # what it makes has no samples either
        lead = site.lead(args, kwargs)
        if lead is None or lead.dim() == 0:
            raise RowOwnershipError(f"{site.name} was called without a tensor that has rows")
        index = len(self.entries)
        self.note(site, lead)
        out = original(*args, **kwargs)
        if index == self.disturb:
            out = out.clone()
            disturb(out[self.row])
        if self.expand is not None and index in self.expand[0]:
            batched = lead.shape[0] == 1 and index not in self.bare
            out = (out if batched else out.unsqueeze(0)).expand(self.expand[1], *out.shape[1 if batched else 0 :])
            if self.disturb_copy:
                out = out.clone()
                disturb(out[self.row])
        return out

    def is_apart(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the output of a call is to be handed out as what is read is."""
        if any(isinstance(x, Tracked) for x in args):
            return not (site.rule.replays or site.rule.reads)
        lead = site.lead(args, kwargs) if self.apart and not (site.rule.replays or site.rule.reads) else None
        return lead is not None and (site, pattern_of(lead.shape, self.samples)) in self.apart

    def _print(self, x: Tensor) -> Tensor:
        if self.packing is None or self.packing.features(x.shape) is None:
            return fingerprint(x)
        return fingerprint(self.packing.by_position(x))

    def note_written(self) -> None:
        """The forward has ended, and what it wrote to is not yet put back: note it where it stood beside parameters."""
        for held, constant in self._watched:
            constant.written = held.overwritten
        self._watched = []

    def note_reached(self, outputs: list[Tensor]) -> None:
        """See which parameters reach the outputs although they were not seen to meet the samples: no operation told of them."""
        missed = {key: p for key, p in self.handed.items() if key not in self.met and key[0].rule.reads}
        reached = leaves_behind(outputs) if missed else set()
        self.unfollowed = [key for key, p in missed.items() if p in reached]

    def close(self) -> None:
        """The forward has ended."""
        self.over = True

    def repeated(self) -> set[Site]:
        """Return the modules with a rule that were called more than once."""
        called = [
            entry.site for entry in self.entries if entry.site is not None and entry.output is None and entry.argument is None
        ]
        return {site for site, times in Counter(called).items() if times > 1}

    def note(self, site: Site, lead: Tensor) -> None:
        """Note what a call was given."""
        columns = fingerprint(lead.transpose(0, 1)) if site.rule.turns and lead.dim() > 1 else None
        self.entries.append(Entry(site, lead.shape, self._print(lead), columns=columns))

    def note_constants(self, problem: UnreadableError, tensors: list[Tensor]) -> None:
        """Note tensors that no sample may move."""
        made = [(x, Constant(problem, x.shape, fingerprint(x.reshape(1, -1)))) for x in tensors if x.numel()]
        self.constants += [constant for _, constant in made]
        self._watched += [(Held(x, version_of(x)), constant) for x, constant in made]

    def spread(self, sites: set[Site], copies: Tensor, dim: int, n: int, met: Tensor | None = None) -> Tensor:
        """Note that a parameter of some sites is given one copy (or block of copies) per sample; disturb one sample's.

        ``met`` is the tensor that it meets, with the samples in the same dimension.
        """
        index = len(self.meetings)
        self.meetings.append(_meeting(sites, met, dim, n))
        copies = copies.clone()  # always: other strides may round in another way
        if self.disturb_spread is None or self.only not in (None, index):
            return copies
        block = copies.shape[dim] // n
        disturb(copies.narrow(dim, self.disturb_spread * block, block))
        return copies

    def _call_without_rule(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note its arguments and what it returned."""
        call = site.rule.record(site.module, args, kwargs)
        out = original(*args, **kwargs)
        call.note_written()
        self.replayable[site] = call
        for place, x in enumerate(call.leaves):
            if isinstance(x, Tensor) and x.dim() > 0:
                # Masks have infinities.
                rows = self._print(torch.nan_to_num(x, 0.0, 1e6, -1e6) if x.is_floating_point() else x)
                self.entries.append(Entry(site, x.shape, rows, argument=place))
        for index, x in enumerate(float_tensors(out)):
            if x.dim() > 0:
                columns = fingerprint(x.transpose(0, 1)) if x.dim() > 1 else None
                self.entries.append(Entry(site, x.shape, self._print(x), output=index, columns=columns))
        return out


def _meeting(sites: set[Site], met: Tensor | None, dim: int, n: int) -> Meeting:
    if met is None:
        return Meeting(sites)
    others = met.movedim(1 - dim, 0) if met.dim() > 1 and met.shape[0] == met.shape[1] == n else None
    rows = fingerprint(met.movedim(dim, 0).reshape(n, -1))
    return Meeting(sites, rows, None if others is None else fingerprint(others))


def moved_rows(before: Tensor, after: Tensor) -> Tensor:
    """Tell which rows differ beyond rounding."""
    scale = before.abs().mean() + 1e-300
    return (before - after).abs() > 1e-6 * (before.abs() + 1e-3 * scale)
