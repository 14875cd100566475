"""The merged pass of a step: the last m rows of the batch are validation rows, one forward and one backward serve both.

``MergedMicrobatch`` asks every layer for contractions of its training rows with the gradient of its validation rows
(``layers.merged``); ``MergedDirections`` knows the gains before the backward, and v = gain ∘ ∇ℓ only after it. What has more
than one use in a forward, or waits for the real gradient (tables under Adam), is kept by the training rows and contracted when the
optimizer steps, with the ∇ℓ that left the backward. Of a head that is tied to a token table only the rows of the validation rows'
tokens wait: the table's part of ∇ℓ is 0 elsewhere, and the head's own part is known in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import StepError, ValidationError
from inrun.old.engine.checks.merged import check_split
from inrun.old.engine.directions import Direction, Directions
from inrun.old.engine.documents import Documents
from inrun.old.engine.microbatch import Kept, Microbatch
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored, Site
from inrun.old.layers import Layout, Merged, MergedAsk, MergedCall, MergedOwned, nbytes_of
from inrun.old.layers.forms import Contraction
from inrun.old.layers.layout import SHARED, TURNED, turned
from inrun.old.layers.trees import float_tensors
from inrun.torch_private import apply_as_it_is, current_backward, detached_parameters


class MergedDirections(Directions):
    """Gains before the backward; directions once the validation rows' gradient is there."""

    only_contracts = False
    #: By parameter: None where one number is the gain of all entries, and it is the direction's scale.
    gains: dict[nn.Parameter, Tensor | None]

    @torch.no_grad()
    def prepare(self, count: bool) -> None:
        """Make the gains that are known before the backward."""
        self.gains = {}
        self._options = [self._options_of(i) for i in range(len(self.optimizers))]
        for s in self.scored:
            rule, state, p = self.rules[s.optimizer], s.state, s.parameter
            if self.timing.waits(rule) or (not rule.linear and (s.only_sparse or self._blank(s, rule, state, count))):
                continue
            dtype = torch.promote_types(p.dtype, torch.float32)
            ones = torch.ones((1, 1) if rule.linear else (1, *p.shape), dtype=dtype, device=p.device)
            factor = rule.frozen(ones, p.detach(), s.group, state)
            if factor is not None:
                self.gains[p] = None if rule.linear else ones
                self.streaming[p] = Direction(ones, factor)

    def is_zero(self, s: Scored) -> bool:
        """Which parameters the validation rows depend on is not known before the backward."""
        return False

    @torch.no_grad()
    def receive(self, found: dict[Scored, Tensor], scale: float) -> None:
        """Take ∇ℓ of the parameters whose own left the backward, times ``scale``, and make their directions."""
        for s, gradient in found.items():
            p = s.parameter
            streamed = self.streaming.get(p)
            if streamed is not None:
                gain = self.gains[p]
                v = gradient.clone() if gain is None else gradient * gain
                self.streaming[p] = Direction(v, streamed.scale)
        for p, streamed in self.streaming.items():
            self.streaming[p] = Direction(streamed.v, streamed.scale / scale)
        self.take([found[s] / scale if s in found else None for s in self.scored])


@dataclass(frozen=True)
class Crossing:
    """Rows ``[r]`` of a head's training rows that wait for the look-ups' part of ∇ℓ there."""

    kept: Kept
    rows: Tensor
    by_rows: bool


class MergedMicrobatch(Microbatch):
    """The probes of one merged forward and backward."""

    def __init__(self, *common: Any, validation_rows: int, points: bool, form: str, checked: bool, repeated: set[Site]) -> None:
        """``checked`` lets every ∇ℓ leave, for the checks of an audited step; ``repeated`` are modules called more than once."""
        super().__init__(*common)
        self.m, self.points, self.form, self.checked, self.repeated = validation_rows, points, form, checked, repeated
        #: ∇ℓ arrives here, ``[k, *shape]``.
        self.validation: dict[Scored, Tensor] = {}
        #: The look-ups' part of it, where a parameter has other uses, too.
        self.looked_up: dict[Scored, Tensor] = {}
        #: The validation rows' tokens, ``[m, t]`` of every look-up so far; and what of heads waits for them.
        self._tokens: dict[Scored, list[Tensor]] = {}
        self.crossing: list[Crossing] = []
        #: What was found of those rows when a head ran, so that a segment that is recomputed asks for the same.
        self._rows_found: dict[tuple[Site, str], Tensor | None] = {}
        #: Kept until ∇ℓ is whole, though the gain is known; and whether row by row.
        self.postponed: list[tuple[Kept, bool]] = []
        #: What the model returned in the running step, where losses are checked against it: tensors with one row per sample.
        self.outputs: list[Tensor] = []
        #: Whether the validation rows of an output got a gradient, one flag ``[]`` per output and backward.
        self._arrived: list[Tensor] = []
        #: The gradient of the loss at its validation part: what a loss scaler multiplied it by.
        self.root: Tensor | None = None
        self._called: set[Site] = set()
        self._watching: Any = None

    @property
    def rows(self) -> int:
        """Return the rows of the batch."""
        return self.n + self.m

    @property
    def groups(self) -> int:
        """Return the rows of the batch."""
        return self.rows

    def watch_outputs(self, model: nn.Module) -> None:
        """Note what the model returns until the step is over, to see later which rows a loss is made of."""
        mine = self._self

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            micro = mine()
            if isinstance(micro, MergedMicrobatch):
                micro.note_output(out)

        self._watching = model.register_forward_hook(hook)

    def note_output(self, out: Any) -> None:
        """Note what the model returned, with gradient; later, whether one comes back to its validation rows."""
        mine, found = self._self, [x for x in float_tensors(out) if x.dim() > 0 and x.shape[0] == self.rows and x.requires_grad]

        def hook(gradient: Tensor) -> None:
            micro = mine()
            if isinstance(micro, MergedMicrobatch):
                micro._arrived.append(gradient[micro.n :].any())

        for x in found:
            x.register_hook(hook)
        self.outputs += found if self.checked else []

    def has_arrived(self) -> bool:
        """Whether a gradient was seen at the validation rows of an output."""
        return any(map(bool, self._arrived))

    def watch_root(self, part: Tensor) -> None:
        """Note, in the backward, the gradient of the loss at its validation part."""
        if part.requires_grad:
            mine = self._self

            def hook(root: Tensor) -> None:
                micro = mine()
                if isinstance(micro, MergedMicrobatch):
                    micro.root = root.detach()

            part.register_hook(hook)

    # One call

    def score(
        self,
        site: Site,
        constants: Any,
        inputs: tuple[Tensor, ...],
        layout: Layout,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer with detached parameters, which get their gradient back from what follows it."""
        names = tuple(name for name, s in site.active().items() if s.parameter.requires_grad)
        if not names:
            return original(*args, **kwargs)
        if layout == "apart":
            raise StepError(
                f"{site.name} runs once for the whole batch and its output is worked on before it meets the samples (tables of "
                "relative positions), which merged steps do not tell apart into training and validation rows; give the Accountant "
                "validation= and open steps without merged="
            )
        turn = layout if layout in TURNED else ""
        self._note_call(site)
        if self._owns(site, inputs, layout):
            asks, given, buffers = self._ask(site, names, constants, self._by_rows_first(inputs, turn), inputs[0].dtype)
            call = MergedCall(site.rule, constants, self.n, self.m, self.points, asks, turn=turn)
            module: Any = site.module
            return MergedOwned.apply(call, buffers, inputs[0], module.weight, getattr(module, "bias", None), *given)
        with detached_parameters(site.module, names):
            out = original(*args, **kwargs)
        expands, one = layout in SHARED, layout == "free" and inputs[0].shape[0] == 1
        if expands:
            inputs = tuple((x if one else x.unsqueeze(0)).expand(self.rows, *x.shape[1 if one else 0 :]) for x in inputs)
        first = self._by_rows_first(inputs, turn)
        if site.rule.sparse:
            self._note_tokens(site, names, first[0])
        asks, given, buffers = self._ask(site, names, constants, first, out.dtype)
        call = MergedCall(site.rule, constants, self.n, self.m, self.points, asks, expands, one, turn)
        parameters = [site.scored[name].parameter for name in names]
        return apply_as_it_is(Merged, out, call, buffers, out, len(inputs), *inputs, *parameters, *given)

    def _by_rows_first(self, inputs: tuple[Tensor, ...], turn: str) -> tuple[Tensor, ...]:
        """Return the inputs of a call with the rows of the batch first, so that those of training can be told by their sizes."""
        return tuple(turned(x, self.rows, turn) for x in inputs) if turn else inputs

    def _owns(self, site: Site, inputs: tuple[Tensor, ...], layout: Layout) -> bool:
        """Whether the rule's own forward and backward run a call; a view as output (of a biased linear layer) would be copied."""
        free = layout not in SHARED and self.form != "project" and not torch.is_autocast_enabled(inputs[0].device.type)
        return free and site.rule.owner is not None and site.rule.owns(site.module, inputs, self.rows, forced=True)

    def _note_tokens(self, site: Site, names: tuple[str, ...], tokens: Tensor) -> None:
        """Note which rows of a table the validation rows look up; segments that are recomputed are known."""
        for s in (site.scored[name] for name in names):
            if len(s.uses) > 1 and current_backward() == -1:
                self._tokens.setdefault(s, []).append(tokens.reshape(self.rows, -1)[self.n :].reshape(-1))

    def _looked_up_rows(self, site: Site, s: Scored, name: str) -> Tensor | None:
        """Return the rows R ``[r]`` in which ∇ℓ is not all this use's own: where all other uses are look-ups that have run.

        None where that is not so. A look-up that runs (again) after this call is seen by ``_note_call``.
        """
        key = (site, name)
        if current_backward() == -1 or key not in self._rows_found:
            self._rows_found[key] = self._find_looked_up_rows(site, s, name)
        return self._rows_found[key]

    def _find_looked_up_rows(self, site: Site, s: Scored, name: str) -> Tensor | None:
        others = [other for other, _ in s.uses if other is not site]
        alone = len(others) == len(s.uses) - 1 and site not in self.repeated and site.rule.grams(name)
        if not alone or not all(o.rule.sparse and o in self._called and o not in self.repeated for o in others):
            return None
        return torch.unique(torch.cat(self._tokens[s]))

    def _note_call(self, site: Site) -> None:
        if current_backward() != -1:
            return  # a segment that is recomputed
        if site in self._called and site not in self.repeated:
            self.repeated.add(site)
            raise StepError(
                f"{site.title} is used more than once in one forward, which no look at the model had shown; nothing was scored. "
                "It is known now: leave the step, zero_grad(), and run it again."
            )
        self._called.add(site)

    def _ask(
        self, site: Site, names: tuple[str, ...], constants: Any, inputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[tuple[MergedAsk, ...], list[Tensor], dict[str, Tensor]]:
        """Tell what is wanted of a call: asks, gains and rows followed by probes, and memory for what is kept formed."""
        directions = self.directions
        assert isinstance(directions, MergedDirections)
        asks: list[MergedAsk] = []
        gains: list[Tensor] = []
        probes: list[Tensor] = []
        buffers: dict[str, Tensor] = {}
        for name in names:
            s = site.scored[name]
            if dtype.itemsize < 4:
                self.coarse[s.parameter] = dtype
            streams = directions.stream(s, site.rule.sparse) is not None
            several = len(s.uses) > 1 or site in self.repeated
            by_rows = streams and directions.by_rows(s) and site.rule.rows_are_classes(name, s.parameter)
            leaves = self.checked or several or not streams
            rows = self._looked_up_rows(site, s, name) if several and streams and not site.rule.sparse else None
            if streams and (rows is not None or not several):
                gain = directions.gains[s.parameter]
                form = self._form_of(site, s, name, inputs, dtype, gain is None and not by_rows)
                gains += [] if gain is None else [gain]
                probes.append(self._sum_leaf(s, by_rows))
                rows_as = None
                if rows is not None:
                    gains.append(rows)
                    rows_as, leaves_of = self._keep_rows(site, s, name, constants, inputs, dtype, rows, by_rows)
                    probes += leaves_of
                asks.append(MergedAsk(name, form, by_rows, gain is not None, rows_as=rows_as, leaves=leaves))
            else:
                kind, leaves_of = self._keep(site, s, name, constants, inputs, dtype, streams, by_rows, buffers)
                asks.append(MergedAsk(name, kept_as=kind, leaves=leaves))
                probes += leaves_of
            if leaves:
                apart = site.rule.sparse and len(s.uses) > 1
                probes.append(self._validation_leaf(s, self.looked_up if apart else self.validation))
        return tuple(asks), [*gains, *probes], buffers

    def _form_of(
        self, site: Site, s: Scored, name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, constant_gain: bool
    ) -> str:
        """Choose how the training rows of a call are contracted; forms are named in ``coverage``."""
        p, lead = s.parameter, inputs[0]
        outer = p.dim() == 2 and site.rule.grams(name)
        exact = {dtype, lead.dtype} <= {torch.float32, torch.float64} if lead.is_floating_point() else dtype.itemsize >= 4
        allowed = {"project", *(["shared"] if exact else []), *(["gram"] if constant_gain and outer else [])}
        if self.form in allowed:
            form = self.form
        elif not outer:
            form = "shared" if exact else "project"
        else:
            t = lead.numel() // max(lead.shape[-1] * self.rows, 1)
            sizes = Contraction(self.n, t, p.shape[0], p.shape[1], k=self.columns, m=self.m)
            form = sizes.cheapest(allowed - ({"gram"} if self.form == "shared" else set()), lead.dtype, p.device.type)
        site.note_form(f"merged {form}")
        return form

    def _keep(
        self,
        site: Site,
        s: Scored,
        name: str,
        constants: Any,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        postponed: bool,
        by_rows: bool,
        buffers: dict[str, Tensor],
    ) -> tuple[Any, list[Tensor]]:
        """Make the probes of training rows that are kept."""
        site.note_form("merged kept")
        training = tuple(x[: x.shape[0] // self.rows * self.n] for x in inputs)
        kind, parts = site.rule.kept_as(constants, name, s.parameter, training, dtype, self.n)
        key: Any = (s, *parts[0], postponed, by_rows)
        if kind.summable and key in self._formed:
            return kind, self._formed[key].leaves
        self.allowance.take(nbytes_of(parts))
        leaves = [self._leaf(*part, self.device) for part in parts]
        waiting = Kept(s, site, site.rule, constants, kind, leaves, None)
        for place, x in enumerate(leaves):
            self.watched(x, (s,), waiting, place)
        if postponed:
            self.postponed.append((waiting, by_rows))
        else:
            self.kept.append(waiting)
        if kind.summable:
            self._formed[key] = waiting
            buffers[name] = self.buffers.next(s, *parts[0], self.device)
        return kind, leaves

    def _keep_rows(
        self,
        site: Site,
        s: Scored,
        name: str,
        constants: Any,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        rows: Tensor,
        by_rows: bool,
    ) -> tuple[Any, list[Tensor]]:
        """Make the probes of some rows of the training rows' gradients: as much as a parameter of so many rows would take."""
        training = tuple(x[: x.shape[0] // self.rows * self.n] for x in inputs)
        kind, parts = site.rule.kept_as(constants, name, s.parameter.detach()[: len(rows)], training, dtype, self.n)
        self.allowance.take(nbytes_of(parts))
        leaves = [self._leaf(*part, self.device) for part in parts]
        waiting = Kept(s, site, site.rule, constants, kind, leaves, None)
        for place, x in enumerate(leaves):
            self.watched(x, (s,), waiting, place)
        self.crossing.append(Crossing(waiting, rows, by_rows))
        return kind, leaves

    def _validation_leaf(self, s: Scored, among: dict[Scored, Tensor]) -> Tensor:
        if s not in among:
            p = s.parameter
            dtype = torch.promote_types(p.dtype, torch.float32)
            among[s] = self.watched(self._leaf((self.columns, *p.shape), dtype, self.device), (s,))
        return among[s]

    # When the optimizer is about to step

    @torch.no_grad()
    def settle(self) -> None:
        """Hand ∇ℓ over to the directions, and contract what waited for it alone."""
        directions = self.directions
        assert isinstance(directions, MergedDirections)
        if any(len(backwards) > 1 for backwards in self.backwards.values()):
            raise StepError(
                "a merged step has one backward, of train_loss + validation_loss; several were run, or segments under reentrant "
                "activation checkpointing. Add the losses up first, pass use_reentrant=False, or give the Accountant validation= "
                "and open steps without merged=."
            )
        if self.root is None and torch.float16 in self.coarse.values():
            raise StepError(
                "a merged step in float16 must be told the scale of its loss apart from clipping: write "
                "scaler.scale(step.merge(train_loss, validation_loss)).backward()"
            )
        scale = 1.0 if self.root is None else float(self.root)
        self._cross()
        found = {s: x.grad for s, x in self.validation.items() if x.grad is not None}
        for s, x in self.looked_up.items():
            if x.grad is not None:
                found[s] = found[s].add_(x.grad) if s in found else x.grad
        if self.checked and not any(bool(g.any()) for g in found.values()):
            raise ValidationError(
                f"no gradient came through the last {self.m} rows, so that every sample would score 0: the loss of a merged step "
                "is train_loss(rows :n) + validation_loss(rows n:)"
            )
        directions.receive(found, scale if scale != 0 else 1.0)
        for kept, by_rows in self.postponed:
            v = directions.streaming[kept.scored.parameter].v
            for shape in kept.shapes():
                self._book(kept.scored, shape.contract_by_rows(v) if by_rows else shape.contract(v), by_rows)
            kept.forget()
        self.postponed = []

    def _cross(self) -> None:
        """Contract the rows that waited with the look-ups' part of ∇ℓ there: ⟨g_n[R], (gain ∘ V_table)[R]⟩."""
        directions = self.directions
        assert isinstance(directions, MergedDirections)
        for crossing in self.crossing:
            kept, rows = crossing.kept, crossing.rows
            s, looked_up = kept.scored, self.looked_up[kept.scored].grad
            shapes = kept.shapes() if looked_up is not None else []
            if shapes:
                assert looked_up is not None
                gain = directions.gains[s.parameter]
                v = looked_up.index_select(1, rows)
                v = v if gain is None else v * gain.index_select(1, rows)
                for shape in shapes:
                    if crossing.by_rows:
                        c = shape.contract_by_rows(v)
                        self._book(s, c.new_zeros(*c.shape[:2], len(s.parameter)).index_add_(2, rows, c), by_rows=True)
                    else:
                        self._book(s, shape.contract(v), by_rows=False)
            kept.forget()
        self.crossing = []

    def _book(self, s: Scored, c: Tensor, by_rows: bool) -> None:
        leaf = self._sum_leaf(s, by_rows)
        c = c.to(leaf.dtype)
        leaf.grad = c if leaf.grad is None else leaf.grad + c

    def release(self) -> None:
        """Free everything."""
        super().release()
        if self._watching is not None:
            self._watching.remove()
        for kept in (*(kept for kept, _ in self.postponed), *(crossing.kept for crossing in self.crossing)):
            kept.forget()
        for x in (*self.validation.values(), *self.looked_up.values()):
            x.grad = None
        self.validation, self.looked_up, self._tokens, self.outputs, self.root = {}, {}, {}, [], None
        self.postponed, self.crossing, self._rows_found = [], [], {}


def open_merged(
    setup: Setup, common: tuple[Any, ...], rows: int, points: bool, checked: bool, repeated: set[Site]
) -> MergedMicrobatch:
    """Return the microbatch of a merged step; ``common`` is what every microbatch takes, samples first."""
    if isinstance(common[0], Documents):
        raise StepError("ids per position in a merged step: packed documents need validation=, and steps without merged=")
    micro = MergedMicrobatch(*common, validation_rows=rows, points=points, form=setup.form, checked=checked, repeated=repeated)
    micro.watch_outputs(setup.model)
    return micro


def merge_losses(microbatches: Sequence[Microbatch], train_loss: Tensor, validation_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a merged step, and the validation losses ``[k]``; raise unless they are of the shapes that it takes."""
    micro = microbatches[-1] if microbatches else None
    if not isinstance(micro, MergedMicrobatch):
        raise StepError("merge() adds up the losses of a merged step; open it with accountant.step(ids, merged=m)")
    wanted = (micro.m,) if micro.points else ()
    if train_loss.dim() != 0 or validation_loss.shape != wanted:
        raise ValidationError(
            f"merge() got losses of shapes {tuple(train_loss.shape)} and {tuple(validation_loss.shape)}; it takes a scalar, "
            f"and {'one loss per validation row' if micro.points else 'a scalar'} of shape {wanted}"
        )
    if not validation_loss.requires_grad:
        raise ValidationError(
            "merge() got a validation loss without a graph, so that every sample would score 0: take it of the model's own output, "
            "without detach() and outside torch.no_grad()"
        )
    if not train_loss.requires_grad:
        raise ValidationError(
            "merge() got a training loss without a graph, so that the step has nothing to learn from: take it of the model's own "
            "output, without detach() and outside torch.no_grad(), or leave such a batch out with step.skip()"
        )
    if micro.checked:
        check_split(train_loss, validation_loss, micro.outputs, micro.n)
    part = validation_loss.sum()
    micro.watch_root(part)
    return train_loss + part, validation_loss.detach().reshape(-1).double().cpu()
