"""Where scores come from: the trainable parameters, the modules that use them, and which rule scores each use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from inrun.errors import ConfigurationError, CoverageError
from inrun.old.layers import FallbackRule, LayerRule, ReadRule, find_rule
from inrun.old.layers.shards import Shards
from inrun.torch_private import held_parameters


def local(x: Any) -> Any:
    """Return the part of a distributed tensor that is here; anything else as it is."""
    kind = type(x)
    if kind is Tensor or kind is nn.Parameter:  # at every gradient of every step: looking for what is not there takes long
        return x
    return x.to_local() if hasattr(x, "to_local") else x


@dataclass(eq=False)
class Scored:
    """One trainable parameter that an optimizer moves."""

    name: str
    parameter: nn.Parameter
    #: Index of the optimizer, and where it keeps its groups.
    optimizer: int
    owner: torch.optim.Optimizer
    group_index: int
    uses: list[tuple[Site, str]] = field(default_factory=list)
    #: How it is split over processes, and what stands for it while it is whole (``fully_shard``); None where it is not split.
    shards: Shards | None = None
    unsharded: Callable[[], Any] | None = None

    def add_use(self, site: Site, name: str) -> None:
        """Note that a module uses this parameter."""
        self.uses.append((site, name))

    @property
    def group(self) -> dict[str, Any]:
        """Return the live parameter group (``load_state_dict`` puts new ones in place)."""
        return self.owner.param_groups[self.group_index]

    @property
    def state(self) -> dict[str, Any]:
        """Return the optimizer's state of this parameter, as far as it is here."""
        found: dict[str, Any] = self.owner.state.get(self.parameter, {})
        return found if self.shards is None else {name: local(x) for name, x in found.items()}

    @property
    def weight(self) -> Tensor:
        """Return the weight itself, without gradient: its rows here, if it is split over processes."""
        weight = self.parameter.detach()
        return weight if self.shards is None else local(weight)  # type: ignore[no-any-return]

    @property
    def gradient(self) -> Tensor | None:
        """Return what is in ``.grad``, as far as it is here."""
        gradient = self.parameter.grad
        return gradient if self.shards is None else local(gradient)

    @property
    def used_gradient(self) -> Tensor:
        """Return the gradient as the optimizer will use it: a fused one divides a loss scale out by itself."""
        gradient, scale = self.gradient, getattr(self.owner, "grad_scale", None)
        assert gradient is not None
        return gradient if scale is None else gradient / scale

    def split(self, shards: Shards, unsharded: Callable[[], Any]) -> None:
        """Note how it is split over processes, and what tells the tensor that stands for it while it is whole."""
        self.shards, self.unsharded = shards, unsharded

    def whole(self, x: Tensor) -> Tensor:
        """Return a tensor of this parameter's rows here, ``[k, ...]``, with the rows of all processes."""
        return x if self.shards is None else self.shards.whole(x)

    def is_parameter(self, value: Any) -> bool:
        """Whether this is the parameter, or what stands for it while it is whole."""
        return value is self.parameter or (self.unsharded is not None and value is self.unsharded())

    @property
    def only_sparse(self) -> bool:
        """Whether every use is an embedding look-up."""
        return all(site.rule.sparse for site, _ in self.uses)

    @property
    def some_sparse(self) -> bool:
        """Whether some use is an embedding look-up."""
        return any(site.rule.sparse for site, _ in self.uses)


@dataclass(eq=False)
class Site:
    """One module that is observed, and the parameters it answers for."""

    name: str
    module: nn.Module
    rule: LayerRule
    #: By name relative to the module.
    scored: dict[str, Scored]
    #: Whether the module around it may read its parameters instead of calling it.
    read_outside: bool = False
    _forms: set[str] = field(default_factory=set)
    #: Parameters that the module registers and does not use itself.
    _idle: set[str] = field(default_factory=set)
    #: Outputs of a module without a rule that no sample moves: they belong to all samples at once.
    _shared_outputs: set[int] = field(default_factory=set)

    @property
    def title(self) -> str:
        """Return the name for messages."""
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"

    @property
    def form(self) -> str:
        """Return the form or forms in which the module was scored so far."""
        return getattr(self.rule, "form", "") or "+".join(sorted(self._forms))

    def note_form(self, form: str) -> None:
        """Remember that a call was scored in this form."""
        self._forms.add(form)

    def note_shared_output(self, index: int) -> None:
        """Remember that an output belongs to all samples at once."""
        self._shared_outputs.add(index)

    def let_be_read(self, allowed: bool = True) -> None:
        """Follow what is read of its parameters outside its own calls, too (or not)."""
        self.read_outside = allowed

    def fall_back(self) -> None:
        """Run the module again instead of scoring what it reads."""
        self.rule = FallbackRule()

    def holders(self) -> dict[nn.Module, dict[str, str]]:
        """Return the modules that hold the parameters, with their names there and at this site."""
        found: dict[nn.Module, dict[str, str]] = {}
        for name in self.scored:
            path, _, leaf = name.rpartition(".")
            found.setdefault(self.module.get_submodule(path), {})[leaf] = name
        return found

    def has_rows(self, index: int, shape: torch.Size, n: int) -> bool:
        """Whether output ``index`` of a module without a rule has rows of ``n`` samples."""
        return len(shape) > 0 and shape[0] % n == 0 and index not in self._shared_outputs

    def active(self) -> dict[str, Scored]:
        """Return the parameters that the module's own calls use, as far as is known."""
        return {name: s for name, s in self.scored.items() if name not in self._idle} if self._idle else self.scored

    def leave_to_others(self, names: set[str]) -> None:
        """Leave parameters that this module only registers, for a child to use, to that child (BERT's head bias)."""
        self._idle = names

    def holds_its_parameters(self) -> bool:
        """Whether the module's parameters are those that are scored; ``torch.func.functional_call`` puts others in place."""
        own = held_parameters(self.module)
        return all(own.get(name) is s.parameter or self._holds(name, s) for name, s in self.scored.items())

    def _holds(self, name: str, s: Scored) -> bool:
        held: Any = self.module
        for part in name.split("."):
            held = getattr(held, part)
        return s.is_parameter(held)

    def lead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the tensor whose rows tell the samples, as the rule knows it."""
        return self.rule.lead(self.module, args, kwargs)


class Called(dict[Site, bool]):
    """Sites that a pass called, each with whether it was with gradient."""

    #: The precision of an autocast block, the callable's own or the model's, that some of them were called in.
    autocast: torch.dtype | None = None

    def note(self, site: Site) -> None:
        """Note a call."""
        self[site] = self.get(site, False) or torch.is_grad_enabled()
        device = next((s.parameter.device.type for s in site.scored.values()), "cpu")
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)


def scored_parameters(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[nn.Parameter, Scored]:
    """List the trainable parameters of the model that some optimizer moves."""
    names = {p: name for name, p in model.named_parameters()}
    found: dict[nn.Parameter, Scored] = {}
    for index, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in found:
                    raise ConfigurationError(f"parameter {found[p].name} is in two optimizers or groups")
                if p in names and p.requires_grad:
                    found[p] = Scored(names[p], p, index, optimizer, place)
    _check_kinds(found)
    _check_memory(found)
    if not found:
        raise ConfigurationError(
            "no trainable parameter of the model is in the optimizer; was the optimizer made from another model?"
        )
    return found


def _check_kinds(scored: dict[nn.Parameter, Scored]) -> None:
    """Raise for parameters that no score can be made for yet, by name and with the way out."""
    for p, s in scored.items():
        if p.device.type == "meta":
            raise ConfigurationError(
                f"{s.name} is on the meta device and has no values; make the Accountant after the weights are loaded "
                "(model.to_empty(device=...) and initialisation, or from_pretrained)"
            )
        if p.is_complex():
            raise ConfigurationError(
                f"{s.name} is complex ({p.dtype}); scores of complex parameters are not defined here. Freeze it, or hold its real "
                "and imaginary parts as two real parameters (torch.view_as_real)."
            )


def _check_memory(scored: dict[nn.Parameter, Scored]) -> None:
    """Raise if two parameters are other names for the same memory: a step moves it twice, which no rule describes."""
    spans = []
    for p, s in scored.items():
        if p.numel() and p.layout == torch.strided and p.device.type != "meta" and type(p) is nn.Parameter and p.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), s))
    spans.sort(key=lambda span: span[:3])
    for (device, start, end, s), (other_device, other_start, _, other) in itertools.pairwise(spans):
        if device == other_device and start <= other_start < end and _overlap(s.parameter, other.parameter):
            raise ConfigurationError(
                f"{s.name} and {other.name} are two parameters in the same memory, which an optimizer step moves twice; tie them "
                "by giving both modules the same Parameter object"
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans of memory meet have an element in common (interleaved views have none)."""

    def places(x: Tensor) -> Tensor:
        found = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(x.shape, x.stride(), strict=True):
            found = found.unsqueeze(-1) + torch.arange(size) * stride
        return found.reshape(-1) * x.element_size() + x.data_ptr()

    return bool(torch.isin(places(a), places(b)).any())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that this module's own forward uses, by name relative to the module."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if parametrize.is_parametrized(module):
        inner = module.parametrizations
        own |= {f"parametrizations.{n}": p for n, p in inner.named_parameters(remove_duplicate=False)}  # type: ignore[union-attr]
    if isinstance(module, nn.MultiheadAttention):
        # Its forward multiplies by out_proj.weight without calling out_proj.
        own |= {f"out_proj.{n}": p for n, p in module.out_proj.named_parameters(remove_duplicate=False)}
    return own


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward (ParameterDict, ParameterList): modules around it use what it holds."""
    return type(module).forward is nn.Module.forward


def contained_parameters(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return what containers hold by the name of the module that answers for them, and the names there.

    That is the innermost module with a forward around all places where a container is registered: if it has to run again, all
    uses run again with it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        if name and is_container(module) and own_parameters(module):
            places.setdefault(module, []).append(name)
    found: dict[str, dict[str, nn.Parameter]] = {}
    for container, names in places.items():
        above = [name.split(".")[:-1] for name in names]
        owner = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*above, strict=False))]
        while owner and is_container(modules[".".join(owner)]):
            owner.pop()
        inside = ".".join(names[0].split(".")[len(owner) :])
        found.setdefault(".".join(owner), {}).update({f"{inside}.{n}": p for n, p in own_parameters(container).items()})
    return found


def _inside(name: str, owners: Iterable[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _find_read_outside(model: nn.Module, sites: list[Site], contained: Collection[str]) -> None:
    """Watch the children of modules that read parameters: they like to read their children's, too (Mamba's convolution)."""
    of_module = {site.module: site for site in sites}
    for name, module in model.named_modules():
        children = [site for child in module.children() if (site := of_module.get(child)) is not None]
        watched = [s for s in children if not (s.rule.reads or s.rule.replays or s.rule.whole or s.rule.sparse)]
        if watched and (own_parameters(module) or name in contained) and find_rule(module) is None:
            for site in watched:
                site.let_be_read()


def find_sites(model: nn.Module, scored: dict[nn.Parameter, Scored]) -> list[Site]:
    """Find the modules to observe, one per module object; tell every parameter who scores it."""
    sites: list[Site] = []
    whole: list[str] = []  # modules whose listed children are answered for by the fallback
    contained = contained_parameters(model)
    for name, module in model.named_modules():
        if _inside(name, whole) or is_container(module):
            continue
        held = own_parameters(module) | contained.get(name, {})
        own = {local: scored[p] for local, p in held.items() if p in scored}
        if parametrize.is_parametrized(module):
            whole.append(f"{name}.parametrizations" if name else "parametrizations")
        if isinstance(module, nn.MultiheadAttention):
            whole.append(f"{name}.out_proj" if name else "out_proj")
        if not own:
            continue
        rule = find_rule(module)
        if rule is not None and (reason := rule.refusal(module)):
            raise CoverageError(f"{name} cannot be scored: {reason}. Freeze it, or change the option.")
        if rule is None or not rule.covers(module, set(own)):
            rule = ReadRule()
        site = Site(name, module, rule, own)
        for local, s in own.items():
            s.add_use(site, local)
        sites.append(site)
    _find_read_outside(model, sites, contained)
    unowned = [s.name for s in scored.values() if not s.uses]
    if unowned:
        raise CoverageError(f"no module owns the trainable parameters {', '.join(unowned)}")
    return sites
