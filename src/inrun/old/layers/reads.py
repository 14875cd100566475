"""Parameters that a forward reads instead of handing them to a layer: position tables, class tokens, attention's projections.

While a forward is scored, such a parameter is handed out as a :class:`Tracked` tensor. What is computed from it alone (slices,
reshapes, exponentials, other parameters) stays tracked, as a function q = f(p) of the parameter. Where q meets the samples, the
per-sample gradients at q are of a known kind:

*spread*   an elementwise operation broadcasts q over the samples, or ``expand`` does: q is given one copy per sample, so that
           autograd itself brings the gradient of every copy, d_n; then g_n = Jᵀ d_n with J = ∂f/∂p
*convolution*  q is the weight of a convolution of the samples (``reads_convolved.py``)
*linear*   q is the weight of a product with the samples: d_n = Σ_t b_nt a_ntᵀ, and ⟨g_n, v⟩ = ⟨d_n, J v⟩

Any other meeting raises :class:`UnreadableError`, and the module goes through the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.errors import CoverageError
from inrun.old.layers.layout import pattern_of
from inrun.torch_private import attention_body, version_of

T = torch.Tensor
#: Operations that broadcast; q may be given one copy per sample in each.
ELEMENTWISE = {
    *(T.add, T.sub, T.mul, T.div, T.__add__, T.__radd__, T.__sub__, T.__rsub__, T.__mul__, T.__rmul__, T.__truediv__),
    *(
        T.__rtruediv__,
        T.__iadd__,
        T.__imul__,
        T.add_,
        T.mul_,
        T.sub_,
        T.div_,
        T.true_divide,
        T.pow,
        T.__pow__,
        T.maximum,
        T.minimum,
    ),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.pow, torch.maximum, torch.minimum, torch.where),
    *(torch.addcmul, torch.lerp, T.where, T.lerp, T.addcmul, T.__rpow__, torch.multiply, torch.subtract),
}
#: Those that keep their result for their backward, into which nothing may write.
KEEPING = {T.pow, T.__pow__, T.__rpow__, torch.pow, F.scaled_dot_product_attention}
LINEAR = {F.linear}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
PRODUCTS = {torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm}
#: Operations that may give a tensor its rows.
REPEATING = {T.expand, T.repeat, T.expand_as, torch.broadcast_to, T.broadcast_to, torch.tile, T.tile, T.repeat_interleave}
#: Linear maps of one tensor, whose derivative is the map itself.
VIEWS = {
    *(T.__getitem__, T.view, T.reshape, T.transpose, T.permute, T.chunk, T.split, T.unsqueeze, T.squeeze, T.flatten, T.t),
    *(T.expand, T.repeat, T.narrow, T.select, T.unflatten, T.contiguous, T.clone, T.neg, T.__neg__, T.unbind, T.movedim),
    *(torch.transpose, torch.permute, torch.chunk, torch.split, torch.unsqueeze, torch.squeeze, torch.flatten, torch.reshape),
    *(T.T.__get__, T.mT.__get__),  # type: ignore[attr-defined]
}


#: Operations that only ask what a tensor is like.
ASKING = {
    *(T.shape.__get__, T.dtype.__get__, T.device.__get__, T.ndim.__get__, T.requires_grad.__get__),  # type: ignore[attr-defined]
    *(T.size, T.dim, T.numel, T.is_floating_point, T.is_contiguous, T.stride, T.__len__),
}
#: Operations whose results have no gradient.
CUT = {T.detach, T.data.__get__, T.grad.__get__}  # type: ignore[attr-defined, union-attr]
#: Parts of the names of operations that draw random numbers, which would draw others when they run again.
RANDOM = ("dropout", "bernoulli", "rrelu", "gumbel", "normal_", "uniform_")


def _writes(func: Any) -> bool:
    """Whether an operation writes into its first argument."""
    name = getattr(func, "__name__", "")
    named = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    return named or (name.endswith("_") and not name.endswith("__"))


def _cannot_follow(func: Any, args: Any) -> bool:
    """Whether an operation draws random numbers, or writes into a tensor that is not tracked."""
    name = getattr(func, "__name__", "")
    return any(part in name for part in RANDOM) or (_writes(func) and bool(args) and not isinstance(args[0], Tracked))


class UnreadableError(CoverageError):
    """A parameter meets the samples in an operation that no kind describes."""

    def __init__(self, track: Track, operation: Any) -> None:
        """Name the parameter and the operation."""
        super().__init__(f"{track.name} meets the samples in {getattr(operation, '__name__', operation)}")
        self.names = track.name
        self.sites = [root.site for root in track.roots]


@dataclass(frozen=True)
class Root:
    """A parameter that is read: whose it is, and its name there. Or an output that a layer made without any sample.

    ``copies`` of such an output, ``[n, *shape]``, bring its gradient sample by sample; ``call`` tells calls apart.
    """

    site: Any
    name: str
    copies: Tensor | None = field(default=None, compare=False)
    call: Any = None


@dataclass(frozen=True)
class Track:
    """A tensor that was computed from parameters alone."""

    plain: Tensor
    #: By parameter: the parameter, the tensor as its function (None for itself), and whether that is linear.
    roots: dict[Root, tuple[Tensor, Callable[[Tensor], Tensor] | None, bool]]
    reader: Reader
    #: How often the tensor, or one that shares its memory, had been written to when the functions described it.
    version: int

    @staticmethod
    def of(plain: Tensor, roots: dict[Root, tuple[Tensor, Callable[[Tensor], Tensor] | None, bool]], reader: Reader) -> Track:
        """Describe a tensor as it is now."""
        return Track(plain, roots, reader, version_of(plain))

    @property
    def overwritten(self) -> bool:
        """Whether it was written to behind its back: through another tensor that shares its memory."""
        return version_of(self.plain) != self.version

    @property
    def name(self) -> str:
        """Return the names of the parameters."""
        return ", ".join(root.name for root in self.roots)

    @property
    def made_apart(self) -> Root | None:
        """Return the output of a layer from which it was computed, if it was; nothing else may be in it then."""
        return next((root for root in self.roots if root.call is not None), None)


@dataclass(frozen=True)
class Held:
    """A tensor beside parameters, as it was when an operation took it: the operation runs again in the backward."""

    tensor: Tensor
    version: int

    @property
    def overwritten(self) -> bool:
        """Whether it was written to since."""
        return version_of(self.tensor) != self.version


#: One operation on what is read: what it is, of which parameters, and the patterns of all shapes by which its kind is chosen; and
#: how many operations on these there were before in the forward: a table may come to have the shape of another's samples.
Reading = tuple[Any, ...]


class Reader(Protocol):
    """The engine, as tracked tensors see it."""

    n: int
    #: Whether operations are left to the framework, bit for bit: copies meet the samples in one more run of them, beside it.
    aside: bool

    @property
    def alive(self) -> bool:
        """Whether the forward that it reads for is still being recorded or scored."""
        ...

    def leaves(self, track: Track, gradient: Tensor | None) -> None:
        """Take note that a backward begins at the tensor, with this gradient: a reentrant checkpoint has returned it."""
        ...

    def decides(self, operation: Any, tracks: list[Track], shapes: tuple[Any, ...]) -> None:
        """Take note that shapes decide what becomes of an operation: a look must have shown that they decide rightly."""
        ...

    def cannot_follow(self, problem: UnreadableError) -> None:
        """Take note that an operation is of no known kind; the error is raised unless another one is raised here."""
        ...

    def spread(self, track: Track, dim: int, size: int, dims: int, met: Tensor | None = None) -> Tensor:
        """Return the tensor with ``dims`` dimensions and ``size`` copies along ``dim``, one (or a block) per sample.

        ``met`` is the tensor of the samples, if there is one.
        """
        ...

    def beside(self, real: Tensor, copied: Tensor, own: bool) -> Tensor:
        """Return ``real``, whose gradient goes to ``copied``, too; ``own`` tells that it may be handed on as it is."""
        ...

    def look_up(self, table: Track, rows: Tensor, padding: int | None) -> Tensor:
        """Return table[rows], with rows of its own for every sample; row ``padding`` of the table gets no gradient."""
        ...

    def check(self, track: Track, operation: Any) -> None:
        """Raise where operations run without gradient although it was on when the parameter was read."""
        ...

    def constant(self, track: Track, operation: Any, others: list[Tensor]) -> None:
        """Take note that other tensors of an operation, which look as if they had samples, are taken to have none."""
        ...

    def linear(self, x: Tensor, weight: Track, bias: Track | Tensor | None, transposed: bool) -> Tensor:
        """Return x weightᵀ + bias (or x weight + bias where ``transposed``)."""
        ...

    def convolve(self, func: Any, x: Tensor, weight: Track, bias: Track | Tensor | None, options: dict[str, Any]) -> Tensor:
        """Return ``func(x, weight, bias, **options)``, a convolution."""
        ...


class Tracked(Tensor):
    """A tensor that knows from which parameters it was computed; after an operation in place, from which it is now."""

    track: Track

    @staticmethod
    def of(track: Track) -> Tracked:
        """Wrap; the tensor stays in the graph, so that what does not ask (autograd functions) trains all the same."""
        made = track.plain.as_subclass(Tracked)
        made.track = track
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the plain tensors, and keep track."""
        return operate(func, args, kwargs or {})


def _tracks(tree: Any) -> Iterator[Track]:
    for x in tree:
        if isinstance(x, Tracked):
            yield x.track
        elif isinstance(x, (list, tuple)):
            yield from _tracks(x)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    for x in tree:
        if isinstance(x, Tensor):
            if not isinstance(x, Tracked):
                yield x
        elif isinstance(x, (list, tuple)):
            yield from _plain_tensors(x)


def _mapped(tree: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a tree with every object of a kind changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(x, kind, change) for x in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(x, kind, change) for x in tree)
    if isinstance(tree, dict):
        return {k: _mapped(x, kind, change) for k, x in tree.items()}
    return tree


def _plain(tree: Any) -> Any:
    return _mapped(tree, Tracked, lambda x: x.track.plain)


def operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation with tracked arguments."""
    tracks = list(_tracks((*args, *kwargs.values())))
    try:
        return _operate(func, args, kwargs, tracks)
    except UnreadableError as problem:
        tracks[0].reader.cannot_follow(problem)
        raise


def _operate(func: Any, args: Any, kwargs: dict[str, Any], tracks: list[Track]) -> Any:
    reader = tracks[0].reader
    if func is F.multi_head_attention_forward:
        return attention_body()(*args, **kwargs)
    if not reader.alive:  # a tensor that was left on a module by a forward that is over
        return func(*_plain(args), **_plain(kwargs))
    reader.check(tracks[0], func)
    for track in tracks:
        if track.overwritten:
            raise UnreadableError(track, "an operation after a tensor that shares its memory was written to")
    if func is torch.autograd.backward:
        _note_leaving(args, kwargs)
    n = reader.n
    if func not in ASKING:
        reader.decides(func, tracks, tuple(_shapes((*args, *kwargs.values()), func in REPEATING)))
    met = [x for x in _plain_tensors((*args, *kwargs.values())) if sample_dim(x.shape, n) is not None]
    if met and func in LINEAR:
        return _linear(reader, func, args, kwargs)
    if met and func in PRODUCTS and isinstance(args[1], Tracked) and args[1].dim() == 2 and not isinstance(args[0], Tracked):
        return reader.linear(args[0], args[1].track, None, transposed=True)
    if met and func is F.scaled_dot_product_attention and not any(isinstance(x, Tracked) for x in args):
        return _elementwise(reader, func, args, kwargs, [args[0]])  # a mask is broadcast
    if met and func in PRODUCTS and isinstance(args[0], Tracked) and args[0].dim() == 2 and args[1].dim() > 2:
        return reader.linear(args[1].transpose(-1, -2), args[0].track, None, transposed=False).transpose(-1, -2)
    if met and func in CONVOLUTIONS:
        return _convolve(reader, func, args, kwargs)
    index = _index(func, args, kwargs, n)
    if index is not None:
        return reader.look_up(*index)
    if met and func in ELEMENTWISE and _broadcasts(tracks, met, n):
        return _elementwise(reader, func, args, kwargs, met)
    if _cannot_follow(func, args):
        raise UnreadableError(tracks[0], func)
    out = func(*_plain(args), **_plain(kwargs))
    written = any(track.overwritten for track in tracks)
    if written or _has_tensor(out):
        # What has gradient and is no parameter was made of samples, whatever its shape; what has none must not move with them.
        others = list(_plain_tensors((*args, *kwargs.values())))
        if any(x.requires_grad and not isinstance(x, torch.nn.Parameter) for x in others):
            raise UnreadableError(tracks[0], func)
        reader.constant(tracks[0], func, others)
    if written:
        return _overwrite(func, args, kwargs, out, tracks, reader)
    if func in REPEATING and len(tracks) == 1 and isinstance(out, Tensor):
        dim = _grown_dim(tracks[0].plain.shape, out.shape, n)
        if dim is not None:
            copies = reader.spread(tracks[0], dim, n, out.dim())
            rest = [1 if i == dim else size // copies.shape[i] for i, size in enumerate(out.shape)]
            tiles = func in (T.repeat, torch.tile, T.tile, T.repeat_interleave)
            copied = copies.repeat(rest) if tiles else copies.expand(out.shape)
            return reader.beside(out, copied, own=False) if reader.aside else copied
    return _derived(func, args, kwargs, out, tracks, reader)


def _shapes(tree: Any, sizes: bool) -> Iterator[Any]:
    """Yield the shapes of all tensors, with whether they are tracked, and sizes where an operation is told them."""
    for x in tree:
        if isinstance(x, Tensor):
            yield (True, x.track.plain.shape) if isinstance(x, Tracked) else (False, x.shape)
        elif isinstance(x, (list, tuple)):
            yield from _shapes(x, sizes)
        elif sizes and isinstance(x, int):
            yield x


def roots_of(tracks: list[Track]) -> tuple[Any, ...]:
    """Return the parameters behind some tensors."""
    return tuple((root.site, root.name) for track in tracks for root in track.roots)


def reading_of(operation: Any, roots: tuple[Any, ...], shapes: tuple[Any, ...], n: int, place: int) -> Reading:
    """Reduce an operation on what is read to what decides about it: parameters, and patterns of shapes."""
    patterns = tuple(pattern_of(torch.Size([x]), n) if isinstance(x, int) else (x[0], pattern_of(x[1], n)) for x in shapes)
    return (operation, roots, patterns, place)


def _note_leaving(args: Any, kwargs: dict[str, Any]) -> None:
    """Tell of tracked tensors at which a backward begins."""
    given = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | kwargs
    roots, gradients = given["tensors"], given.get("grad_tensors")
    roots = [roots] if isinstance(roots, Tensor) else list(roots)
    gradients = [gradients] if isinstance(gradients, Tensor) else list(gradients or [None] * len(roots))
    for x, gradient in zip(roots, gradients, strict=True):
        if isinstance(x, Tracked):
            x.track.reader.leaves(x.track, gradient)


def _has_tensor(out: Any) -> bool:
    return isinstance(out, Tensor) or (isinstance(out, (tuple, list)) and any(isinstance(x, Tensor) for x in out))


def _overwrite(func: Any, args: Any, kwargs: dict[str, Any], out: Any, tracks: list[Track], reader: Reader) -> Any:
    """Follow an operation that has written into its first argument: that is another function of the parameters from now on."""
    target = args[0]
    if not isinstance(target, Tracked) or any(t.overwritten for t in tracks if t.plain is not target.track.plain):
        raise UnreadableError(tracks[0], func)

    def in_place(first: Tensor, *rest: Any, **options: Any) -> Tensor:
        copy = first.clone()  # the function is run again, and must not write into what it is given
        func(copy, *rest, **options)
        return copy

    made = _one(in_place, args, kwargs, target.track.plain, tracks, reader, None)
    if not isinstance(made, Tracked):
        raise UnreadableError(tracks[0], func)
    target.track = made.track
    return None if out is None else target


def _derived(func: Any, args: Any, kwargs: dict[str, Any], out: Any, tracks: list[Track], reader: Reader) -> Any:
    """Track what was computed from tracked tensors alone."""
    if isinstance(out, (tuple, list)):
        made = [_one(func, args, kwargs, x, tracks, reader, place) for place, x in enumerate(out)]
        return type(out)(*made) if hasattr(out, "_fields") else type(out)(made)
    return _one(func, args, kwargs, out, tracks, reader, None)


def _one(func: Any, args: Any, kwargs: dict[str, Any], out: Any, tracks: list[Track], reader: Reader, place: int | None) -> Any:
    cut = torch.is_grad_enabled() and isinstance(out, Tensor) and not out.requires_grad
    if isinstance(out, Tensor) and out.is_complex() and not cut and func not in CUT:
        raise UnreadableError(tracks[0], func)  # has gradient, and functions of the parameter are followed in real numbers
    if not isinstance(out, Tensor) or not out.is_floating_point() or cut or func in CUT:
        return out
    roots: dict[Root, tuple[Tensor, Callable[[Tensor], Tensor] | None, bool]] = {}
    # Tensors may be written to later; what they were made of is kept as it is now.
    given, named = _mapped((args, kwargs), Tensor, lambda x: x.track if isinstance(x, Tracked) else Held(x, version_of(x)))
    for root, (parameter, _, _) in {k: v for t in tracks for k, v in t.roots.items()}.items():
        as_it_is = Held(parameter, version_of(parameter))

        def run(p: Tensor, root: Root = root, itself: Held = as_it_is) -> Tensor:
            if root.call is None and itself.overwritten:
                raise _written_since(tracks[0], "the parameter itself")

            def value(x: Track | Held) -> Tensor:
                if isinstance(x, Held):
                    if x.overwritten:
                        raise _written_since(tracks[0], f"a tensor of shape {tuple(x.tensor.shape)} beside it")
                    return x.tensor
                if root not in x.roots:
                    return _as_it_was(x)
                function = x.roots[root][1]
                return p if function is None else function(p)

            made = func(*_mapped(given, (Track, Held), value), **_mapped(named, (Track, Held), value))
            found: Tensor = made if place is None else made[place]
            return found

        linear = func in VIEWS and len(tracks) == 1 and tracks[0].roots[root][2]
        roots[root] = (parameter, run, linear)
    return Tracked.of(Track.of(out, roots, reader))


def _as_it_was(track: Track) -> Tensor:
    """Return a tensor as it was when its functions described it, whatever has been written into its memory since."""
    if not track.overwritten:
        return track.plain.detach()
    for root, (parameter, function, _) in track.roots.items():
        if function is not None and root.call is None:
            return function(parameter.detach())
    raise _written_since(track, "it")


def _written_since(track: Track, what: str) -> UnreadableError:
    """Return what to raise in a backward that must run an operation again on what is no longer there."""
    problem = UnreadableError(track, f"an operation after which {what} was written to in place")
    track.reader.cannot_follow(problem)
    return problem


def sample_dim(shape: torch.Size, n: int) -> int | None:
    """Return which dimension could be the samples': the first, the second, or the first in blocks; None for none."""
    if len(shape) == 0:
        return None
    if shape[0] == n:
        return 0
    if len(shape) > 1 and shape[1] == n:
        return 1
    return 0 if shape[0] > n and shape[0] % n == 0 else None


def _grown_dim(before: torch.Size, after: torch.Size, n: int) -> int | None:
    """Return the dimension along which a tensor got one copy per sample."""
    extra = len(after) - len(before)
    for dim in (0, 1):
        if dim < len(after) and after[dim] == n and (dim < extra or before[dim - extra] == 1):
            return dim
    return None


def _index(func: Any, args: Any, kwargs: dict[str, Any], n: int) -> tuple[Track, Tensor, int | None] | None:
    """Return table, rows and padding of a look-up that gives every sample rows of its own, None for any other operation."""
    padding = None
    if func is T.__getitem__:
        table, rows = args
    elif func is F.embedding:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        options = dict(zip(names, args, strict=False)) | kwargs
        rows, table, padding = options["input"], options["weight"], options.get("padding_idx")
        if options.get("max_norm") is not None or options.get("scale_grad_by_freq") or options.get("sparse"):
            return None  # another gradient than the sum over rows
    else:
        return None
    fits = isinstance(rows, Tensor) and not isinstance(rows, Tracked) and rows.dtype == torch.int64 and rows.dim() > 1
    fits = fits and isinstance(table, Tracked) and table.dim() == 2 and len(rows) == n
    return (table.track, rows, padding) if fits else None


def _broadcasts(tracks: list[Track], met: list[Tensor], n: int) -> bool:
    """Whether what was met may have samples by its shape and those of the parameters, or has gradient, so that it must have some.

    A parameter that is as large as what it meets has no place for copies. Then a mask of a weight, or a norm of its columns, looks
    like samples because n divides its size: it is taken for what no sample moves, which looks verify.
    """
    if any(x.requires_grad and not isinstance(x, torch.nn.Parameter) for x in met):
        return True
    widest = _widest(met)
    dim = sample_dim(widest.shape, n)
    assert dim is not None
    return all(_has_place(track.plain.shape, dim, widest.dim()) for track in tracks)


def _widest(met: list[Tensor]) -> Tensor:
    dims = max(x.dim() for x in met)
    return next(x for x in met if x.dim() == dims)


def _has_place(shape: torch.Size, dim: int, dims: int) -> bool:
    """Whether a tensor can be given copies along ``dim`` of a result of ``dims`` dimensions."""
    place = dim - (dims - len(shape))
    return len(shape) <= dims and (place < 0 or shape[place] == 1)


def _elementwise(reader: Reader, func: Any, args: Any, kwargs: dict[str, Any], met: list[Tensor]) -> Any:
    """Give every tracked argument one copy per sample."""
    widest = _widest(met)
    dims, dim = widest.dim(), sample_dim(widest.shape, reader.n)
    assert dim is not None

    def copies(x: Tracked) -> Tensor:
        if not _has_place(x.track.plain.shape, dim, dims):
            raise UnreadableError(x.track, func)
        return reader.spread(x.track, dim, widest.shape[dim], dims, widest)

    if not reader.aside or (_writes(func) and isinstance(args[0], Tracked)):
        return func(*_mapped(args, Tracked, copies), **_mapped(kwargs, Tracked, copies))
    given, named = _mapped((args, kwargs), Tensor, lambda x: copies(x) if isinstance(x, Tracked) else x.detach())
    if _writes(func):
        given = (given[0].clone(), *given[1:])
    with torch.random.fork_rng(devices={widest.device} - {torch.device("cpu")}):  # attention may drop out, the same twice
        copied = func(*given, **named)
    return reader.beside(func(*_plain(args), **_plain(kwargs)), copied, own=func not in KEEPING)


def _linear(reader: Reader, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(x, Tracked) or not isinstance(weight, Tracked) or weight.dim() != 2:
        raise UnreadableError(next(_tracks((x, weight, bias))), func)
    return reader.linear(x, weight.track, bias.track if isinstance(bias, Tracked) else bias, transposed=False)


def _convolve(reader: Reader, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    options = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = options.pop("input"), options.pop("weight"), options.pop("bias", None)
    if isinstance(x, Tracked) or not isinstance(weight, Tracked) or x.dim() != weight.dim():
        raise UnreadableError(next(_tracks((x, weight, bias))), func)
    return reader.convolve(func, x, weight.track, bias.track if isinstance(bias, Tracked) else bias, options)
