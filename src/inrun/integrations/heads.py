"""The head of TRL's trainers, called as a module.

TRL computes log-probabilities from ``lm_head.weight`` in a kernel of its own, and never calls the head: no sample's part of its
gradient can be seen there. Where the head is trained, this forward takes the place of the fused one: the same numbers, from calls
of the head, in tiles of positions whose logits are not kept.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inrun.errors import ConfigurationError

#: Logits that are held at once; more are made tile by tile, and once more in the backward.
HELD = 2**25
#: How far both forwards may differ, relative to the largest log-probability.
AGREE = 1e-3


class CalledHead:
    """A forward with ``fused_lm_head=True`` that calls the head; everything else is left to the forward that was there."""

    def __init__(self, model: nn.Module) -> None:
        """Look up how the model makes logits of what the head returns; ``model`` has TRL's fused forward."""
        try:
            from trl.trainer.utils import FusedCausalLMOutput
        except ImportError as error:
            raise ConfigurationError(
                "this version of TRL has another head than the one that inrun knows (it is tested with TRL 1.16), so that it "
                "cannot be scored. Freeze the head, train LoRA adapters, or install trl==1.16.0"
            ) from error
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._output: Any = FusedCausalLMOutput
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._scale = _scale_of(config)
        self.fused: Callable[..., Any] = model.forward
        #: Whether positions may be taken in tiles; those of packed documents must stay together.
        self.tiled = True

    def install(self, model: nn.Module) -> None:
        """Put the forward on a model's instance."""

        @functools.wraps(self.fused)
        def forward(this: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            # Evaluation stays with the fused head; a look at the rows runs without gradient, but in training mode.
            if not fused_lm_head or not (torch.is_grad_enabled() or this.training):
                return self.fused(*args, fused_lm_head=fused_lm_head, **kwargs)
            return self.called(this, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def called(
        self,
        model: Any,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the backbone and the head; return what the fused forward returns."""
        hidden = model.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        length = hidden.shape[1]
        if shift_labels is None:
            assert labels is not None
            # The head runs on all positions, so that those of packed documents stay in place; the last one predicts nothing.
            length -= 1
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        else:
            labels = shift_labels
        found = self._in_tiles(model.get_output_embeddings(), hidden, labels.clamp(min=0))
        mask = labels[:, :length] != -100
        log_probs, entropy, squares, mean_logits, top = (x[:, :length].masked_fill(~mask, 0) for x in found)
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return self._output(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            log_sum_sq_probs=squares,
            mean_logits=mean_logits,
            is_top1=top,
            label_mask=mask,
        )

    def _in_tiles(self, head: Any, hidden: Tensor, labels: Tensor) -> list[Tensor]:
        rows, length = labels.shape
        tile = max(1, HELD // max(1, rows * head.weight.shape[0]))
        if tile >= length or not self.tiled:
            return list(self._tile(head, hidden, labels))
        parts = []
        for at in range(0, length, tile):
            here = hidden[:, at : at + tile], labels[:, at : at + tile]
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._tile, head, *here, use_reentrant=False))
            else:
                parts.append(self._tile(head, *here))
        return [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]

    def _tile(self, head: Any, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return log-probabilities, entropy, log Σ p², mean logit and whether the label is the likeliest, each ``[n, t]``."""
        logits = head(hidden)
        logits = (logits.float() if logits.dtype.itemsize < 4 else logits) * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        normal = torch.logsumexp(logits, dim=-1)
        log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normal
        with torch.no_grad():
            each = logits - normal.unsqueeze(-1)
            entropy = -(each.exp() * each).sum(-1)
            squares = torch.logsumexp(2 * each, dim=-1)
            top = logits.argmax(-1) == labels
            mean = logits.mean(-1)
        return log_probs, entropy, squares, mean, top

    def verify(self, model: nn.Module) -> None:
        """Raise unless both forwards give the same log-probabilities, on a few tokens."""
        table = model.get_input_embeddings()  # type: ignore[operator]
        tokens = torch.arange(8, device=table.weight.device).unsqueeze(0) % table.weight.shape[0]
        with _in_eval_mode(model), torch.no_grad():
            theirs = self.fused(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs.double()
            ours = self.called(model, input_ids=tokens, labels=tokens).log_probs.double()
        if not bool((theirs - ours).abs().max() <= AGREE * (1 + theirs.abs().max())):
            raise ConfigurationError(
                f"{type(model).__name__} makes its logits in a way that this version of TRL knows and inrun does not, so that its "
                "head cannot be scored. Freeze the head (model.get_output_embeddings().requires_grad_(False)), or train LoRA "
                "adapters."
            )


def _scale_of(config: Any) -> float:
    """Return by what a model multiplies its logits, as its configuration says it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    before = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag
