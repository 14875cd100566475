"""The small models of the golden runs, defined here so that no other change can alter them.

They are given their weights by :func:`initialise`, which draws integers and so gives the same
numbers on every machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Standard scale of weights with two or more dimensions, and of those with one.
WIDE, NARROW = 0.4, 0.1


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers between -1 and 1 in float64, the same on every machine."""
    return torch.randint(-1000, 1001, shape, generator=generator).double() / 1000


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Convert the model to float64 and draw every parameter; the B matrices of LoRA begin at zero.

    Args:
        model: Any model; weights of norms are recognised by their name.
        seed: Of the draw.

    Returns:
        The model.
    """
    model.double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = uniform(tuple(parameter.shape), generator)
        if "lora_B" in name:
            parameter.zero_()
        elif parameter.ndim > 1:
            parameter.copy_(WIDE * noise)
        else:
            is_scale = "norm" in name and name.endswith("weight")
            parameter.copy_(NARROW * noise + float(is_scale))
    return model


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Map ``[n, t, d]`` to ``[n, t, d]``; ``seen`` is ``[..., t, t]``, true where i sees j."""
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens ``[n, t]`` to logits ``[n, t, vocab]``; several documents per row if told apart."""

    def __init__(self, vocab: int, context: int, width: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return logits; ``positions`` and ``documents`` are ``[n, t]`` where rows are packed."""
        t = tokens.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        if documents is not None:  # [n, 1, t, t]: documents do not see each other
            same = documents.unsqueeze(2) == documents.unsqueeze(1)
            seen = (same & seen).unsqueeze(1)
        if positions is None:
            positions = torch.arange(t).unsqueeze(0)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm; the shortcut is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, i, h, w]`` to ``[n, o, h / stride, w / stride]``."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(x + shortcut)


class GroupNormResNet(nn.Module):
    """Images ``[n, 3, 8, 8]`` to logits ``[n, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6)
        self.block1, self.block2 = ResidualBlock(6, 6, 1), ResidualBlock(6, 8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.block2(self.block1(torch.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class BatchNormCNN(nn.Module):
    """Images ``[n, 3, 8, 8]`` to logits ``[n, 4]``; convolutions have no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(6, 10, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class LSTMClassifier(nn.Module):
    """Tokens ``[n, t]`` to logits ``[n, 4]``, with dropout in front of the head."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, 8)
        self.lstm = nn.LSTM(8, 10, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(10, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        outputs, _ = self.lstm(self.tokens(tokens))
        return self.head(self.dropout(outputs[:, -1]))
