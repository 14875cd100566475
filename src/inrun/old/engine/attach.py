"""What is put on the user's objects, and how it comes off again.

Observed modules get a subclass of their own class whose ``forward`` (or, for the model and for modules without a rule, whose
whole call, hooks and all) asks a slot first; parameters and optimizers get hooks. All of it refers to the engine weakly: a
model is never kept alive by an accountant that was forgotten, and copies of the model (``deepcopy``, ``pickle``) are plain.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inrun.old.engine.plan import Board, Desk
from inrun.old.engine.sites import Site
from inrun.torch_private import compiler_here, move_last

SLOT = "_inrun_slot"
READS = "_inrun_reads"
PLAIN = "_inrun_plain"
#: What Dynamo says, under fullgraph=True, of a module that must leave compiled code.
NO_RULE = (
    "inrun has no rule for this module, records its calls and runs it again, which cannot be compiled. Leave fullgraph out (the "
    "rest stays compiled), freeze its parameters, or build it from layers that have a rule (see accountant.coverage)"
)


class Listener(Protocol):
    """The engine, as what is attached to the user's objects sees it."""

    @property
    def model(self) -> nn.Module:
        """Return the model that is observed."""
        ...

    @property
    def called(self) -> nn.Module:
        """Return what the user calls: the model, or what torch.compile made of it."""
        ...

    def desk(self, site: Site) -> Desk:
        """Return what compiled code finds at an observed module."""
        ...

    def route(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of an observed module."""
        ...

    def read(self, site: Site, name: str, value: nn.Parameter) -> Tensor:
        """Hand out a parameter that a forward reads."""
        ...

    def begin_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> bool:
        """A call of the model itself begins, inside compiled code or not; return whether it is observed."""
        ...

    def end_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: bool) -> None:
        """An observed call of the model ends."""
        ...

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient was accumulated."""
        ...

    def before_optimizer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """An optimizer is about to step; return other arguments for it, if it must have them."""
        ...

    def after_optimizer(self, index: int) -> None:
        """An optimizer has stepped."""
        ...


class Slot:
    """What an observed module holds: who it is, and a weak way to the engine."""

    def __init__(self, site: weakref.ref[Site] | None, listener: weakref.ref[Any], desk: Desk) -> None:
        """Refer to the engine weakly; ``site`` is None for a model that has no parameters of its own."""
        self._site, self._listener, self.desk = site, listener, desk
        found = None if site is None else site()
        #: Whether its calls must leave compiled code.
        self.uncompiled = found is not None and not found.rule.compiles

    def route(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand a call to the engine; run it plainly if there is none any more.

        A copy of a module that took its attributes over, slot and all, is not the module that is observed.
        """
        listener = self._listener()
        site = None if listener is None or self._site is None else self._site()
        if listener is None or site is None or site.module is not module:
            return original(*args, **kwargs)
        return listener.route(site, original, args, kwargs)

    def begin_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> Listener | None:
        """Tell the engine that a call of the model itself begins; return whom to tell that it ends, if anyone."""
        listener: Listener | None = self._listener()
        if listener is None or (module is not listener.model and module is not listener.called):
            return None
        return listener if listener.begin_model(args, kwargs, compiled) else None


class ReadSlot:
    """What a module holds whose parameters are read: for which site, under which names."""

    def __init__(self, holder: nn.Module, site: weakref.ref[Site], names: dict[str, str], listener: weakref.ref[Any]) -> None:
        """Refer to the engine, and to the module itself, weakly."""
        self._holder, self._site, self._names, self._listener = weakref.ref(holder), site, names, listener

    def read(self, module: Any, name: str, value: nn.Parameter) -> Tensor:
        """Ask the engine what to hand out; plain parameters where there is none, and while a module is being compiled."""
        listener, site = self._listener(), self._site()
        if listener is None or site is None or name not in self._names or self._holder() is not module:
            return value
        if torch.compiler.is_compiling():
            return value
        found: Tensor = listener.read(site, self._names[name], value)
        return found


def _slot_of(module: Any) -> Slot | None:
    """Return the slot of a module; a copy may have the class and no slot."""
    return module.__dict__.get(SLOT)


class Observed:
    """Mixed into the class of every observed module. Copies and pickles are of the module's own class, without a slot."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the plain module."""
        plain = getattr(type(self), PLAIN)
        reduced = list(super().__reduce_ex__(protocol))
        if reduced[1] == (type(self),):  # the usual way to make an object, which insists on its own class
            reduced[:2] = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        reduced[0] = plain if reduced[0] is type(self) else reduced[0]
        reduced[1] = tuple(plain if x is type(self) else x for x in reduced[1])
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2] = {k: v for k, v in reduced[2].items() if k not in (SLOT, READS)}
        return tuple(reduced)


class ObservedForward(Observed):
    """Modules with a rule: their ``forward`` is observed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the slot."""
        slot, original = _slot_of(self), super().forward  # type: ignore[misc]
        if slot is None:
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():  # all that compiled code sees of the engine is a desk
            if slot.uncompiled and slot.desk.board.observing and torch.is_grad_enabled():
                return _route_uncompiled(slot, self, original, args, kwargs)
            return original(*args, **kwargs) if slot.uncompiled else slot.desk.run(self, original, args, kwargs)
        return slot.route(self, original, args, kwargs)


class ObservedCall(Observed):
    """Modules without a rule: the whole call is observed, hooks included, since all of it runs again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the slot."""
        slot, original = _slot_of(self), super().__call__  # type: ignore[misc]
        if slot is None or (torch.compiler.is_compiling() and not (slot.desk.board.observing and torch.is_grad_enabled())):
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _route_uncompiled(slot, self, original, args, kwargs)
        return slot.route(self, original, args, kwargs)


def _route_uncompiled(slot: Slot, module: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave compiled code for a module without a rule: its call is recorded, to be run again."""
    return torch.compiler.disable(slot.route, reason=NO_RULE)(module, original, args, kwargs)


class ObservedReads(Observed):
    """Modules that hold parameters which forwards read: what they hand out is observed."""

    def __getattr__(self, name: str) -> Any:
        """Ask the slot for parameters."""
        value = super().__getattr__(name)  # type: ignore[misc]
        slot = self.__dict__.get(READS) if isinstance(value, nn.Parameter) else None
        return value if slot is None else slot.read(self, name, value)


class ObservedModel(Observed):
    """The model itself: what runs before and after its call is the engine's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the slot."""
        if not isinstance(self, ObservedModel):  # compiled code remembers this method when the accountant is long gone
            return type(self).__call__(self, *args, **kwargs)
        slot = self.__dict__.get(SLOT)
        listener = None if slot is None else _outside()["begin"](slot, self, args, kwargs, callable(compiler_here()))
        if listener is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        failed = True
        try:
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
            failed = False
        finally:
            _outside()["end"](listener, args, kwargs, failed)
        return out


def _begin(slot: Slot, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> Listener | None:
    return slot.begin_model(module, args, kwargs, compiled)


def _end(listener: Listener, args: tuple[Any, ...], kwargs: dict[str, Any], failed: bool) -> None:
    listener.end_model(args, kwargs, failed)


@functools.cache
def _outside() -> dict[str, Any]:
    """Return what runs before and after the model, as functions that are never compiled, nor is what they call."""
    return {"begin": torch.compiler.disable(_begin), "end": torch.compiler.disable(_end)}


_classes: dict[tuple[type, ...], type] = {}


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class; what torch.compile returns would hand an assignment on to the module inside it."""
    object.__setattr__(module, "__class__", cls)


def observed_class(cls: type[nn.Module], kinds: tuple[type[Observed], ...]) -> type[nn.Module]:
    """Return the observed subclass of a module class, under its own name."""
    key = (cls, *kinds)
    if key not in _classes:
        # Of what belongs to modules of torch.nn itself, Dynamo takes every size to be fixed; those of probes are not.
        home = __name__ if cls.__module__.startswith("torch.") else cls.__module__
        body: dict[str, Any] = {"__module__": home, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, PLAIN: cls}
        if ObservedModel in kinds:
            # Not compiled itself, so that probes are made and rows verified before compiled code begins; what it calls is.
            body["__call__"] = torch.compiler.disable(ObservedModel.__call__, recursive=False)
        _classes[key] = type(cls.__name__, (*kinds, cls), body)
    return _classes[key]


class Attachment:
    """Everything that was put on the user's objects. It refers to them, and to the engine only weakly."""

    def __init__(self, model: nn.Module, sites: list[Site], parameters: list[nn.Parameter], listener: Listener) -> None:
        """Attach to modules and parameters."""
        self.listener = weakref.ref(listener)
        of_module = {site.module: site for site in sites}
        doors = [model] if listener.called is model else [model, listener.called]
        modules = [*doors, *(site.module for site in sites if site.module is not model)]
        #: Module, its site and desk if it has one, and what is mixed into its class.
        self._observed: list[tuple[nn.Module, weakref.ref[Site] | None, Desk, tuple[type[Observed], ...]]] = []
        for module in modules:
            site = of_module.get(module)
            whole = site is not None and (site.rule.replays or site.rule.reads)
            kinds: tuple[type[Observed], ...] = () if site is None else (ObservedCall if whole else ObservedForward,)
            reference = None if site is None else weakref.ref(site)
            desk = Desk(Board()) if site is None else listener.desk(site)
            self._observed.append((module, reference, desk, (ObservedModel, *kinds) if module in doors else kinds))
        self._holders = [
            (module, weakref.ref(site), names)
            for site in sites
            if site.rule.reads or site.read_outside
            for module, names in site.holders().items()
        ]
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._gradient_hook()) for p in parameters]
        self._step_hooks: list[tuple[torch.optim.Optimizer, Any]] = []
        self.attach_model()

    def attach_model(self) -> None:
        """Observe the model's modules (again)."""
        if self._swapped:
            return
        for module, site, desk, kinds in self._observed:
            self._swapped.append((module, type(module)))
            object.__setattr__(module, SLOT, Slot(site, self.listener, desk))
            _set_class(module, observed_class(type(module), kinds))
        for module, reading, names in self._holders:
            self._swapped.append((module, type(module)))
            object.__setattr__(module, READS, ReadSlot(module, reading, names, self.listener))
            _set_class(module, observed_class(type(module), (ObservedReads,)))

    def detach_model(self) -> None:
        """Leave the model's modules as they were."""
        for module, cls in reversed(self._swapped):
            _set_class(module, cls)
            module.__dict__.pop(SLOT, None)
            module.__dict__.pop(READS, None)
        self._swapped = []

    def attach_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Watch the optimizers' steps."""
        listener = self.listener
        for index, optimizer in enumerate(optimizers):

            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> tuple[Any, Any] | None:
                found = listener()
                return None if found is None else found.before_optimizer(index, args, kwargs)

            def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
                found = listener()
                if found is not None:
                    found.after_optimizer(index)

            self._step_hooks.append((optimizer, optimizer.register_step_pre_hook(before)))
            self._handles.append(optimizer.register_step_post_hook(after))

    def _gradient_hook(self) -> Callable[[Tensor], None]:
        listener = self.listener

        def hook(parameter: Tensor) -> None:
            found = listener()
            if found is not None:
                found.gradient_arrived(parameter)  # type: ignore[arg-type]

        return hook

    def go_last(self) -> None:
        """Put our step hooks behind those that others registered since, which may clip: ours must see what is used."""
        for optimizer, handle in self._step_hooks:
            move_last(optimizer, handle)

    def close(self) -> None:
        """Take everything off."""
        self.detach_model()
        for handle in (*self._handles, *(handle for _, handle in self._step_hooks)):
            handle.remove()
        self._handles, self._step_hooks = [], []
