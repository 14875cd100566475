"""What is fixed for a run: the model, its parameters and modules, the method, and how updates are described."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from inrun.errors import ConfigurationError, CoverageError, OptimizerError
from inrun.old.engine.checks.coverage import Coverage, CoverageRow
from inrun.old.engine.credit.choice import resolve_credit
from inrun.old.engine.credit.sketcher import default_size
from inrun.old.engine.directions import Timing
from inrun.old.engine.extras import check_extra
from inrun.old.engine.group import find_processes
from inrun.old.engine.no_validation import NoValidation
from inrun.old.engine.processes import Processes
from inrun.old.engine.sharded import shard_group, tell_shards
from inrun.old.engine.sites import Scored, Site, find_sites, scored_parameters
from inrun.old.engine.validation import Loss, Validation
from inrun.old.layers.forms import FORMS
from inrun.old.layers.merged import drops_out
from inrun.old.methods import KNOWN_AT_STEP, Method, find_method, resolve_update
from inrun.old.optimizers import UpdateRule, find_update, plain
from inrun.torch_private import buffers_written_silently, rounds_gradients, uncompiled

log = logging.getLogger("inrun")


@dataclass(frozen=True)
class CreditPlan:
    """How whole credit is kept: gradients themselves, or sketches of so many numbers per sample."""

    exact: bool
    sketch: int


@dataclass(frozen=True)
class Setup:
    """Everything about a run that does not change while it runs."""

    #: The model, and what is called: the same, or what torch.compile made of it.
    model: nn.Module
    called: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scored: list[Scored]
    sites: list[Site]
    #: Parameters in the optimizers that are not part of the model.
    foreign: frozenset[nn.Parameter]
    validation: Validation
    method: Method
    update: str
    #: One per optimizer: how samples' shares are made, and (None where unknown) what it really does.
    rules: list[UpdateRule]
    real_rules: list[UpdateRule] | None
    timing: Timing
    refresh: int
    deferred_memory: int | None
    form: str
    check_rows: bool
    groups: int
    #: Whole credit, as it is kept; None for the step game.
    credit: CreditPlan | None = None
    #: Steps are merged: validation rows are part of their batches, and there are no validation callables.
    merges: bool = False
    #: What steps tell beside contributions.
    extra: tuple[str, ...] = ()
    #: The processes that train together.
    processes: Processes = field(default_factory=Processes)

    @property
    def device(self) -> torch.device:
        """Return the device of the probes."""
        return self.scored[0].parameter.device

    @property
    def probe_dtype(self) -> torch.dtype:
        """Return the dtype that contributions are added up in."""
        double = any(s.parameter.dtype == torch.float64 for s in self.scored)
        return torch.float64 if double else torch.float32

    def check_unchanged(self) -> None:
        """Raise if the optimizers gained groups or parameters; one that is frozen for a while just gets no gradient."""
        if sum(len(o.param_groups) for o in self.optimizers) != self.groups:
            raise OptimizerError("a parameter group was added after the Accountant was made; make a new one")
        places = {p: (i, k) for i, o in enumerate(self.optimizers) for k, g in enumerate(o.param_groups) for p in g["params"]}
        moved = [s.name for s in self.scored if places.get(s.parameter) != (s.optimizer, s.group_index)]
        if moved:
            raise OptimizerError(
                f"{', '.join(moved[:5])} is no longer in the parameter group of the optimizer that it was in when the Accountant "
                "was made, and would be scored with the options of that one; make a new Accountant"
            )
        trainable = {p for p in places if p.requires_grad}
        known = {s.parameter for s in self.scored} | self.foreign
        if trainable - known:
            names = {p: n for n, p in self.model.named_parameters()}
            changed = ", ".join(sorted(names.get(p, "?") for p in trainable - known))
            raise CoverageError(f"{changed} was unfrozen after the Accountant was made, which does not know it; make a new one")

    def coverage(self) -> Coverage:
        """Return which parameter is scored by which rule and form."""
        rows = []
        for s in self.scored:
            for site in [site for site, name in s.uses if name in site.active()]:
                timing = self._timing_of(s, site)
                rows.append(CoverageRow(s.name, site.name, site.rule.label, site.form, timing, s.parameter.numel()))
        moved = {s.parameter for s in self.scored}
        for name, p in self.model.named_parameters():
            if p.requires_grad and p not in moved:
                rows.append(CoverageRow(name, name.rpartition(".")[0], "in no optimizer", "", "unmoved", p.numel()))
        return Coverage(tuple(rows))

    def _timing_of(self, s: Scored, site: Site) -> str:
        """Say when the gradients of one use are contracted, or what is kept of them."""
        if self.credit is not None:
            return "kept" if self.credit.exact else "sketched"
        return "deferred" if self.timing.waits_at(self.rules[s.optimizer], site.rule.sparse) else "streaming"

    def about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        return {
            "method": self.method.name,
            "update": self.update,
            "credit": "step" if self.credit is None else "whole",
            **({} if self.credit is None else {"credit_memory": "exact" if self.credit.exact else "sketch"}),
            **({} if self.credit is None or self.credit.exact else {"sketch": self.credit.sketch}),
            "validation": self.validation.names,
            **({"merged": True} if self.merges else {}),
            "optimizers": [type(o).__name__ for o in self.optimizers],
            "model": type(self.model).__name__,
            "parameters": sum(s.parameter.numel() for s in self.scored),
            **({"processes": self.processes.world} if self.processes.several else {}),
        }

    def warn(self) -> None:
        """Say once what the user should know before training."""
        if self.foreign:
            log.warning("inrun: %d optimizer parameters are not part of the model and are not scored", len(self.foreign))
        dropping = [n for n, m in self.model.named_modules() if drops_out(m)]
        if self.merges and dropping:
            log.warning(
                "inrun: dropout in training mode (%s) also drops in the validation rows of merged steps, and draws other numbers "
                "than without them; give validation= for losses without dropout",
                ", ".join(dropping[:3]),
            )
        slow = [site.title for site in self.sites if site.rule.replays]
        if slow:
            log.warning("inrun: no rule for %s; each runs its forward once more per backward (see coverage)", ", ".join(slow))
        # One whose statistics are frozen couples nothing; a model that is in eval mode as a whole may be put into training mode.
        norms = [(n, m) for n, m in self.model.named_modules() if buffers_written_silently(m)]
        coupled = [n for n, m in norms if m.training or m.running_mean is None or not self.model.training]
        if coupled:
            log.warning(
                "inrun: batch norm %s (%s) couples the rows of a batch: a sample's contribution is what flows "
                "through its own rows, and its effect on the others' statistics is not told apart. Ways out: eval mode, "
                "GroupNorm.",
                "in training mode" if self.model.training else "that is put into training mode",
                ", ".join(coupled),
            )


def make_setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    validation: Loss | Mapping[str, Loss] | None,
    *,
    method: str | None,
    update: str | None,
    credit: str,
    credit_memory: str,
    sketch: int | None,
    refresh: int,
    bitwise: bool,
    form: str,
    validation_mode: str,
    check_rows: bool,
    quadrature: str | None,
    hessian: str,
    deferred_memory: int | str | None,
    extra: Iterable[str],
    process_group: Any = None,
) -> Setup:
    """Check the arguments of an accountant and find out everything that is fixed for the run."""
    wrapper = uncompiled(model)
    called, model, group = unwrapped(model)
    check_model(model)
    rounds = None if group is None else rounds_gradients(wrapper)
    shards = shard_group(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    processes = find_processes(shards or group, process_group, device, shards is not None, rounds)
    _check_processes(processes, validation, model)
    if processes.sharded:
        # A second backward would need whole parameters in all layers at once.
        hessian = "differences" if method == "second" else hessian
        _check_sharded(credit_memory, extra)
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    optimizers = [without_wrapper(o) for o in given]
    _check_optimizers(optimizers)
    if update != "sgd":
        _check_precision(optimizers)
    check_count("refresh", refresh, 1)
    if validation is None:
        method, credit = _merged_options(method, credit, refresh, bitwise)
    if credit == "auto" and refresh > 1:
        credit = "step"  # whole credit takes its own gradient at every move
    game = resolve_credit(credit, method, update, optimizers, exact=credit_memory == "exact")
    if credit_memory not in ("sketch", "exact"):
        raise ConfigurationError(f'credit_memory is {credit_memory!r}; accepted are "sketch" and "exact"')
    if sketch is not None:
        check_count("sketch", sketch, 64)
    method = method or ("midpoint" if game == "whole" else "first")
    chosen = find_method(method, quadrature=quadrature, hessian=None if hessian == "double" else hessian)
    resolved = "realised" if game == "whole" else resolve_update(update or "auto", chosen)
    rules = [plain if resolved == "sgd" else find_update(o) for o in optimizers]
    if game == "whole" and refresh > 1:
        raise ConfigurationError(f'refresh={refresh} reuses validation gradients; credit="whole" takes its own at every move')
    if refresh > 1 and chosen.deferred:
        raise ConfigurationError(f'refresh={refresh} reuses validation gradients; method="{method}" takes its own at every move')
    _check_form(form, validation is None and all(rule.linear for rule in rules))
    if bitwise and form == "shared":
        raise ConfigurationError("bitwise=True leaves weight gradients to the framework, which form='shared' replaces")
    by_parameter = scored_parameters(model, optimizers)
    sets = NoValidation(model) if validation is None else Validation(model, called, validation, validation_mode, processes)
    if processes.sharded:
        tell_shards(model, list(by_parameter.values()), processes, shards)
        _check_elementwise(rules)
    entries = sum(p.numel() for p in by_parameter)
    plan = CreditPlan(credit_memory == "exact", sketch or default_size(entries)) if game == "whole" else None
    sites = find_sites(model, by_parameter)
    in_groups = {p for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
    return Setup(
        model=model,
        called=called,
        optimizers=optimizers,
        scored=list(by_parameter.values()),
        sites=sites,
        extra=check_extra(extra, plan is None and not chosen.deferred, validation is None, sites),
        foreign=frozenset(in_groups - set(by_parameter)),
        validation=sets,
        method=chosen,
        update=resolved,
        rules=rules,
        real_rules=_real_rules(optimizers) if resolved == "sgd" else rules,
        credit=plan,
        merges=validation is None,
        timing=_timing_of(plan)
        if plan is not None
        else Timing.AT_STEP
        if chosen.deferred
        else Timing.GAIN_AT_STEP
        if resolved in KNOWN_AT_STEP
        else Timing.BEFORE,
        refresh=refresh,
        deferred_memory=parse_bytes(deferred_memory),
        form="project" if bitwise else form,
        check_rows=check_rows,
        groups=sum(len(o.param_groups) for o in optimizers),
        processes=processes,
    )


def unwrapped(model: Any) -> tuple[Any, Any, Any]:
    """Return what validation callables call, the module itself, and the process group of DistributedDataParallel, if any.

    What is called is the module, or what torch.compile made of it: never DDP, whose forward prepares a reduction.
    """
    called, model, group = model, uncompiled(model), None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        called, model, group = model.module, uncompiled(model.module), model.process_group
    return called, model, group


def _check_processes(processes: Processes, validation: Loss | Mapping[str, Loss] | None, model: nn.Module) -> None:
    """Raise on all ranks unless all have the same validation sets, and samples of one do not meet those of another."""
    if not processes.several:
        return
    names = list(map(str, validation)) if isinstance(validation, Mapping) else [] if validation is None else ["validation"]
    of_ranks = processes.tell(names)
    if any(x != of_ranks[0] for x in of_ranks):
        told = ", ".join(f"rank {r} has {', '.join(x) or 'none'}" for r, x in enumerate(of_ranks))
        raise ConfigurationError(
            f"validation sets differ between processes: {told}. Every rank gives every set, with all of its rows or with a part of "
            "them: the loss of a set is the mean over ranks of what its callables return."
        )
    synced = [name for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]
    if synced:
        raise ConfigurationError(
            f"{', '.join(synced[:3])} is a SyncBatchNorm: samples of different processes meet in its statistics, and a module that "
            "waits for others cannot be run beside training. Take BatchNorm (shares of rows), GroupNorm or LayerNorm."
        )
    if validation is None:
        raise ConfigurationError(
            f"no validation= in a run of {processes.world} processes: merged steps contract with the validation rows of their own "
            "process only. Give validation= (its rows may be split over processes)."
        )


def _merged_options(method: str | None, credit: str, refresh: int, bitwise: bool) -> tuple[str, str]:
    """Return method and credit of a run without validation callables; raise for what one pass over both rows cannot give."""
    wanted = {
        'credit="whole"': credit == "whole",
        f'method="{method}"': method not in (None, "first"),
        f"refresh={refresh}": refresh > 1,
        "bitwise=True": bitwise,
    }
    refused = [what for what, is_asked in wanted.items() if is_asked]
    if refused:
        raise ConfigurationError(
            f"{', '.join(refused)} without validation=: a merged step has the validation gradient at its own weights, once, inside "
            'its backward (method="first", credit="step"). Give validation= for anything else.'
        )
    return "first", "step"


def _check_form(form: str, can_gram: bool) -> None:
    if form not in ("auto", *FORMS):
        raise ConfigurationError(f"form is {form!r}; accepted are auto, {', '.join(FORMS)}")
    if form == "gram" and not can_gram:
        raise ConfigurationError(
            'form="gram" contracts training rows with validation rows of the same pass, with one gain for the whole tensor: it is '
            'for merged steps (no validation=) with update="sgd" or an optimizer of the SGD family. Take form="auto".'
        )


def _timing_of(plan: CreditPlan) -> Timing:
    return Timing.AT_STEP if plan.exact else Timing.BEFORE


def check_model(model: Any) -> None:
    """Raise unless ``model`` is a module that can be scored; say what to give instead."""
    if type(model).__module__.startswith("torch.distributed.pipelining"):
        raise ConfigurationError(
            f"the model is {type(model).__name__}, a pipeline stage or schedule: forward and backward of a sample run on several "
            "processes and at several times, which is not scored. Take DistributedDataParallel or fully_shard."
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, nn.DataParallel):
        raise ConfigurationError(
            "the model is wrapped in DataParallel, whose copies of the model are not observed; take DistributedDataParallel (one "
            "process per device), or the module inside (model.module) on one device."
        )
    _check_fused_head(model)
    _check_parameters(model)
    old = [name or "the model itself" for name, m in model.named_modules() if _is_flattened(m)]
    if old:
        raise ConfigurationError(
            f"the model is sharded by FullyShardedDataParallel ({', '.join(old[:3])}), whose flat parameters hide those of "
            "the layers; take fully_shard (FSDP2), or DistributedDataParallel."
        )


def _check_fused_head(model: nn.Module) -> None:
    """Raise if a forward multiplies by the head's weight inside its loss, without calling the head (Liger's fused kernels)."""
    for name, m in model.named_modules():
        forward = getattr(m, "forward", None)
        home = str(getattr(forward, "__module__", ""))
        fused = "lce" in getattr(forward, "__name__", "") or "fused_linear" in home
        if home.startswith("liger_kernel.") and fused:
            raise ConfigurationError(
                f"{name or 'the model itself'} ({type(m).__name__}) runs Liger's fused linear cross entropy, which takes the "
                "head's weight without calling the head, so that its gradient cannot be told apart by sample; apply the kernels "
                "with fused_linear_cross_entropy=False."
            )


def _check_parameters(model: nn.Module) -> None:
    """Raise for parameters that are split over processes, or that an optimizer moves inside the backward."""
    for name, p in model.named_parameters():
        if hasattr(p, "ds_id") or hasattr(p, "ds_tensor"):
            raise ConfigurationError(
                f"{name} is partitioned by DeepSpeed ZeRO-3, whose parameters and gradients are whole only inside its own "
                "engine; take fully_shard (FSDP2), or DistributedDataParallel."
            )
        if getattr(p, "_in_backward_optimizers", None):
            raise ConfigurationError(
                f"{name} is moved by an optimizer inside the backward (_apply_optimizer_in_backward), where its gradient is gone "
                "before the step is known; call optimizer.step() after the backward instead."
            )


def _is_flattened(module: nn.Module) -> bool:
    return any(c.__name__ == "FullyShardedDataParallel" for c in type(module).__mro__)


def _check_sharded(credit_memory: str, extra: Iterable[str]) -> None:
    """Raise for what is not scored where parameters are split over processes."""
    if credit_memory == "exact":
        raise ConfigurationError(
            'credit_memory="exact" keeps whole gradients of every sample and contracts them with whole directions; with '
            'fully_shard take credit_memory="sketch", or DistributedDataParallel.'
        )
    if "cosine" in ((extra,) if isinstance(extra, str) else tuple(extra)):
        raise ConfigurationError('extra="cosine" is told of models that are not sharded; leave it out')


def _check_elementwise(rules: list[UpdateRule]) -> None:
    for rule in rules:
        if not rule.elementwise:
            raise OptimizerError(
                f"{type(rule).__name__.removesuffix('Rule')} looks at a whole matrix to move it; where parameters are split over "
                'processes (fully_shard), optimizers that move every entry by itself are scored (AdamW, SGD, ...), or update="sgd"'
            )


def _check_optimizers(optimizers: list[Any]) -> None:
    wrong = [type(o).__name__ for o in optimizers if not isinstance(o, torch.optim.Optimizer)]
    if wrong or not optimizers:
        raise ConfigurationError(f"optimizer must be a torch optimizer or a list of them; got {wrong or 'none'}")


def without_wrapper(optimizer: Any) -> Any:
    """Return the torch optimizer inside accelerate's wrapper, which has its groups and state and whose step is run."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _check_precision(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise for optimizers whose state is quantised: what they do to a weight cannot be told from it."""
    for o in optimizers:
        home, name = type(o).__module__, type(o).__name__
        if home.startswith(("bitsandbytes.", "torchao.")) or re.search(r"(8|4)bit|Fp8", name):
            raise OptimizerError(
                f"{name} of {home.partition('.')[0]} keeps its state in few bits and updates in a kernel of its own, so that a "
                "sample's part of the move cannot be told; train with the optimizer of full precision (torch.optim.AdamW for "
                'AdamW8bit), or take update="sgd", the paper\'s proxy.'
            )


def _real_rules(optimizers: list[torch.optim.Optimizer]) -> list[UpdateRule] | None:
    """Return what the optimizers really do, for the accounts; None where one of them has no rule."""
    try:
        return [find_update(o) for o in optimizers]
    except OptimizerError:
        return None


def check_count(name: str, value: Any, least: int) -> None:
    """Raise unless an argument is an integer of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer of at least {least}")


def parse_bytes(given: int | str | None) -> int | None:
    """Read a number of bytes, or text such as "500MB" or "4 GB"."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b\s*", str(given).lower())
    if not found:
        raise ConfigurationError(
            f'deferred_memory is {given!r}; accepted are bytes as an integer, or text such as "500MB" or "4GB"'
        )
    return int(float(found.group(1)) * 1000.0 ** " kmgt".index(found.group(2) or " "))
