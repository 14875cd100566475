"""Count what a scored training step asks of a device: operations, blocking host reads, host-to-device copies.

    python benchmarks/launches.py                                  "first" and "whole", counted on the CPU by a dispatch mode
    python benchmarks/launches.py --method step --method "paper first" --json
    python benchmarks/launches.py --device pretend --pretend /tmp/pretend_device

The model is a GPT of 4 layers and width 64 with 8 training and 2 validation rows, trained by AdamW (foreach) with norm clipping.
Counting starts when whole credit's window is full. "Floor" is plain training that also takes the gradient of the validation loss at
every step. "paper first" and "paper second" are the paper's own algorithms (``inrun.paper``).

Counts are deterministic, so they can be tests. The convention is the same on both devices:

- An operation is what a backend without kernels of its own for composite operations would launch. Composite operations count as the
  operations they consist of: a foreach call counts once per tensor, layer norm counts as batch norm and an affine map, attention
  counts as the products and the softmax it consists of.
- Views and uninitialized memory cost nothing.
- Host tensors cost nothing: AdamW keeps its step counts there. What else scoring keeps on the host counts on a CPU as if it were
  on the device; only the pretend device leaves it out.

A GPU runs a foreach call, a layer norm or an attention in one or a few kernels, so it launches less than this counts, with and
without scores.

On a CPU, ``.cpu()``, ``.tolist()`` and ``.numpy()`` are not operations, and no dispatch mode sees them. ``--device pretend`` sees
them, and it refuses operations that mix its tensors with CPU tensors. It takes a writable folder with ``pretend.py``, which
compiles a torch backend.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import inrun

# ---- What is counted

#: Memory without contents, and reads, which are counted apart.
FREE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_.source_Storage_storage_offset",
    "aten::_local_scalar_dense",
}
#: Composite operations that a CPU kernel short-cuts; on a device each is one operation.
ONE = {"aten::copy_", "aten::scalar_tensor"}
#: Operations whose output's size, or whose result in Python, depends on the data: the host waits for them.
DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::repeat_interleave.Tensor",
}
INDEXED = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


@dataclass
class Count:
    """What one step asked for."""

    operations: int = 0
    #: Times that the host waited for a number or for a copy.
    reads: int = 0
    #: Copies to the host that it does not wait for, and copies to the device (visible on the pretend device only).
    async_copies: int = 0
    to_device: int = 0
    #: Operations on host tensors, which a device never sees.
    on_host: int = 0
    by_name: collections.Counter[str] = field(default_factory=collections.Counter)


def _has(name: str, key: DispatchKey) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _composite_key(name: str, is_view: bool) -> DispatchKey | None:
    """Return the key of the kernel that a backend without one of its own would take, if that kernel calls other operations."""
    if _has(name, DispatchKey.CompositeImplicitAutograd):  # some, like reshape, return a view or a copy
        return DispatchKey.CompositeImplicitAutograd
    if is_view or name in FREE | ONE:
        return None
    if _has(name, DispatchKey.CompositeExplicitAutograd):
        return DispatchKey.CompositeExplicitAutograd
    # Structured operations have this key, too: there it allocates the output and calls the out variant.
    if _has(name, DispatchKey.CompositeExplicitAutogradNonFunctional) and not _has(name, DispatchKey.CPU):
        return DispatchKey.CompositeExplicitAutogradNonFunctional
    return None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class OperationCounter(TorchDispatchMode):
    """Count the operations of one step.

    Args:
        host: Tensors that a run on a device keeps on the host. On a CPU they cannot be told from the others.
        device: "cpu", or a device that counts operations itself; then only reads and copies are counted here.
    """

    def __init__(self, host: Iterable[Tensor] = (), device: str = "cpu") -> None:
        super().__init__()
        self.count, self.device = Count(), device
        self._host = {x.untyped_storage().data_ptr() for x in host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, or decompose it and count what it consists of."""
        kwargs, name = kwargs or {}, func.name()
        if self.device != "cpu":
            self._count_waits(name, args, kwargs)
            return func(*args, **kwargs)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        key = _composite_key(name, is_view)
        if key is not None:
            with self:
                return func._op_dk(key, *args, **kwargs)
        self._count_waits(name, args, kwargs)
        if name in FREE or is_view:
            pass
        elif any(map(self._is_host, _tensors(args))):
            self.count.on_host += 1
        else:
            self.count.operations += 1
            self.count.by_name[name] += 1
        return func(*args, **kwargs)

    def _is_host(self, x: Tensor) -> bool:
        if self.device != "cpu":
            return x.device.type == "cpu"
        return x.untyped_storage().data_ptr() in self._host

    def _count_waits(self, name: str, args: Any, kwargs: Any) -> None:
        """Count host reads and copies between host and device."""
        given = list(_tensors(args))
        if name == "aten::_local_scalar_dense" or name in DATA_DEPENDENT:
            self.count.reads += not all(map(self._is_host, given))
        elif name in INDEXED:
            # A mask is turned into positions, for which the host waits; one value for all of them is a masked_fill, though.
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
            one_value = len(args) > 2 and args[2].numel() == 1
            self.count.reads += masks and not one_value and not self._is_host(args[0])
        elif self.device != "cpu" and name in ("aten::copy_", "aten::_to_copy"):
            if name == "aten::copy_":
                to, source, waits = args[0].device, args[1].device, not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            else:
                source, waits = args[0].device, not kwargs.get("non_blocking")
                to = torch.device(kwargs.get("device") or source)
            if to.type == "cpu" and source.type != "cpu":
                self.count.reads += waits
                self.count.async_copies += not waits
            elif to.type != "cpu" and source.type == "cpu":
                self.count.to_device += 1


# ---- What is trained


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        """Take the width and the number of heads."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, t, width]``."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT with learned positions and a head of its own."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, context: int) -> None:
        """Take the sizes."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token, ``[n, t, vocab]``."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places.expand(ids.shape))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token; ``rows`` are ``[n, t + 1]``."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def next_token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the same for every row, ``[n]``."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1).mean(1)


# ---- Who scores


class Scores(Protocol):
    """What an accountant offers, and the paper's scorer in :func:`merged_step`."""

    def step(self, ids: Iterable[int]) -> AbstractContextManager[Any]:
        """Return the context of one training step."""

    def close(self) -> Any:
        """Detach."""


Loss = Callable[[nn.Module], Tensor]
#: The paper's algorithms by name, with the order of the theorem.
PAPER = {"paper first": 1, "paper second": 2}
#: Everything that scores.
METHODS = (*inrun.methods.METHODS, *PAPER)
#: Leaves out audits, so that every counted step is an ordinary one.
NO_AUDITS = {"audit_every": 1_000_000}


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, validation: Loss, method: str, **options: Any) -> Any:
    """Attach an accountant, or the paper's algorithms, whose steps run as :func:`merged_step` does."""
    if method in PAPER:
        return inrun.paper.GhostScorer(model, optimizer, order=PAPER[method])
    return inrun.Accountant(model, optimizer, validation, method=method, **options)


def merged_step(scorer: Any, losses: Callable[[Any], Tensor], rows: Any, held: Any, ids: range, update: Callable[[], None]) -> None:
    """Run one step of the paper: training and validation rows in one batch.

    Args:
        scorer: A ``GhostScorer``.
        losses: Returns one loss per row of a batch.
        rows: Training rows: a tensor, or a tuple of tensors (inputs and labels).
        held: Validation rows, likewise.
        ids: Ids of the training rows.
        update: Clips, steps and clears the gradients.
    """
    both = torch.cat([rows, held]) if isinstance(rows, Tensor) else tuple(torch.cat(pair) for pair in zip(rows, held, strict=True))
    n = len(ids)
    with scorer.step(ids, validation_rows=len(held if isinstance(held, Tensor) else held[0])):
        found = losses(both)
        scorer.loss(found[:n].mean(), found[n:].mean()).backward()
        update()


# ---- Counting


@dataclass(frozen=True)
class Setting:
    """The model, the batch, and which steps are counted."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 32
    vocab: int = 96
    batch: int = 8
    validation_rows: int = 2
    #: Steps before the first that is counted (whole credit's window is 44 steps at β₁ = 0.9), and counted steps.
    warm_up: int = 60
    steps: int = 22
    device: str = "cpu"


DEFAULT = Setting()


@dataclass
class Counted:
    """The counts of one contestant."""

    name: str
    each: list[Count]

    def ordinary(self, what: str) -> int:
        """Return the count of the median step."""
        return statistics.median_low(getattr(x, what) for x in self.each)

    def mean(self, what: str) -> float:
        """Return the mean count of a step."""
        return statistics.fmean(getattr(x, what) for x in self.each)

    def most(self, what: str) -> int:
        """Return the largest count of a step."""
        return max(getattr(x, what) for x in self.each)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        kinds = ("operations", "reads", "async_copies", "to_device", "on_host")
        counts = {k: {"ordinary": self.ordinary(k), "mean": self.mean(k), "most": self.most(k)} for k in kinds}
        names = dict(self.each[-1].by_name.most_common())
        return {"name": self.name, **counts, "each": [x.operations for x in self.each], "by_name_of_last": names}


def host_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that torch's optimizers keep on the host unless they are capturable or fused: step counts."""
    kept = [g for g in optimizer.param_groups if not g.get("capturable") and not g.get("fused")]
    states = (optimizer.state.get(p, {}) for g in kept for p in g["params"])
    return [s["step"] for s in states if isinstance(s.get("step"), Tensor)]


def _pretend() -> Any:
    """Return the module of the pretend device, which :func:`main` has imported."""
    return sys.modules["pretend"].ext


def count_steps(
    name: str,
    setting: Setting = DEFAULT,
    attach: Callable[[nn.Module, torch.optim.Optimizer, Loss], Scores] | None = None,
    validation_gradient: bool = False,
    merged: bool = False,
) -> Counted:
    """Train and count the steps after the warm-up.

    Args:
        name: What the result is called.
        setting: The model and the steps.
        attach: Attaches what scores to a model, its optimizer and a validation loss; None for plain training.
        validation_gradient: Take the gradient of the validation loss after every step, as the floor does.
        merged: Run steps as the paper does (:func:`merged_step`).
    """
    torch.manual_seed(0)
    s = setting
    model = GPT(s.vocab, s.width, s.layers, s.heads, s.context).to(s.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    parameters = list(model.parameters())
    draw = torch.Generator().manual_seed(1)
    held = torch.randint(0, s.vocab, (s.validation_rows, s.context + 1), generator=draw).to(s.device)

    def validation(model: nn.Module) -> Tensor:
        return next_token_loss(model, held)

    accountant: Any = None if attach is None else attach(model, optimizer, validation)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def train(number: int, rows: Tensor) -> None:
        ids = range(number * s.batch, (number + 1) * s.batch)
        if merged:
            merged_step(accountant, lambda both: next_token_losses(model, both), rows, held, ids, update)
            return
        with nullcontext() if accountant is None else accountant.step(ids):
            next_token_loss(model, rows).backward()
            update()
        if validation_gradient:
            torch.autograd.grad(validation(model), parameters)

    each = []
    with sdpa_kernel(SDPBackend.MATH):
        for number in range(s.warm_up + s.steps):
            rows = torch.randint(0, s.vocab, (s.batch, s.context + 1), generator=draw).to(s.device)
            if number < s.warm_up:
                train(number, rows)
                continue
            if s.device != "cpu":
                _pretend().counts(), _pretend().ops()
            with OperationCounter(host_tensors(optimizer), s.device) as counter:
                train(number, rows)
            if s.device != "cpu":
                counter.count.operations = _pretend().counts()[0]
                counter.count.by_name = collections.Counter(_pretend().ops())
            each.append(counter.count)
    if accountant is not None:
        accountant.close()
    return Counted(name, each)


def count_yardsticks(setting: Setting) -> list[Counted]:
    """Count plain training and the floor."""
    return [count_steps("plain", setting), count_steps("floor", setting, validation_gradient=True)]


def count_method(method: str, setting: Setting = DEFAULT, attach: Callable[..., Scores] = attach, **options: Any) -> Counted:
    """Count a method: ``attach(model, optimizer, validation, method, **options)``."""
    return count_steps(method, setting, lambda m, o, v: attach(m, o, v, method, **options), merged=method in PAPER)


# ---- The command


def print_table(setting: Setting, found: list[Counted]) -> None:
    """Print one row per contestant."""
    from rich.console import Console
    from rich.table import Table

    s = setting
    title = (
        f"GPT of {s.layers} layers and width {s.width}, {s.batch} rows, {s.validation_rows} validation rows, AdamW foreach, "
        f"clipped; {s.steps} steps after {s.warm_up}, device {s.device}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = ["operations", "of floor", "mean", "most", "blocking reads", "mean", "most"]
    columns += [] if s.device == "cpu" else ["async copies", "to device"]
    for column in columns:
        table.add_column(column, justify="right")
    floor = found[1].ordinary("operations")
    for x in found:
        operations = x.ordinary("operations")
        cells = [f"{operations:,}", f"{operations / floor:.2f}", f"{x.mean('operations'):,.0f}", f"{x.most('operations'):,}"]
        cells += [f"{x.ordinary('reads'):,}", f"{x.mean('reads'):,.1f}", f"{x.most('reads'):,}"]
        cells += [] if s.device == "cpu" else [f"{x.mean('async_copies'):.1f}", f"{x.mean('to_device'):.1f}"]
        table.add_row(x.name, *cells)
    Console(width=max(Console().width, 120)).print(table)


def main() -> None:
    """Count, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable; first and whole by default")
    parser.add_argument("--device", choices=["cpu", "pretend"], default="cpu")
    parser.add_argument("--pretend", metavar="PATH", help="folder of the pretend device, which must be writable")
    parser.add_argument("--json", action="store_true")
    for name in ("warm_up", "steps", "batch", "validation_rows", "layers", "width", "context", "vocab"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting, name))
    options = parser.parse_args()
    if (options.device == "pretend") != bool(options.pretend):
        parser.error("--device pretend and --pretend PATH go together")
    torch.set_num_threads(1)
    if options.pretend:
        sys.path.insert(0, options.pretend)
        importlib.import_module("pretend")
    setting = Setting(**{name: getattr(options, name) for name in vars(options) if hasattr(Setting, name)})
    found = count_yardsticks(setting) + [count_method(m, setting, **NO_AUDITS) for m in options.method or ("first", "whole")]
    if options.json:
        print(
            json.dumps({"setting": asdict(setting), "torch": torch.__version__, "results": [x.as_dict() for x in found]}, indent=1)
        )
    else:
        print_table(setting, found)


if __name__ == "__main__":
    main()
