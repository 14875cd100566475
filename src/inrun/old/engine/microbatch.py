"""What one backward leaves behind: probes, and what arrives in them.

Every number that a step needs of a backward comes out of it as the gradient of a leaf that is made here (see
``layers.seam``). A leaf for sums is made once per parameter; a leaf for factors once per call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.errors import CoverageError, StepError
from inrun.old import DeferredMemoryError
from inrun.old.engine.buffers import Buffers
from inrun.old.engine.directions import Asks
from inrun.old.engine.documents import Documents
from inrun.old.engine.sites import Scored, Site
from inrun.old.layers import (
    Ask,
    GradientShape,
    LayerRule,
    PackedReplay,
    Parts,
    RecordedCall,
    Replay,
    SketchPlan,
    from_bits,
    nbytes_of,
)
from inrun.torch_private import current_backward, unseen_by_modes, version_of

if TYPE_CHECKING:
    from inrun.old.engine.extras import Extras


@dataclass
class StepFlag:
    """Whether a step of the run is open, and whether something in it went wrong that the user may have caught."""

    open: bool = False
    spoiled: bool = False

    def raise_(self) -> None:
        """A step begins."""
        self.open, self.spoiled = True, False

    def lower(self) -> None:
        """It is over."""
        self.open = False

    def spoil(self) -> None:
        """Gradient of another step got into this one."""
        self.spoiled = True


@dataclass
class Allowance:
    """What one optimizer step keeps between backward and update, as its forwards tell it, and how much it may be."""

    limit: int | None
    method: str
    nbytes: int = 0

    def take(self, nbytes: int) -> None:
        """Count memory; raise before it is taken."""
        self.nbytes += nbytes
        if self.limit is not None and self.nbytes > self.limit:
            raise DeferredMemoryError(
                f'method="{self.method}" has to keep more than {self.nbytes / 1e6:,.0f} MB from the backward until the optimizer '
                f"steps, and deferred_memory allows {self.limit / 1e6:,.0f} MB. Raise it, take fewer samples per optimizer step, "
                'or take method="lookahead", which keeps nothing.'
            )


@dataclass(eq=False)
class Waiting:
    """Leaves of one call (or, where gradients may be added up, of all calls of a parameter) and what arrived in them."""

    title: str
    leaves: list[Tensor]
    #: By backward: the parts, with how often each had been written to when it arrived.
    arrived: dict[int, list[tuple[Tensor, int] | None]] = field(default_factory=dict)

    def take_in(self, place: int, backward: int) -> None:
        """Take what arrived out of its leaf, so that nothing is ever added into tensors that may be the user's."""
        part = self.leaves[place].grad
        assert part is not None
        self.leaves[place].grad = None
        self.arrived.setdefault(backward, [None] * len(self.leaves))[place] = (part, version_of(part))

    def parts(self) -> list[list[Tensor | None]]:
        """Return the parts of every backward that came by."""
        for held in self.arrived.values():
            if any(x is not None and version_of(x[0]) != x[1] for x in held):
                raise StepError(
                    f"the input or output gradient of {self.title} was overwritten between its backward and optimizer.step(), "
                    "where its contraction had to wait; give every microbatch a tensor of its own"
                )
        return [[None if x is None else x[0] for x in held] for held in self.arrived.values()]

    def forget(self) -> None:
        """Free what arrived."""
        self.arrived = {}
        for x in self.leaves:
            x.grad = None


class Kept(Waiting):
    """Gradients of one parameter that wait for a direction."""

    def __init__(
        self,
        scored: Scored,
        site: Site,
        rule: LayerRule,
        constants: Any,
        kind: type[GradientShape],
        leaves: list[Tensor],
        documents: Documents | None,
    ) -> None:
        """``kind`` is the shape they are kept in, ``leaves`` its parts'."""
        super().__init__(f"a {type(site.module).__name__}", leaves)
        self.scored, self.rule, self.constants, self.kind, self.documents = scored, rule, constants, kind, documents

    def shapes(self) -> list[GradientShape]:
        """Return the gradients, one shape per backward."""
        whole = [tuple(x for x in parts if x is not None) for parts in self.parts()]
        return [self.restore(parts) for parts in whole if len(parts) == len(self.leaves)]

    def restore(self, parts: tuple[Tensor, ...]) -> GradientShape:
        """Make the shape again from its parts, wherever they are."""
        shape = self.rule.restore(self.constants, self.kind, parts)
        return shape if self.documents is None else self.documents.gather(shape)


class KeptRows(Waiting):
    """Sketched rows of a parameter that one call touched, or touched most: segment sums and row numbers."""

    def __init__(self, scored: Scored, site: Site, leaves: list[Tensor], documents: Documents | None) -> None:
        """``leaves`` are for values ``[n, r, J]`` and rows ``[n, r]``."""
        super().__init__(f"a {type(site.module).__name__}", leaves)
        self.scored = scored
        #: Whether these are all rows of a look-up, and not the heaviest of a matrix.
        self.lookup = site.rule.sparse
        #: Rows of a look-up in packed documents are those of chunks: the document of each.
        self.owner = documents.owner if documents is not None and self.lookup else None

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Return row numbers ``[n, r]`` and values ``[n, r, J]``, one pair per backward."""
        return [(from_bits(bits), values) for values, bits in self.parts() if values is not None and bits is not None]


class Replayed(Waiting):
    """A call of a module without a rule: it runs again when its output gradients are in."""

    def __init__(
        self, site: Site, names: tuple[str, ...], call: RecordedCall, leaves: list[Tensor], documents: Documents | None
    ) -> None:
        """``names`` are the parameters that this call trains, ``leaves`` one per floating-point output."""
        super().__init__(f"a {type(site.module).__name__}", leaves)
        self.site, self.call, self.documents = site, call, documents
        self.scored = {name: site.scored[name] for name in names}

    def check_rows(self, n: int) -> None:
        """Raise if gradient came through an output that has no row per sample."""
        if self.call.turned != {place for place, turned in self.call.rule.turned.items() if turned}:
            raise StepError(
                f"{self.site.title} has no rule, and an output of it has its samples in the second dimension, which no look at the "
                "rows had shown; nothing was scored. It is known now: run this step again."
            )
        for held in self.arrived.values():
            for index, x in enumerate(self.call.with_samples_first([None if x is None else x[0] for x in held])):
                if x is not None and self.documents is not None:
                    self.documents.check_output(self.site, x)
                elif x is not None and not self.site.has_rows(index, x.shape, n):
                    names = ", ".join(s.name for s in self.scored.values())
                    raise CoverageError(
                        f"{names} cannot be scored: {self.site.title} has no rule, and gradient flows through its output of shape "
                        f"{tuple(x.shape)}, which has no row per sample (batch of {n}). Return per-sample outputs and take the "
                        "loss outside, or move the parameter into a small module of its own."
                    )

    def shapes(
        self, name: str, n: int, quietly: Callable[[], AbstractContextManager[None]], known: Collection[int] = ()
    ) -> dict[int, GradientShape]:
        """Return the gradients of one parameter by backward, without those of the backwards ``known``."""
        parts = [self.call.with_samples_first(held) for held in self.parts()]
        new = {k: held for k, held in zip(self.arrived, parts, strict=True) if k not in known}
        if self.documents is None:
            return {k: Replay(self.call, name, parts, n, quietly) for k, parts in new.items()}
        packing, unit = self.documents.packing, self.documents.unit
        return {k: PackedReplay(self.call, name, parts, packing, unit, quietly) for k, parts in new.items()}


class Microbatch:
    """The probes of one forward and backward, and what came of them."""

    def __init__(
        self,
        samples: Tensor | Documents,
        directions: Asks,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        allowance: Allowance,
        flag: StepFlag,
    ) -> None:
        """``samples`` are ids ``[n]`` of rows, or documents; ``columns`` is the number of directions; ``flag`` tells of steps."""
        self.documents = samples if isinstance(samples, Documents) else None
        self.ids: Tensor = samples.ids if isinstance(samples, Documents) else samples
        self.directions, self.columns, self.dtype, self.device = directions, columns, dtype, device
        self.buffers, self.allowance, self.flag = buffers, allowance, flag
        #: Its step has ended: gradient that still flows through it can be scored no more.
        self.over = False
        #: ⟨g_n, v⟩ arrives here: by parameter, ``[n, k]``, or ``[n, k, p]`` where the rows of the parameter stay apart.
        self.sums: dict[Scored, Tensor] = {}
        self.row_sums: dict[Scored, Tensor] = {}
        #: The same of several parameters that are used together, ``[parameters, n, k]``.
        self.joined: dict[tuple[Scored, ...], Tensor] = {}
        #: Sketches arrive here, ``[n, buckets]`` by parameter, and rows that are kept apart, call by call.
        self.sketches: dict[Scored, Tensor] = {}
        self.kept_rows: list[KeptRows] = []
        self.kept: list[Kept] = []
        self.replays: list[Replayed] = []
        #: Gradient that flowed past every rule, in a backward of a backward.
        self.past = torch.zeros((), requires_grad=True)
        #: Gradient at positions that are nobody's.
        self.nobody = torch.zeros((), device=device, requires_grad=True)
        #: Backwards in which something of a parameter arrived.
        self.backwards: dict[nn.Parameter, set[int]] = {}
        #: Parameters whose gradient came through tensors of less than single precision.
        self.coarse: dict[nn.Parameter, torch.dtype] = {}
        #: What is asked for beside contributions.
        self.extras: Extras | None = None
        self._self = weakref.ref(self)
        #: The one number that leaves of a kind are made of.
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._formed: dict[tuple[Scored, tuple[int, ...], torch.dtype], Kept] = {}

    @property
    def n(self) -> int:
        """Return the number of samples: rows, or documents."""
        return self.ids.numel()

    @property
    def rows(self) -> int:
        """Return the number of rows of the batch."""
        return self.n if self.documents is None else self.documents.packing.rows

    @property
    def groups(self) -> int:
        """Return how many groups of positions a rule sees: rows, or chunks of documents."""
        return self.n if self.documents is None else self.documents.packing.chunks

    # Leaves

    def _leaf(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a probe: a leaf of zeros that takes the memory of one number."""
        zero = self._zeros.get((dtype, device))
        with unseen_by_modes():
            if zero is None:
                zero = self._zeros[dtype, device] = torch.zeros((), dtype=dtype, device=device)
            return zero.expand(shape).requires_grad_()

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a probe."""
        return self._leaf(shape, dtype, self.device)

    def watched(self, made: Tensor, scored: tuple[Scored, ...], waiting: Waiting | None = None, place: int = 0) -> Tensor:
        """Note what arrives in a probe."""
        # Weakly: a leaf that held what holds it could not be freed, nor what arrived in it.
        held = None if waiting is None else weakref.ref(waiting)
        made.register_post_accumulate_grad_hook(functools.partial(_arrive, self._self, self.flag, scored, held, place))
        return made

    def _sum_leaf(self, s: Scored, by_rows: bool) -> Tensor:
        leaves = self.row_sums if by_rows else self.sums
        if s not in leaves:
            shape = (self.n, self.columns, s.parameter.shape[0]) if by_rows else (self.n, self.columns)
            leaves[s] = self.watched(self._leaf(shape, self.dtype, self.device), (s,))
        return leaves[s]

    def ask_joined(self, used: Iterable[tuple[str, Scored]], rule: LayerRule) -> tuple[tuple[Ask, ...], list[Tensor]] | None:
        """Tell what is wanted of a call where that is inner products alone: asks, and directions followed by one probe for all.

        ``used`` are the parameters, by name. None where something else is wanted of one of them: see :meth:`ask`.
        """
        directions = self.directions
        if self.extras is not None or self.documents is not None or not directions.only_contracts:
            return None
        names: list[str] = []
        scored: list[Scored] = []
        given: list[Tensor] = []
        for name, s in used:
            if not s.parameter.requires_grad or directions.is_zero(s):
                continue
            direction = directions.stream(s, rule.sparse)
            if direction is None or s.shards is not None or (directions.by_rows(s) and rule.rows_are_classes(name, s.parameter)):
                return None
            names.append(name)
            scored.append(s)
            given.append(direction.v)
        if not names:
            return (), []
        key = tuple(scored)
        leaf = self.joined.get(key)
        if leaf is None:
            leaf = self._leaf((len(key), self.n, self.columns), self.dtype, self.device)
            self.joined[key] = self.watched(leaf, key)
        given.append(leaf)
        return _contractions(tuple(names)), given

    def sums_of(self, s: Scored) -> list[Tensor]:
        """Return ⟨g_n, v⟩ of a parameter as far as it arrived, ``[n, k]`` each: they add up."""
        own = self.sums.get(s)
        found = [] if own is None or own.grad is None else [own.grad]
        for scored, leaf in self.joined.items():
            if leaf.grad is not None and s in scored:
                found.append(leaf.grad[scored.index(s)])
        return found

    def ask(
        self,
        site: Site,
        constants: Any,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        only: str | None = None,
        rule: LayerRule | None = None,
    ) -> tuple[tuple[Ask, ...], list[Tensor], dict[str, Tensor]]:
        """Tell what is wanted of a call: asks, directions followed by probes, and memory for what is kept formed.

        ``only`` asks for one parameter of the module, ``rule`` for what another rule than the module's own makes of it.
        """
        rule = rule or site.rule
        asks: list[Ask] = []
        directions: list[Tensor] = []
        probes: list[Tensor] = []
        buffers: dict[str, Tensor] = {}
        for name, s in site.active().items():
            if only not in (None, name):
                continue
            if not s.parameter.requires_grad:  # frozen for this use: it gets no gradient of it
                continue
            if self.extras is not None:
                more = self.extras.ask(self, site, rule, name, constants, inputs, dtype)
                asks, directions, probes = asks + more[0], directions + more[1], probes + more[2]
            if self.directions.is_zero(s):
                continue
            if dtype.itemsize < 4:
                self.coarse[s.parameter] = dtype
            direction = self.directions.stream(s, rule.sparse)
            sketch = self.directions.sketch(s)
            if sketch is not None:
                parts = self._sketched_as(rule, sketch.plan, inputs)
                leaves = self._sketch_leaves(s, site, parts)
                if direction is not None:
                    directions.append(direction.v)
                    leaves.insert(0, self._sum_leaf(s, by_rows=False))
                directions += [sketch.signs, sketch.weights]
                asks.append(Ask(name, contracts=direction is not None, sketch=sketch.plan, probes=len(leaves), shards=s.shards))
                probes += leaves
                continue
            if direction is not None:
                by_rows = self.directions.by_rows(s) and rule.rows_are_classes(name, s.parameter)
                asks.append(_contraction(name, by_rows) if s.shards is None else Ask(name, by_rows, shards=s.shards))
                directions.append(direction.v)
                probes.append(self._sum_leaf(s, by_rows))
                continue
            kind, parts = self.kept_as(rule, constants, name, s.parameter, inputs, dtype)
            key = (s, *parts[0])
            if kind.summable and key in self._formed:
                leaves = self._formed[key].leaves
            else:
                self.allowance.take(nbytes_of(parts))
                leaves = [self._leaf(*part, self.device) for part in parts]
                waiting = Kept(s, site, rule, constants, kind, leaves, self.documents)
                for place, x in enumerate(leaves):
                    self.watched(x, (s,), waiting, place)
                self.kept.append(waiting)
                if kind.summable:
                    self._formed[key] = waiting
                    with unseen_by_modes():
                        buffers[name] = self.buffers.next(s, *parts[0], self.device)
            asks.append(Ask(name, kept_as=kind, probes=len(leaves)))
            probes += leaves
        if self.documents is not None and asks:
            directions = [self.documents.places, self.documents.nobody, *directions]
            probes.append(self.nobody)
        return tuple(asks), [*directions, *probes], buffers

    def kept_as(
        self, rule: LayerRule, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[type[GradientShape], Parts]:
        """Tell as which shape and tensors the gradients of a parameter are kept."""
        if self.documents is None:
            return rule.kept_as(constants, name, parameter, inputs, dtype, self.n)
        return self.documents.packing.kept_as(rule, constants, name, parameter, inputs, dtype)

    def _sketched_as(self, rule: LayerRule, plan: SketchPlan, inputs: tuple[Tensor, ...]) -> Parts:
        if self.documents is None:
            return rule.sketched_as(plan, inputs, self.dtype, self.n)
        return self.documents.packing.sketched_as(rule, plan, inputs, self.dtype)

    def _sketch_leaves(self, s: Scored, site: Site, parts: Parts) -> list[Tensor]:
        """Return the probes of a sketch: buckets are added up over calls, rows are not."""
        leaves: list[Tensor] = []
        if len(parts) != 2:  # not only rows
            if s not in self.sketches:
                self.sketches[s] = self.watched(self._leaf(*parts[0], self.device), (s,))
            leaves.append(self.sketches[s])
            parts = parts[1:]
        if parts:
            made = [self._leaf(*part, self.device) for part in parts]
            waiting = KeptRows(s, site, made, self.documents)
            for place, x in enumerate(made):
                self.watched(x, (s,), waiting, place)
            self.kept_rows.append(waiting)
            leaves += made
        return leaves

    def ask_outputs(self, site: Site, names: tuple[str, ...], call: RecordedCall, outputs: list[Tensor]) -> list[Tensor]:
        """Return one probe per output of a module that will run again, for the parameters ``names``."""
        self.allowance.take(sum(x.nbytes for x in outputs))
        rounded = next((x.dtype for x in outputs if x.dtype.itemsize < 4), call.autocast[1] if call.autocast[0] else None)
        if rounded is not None:
            self.coarse.update({site.scored[name].parameter: rounded for name in names})
        leaves = [self._leaf(tuple(x.shape), x.dtype, x.device) for x in outputs]
        waiting = Replayed(site, names, call, leaves, self.documents)
        for place, x in enumerate(leaves):
            self.watched(x, tuple(waiting.scored.values()), waiting, place)
        self.replays.append(waiting)
        return leaves

    def arrive(self, scored: tuple[Scored, ...], backward: int) -> None:
        """Note that something of these parameters arrived in a backward."""
        for s in scored:
            self.backwards.setdefault(s.parameter, set()).add(backward)

    def note_backward(self, parameter: nn.Parameter, backward: int) -> None:
        """Note a backward in which a parameter got no gradient of anybody: a batch without rows."""
        self.backwards.setdefault(parameter, set()).add(backward)

    # What came of them

    def flowed_past(self) -> bool:
        """Whether gradient flowed past the rules, through a backward that was itself differentiated."""
        return self.past.grad is not None and float(self.past.grad) != 0.0

    def check_outputs(self) -> None:
        """Raise if gradient came through an output, of a module that runs again, that has no row per sample, or is nobody's."""
        for replayed in self.replays:
            replayed.check_rows(self.n)
        if self.documents is not None and self.nobody.grad is not None:
            self.documents.check_nobody(float(self.nobody.grad))

    def release(self) -> None:
        """Free everything; leaves that graphs still hold take no memory to speak of."""
        self.over = True
        for waiting in (*self.kept, *self.replays, *self.kept_rows):
            waiting.forget()
        for x in (
            *self.sums.values(),
            *self.row_sums.values(),
            *self.joined.values(),
            *self.sketches.values(),
            self.past,
            self.nobody,
        ):
            x.grad = None
        self.sums, self.row_sums, self.kept, self.replays, self._formed = {}, {}, [], [], {}
        self.sketches, self.kept_rows, self.joined = {}, [], {}


@functools.cache
def _contractions(names: tuple[str, ...]) -> tuple[Ask, ...]:
    """Ask for the inner products of several parameters: the same at every step."""
    return tuple(_contraction(name, False) for name in names)


@functools.cache
def _contraction(name: str, by_rows: bool) -> Ask:
    """Ask for the inner products of a parameter: the same at every call."""
    return Ask(name, by_rows)


def _arrive(
    owner: weakref.ref[Microbatch],
    flag: StepFlag,
    scored: tuple[Scored, ...],
    held: weakref.ref[Waiting] | None,
    place: int,
    probe: Tensor,
) -> None:
    """Note the gradient of a probe, right after it arrived."""
    micro = owner()
    if micro is None or micro.over:
        probe.grad = None
        if flag.open:
            flag.spoil()
            names = ", ".join(s.name for s in scored)
            raise StepError(
                f"gradient flows through a use of {names} that was made in an earlier step; its samples would not be "
                "scored. Run forward and backward inside the same step."
            )
        return
    backward = current_backward()
    micro.arrive(scored, backward)
    waiting = None if held is None else held()
    if waiting is not None:
        waiting.take_in(place, backward)
