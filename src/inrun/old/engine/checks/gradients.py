"""Watches ``.grad`` from the backward to the optimizer's step: who got gradient, and what was done to it.

Norm clipping, loss scaling and division by accumulation steps multiply the whole gradient by one number, which is
told apart from anything else by the norms of the single tensors and a few of their entries. No gradient is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from inrun.errors import ConservationError, CoverageError, OptimizerError, StepError
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored, local
from inrun.torch_private import at_end_of_backward, current_backward, foreign_gradient_hooks, norms_of, version_of

SKETCH = 8
#: Entries whose squares are added up at a time, and up to how many that is done in one go.
PIECE = 1024
FEW = 16 * PIECE


_NONE: frozenset[int] = frozenset()


def _check_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device):
        raise StepError(
            "loss.backward() runs inside an autocast block, which rounds the gradients of the weights once more; leave the block "
            "before the backward, as PyTorch asks for"
        )


@dataclass
class Seen:
    """What a gradient looked like right after a backward; norm and sketch are there once that has come to its end."""

    gradient: Tensor
    version: int
    norm: Tensor = field(init=False)
    sketch: Tensor = field(init=False)
    #: A part of a larger tensor (a view of one of DDP's buckets) shares the count of writes with all others: it tells nothing.
    counts: bool = True

    def untouched(self, gradient: Tensor | None, writes: int = 0) -> bool:
        """Whether this very tensor is still there and was written to just so often."""
        return gradient is self.gradient and (not self.counts or version_of(local(gradient)) == self.version + writes)


def norm_of(gradient: Tensor) -> Tensor:
    """Return the norm in single precision at least, to a few roundings whatever the size.

    torch adds all squares up in one go, which is off by 1e-4 for three million entries and by 2e-3 for a vocabulary of
    GPT-2; norms of pieces and the norm of those are not, and on a CPU take half the time.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.numel() <= FEW:
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    flat = gradient.reshape(-1)
    whole = flat.numel() // PIECE * PIECE
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
    if norms.numel() > PIECE:
        norms = norm_of(norms)
    if whole == flat.numel():
        return torch.linalg.vector_norm(norms)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.hypot(torch.linalg.vector_norm(norms), rest)


def norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return :func:`norm_of` every gradient; small ones in one go, since models have many."""
    found: list[Tensor | None] = [None] * len(gradients)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, g in enumerate(gradients):
        if g.numel() <= FEW and g.dtype in (torch.float32, torch.float64):
            kinds.setdefault((g.dtype, g.device), []).append(place)
        else:
            found[place] = norm_of(g)
    for places in kinds.values():
        for place, norm in zip(places, norms_of([gradients[i] for i in places]), strict=True):
            found[place] = norm
    return [x for x in found if x is not None]


def _first(gradient: Tensor) -> Tensor:
    """Return the first entries: they tell a sign, which norms do not."""
    if gradient.is_contiguous():
        return gradient.as_strided((min(SKETCH, gradient.numel()),), (1,))
    return gradient.reshape(-1)[:SKETCH]


def _sketches_agree(now: Tensor, then: Tensor) -> bool:
    """Whether the first entries are what they were, and not all 0: a loss scaler's kernel does not count its writes."""
    return torch.equal(now, then) and bool((then != 0).any())


def _sketch_distances(now: Tensor, then: Tensor, sizes: list[int], factor: float) -> tuple[Tensor, Tensor]:
    """Return ‖first entries now − factor · first entries then‖ and ‖first entries then‖, per gradient; ``sizes`` of each."""
    now, then = now.cpu(), then.cpu()
    owner = torch.repeat_interleave(torch.tensor(sizes))
    pairs = torch.stack([now.double() - factor * then.double(), then.double()]).square()
    sums = pairs.new_zeros(2, len(sizes)).index_add_(1, owner, pairs).sqrt()
    return sums[0], sums[1]


class GradientWatch:
    """What happens to the gradients of the scored parameters in one step; told by hooks that the engine keeps on them."""

    def __init__(self, scored: list[Scored], processes: Processes | None = None) -> None:
        """Look at the gradients as they stand before the step's first backward.

        Those that are averaged over processes are so before a backward is over: they are measured then.
        """
        self.processes = processes or Processes()
        self.reduced = self.processes.reduces
        #: Of several processes: gradients that stood after a backward in which they did not arrive here.
        self._elsewhere: dict[nn.Parameter, Seen] = {}
        self.names = {s.parameter: s.name for s in scored}
        self.seen: dict[nn.Parameter, Seen] = {}
        #: Backwards in which a parameter received gradient.
        self.backwards: dict[nn.Parameter, set[int]] = {}
        #: Parameters whose gradient was changed between two backwards; that got gradient after an optimizer had stepped.
        self.disturbed: set[nn.Parameter] = set()
        self.late: set[nn.Parameter] = set()
        #: Norms of gradients that were there before the step's first backward.
        self.before: dict[nn.Parameter, Tensor] = {}
        self.settled = False
        self._latest: int | None = None
        #: Gradients that arrived and are to be measured when their backward has come to its end.
        self._arrived: list[Seen] = []
        #: Hooks of others may change gradients on their way to ``.grad``, where nothing is seen of it.
        self.hooked = foreign_gradient_hooks(self.names, ours=1)
        self._handles = [p.register_hook(self._before_arrival(p)) for p in self.names if p.grad is not None and p.requires_grad]

    def _before_arrival(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        """Note what is in ``.grad`` when the step's first gradient comes to be added to it."""

        @torch.no_grad()
        def hook(_: Tensor) -> None:
            if parameter in self.seen:
                return
            self.before.pop(parameter, None)  # torch.autograd.grad calls this too, and zero_grad may have come since
            if parameter.grad is not None:
                self.before[parameter] = norm_of(local(parameter.grad))

        return hook

    def arrive(self, parameter: nn.Parameter, measure: bool = False) -> None:
        """Note a gradient right after it was accumulated; it is measured at the end of its backward, unless told to now."""
        gradient = parameter.grad
        if gradient is None:
            return
        backward = current_backward()
        if backward != self._latest:
            self._latest = backward
            _check_autocast(parameter.device.type)
            if self.reduced or not self.hooked:
                at_end_of_backward(self._measure_reduced if self.reduced else self.measure)
        backwards = self.backwards.get(parameter)
        if backwards is None:
            self.backwards[parameter] = {backward}
        else:
            backwards.add(backward)
            before = self.seen.get(parameter)
            # DDP lays its buckets out anew after the first backward: a view of one is another tensor, with the same content.
            in_bucket = self.reduced and local(gradient)._is_view()
            if before is not None and not in_bucket and not before.untouched(gradient, writes=1):
                self.disturbed.add(parameter)
        if self.settled:
            self.late.add(parameter)
        if measure or not self.reduced:
            self._note(self.seen, parameter)
        if measure or (self.hooked and not self.reduced):  # before any hook of others changes it
            self.measure()

    def _note(self, seen: dict[nn.Parameter, Seen], parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        here: Tensor = local(gradient)
        note = seen[parameter] = Seen(gradient, version_of(here), counts=not (self.reduced and here._is_view()))
        self._arrived.append(note)

    def _measure_reduced(self) -> None:
        """At the end of a backward, when gradients are what all processes use."""
        for p in self.names:
            if p.grad is not None:
                self._note(self.seen if p in self.backwards else self._elsewhere, p)
        self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Take norms and first entries of the gradients that arrived, all at once."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        gradients = [local(note.gradient) for note in arrived]
        first = [_first(g) for g in gradients]
        alike = all(x.dtype == first[0].dtype and x.device == first[0].device for x in first)
        copies = torch.cat(first).split([x.numel() for x in first]) if alike else [x.clone() for x in first]
        for note, norm, sketch in zip(arrived, norms(gradients), copies, strict=True):
            note.norm, note.sketch = norm, sketch

    def take_reduced(self, scored: list[Scored], processes: Processes) -> None:
        """Take gradients into account that arrived on other processes only, of samples there."""
        came = torch.tensor([s.parameter in self.backwards for s in scored], dtype=torch.int32)
        somewhere = processes.summed("small", came)
        for s, count in zip(scored, somewhere.tolist(), strict=True):
            if count and s.parameter not in self.seen and s.parameter in self._elsewhere:
                self.seen[s.parameter] = self._elsewhere[s.parameter]

    def settle(self) -> None:
        """From now on an optimizer has stepped: more gradient comes too late."""
        self.settled = True

    def close(self) -> None:
        """Take the step's own hooks off."""
        for handle in self._handles:
            handle.remove()

    def check_coverage(self, scored: Collection[Scored], contracted: list[dict[nn.Parameter, set[int]]]) -> None:
        """Raise if a parameter received gradient in a backward in which no rule contracted it.

        ``contracted`` tells, per microbatch, the backwards in which something of a parameter came out of a rule.
        """
        missed = []
        for s in scored:
            came = self.backwards.get(s.parameter)
            if came and not any(came <= found.get(s.parameter, _NONE) for found in contracted):
                missing = came - set().union(*(found.get(s.parameter, _NONE) for found in contracted))
                missed += [s.name] if missing else []
        if missed:
            raise CoverageError(
                f"{', '.join(missed)} received gradient, but no observed module used it in this step; its scores would be "
                "missing. Usual causes: the weight is multiplied without calling its module (a fused loss that takes the "
                "head's weight, such as Liger's: take the unfused one), the backward belongs to a "
                "forward outside the step or of backward(inputs=...), or the model was changed after the Accountant was made."
            )

    def check_history(self) -> None:
        """Raise if the gradient did not grow by backwards alone."""
        for found, what in (
            (self.disturbed, "was reset or changed between two backwards of one step"),
            (self.late, "received more gradient after an optimizer had stepped"),
        ):
            if found:
                names = ", ".join(sorted(self.names[p] for p in found)[:5])
                raise StepError(f"{names} {what}; what was scored is not what the optimizer uses. Open a new step instead.")

    def check_left_over(self, moving: list[Scored]) -> None:
        """Raise if the optimizer is about to use gradient of before the step, which is no sample's of this step."""
        norms = dict(self.before)
        for s in moving:
            if s.parameter not in self.seen and s.parameter.grad is not None:
                norms[s.parameter] = norm_of(local(s.parameter.grad))
        if not norms:
            return
        nonzero = (torch.stack([x.double() for x in norms.values()]) != 0).tolist()
        found = sorted(self.names[p] for p, is_nonzero in zip(norms, nonzero, strict=True) if is_nonzero)
        if found:
            raise ConservationError(
                f"{', '.join(found[:5])} had gradient left in .grad from before the step: the optimizer would use it, and it is "
                "no sample's of this step. Call zero_grad() before the step's first backward, or put all backwards of an update "
                "into one step (step.microbatch)."
            )

    @torch.no_grad()
    def factor(self, scored: list[Scored], strict: bool = True) -> float | None:
        """Return the one number by which all gradients were multiplied since the backward; None if there is none.

        Raises:
            OptimizerError: The change is not one number for all parameters, and ``strict``.
        """
        if self._arrived:
            raise StepError(
                "a backward of this step failed on its way, and the gradients that it left are not whole; leave the step, call "
                "zero_grad() and begin a new one"
            )
        seen = [(s, self.seen[s.parameter]) for s in scored if s.parameter in self.seen]
        gone = [s.name for s, _ in seen if s.parameter.grad is None]
        if gone:
            raise OptimizerError(f"the gradient of {', '.join(gone)} was removed between backward and optimizer.step()")
        grads = [g for s, _ in seen if (g := s.gradient) is not None]
        b, a = torch.stack([*(note.norm for _, note in seen), *norms(grads)]).double().cpu().view(2, -1)
        now, then = torch.cat([_first(g) for g in grads]), torch.cat([note.sketch for _, note in seen])
        # Writes through .data, and those of a loss scaler's kernel, are not counted: look at all of it.
        same = torch.equal(a, b) and all(note.untouched(s.parameter.grad) for s, note in seen) and _sketches_agree(now, then)
        if self.processes.sharded:
            squares = self.processes.joined(torch.cat([b.square(), a.square(), b.new_tensor([float(not same)])]))
            same, (b, a) = float(squares[-1]) == 0.0, squares[:-1].sqrt().chunk(2)
        if same:
            return 1.0
        total = b.norm()
        if not torch.isfinite(total) or total == 0:
            return 1.0  # non-finite gradients are dealt with by the step; of zeros any factor is true
        c = float(a.norm() / total)
        eps = max(torch.finfo(g.dtype).eps for g in grads)
        tolerance = (4 if eps > 1e-5 else 64) * eps
        off = (a - c * b).abs() > tolerance * c * b + 1e-30
        turned, first = _sketch_distances(now, then, [len(note.sketch) for _, note in seen], c)
        off |= turned > tolerance * c * (first + 1e-3 * b) + 1e-30
        bad = torch.nonzero(self.processes.joined(off.to(torch.int32))).flatten().tolist()
        if bad and not strict:
            return None
        if bad:
            names = ", ".join(seen[i][0].name for i in bad[:5])
            raise OptimizerError(
                "between backward and optimizer.step() the gradient was changed by something other than one factor for "
                f"all parameters (seen at {names}). Accepted: norm clipping over all parameters, loss scaling, division "
                "by accumulation steps. "
                + (
                    "With several processes nothing else can be scored, since none has the gradients of all samples; clip by the "
                    "global norm."
                    if self.processes.several
                    else "Value clipping and per-group clipping cannot be scored with a direction made before the backward, nor by "
                    'whole credit: take credit="step" with method="midpoint" and update="secant", which wait for the gradients '
                    "that the optimizer uses, or clip by the global norm. Noise that is added is no sample's share."
                )
            )
        return c
