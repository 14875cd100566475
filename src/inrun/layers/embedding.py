"""Embedding tables. The gradient of sample n at row w is Σ_t [token_nt = w] b_nt; row ``padding_idx`` has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inrun.layers.registry import Kept, KeptFactors, Rule, Saved, Take, register
from inrun.layers.rows import SCRATCH_BYTES, row_dots, scratch_like


class KeptRows(KeptFactors):
    """Tokens and output gradients; only the rows that occur can carry gradient."""

    def rows(self) -> Tensor | None:
        """Return the sorted distinct tokens of the batch where that is fewer than the table has rows."""
        tokens = self.saved[0]
        return torch.unique(tokens) if tokens.numel() < len(self.module.get_parameter("weight")) else None

    def contract_rows(self, rows: Tensor, v: Tensor) -> Tensor:
        """Contract with directions given only for ``rows``, ``[k, r, d]``."""
        self.check()
        places = torch.searchsorted(rows, self.saved[0].reshape(-1)).view(self.saved[0].shape)
        return gather_contract(places, self.saved[1], self.b, self.n, v)


def gather_contract(tokens: Tensor, padding: Tensor | None, b: Tensor, n: int, v: Tensor) -> Tensor:
    """Return Σ_t b_nt · v[token_nt], ``[n, k]``; positions marked in ``padding`` count nothing."""
    b = b.reshape(n, -1).to(v.dtype)
    if tokens.dim() > 1 and tokens.stride(0) == 0 and padding is None:
        # The same tokens for every sample (position indices): pick their rows once.
        return b @ v[:, tokens[0].reshape(-1)].flatten(1).t()
    flat = tokens.reshape(n, -1)
    blank = None if padding is None else padding.reshape(n, -1)
    piece = max(1, SCRATCH_BYTES * n // max(b.nbytes, 1))
    parts = []
    for first in range(0, n, piece):
        group = slice(first, first + piece)
        index, b_p = flat[group].reshape(-1), b[group]
        scores = []
        for direction in v:
            picked = torch.index_select(direction, 0, index, out=scratch_like(b_p, (len(index), v.shape[-1])))
            if blank is not None:
                picked.masked_fill_(blank[group].reshape(-1, 1), 0.0)
            scores.append(row_dots(picked.view(b_p.shape), b_p))
        parts.append(torch.stack(scores, dim=1))
    return torch.cat(parts)


@register(nn.Embedding)
class EmbeddingRule(Rule):
    """A table look-up. The layer's own backward stays the framework's; the contraction is n·t·d and needs no GEMM."""

    label = "embedding"
    names = ("weight",)
    sparse = True

    def refusal(self, module: nn.Module) -> str | None:
        """Refuse options under which the table's gradient is not the sum over its uses."""
        options = ("scale_grad_by_freq", "sparse", "max_norm")
        used = [option for option in options if getattr(module, option)]
        return f"nn.Embedding with {', '.join(used)} has another gradient than the sum over tokens" if used else None

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saved:
        """Keep tokens and, where the table has a padding row, which of them are padding."""
        (tokens,) = (*args, *kwargs.values())
        padding = None if module.padding_idx is None else tokens == module.padding_idx
        return (tokens, padding)

    def sample_gradient(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Scatter the output gradients into one table per sample (large; for tests and tiny tables)."""
        tokens, padding = saved
        b = b.reshape(n, -1, b.shape[-1])
        if padding is not None:
            b = b.masked_fill(padding.reshape(n, -1, 1), 0.0)
        index = tokens.reshape(n, -1, 1).expand_as(b)
        return b.new_zeros(n, *module.get_parameter(name).shape).scatter_add_(1, index, b)

    def contract(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Gather the direction's rows and contract."""
        return gather_contract(saved[0], saved[1], b, n, v)

    def total(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Scatter the output gradients of all samples into one table."""
        tokens, padding = saved
        flat = b.reshape(-1, b.shape[-1])
        if padding is not None:
            flat = flat.masked_fill(padding.reshape(-1, 1), 0.0)
        return flat.new_zeros(module.get_parameter(name).shape).index_add_(0, tokens.reshape(-1), flat)

    def kept_bytes(self, module: nn.Module, name: str, lead: Tensor, n: int) -> int:
        """Return the size of tokens and output gradients; a look-up without batch has one output per sample."""
        parameter = module.get_parameter(name)
        rows = lead.numel() * (1 if lead.shape[:1] == (n,) or lead.numel() % n == 0 else n)
        return rows * (parameter.shape[1] * parameter.element_size() + 8)

    def keep(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, take: Take) -> Kept:
        """Keep tokens and output gradients."""
        tokens, padding = saved  # tokens are copied: loaders like to refill one buffer
        return KeptRows(self, module, name, (tokens.clone(), padding), b, n)
