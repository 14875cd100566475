"""Documents packed into rows, and the same documents one per row, for models that keep documents apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.training.gpt import GPT, GPTConfig

VOCAB = 19
#: Documents of every row of a packed batch, by length; a negative one is padding.
TWO_ROWS = ((3, 5, 2, -2), (7, 1, -1, 3))
ONE_ROW = ((4, 6, 1, 5),)


@dataclass
class Batch:
    """Tokens, ids, positions and labels ``[n, t]``, and the number of the document of every position (−1 padding)."""

    tokens: Tensor
    ids: Tensor
    positions: Tensor
    labels: Tensor
    documents: Tensor

    def mask(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a block-diagonal causal mask, ``[n, 1, t, t]``, to be added; padding sees itself."""
        t = self.tokens.shape[1]
        same = self.documents.unsqueeze(2) == self.documents.unsqueeze(1)
        seen = same & torch.ones(t, t, dtype=torch.bool).tril()
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def documents_of(rows, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (size,), generator=generator) for row in rows for size in row if size > 0]


def batch_of(rows, documents: list[Tensor], ids: list[int]) -> Batch:
    """Lay documents out in rows of the given lengths."""
    length = max(sum(abs(size) for size in row) for row in rows)
    blank = torch.zeros(len(rows), length, dtype=torch.int64)
    made = Batch(blank, blank - 1, blank.clone(), blank - 100, blank - 1)
    number = 0
    for r, row in enumerate(rows):
        at = 0
        for size in row:
            if size > 0:
                here, tokens = slice(at, at + size), documents[number]
                made.tokens[r, here], made.ids[r, here], made.documents[r, here] = tokens, ids[number], number
                made.positions[r, here] = torch.arange(size)
                made.labels[r, at : at + size - 1] = tokens[1:]
                number += 1
            at += abs(size)
    return made


def both(rows, seed: int = 0) -> tuple[Batch, Batch, list[int]]:
    """Return a packed batch, the same documents one per row, and their ids."""
    documents = documents_of(rows, seed)
    ids = [3 * i + 10 * seed for i in range(len(documents))]
    return batch_of(rows, documents, ids), batch_of([(len(d),) for d in documents], documents, ids), ids


class PackedGPT(GPT):
    """Our GPT, with positions and a mask of documents."""

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            n, t, d = x.shape
            qkv = block.qkv(block.norm1(x)).view(n, t, 3, block.heads, d // block.heads).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
            x = x + block.out(mixed.transpose(1, 2).reshape(n, t, d))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        return self.head(self.norm(x))


def packed_gpt(tied: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = PackedGPT(GPTConfig(VOCAB, 16, 8, 2, 2, 0.0, tied)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)  # attention that tells documents apart needs weights that matter
    return model


def gpt_logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.tokens, batch.positions, batch.mask())


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens that are predicted."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
