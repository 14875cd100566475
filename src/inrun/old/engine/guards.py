"""Tensors of the model that an extra forward pass writes to, put back: buffers, and parameters where a forward updates them.

Contents are compared, since batch norm's kernel, and whoever writes through ``.data``, does not count the writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from inrun.errors import RowOwnershipError, ValidationError
from inrun.old.engine.quiet import modules_of
from inrun.torch_private import held_parameters, keep_version_counters, own_buffers, version_of

#: A tensor, as the place of its module in the tree and its name there.
Place = tuple[int, str]
#: Frozen parameters are copied around a pass up to so many bytes: codebooks and such, not the weights under an adapter.
MOST_FROZEN = 2**28


def _buffers(modules: list[nn.Module]) -> dict[Place, Tensor]:
    return {(i, k): b for i, m in enumerate(modules) for k, b in own_buffers(m).items() if b is not None}


def _parameters(modules: list[nn.Module]) -> dict[Place, Tensor]:
    """Return parameters that can be copied and compared: no shards, nothing quantised."""
    held = ((i, k, p) for i, m in enumerate(modules) for k, p in held_parameters(m).items())
    return {(i, k): p for i, k, p in held if type(p) is nn.Parameter and p.layout is torch.strided}


def _frozen(parameters: dict[Place, Tensor]) -> dict[Place, Tensor]:
    """Return those that do not require gradient, the small ones first, as far as copies of them are cheap."""
    found, room = {}, MOST_FROZEN
    for place, p in sorted(parameters.items(), key=lambda item: item[1].nbytes):
        if not p.requires_grad:
            room -= p.nbytes
            if room < 0:
                break
            found[place] = p
    return found


def _held(module: nn.Module, name: str) -> Tensor | None:
    found = own_buffers(module).get(name)
    return held_parameters(module).get(name) if found is None else found


def _names(model: nn.Module, modules: list[nn.Module], places: Iterable[Place]) -> str:
    names = {m: name for name, m in model.named_modules()}
    return ", ".join(sorted(f"{names[modules[i]]}.{k}".lstrip(".") for i, k in places))


def _put_back(owner: nn.Module, name: str, tensor: Tensor, copy: Tensor) -> None:
    with torch.no_grad(), keep_version_counters([tensor]):  # bit for bit what graphs have saved
        tensor.copy_(copy)
    if _held(owner, name) is not tensor:
        setattr(owner, name, tensor)


class _Guard:
    """Copies some tensors around a pass, puts back those that were written to, and remembers which ones a forward writes to."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the tensors of ``model``."""
        self.model = model
        #: By constellation of train and eval modes.
        self.written: dict[tuple[bool, ...], set[Place]] = {}

    def _choose(self, modules: list[nn.Module], written: set[Place] | None) -> tuple[dict[Place, Tensor], Collection[Place]]:
        """Return what is watched, and what of it is copied; ``written`` is None in the first pass of its kind."""
        raise NotImplementedError

    def _lost(self, names: str) -> Exception:
        """Return what to raise where something was written to that had not been copied."""
        raise NotImplementedError

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Restore what is written to in the block."""
        modules = modules_of(self.model)
        flags = tuple(m.training for m in modules)
        written = self.written.get(flags)
        watched, copied = self._choose(modules, written)
        copies = {place: watched[place].detach().clone() for place in copied}
        versions = {place: version_of(x) for place, x in watched.items()}
        finished = False
        try:
            yield
            finished = True
        finally:
            changed = {p for p, x in watched.items() if version_of(x) != versions[p] or _held(modules[p[0]], p[1]) is not x}
            changed |= {p for p, copy in copies.items() if p not in changed and not torch.equal(watched[p], copy)}
            for place in changed & copies.keys():
                _put_back(modules[place[0]], place[1], watched[place], copies[place])
            if finished or written is not None:  # a pass that was broken off has not shown all
                self.written[flags] = changed | (written or set())
            lost = changed - copies.keys()
            if lost:
                raise self._lost(_names(self.model, modules, lost))


class BufferGuard(_Guard):
    """Puts back what validation passes write to.

    All buffers, and frozen parameters, are copied around the first pass of every constellation of modes; later passes copy those
    alone that were written to. A buffer that is first written in a later pass is an error, since its old content is gone.
    """

    def __init__(self, model: nn.Module, always: bool = False) -> None:
        """``always`` copies all buffers, for passes in train mode, in which a forward may begin to write at any time."""
        super().__init__(model)
        self.always = always

    def _choose(self, modules: list[nn.Module], written: set[Place] | None) -> tuple[dict[Place, Tensor], Collection[Place]]:
        watched = _buffers(modules)
        if written is None:
            watched |= _frozen(_parameters(modules))
            return watched, watched.keys()
        if not written <= watched.keys():  # frozen parameters are looked for once
            watched |= {(i, k): x for i, k in written if (x := _held(modules[i], k)) is not None}
        return watched, watched.keys() if self.always else written & watched.keys()

    def _lost(self, names: str) -> Exception:
        return ValidationError(
            f"a validation pass wrote to {names}, which no pass before it had written to, so that what was there is lost: load it "
            "again, and let the forward write to buffers in train mode only (if self.training), or from the first pass on"
        )


class LookGuard(_Guard):
    """Puts back what looks at the rows write to: they run in train mode, in which a forward may begin to write at any time.

    Buffers and frozen parameters are copied around every run of a look. Parameters that are trained are around the first one of
    every constellation of modes, which takes no more memory than their gradients will, and later if they were written to.
    """

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        """Parameters are watched only where they are whole."""
        super().__init__(model)
        self.parameters = parameters

    def _choose(self, modules: list[nn.Module], written: set[Place] | None) -> tuple[dict[Place, Tensor], Collection[Place]]:
        buffers, parameters = _buffers(modules), _parameters(modules) if self.parameters else {}
        trained = {p for p, x in parameters.items() if x.requires_grad and (written is None or p in written)}
        return buffers | parameters, buffers.keys() | _frozen(parameters).keys() | trained

    def _lost(self, names: str) -> Exception:
        return RowOwnershipError(
            f"the model's forward writes to {names}, which it did not do when its rows were looked at before, so that what an "
            "extra forward wrote cannot be taken back: load the weights again, and change parameters behind optimizer.step() "
            "instead of in the forward"
        )
