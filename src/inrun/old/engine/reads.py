"""What happens when a forward reads a parameter: recorded, to see whose rows move, or scored."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.errors import RowOwnershipError, StepError
from inrun.old.engine.checks.examine import give_up
from inrun.old.engine.checks.look import unreadable
from inrun.old.engine.checks.recorder import Recorder
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.sites import Scored, Site
from inrun.old.layers import Ask, Call, LayerRule, Layout, Tapped
from inrun.old.layers.layout import SHARED, TURNED
from inrun.old.layers.read_gradients import LinearReadRule, LookUpRule, ReadRule, SpreadRule, TableRule, Way
from inrun.old.layers.reads import Root, Track, Tracked, UnreadableError, reading_of, roots_of
from inrun.old.layers.reads_convolved import ConvolutionReadRule, geometry_of
from inrun.old.layers.seam_reads import Beside, Multiplied, Spread, arranged, expanded
from inrun.torch_private import apply_as_it_is, current_backward

_spread, _linear, _looked_up, _convolved, _read = SpreadRule(), LinearReadRule(), LookUpRule(), ConvolutionReadRule(), ReadRule()
_table = TableRule()


class Verified(Protocol):
    """What looks at the rows have shown (``RowCheck``)."""

    def layout(self, site: Site, shape: torch.Size, n: int) -> Layout:
        """Return the layout of a call."""
        ...

    def reads(self, operation: Any, tracks: list[Track], shapes: tuple[Any, ...], n: int) -> None:
        """Take note of an operation on what is read."""
        ...


#: What is taken for the number of samples where these are documents: no dimension has it, so that nothing is told by a shape.
DOCUMENTS = 1 << 62


def samples_of(micro: Microbatch) -> int:
    """Return the number of samples by which shapes tell where parameters that are read meet them."""
    return micro.n if micro.documents is None else DOCUMENTS


def track(site: Site, name: str, parameter: Tensor, reader: Any) -> Tracked:
    """Hand out a parameter that is read."""
    return Tracked.of(Track.of(parameter, {Root(site, name): (parameter, None, True)}, reader))


def output_apart(site: Site, out: Tensor, copies: Tensor | None, reader: Any) -> Tracked:
    """Hand out what a layer made without any sample; ``copies``, one per sample, bring its gradient."""
    root = Root(site, f"the output of {site.name}", copies, object())
    if copies is not None:
        out = out.clone()  # the copies may be views of it, into which an operation in place must not write
    return Tracked.of(Track.of(out, {root: (out, None, True)}, reader))


def _crosses(track: Track, how: str) -> StepError:
    """Return what to raise where a tensor without samples goes into, or comes out of, a reentrant checkpoint."""
    names = ", ".join(r.name if r.call is not None else f"{r.site.name}.{r.name}".lstrip(".") for r in track.roots)
    return StepError(
        f"{names} (read, or made once for the whole batch) {how} a segment under reentrant activation checkpointing, where its "
        "gradient arrives summed over the samples; pass use_reentrant=False to torch.utils.checkpoint (transformers: "
        'gradient_checkpointing_kwargs={"use_reentrant": False}), or make it inside the segment that uses it'
    )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x @ weight if transposed else F.linear(x, weight, bias)


class RecordingReader:
    """Runs as the forward would, and notes what meets the samples."""

    aside = False

    def __init__(self, recorder: Recorder, n: int) -> None:
        """Note into ``recorder``."""
        self.recorder, self.n = recorder, n

    @property
    def alive(self) -> bool:
        """Whether the forward is still being recorded."""
        return not self.recorder.over

    def _meet(self, *tracks: Track | Tensor | None) -> None:
        """Note that parameters have met the samples."""
        self.recorder.met |= {(root.site, root.name) for t in tracks if isinstance(t, Track) for root in t.roots}

    def look_up(self, table: Track, rows: Tensor, padding: int | None) -> Tensor:
        """Look up, and disturb one sample's rows where that is wanted."""
        if table.made_apart is not None:
            raise UnreadableError(table, "a look-up")
        self._meet(table)
        return self.recorder.spread({root.site for root in table.roots}, table.plain[rows], 0, self.n, rows)

    def beside(self, real: Tensor, copied: Tensor, own: bool) -> Tensor:
        """Nothing runs backwards."""
        return copied

    def check(self, track: Track, operation: Any) -> None:
        """A forward of an autograd function, or one without gradient, is not followed."""
        if self.recorder.with_grad and not torch.is_grad_enabled():
            raise UnreadableError(track, operation)

    def leaves(self, track: Track, gradient: Tensor | None) -> None:
        """Nothing runs backwards."""

    def constant(self, track: Track, operation: Any, others: list[Tensor]) -> None:
        """Note them: no sample may move them."""
        self.recorder.note_constants(UnreadableError(track, operation), others)

    def decides(self, operation: Any, tracks: list[Track], shapes: tuple[Any, ...]) -> None:
        """Note it: the look that is being taken verifies it."""
        roots = roots_of(tracks)
        place = self.recorder.reads[roots]
        self.recorder.reads[roots] += 1
        self.recorder.readings.add(reading_of(operation, roots, shapes, self.n, place))

    def cannot_follow(self, problem: UnreadableError) -> None:
        """The look deals with it."""

    def spread(self, track: Track, dim: int, size: int, dims: int, met: Tensor | None = None) -> Tensor:
        """Expand, and disturb one sample's copy where that is wanted."""
        if track.made_apart is not None and len(track.roots) > 1:
            raise UnreadableError(track, "an operation, mixed with other parameters")
        sites = {root.site for root in track.roots}
        self._meet(track)
        return self.recorder.spread(sites, expanded(track.plain, dim, size, dims), dim, self.n, met)

    def linear(self, x: Tensor, weight: Track, bias: Track | Tensor | None, transposed: bool) -> Tensor:
        """Note whose rows ``x`` has."""
        if weight.made_apart is not None or (isinstance(bias, Track) and bias.made_apart is not None):
            raise UnreadableError(weight, F.linear)
        self._meet(weight, bias)
        for site in {root.site for root in weight.roots}:
            self.recorder.note(site, x)
        return _multiply(x, weight.plain, bias.plain if isinstance(bias, Track) else bias, transposed)

    def convolve(self, func: Any, x: Tensor, weight: Track, bias: Track | Tensor | None, options: dict[str, Any]) -> Tensor:
        """Note whose rows ``x`` has."""
        apart = [t for t in (weight, bias) if isinstance(t, Track) and t.made_apart is not None]
        if apart or geometry_of(weight.plain, options) is None:
            raise UnreadableError(weight, func)
        self._meet(weight, bias)
        for site in {root.site for root in weight.roots}:
            self.recorder.note(site, x)
        made: Tensor = func(x, weight.plain, bias.plain if isinstance(bias, Track) else bias, **options)
        return made


class ScoringReader:
    """Scores every use of the parameters that one microbatch reads."""

    def __init__(
        self, micro: Microbatch, rows: Verified, form: str, in_forward: Callable[[], bool], calls: dict[Any, Call]
    ) -> None:
        """Refer to the microbatch weakly: tracked tensors live as long as the graph. ``in_forward``: whether the model runs.

        ``calls`` are products as they were at other steps: most are the same.
        """
        self._micro, self.rows, self.form, self.n = weakref.ref(micro), rows, form, samples_of(micro)
        self.in_forward, self._calls = in_forward, calls
        self.aside = form == "project"

    def beside(self, real: Tensor, copied: Tensor, own: bool) -> Tensor:
        """Return ``real``, whose gradient goes to ``copied``, too."""
        if not copied.requires_grad:
            return real
        out: Tensor = apply_as_it_is(Beside, real, real, copied, own)
        return out

    def check(self, track: Track, operation: Any) -> None:
        """Refuse what only reentrant checkpoints do: run with gradient in the recorded forward, and without in this one."""
        if not torch.is_grad_enabled() and self.in_forward():
            raise _crosses(track, "is handed to")

    def leaves(self, track: Track, gradient: Tensor | None) -> None:
        """Refuse gradient that arrives summed over the samples, in a segment that a backward has recomputed."""
        if current_backward() != -1 and (gradient is None or bool(gradient.any())):
            raise _crosses(track, "leaves")

    def constant(self, track: Track, operation: Any, others: list[Tensor]) -> None:
        """The forward was recorded."""

    @property
    def alive(self) -> bool:
        """Whether the step is still open."""
        micro = self._micro()
        return micro is not None and not micro.over

    def look_up(self, table: Track, rows: Tensor, padding: int | None) -> Tensor:
        """Look up, and have the gradients of the rows."""
        out = F.embedding(rows, table.plain, padding) if padding is not None else table.plain[rows]
        sizes = (len(table.plain), padding)
        itself = all(function is None for _, function, _ in table.roots.values())
        kept = (sizes, _table) if itself else ((), _read)
        asks, asked, buffers, ways = self._ask({"weight": table}, (rows,), out.dtype, "look-up", *kept)
        if not asks:
            return out
        constants = ({name: way for name, (_, way) in ways.items()}, *sizes)
        call = Call(_looked_up, constants, self.n, asks)
        tapped: Tensor = apply_as_it_is(Tapped, out, call, buffers, self.micro.past, out, 1, rows, *asked)
        return tapped

    @property
    def micro(self) -> Microbatch:
        """Return the microbatch."""
        found = self._micro()
        assert found is not None
        return found

    def _ask(
        self,
        tracks: dict[str, Track],
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        form: str,
        constants: Any = (),
        rule: LayerRule = _read,
    ) -> tuple[tuple[Ask, ...], list[Tensor], dict[str, Tensor], dict[str, tuple[str, Way]]]:
        """Ask for every parameter behind ``tracks`` (by kind of use); names are made unique over modules.

        ``rule`` tells, with its ``constants``, as what gradients are kept.
        """
        asks: list[Ask] = []
        directions: list[Tensor] = []
        probes: list[Tensor] = []
        buffers: dict[str, Tensor] = {}
        ways: dict[str, tuple[str, Way]] = {}
        for kind, used in tracks.items():
            for root, way in used.roots.items():
                some, tensors, memory = self.micro.ask(root.site, constants, inputs, dtype, root.name, rule)
                if not some:
                    continue
                key = f"{kind} {len(ways)}"
                root.site.note_form(form)
                ways[key] = (kind, Way(*way))
                given = sum(ask.given for ask in some)
                asks += [dataclasses.replace(ask, name=key) for ask in some]
                directions += tensors[:given]
                probes += tensors[given:]
                if memory:
                    (buffers[key],) = memory.values()
        return tuple(asks), [*directions, *probes], buffers, ways

    def whole(self, track: Track) -> Tensor:
        """Hand out a parameter to a batch of one sample: all of its gradient is the sample's."""
        return self._spread(track, track.plain, (0, 1, track.plain.dim() + 1))[0]

    def decides(self, operation: Any, tracks: list[Track], shapes: tuple[Any, ...]) -> None:
        """Have it verified after the forward, unless a look has shown it."""
        self.rows.reads(operation, tracks, shapes, self.n)

    def cannot_follow(self, problem: UnreadableError) -> None:
        """Let the modules go through the fallback from now on; in the forward that runs it is too late for that."""
        give_up(problem.sites, str(problem), unreadable(problem, self.n))
        raise RowOwnershipError(
            f"{problem}, which no look at the rows had shown; nothing was scored. The module goes through the fallback from now "
            "on: run this step again."
        ) from problem

    def spread(self, track: Track, dim: int, size: int, dims: int, met: Tensor | None = None) -> Tensor:
        """Expand, and have the gradients of the copies."""
        if (root := track.made_apart) is not None:
            assert root.copies is not None
            function = track.roots[root][1]
            each = root.copies if function is None else torch.func.vmap(function)(root.copies)
            return arranged(each, dim, size, dims)
        # Beside the framework's own run, copies are for what is asked alone.
        return self._spread(track, track.plain.detach() if self.aside else track.plain, (dim, size, dims))

    def _spread(self, track: Track, plain: Tensor, place: tuple[int, int, int]) -> Tensor:
        """Expand ``plain``, the track's tensor, to ``place``: dimension of the samples, its size, and how many dimensions."""
        asks, asked, buffers, ways = self._ask({"weight": track}, (plain,), plain.dtype, "spread")
        if not asks:
            return expanded(plain, *place)
        call = Call(_spread, {name: way for name, (_, way) in ways.items()}, self.n, asks)
        out: Tensor = Spread.apply(call, buffers, self.micro.past, plain, place, *asked)
        return out

    def linear(self, x: Tensor, weight: Track, bias: Track | Tensor | None, transposed: bool) -> Tensor:
        """Multiply in the shared form, or as the framework does."""
        site = next(iter(weight.roots)).site
        layout = self.rows.layout(site, x.shape, self.n)
        if layout in SHARED:
            raise UnreadableError(weight, F.linear)
        tracks = {"weight": weight} | ({"bias": bias} if isinstance(bias, Track) else {})
        plain_bias = bias.plain if isinstance(bias, Track) else bias
        exact = x.dtype == weight.plain.dtype and x.dtype in (torch.float32, torch.float64)
        owned = self.form != "project" and exact and not torch.is_autocast_enabled(x.device.type)
        turn = layout if layout in TURNED else ""
        if owned:
            joined = self._linear_joined(tracks, transposed, turn)
            if joined is not None:
                call, given = joined
                if call is None:
                    return _multiply(x, weight.plain, plain_bias, transposed)
                product: Tensor = Multiplied.apply(call, {}, self.micro.past, x, weight.plain, plain_bias, *given)
                return product
        dtype = x.dtype if owned or not torch.is_autocast_enabled(x.device.type) else torch.get_autocast_dtype(x.device.type)
        asks, asked, buffers, ways = self._ask(tracks, (x,), dtype, "shared" if owned else "project")
        if not asks:
            return _multiply(x, weight.plain, plain_bias, transposed)
        call = Call(_linear, (transposed, ways), self.n, asks, turn=turn)
        if owned:
            out: Tensor = Multiplied.apply(call, buffers, self.micro.past, x, weight.plain, plain_bias, *asked)
            return out
        made = _multiply(x, weight.plain, plain_bias, transposed)
        tapped: Tensor = apply_as_it_is(Tapped, made, call, buffers, self.micro.past, made, 1, x, *asked)
        return tapped

    def _linear_joined(self, tracks: dict[str, Track], transposed: bool, turn: str) -> tuple[Call | None, list[Tensor]] | None:
        """Return call and tensors of a product whose weight and bias are parameters as they are, and only contracted."""
        used: list[tuple[str, Scored]] = []
        ways: dict[str, tuple[str, Way]] = {}
        for kind, track in tracks.items():
            (root, way), *others = track.roots.items()
            s = root.site.active().get(root.name)
            if others or way[1] is not None or s is None:
                return None
            root.site.note_form("shared")
            used.append((kind, s))
            ways[kind] = (kind, Way(*way))
        found = self.micro.ask_joined(used, _read)
        if found is None:
            return None
        asks, given = found
        if not asks:
            return None, []
        key = (*(s for _, s in used), transposed, turn)
        call = self._calls.get(key)
        if call is None or call.asks != asks or call.n != self.n:
            call = self._calls[key] = Call(_linear, (transposed, ways), self.n, asks, turn=turn, joined=True)
        return call, given

    def convolve(self, func: Any, x: Tensor, weight: Track, bias: Track | Tensor | None, options: dict[str, Any]) -> Tensor:
        """Convolve as the framework does, and have the gradients of weight and bias."""
        site = next(iter(weight.roots)).site
        if self.rows.layout(site, x.shape, self.n) not in ("rows", "flat"):
            raise UnreadableError(weight, func)
        made: Tensor = func(x, weight.plain, bias.plain if isinstance(bias, Track) else bias, **options)
        tracks = {"weight": weight} | ({"bias": bias} if isinstance(bias, Track) else {})
        asks, asked, buffers, ways = self._ask(tracks, (x,), made.dtype, "project")
        if not asks:
            return made
        call = Call(_convolved, (geometry_of(weight.plain, options), ways), self.n, asks)
        tapped: Tensor = apply_as_it_is(Tapped, made, call, buffers, self.micro.past, made, 1, x, *asked)
        return tapped
