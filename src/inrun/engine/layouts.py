"""The layouts of taps over a run: read from the graph where they are new, remembered where they are not."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.rows import RowProbe, Samples
from inrun.errors import IdsError, RowOwnershipError
from inrun.layers.checkpoints import no_reentry, no_trace
from inrun.layers.layout import UNREAD, Layout, tensors_in
from inrun.layers.tap import Tap
from inrun.layers.tape import Tape
from inrun.torch_private import is_compiled

log = logging.getLogger("inrun")
#: A tap's layout is believed for new shapes once it was read for so many.
SEEN = 3


class Hook:
    """A hook that calls a method of an object while that lives. In a copy or pickle of the model it does nothing."""

    def __init__(self, owner: Any = None, method: str = "") -> None:
        self._owner, self._method = None if owner is None else weakref.ref(owner), method

    def __call__(self, *args: Any) -> None:
        """Call the method."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> Any:
        """Return a hook that does nothing."""
        return Hook, ()


class Layouts:
    """Hooks on the model note its inputs and outputs; :meth:`find` reads what is not known when a backward begins."""

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        self.tape, self.model = tape, model
        self._reentry = contextlib.ExitStack()
        self.samples = Samples(0)
        #: By tap: the name of its layout, and the shapes it was read for.
        self._names: dict[Any, tuple[str, set[Any]]] = {}
        self._made: dict[Any, Layout | None] = {}
        #: Taps that nothing reached, of this microbatch; and keys of those that the loss did not reach either.
        self._unread: set[Tap] = set()
        self._dead: set[Any] = set()
        self._outputs: list[Tensor] = []
        self.fresh = True
        self._hooks: list[Any] = []
        self._told = False

    def begin(self, samples: Samples, fresh: bool) -> None:
        """Begin a microbatch; ``fresh`` reads all layouts again."""
        if samples.documents is not None or samples != self.samples:
            self._made.clear()
        self.end()
        self.samples, self.fresh = samples, fresh
        self._reentry.enter_context(no_reentry())
        # Between microbatches the model has no hooks of ours: what is compiled of it then does not know of them.
        self._hooks = [
            self.model.register_forward_pre_hook(Hook(self, "_called"), with_kwargs=True),
            self.model.register_forward_hook(Hook(self, "_returned")),
        ]
        if fresh and not self._told and any(is_compiled(m) for m in self.model.modules()):
            self._told = True
            log.info("the model is compiled: it runs eagerly inside scored steps, and compiled everywhere else")

    def end(self) -> None:
        """Let go of the graph, and remove the hooks."""
        self._reentry.close()
        self._outputs, self._unread = [], set()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.tape.active:
            self._check_sizes(args, kwargs)
            self.tape.tensors.take_inputs((args, kwargs))

    def _check_sizes(self, args: Any, kwargs: Any) -> None:
        """Raise where nothing that the model is given can have a row per id."""
        n, documents = self.samples.n, self.samples.documents
        shapes = [t.shape for t in tensors_in((args, kwargs)) if t.dim() > 0]
        if n <= 1 or not shapes:
            return
        if documents is not None and not any(s[:2] == documents.shape or s[0] == documents.numel() for s in shapes):
            raise IdsError(
                f"the sample ids have shape {tuple(documents.shape)}, one per position, and the model was called with tensors of "
                f"{', '.join(str(tuple(s)) for s in shapes[:5])}, none of which has these positions."
            )
        if documents is None and all(size % n for s in shapes for size in s[:2]):
            sizes = sorted({s[0] for s in shapes})
            raise IdsError(
                f"got {n} sample ids, and the model was called with tensors whose leading sizes are {sizes}. "
                "Give one id per row; repeat an id for rows of the same sample."
            )

    def _returned(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.tape.active and torch.is_grad_enabled():
            values = out if isinstance(out, (Tensor, dict, list, tuple)) else vars(out) if hasattr(out, "__dict__") else ()
            self._outputs += [t for t in tensors_in(values) if t.requires_grad and t.is_floating_point()]

    # Layouts

    def known(self, tap: Tap, again: bool = False) -> Layout | None:
        """Return the layout of a tap, if it was read before; ``again`` where the tap is one of a recomputation."""
        name, shapes = self._names.get(tap.key, ("", set()))
        if tap.key in self._dead and not self.fresh:
            return UNREAD
        if (self.fresh and not again) or not name or self.tape.tensors.moves.chosen:
            return None
        shape = (self.samples.n, tuple(tap.shape))
        if shape not in shapes and len(shapes) < SEEN:
            return None
        return self._named(name, tap)

    def _named(self, name: str, tap: Tap) -> Layout | None:
        key = (name, tuple(tap.shape))
        if key not in self._made:
            self._made[key] = next(
                (layout for n, layout, _ in self.samples.layouts(tap.shape) if n == name and _static(layout, self.samples)), None
            )
        return self._made[key]

    def find(self, taps: list[Tap]) -> None:
        """Read the layouts of all taps if one is not known."""
        outputs, self._outputs = self._outputs, []
        if not any(tap.layout is None for tap in taps):
            return
        before = {tap: tap.layout for tap in taps}
        probe = RowProbe(self.samples, [tap for tap in taps if tap.edge is not None], self._probing)
        try:
            names = probe.read(outputs)
        except RowOwnershipError:
            if all(bool(t.isfinite().all()) for t in outputs):
                raise
            for tap in probe.taps:
                tap.layout = UNREAD
            return
        for tap, name in names.items():
            old, shapes = self._names.get(tap.key, (name, set()))
            if name == "unread":
                self._unread.add(tap)
            if name in ("unread", "routed"):
                continue
            if before[tap] is None and old != name:
                shapes = set()
            self._names[tap.key] = (name, shapes | {(self.samples.n, tuple(tap.shape))})

    @contextlib.contextmanager
    def _probing(self) -> Iterator[None]:
        self.tape.probing = True
        try:
            with no_trace(self.model):
                yield
        finally:
            self.tape.probing = False

    def check(self, tap: Tap, b: Tensor) -> None:
        """Raise if gradient ``b`` arrives at a tap that nothing reached when its rows were read."""
        if tap.layout is UNREAD and self.samples.n > 0:
            self._dead.discard(tap.key)
            fitting = next((layout for _, layout, _ in self.samples.layouts(tap.shape)), None)
            if fitting is not None and not bool(b.isfinite().all()):
                tap.layout = fitting  # weights that are not finite show nothing, and the step will not be scored
                return
            raise RowOwnershipError(
                f"{tap.name} returns {tuple(tap.shape)} for {self.samples.n} samples, and which rows are whose is not known: the "
                "outputs of the model did not show it when they were read. Return from the model's forward what the loss is made "
                "of, and give the model its inputs, samples first. If the model is used in another way from this step on, run the "
                "step again."
            )

    def note_dead(self, taps: list[Tap]) -> None:
        """Remember taps that no gradient reached, neither from the outputs nor from the loss: they are not read again."""
        self._dead |= {tap.key for tap in taps if tap in self._unread and not tap.fired}


def _static(layout: Layout, samples: Samples) -> bool:
    """Return whether a layout follows from its name and the shape."""
    return layout.kind != "index" or samples.documents is not None
