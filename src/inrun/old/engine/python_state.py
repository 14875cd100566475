"""What a forward leaves in plain Python, taken back after an extra one: counters, lists that it fills, batches that it consumes.

Modules keep more than buffers: numbers, the last hidden state, auxiliary losses in a list, a random generator of their own. Hooks
collect features in lists around them, and a forward may pop the labels out of the batch, or scale it in place. None of that
is a tensor of the model (``guards.py``), all of it would be there twice after a look at the rows. Everything is put back in place,
so that whoever holds a list goes on to hold the same one.

What cannot be seen from here stays as the forward left it: state in objects of other packages, in files, in C. Where that changes
what the model computes, two runs of one batch differ, and a look that fails says so (``checks/repeats.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import RowOwnershipError
from inrun.old.engine.quiet import Arguments, modules_of
from inrun.torch_private import forward_hooks, keep_version_counters, version_of

#: What every module holds: parameters, buffers, children and hooks, which have their own guards or are not a forward's business.
_OF_MODULES = frozenset(nn.Module().__dict__)
#: Cannot change, and hold nothing that can.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, NoneType, torch.dtype, torch.device, torch.Size, type, range, slice})
_CONTAINERS = (list, dict, set, deque)
#: The entries of longer containers are not opened.
_LONG = 1000
#: Steps between two whose passes hold everything, where not all do.
LOOK_AGAIN = 100
_GONE = object()


class PythonState:
    """Holds what the forwards of a model may change in Python; there is one for every kind of extra passes."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is known of the model yet."""
        self.model = model
        self._first: int | None = None
        #: Modules, and classes of modules, whose forwards or hooks were seen to leave something.
        self._leaving: set[Any] = set()

    @contextlib.contextmanager
    def hold(self, arguments: Arguments = ((), {}), step: int | None = None) -> Iterator[None]:
        """Put back what changes in the block, in the model, around its hooks and in ``arguments`` of its call.

        Passes that are rare hold everything. Those that every step has say which it is: at the first ones, and now and then
        later, they hold everything, and else what was seen to change.
        """
        everything = step is None or self._is_time(step)
        if not everything and not self._leaving:
            yield
            return
        found = _Snapshot()
        homes: dict[type, str | None] = {}
        for module in modules_of(self.model):
            kind = type(module)
            if kind not in homes:
                homes[kind] = None if _follows_others(kind) else _home(kind)
                if everything or kind in self._leaving:
                    found.kind(kind)
            if (home := homes[kind]) is not None and (everything or module in self._leaving):
                found.module(module, home)
        for name, value in (*enumerate(arguments[0], 1), *arguments[1].items()):
            found.argument(f"argument {name}", value)
        try:
            yield
        finally:
            self._leaving |= found.restore()

    def _is_time(self, step: int) -> bool:
        if self._first is None:
            self._first = step
        since = abs(step - self._first)
        return since < 4 or since & (since - 1) == 0 or since % LOOK_AGAIN == 0


class _Snapshot:
    """What was found before a pass, and how to go back to it. Everything is noted with the root by which it was found."""

    def __init__(self) -> None:
        #: By identity; what is in here lives as long.
        self._seen: dict[int, Any] = {}
        self._root: Any = None
        #: With how many names there were in all, and those that are left alone.
        self._namespaces: list[tuple[Any, dict[str, Any], dict[str, Any], int, frozenset[str]]] = []
        self._containers: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Any, Tensor, int, Tensor]] = []
        #: Cells, slots, globals, attributes of classes: is it the same still? If not, this puts it back.
        self._bindings: list[tuple[Any, Callable[[], bool], Callable[[], Any]]] = []
        #: The argument of the model that is being opened, if any: all of it is the user's, whatever it is.
        self._argument: str | None = None

    # What a model has

    def module(self, module: nn.Module, home: str) -> None:
        """Note a module's own attributes, and what its hooks hold."""
        self._root = module
        self._namespace(module.__dict__, 2, home, _OF_MODULES)
        for hook in forward_hooks(module):
            if isinstance(hook, (FunctionType, MethodType, functools.partial)):
                self._value(hook, 3, "")
            else:
                self._object(hook, 2, _home(type(hook)), surely=True)
                self._value(vars(type(hook)).get("__call__"), 3, "")

    def kind(self, kind: type) -> None:
        """Note what the forward of a class of modules names, and what the class itself holds."""
        self._root = kind
        for cls in kind.__mro__:
            if _is_ours(cls.__module__):
                continue
            held = vars(cls)
            self._value(held.get("forward"), 2, _home(cls))
            for name, value in held.items():
                if not name.startswith("__") and (type(value) in _ATOMS or isinstance(value, _CONTAINERS)):
                    self._value(value, 1, _home(cls))
                    self._attribute(cls, name, value, setattr)

    def argument(self, title: str, value: Any) -> None:
        """Note an argument of the model, however it is wrapped."""
        self._argument, self._root = title, None
        self._value(value, 6, "")
        self._argument = None

    # What there is

    def _namespace(self, live: dict[str, Any], depth: int, home: str, without: frozenset[str] = frozenset()) -> None:
        saved = {name: value for name, value in live.items() if name not in without}
        self._namespaces.append((self._root, live, saved, len(live), without))
        for value in saved.values():
            if type(value) not in _ATOMS:
                self._value(value, depth, home)

    def _value(self, x: Any, depth: int, home: str) -> None:
        """Note anything; ``home`` is the package whose objects are opened."""
        if type(x) in _ATOMS or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if isinstance(x, Tensor):
            self._tensor(x)
        elif isinstance(x, _CONTAINERS):
            self._container(x, depth, home)
        elif isinstance(x, tuple):
            self._values(x, depth, home)
        elif isinstance(x, (FunctionType, MethodType, functools.partial)):
            if depth:
                self._function(x, depth - 1, home)
        elif not (_note_generator(x, self._bind) or isinstance(x, (nn.Module, type, ModuleType, BuiltinFunctionType))):
            self._object(x, depth, home)

    def _values(self, values: Any, depth: int, home: str) -> None:
        if depth and len(values) <= _LONG:
            for x in values:
                if type(x) not in _ATOMS:
                    self._value(x, depth - 1, home)

    def _container(self, x: Any, depth: int, home: str) -> None:
        self._containers.append((self._root, x, dict(x) if isinstance(x, dict) else list(x)))
        self._values(x.values() if isinstance(x, dict) else x, depth, home)
        if isinstance(x, dict) and type(x) is not dict and self._argument is not None:
            self._object(x, depth, home)  # outputs of transformers are dictionaries with attributes

    def _object(self, x: Any, depth: int, home: str, surely: bool = False) -> None:
        """Open an object whose attributes a forward may change: an argument's, or one of the model's own package."""
        if self._argument is not None and hasattr(type(x), "__next__"):
            raise RowOwnershipError(
                f"the model was called with an iterator ({type(x).__name__}, {self._argument}): what the extra forwards of a look "
                "at the rows would take out of it cannot be put back, so that the rows cannot be verified. Give the model what it "
                "iterates over (a list, a tensor), or pass check_rows=False to vouch that the leading dimension of every module's "
                "input is the sample."
            )
        own = dataclasses.is_dataclass(x) or isinstance(x, SimpleNamespace) or _home(type(x)) == home
        if not depth or _is_ours(type(x).__module__) or not (surely or own or self._argument is not None):
            return
        held = getattr(x, "__dict__", None)
        if isinstance(held, dict):
            self._namespace(held, depth - 1, home)
        for cls in type(x).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and (value := getattr(x, name, _GONE)) is not _GONE:
                    self._value(value, depth - 1, home)
                    self._attribute(x, name, value, object.__setattr__)

    def _function(self, f: Any, depth: int, home: str) -> None:
        """Note what a function holds: of partial ones arguments, of methods the object, cells, and globals that it names."""
        if isinstance(f, functools.partial):
            self._value(f.func, depth + 1, home)
            self._values((*f.args, *f.keywords.values()), depth + 1, home)
        elif isinstance(f, MethodType):
            self._value(f.__func__, depth + 1, home)
            if isinstance(f.__self__, nn.Module):
                self._namespace(f.__self__.__dict__, depth, _home(type(f.__self__)), _OF_MODULES)
            elif id(f.__self__) not in self._seen:
                self._seen[id(f.__self__)] = f.__self__
                self._object(f.__self__, depth + 1, _home(type(f.__self__)), surely=True)
        elif not _is_ours(f.__module__ or ""):
            home = (f.__module__ or "").partition(".")[0]
            self._values((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()), depth + 1, home)
            if f.__dict__:
                self._namespace(f.__dict__, depth, home)
            for cell in f.__closure__ or ():
                self._cell(cell, depth, home)
            for name in _names(f.__code__) & f.__globals__.keys():
                self._global(f.__globals__, name, depth, home)

    def _cell(self, cell: CellType, depth: int, home: str) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return
        self._value(value, depth, home)
        self._bind(lambda: cell.cell_contents is value, lambda: setattr(cell, "cell_contents", value))

    def _global(self, names: dict[str, Any], name: str, depth: int, home: str) -> None:
        value = names[name]
        if isinstance(value, (type, ModuleType)):
            return
        self._value(value, depth, home)
        if type(value) in _ATOMS or isinstance(value, Tensor):
            self._bind(lambda: names.get(name) is value, lambda: names.__setitem__(name, value))

    def _tensor(self, x: Tensor) -> None:
        """Note the content of a tensor that is nobody else's business: parameters have their guards."""
        whole = type(x) is Tensor and x.layout is torch.strided and not (x.is_inference() or x.is_meta)
        if whole and (x.grad_fn is None or self._argument is not None):  # graphs count what is written to others
            self._tensors.append((self._root, x, version_of(x), x.detach().clone()))

    def _attribute(self, owner: Any, name: str, value: Any, put: Callable[[Any, str, Any], None]) -> None:
        self._bind(lambda: getattr(owner, name, _GONE) is value, lambda: put(owner, name, value))

    def _bind(self, same: Callable[[], bool], restore: Callable[[], Any]) -> None:
        self._bindings.append((self._root, same, restore))

    # And back

    def restore(self) -> set[Any]:
        """Put everything back that is not as it was; return the roots by which it was found."""
        changed = set()
        for root, live, saved, count, without in self._namespaces:
            if len(live) != count or not all(map(operator.is_, map(live.get, saved), saved.values())):
                changed.add(root)
                for name in live.keys() - saved.keys() - without:
                    del live[name]
                live.update(saved)
        for root, container, content in self._containers:
            if not _same(container, content):
                changed.add(root)
                _refill(container, content)
        for root, same, put_back in self._bindings:
            if not same():
                changed.add(root)
                put_back()
        for root, x, version, content in self._tensors:
            if version_of(x) != version or not torch.equal(x, content):
                changed.add(root)
                with torch.no_grad(), keep_version_counters([x]):  # bit for bit what graphs have saved
                    x.copy_(content)
        return changed - {None}


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held, without comparing them."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(map(operator.is_, container, content)) and all(map(operator.is_, container.values(), content.values()))
    if isinstance(container, set):
        return container.issuperset(content)
    return all(map(operator.is_, container, content))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in content.items():
            container[key] = value
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _note_generator(x: Any, note: Callable[[Callable[[], bool], Callable[[], Any]], None]) -> bool:
    """Note a random generator's state; whether it is one."""
    numpy = sys.modules.get("numpy")
    if isinstance(x, torch.Generator):
        state: Any = x.get_state()
        note(lambda: torch.equal(x.get_state(), state), lambda: x.set_state(state))
    elif isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        state = x.getstate()
        note(lambda: x.getstate() == state, lambda: x.setstate(state))
    elif numpy is not None and isinstance(x, numpy.random.Generator):
        bits, state = x.bit_generator, x.bit_generator.state
        note(lambda: False, lambda: setattr(bits, "state", state))
    elif numpy is not None and isinstance(x, numpy.random.RandomState):
        state = x.get_state()
        note(lambda: False, lambda: x.set_state(state))
    else:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names outside of itself that a function, and those inside it, may mean."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _home(cls: type) -> str:
    """Return the outermost package of a class."""
    return cls.__module__.partition(".")[0]


def _follows_others(cls: type) -> bool:
    """Whether a module is a wrapper whose state follows the other processes, or the compiler."""
    wrappers = ("torch.nn.parallel", "torch.distributed.fsdp.fully_sharded", "torch._dynamo")
    return any(c.__module__.startswith(wrappers) for c in cls.__mro__)


def _is_ours(module: str) -> bool:
    """Whether code is of torch or of this engine, neither of which leaves anything in a forward of the user's."""
    return module.startswith(("torch.", "inrun.old.engine", "inrun.old.layers", "builtins"))
