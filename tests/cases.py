"""Small modules with inputs: a rule is covered by one entry here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    #: Input of n samples, t positions.
    draw: Callable[[int, int, torch.Generator], Tensor]
    #: Accuracy asked for in float64; the model itself computes in float32 where it is not 1e-9.
    accuracy: float = 1e-9


D = 6


def floats(n: int, t: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, t, D, generator=g, dtype=torch.float64)


def flat_floats(n: int, t: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, D, generator=g, dtype=torch.float64)


def tokens(n: int, t: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 11, (n, t), generator=g)


class Wrap(nn.Module):
    """A layer between things that give it a non-trivial input and output gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Reused(nn.Module):
    """A weight used three times in one forward, once through a tied second module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.twin = nn.Linear(D, D, bias=False)
        self.twin.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.twin(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    """Token table tied to the head, learned positions with batch size 1."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Embedding(11, D, padding_idx=padding_idx)
        self.positions = nn.Embedding(16, D)
        self.mix = nn.Linear(D, D)
        self.head = nn.Linear(D, 11, bias=False)
        self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(x.shape[1]).unsqueeze(0))
        return self.head(torch.tanh(self.mix(self.layer(x) + positions)))


class UnbatchedPositions(Tied):
    """Position indices of shape [t], as in nanoGPT."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.layer(x) + self.positions(torch.arange(x.shape[1])))))


class Grid(nn.Module):
    """A layer over one, two or three dimensions of space, ``[n, D, t]`` or ``[n, D, t, t]`` or ``[n, D, t, t, t]``."""

    def __init__(self, layer: nn.Module, dims: int, images: int = 1) -> None:
        super().__init__()
        self.layer, self.dims, self.images = layer, dims, images

    def forward(self, x: Tensor) -> Tensor:
        grid = row = x.transpose(1, 2)
        for _ in range(self.dims - 1):
            grid, row = grid.unsqueeze(-1) + row.unsqueeze(-2).sin() * grid.unsqueeze(-1), row.unsqueeze(-2)
        if self.images > 1:
            grid = torch.stack([grid * (i + 1) for i in range(self.images)], 1).flatten(0, 1)
        # torch 2.13 crashes in the backward of a group norm whose input is channels-last and needs no gradient.
        return self.layer(grid.contiguous()).reshape(len(x), -1)


class Rows(nn.Module):
    """Positions laid end to end before the layer, ``[n·t, D]``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:2], -1)


class Twice(nn.Module):
    """A layer of two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, input2=torch.sin(x))


class Bags(nn.Module):
    """Bags with a weight per token, or laid end to end with offsets; the first may be empty."""

    def __init__(self, offsets: bool = False, last: bool = False) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(11, D, mode="mean" if offsets else "sum", include_last_offset=last)
        self.offsets, self.last = offsets, last

    def forward(self, x: Tensor) -> Tensor:
        if not self.offsets:
            return self.layer(x, per_sample_weights=(x + 1).to(self.layer.weight.dtype).sqrt() / 9)
        kept = x % 3 != 0
        counts = kept.sum(1)
        ends = counts.cumsum(0)
        starts = ends - counts
        return self.layer(x[kept], torch.cat([starts, ends[-1:]]) if self.last else starts)


class Flattened(nn.Module):
    """Samples laid end to end before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, D)).view(x.shape[0], -1, 5)


class RawScale(nn.Module):
    """A raw parameter beside a child that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))
        self.shift = nn.Parameter(torch.randn(1, 1, D))
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.sin(x * self.scale)) + self.shift


class RawTables(nn.Module):
    """Positions, a class token, a relative table without a batch and a gate, read at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 9, D))
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.relative = nn.Parameter(torch.randn(25, 2))
        self.gate = nn.Parameter(torch.randn(()))
        self.mix, self.query = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[0], x.shape[1] + 1
        x = torch.cat([self.token.expand(n, -1, -1), x], dim=1) + self.positions[:, :t]
        q, k = (layer(x).view(n, t, 2, -1).transpose(1, 2) for layer in (self.query, self.mix))
        places = torch.arange(t)[:, None] - torch.arange(t)[None] + 12
        bias = self.relative[places.view(-1)].view(t, t, -1).permute(2, 0, 1).contiguous()
        scores = q @ k.transpose(2, 3) + 4 * torch.sigmoid(bias).unsqueeze(0)
        mixed = (scores.softmax(-1) @ q).transpose(1, 2).reshape(n, t, -1)
        return (x * self.gate.exp() + mixed)[:, 1:]


class RawProducts(nn.Module):
    """Weights that are multiplied with, one of them a slice of another's square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(5, D))
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first.t())
        return nn.functional.linear(x, self.second.square()[:4], self.shift[1:]) @ self.first[:4]


class RawUnknown(nn.Module):
    """A raw parameter that meets the samples in an operation that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(D, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose1d(x.transpose(1, 2), self.kernel, groups=D).transpose(1, 2)


class CutOff(nn.Module):
    """A raw parameter divided by its own norm, which is taken without gradient (power iterations, running scales)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.weight.norm()
        return nn.functional.linear(x, self.weight / size)


class ReadChildren(nn.Module):
    """A module with a raw parameter that reads its children's parameters, and calls one of them as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))
        self.convolution = nn.Conv1d(D, D, 2, padding=1, groups=D)
        self.inner, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.kernel = nn.Parameter(torch.randn(D, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        weight = self.convolution.weight.squeeze(1).unsqueeze(1)
        y = nn.functional.conv1d(y, weight, self.convolution.bias, padding=1, groups=D)[..., : x.shape[1]]
        y = y + nn.functional.conv1d(nn.functional.pad(y, (2, 0)), self.kernel.exp(), None, 1, 0, 2, D // 3)
        y = self.inner.weight @ y + self.inner.bias[:, None]
        return self.inner(self.norm(y.transpose(1, 2) * self.scale)) * self.norm.weight


class Attention(nn.Module):
    """nn.MultiheadAttention to itself or to other keys and values, batch or sequence first."""

    def __init__(self, batch_first: bool = True, cross: bool = False, **options: object) -> None:
        super().__init__()
        self.layer, self.cross = nn.MultiheadAttention(D, 2, batch_first=batch_first, **options), cross

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        key, value = (torch.sin(x), torch.cos(x)) if self.cross else (x, x)
        out, _ = self.layer(x, key, value, need_weights=self.cross)
        return out if self.layer.batch_first else out.transpose(0, 1)


def encoder_layer(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 7, dropout=0.0, batch_first=batch_first)


class Turned(nn.Module):
    """A sequence-first layer in a batch-first model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Decoder(nn.Module):
    """nn.TransformerDecoderLayer with a causal mask."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(D, 2, 7, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.layer(x, torch.sin(x), tgt_mask=mask)
        return out if self.batch_first else out.transpose(0, 1)


class Sequences(nn.Module):
    """A recurrent network: its outputs and last states, or its outputs alone; packed, or sequence first."""

    def __init__(self, layer: nn.RNNBase, states: bool = False, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.states, self.packed = layer, states, packed

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        given = x if self.layer.batch_first else x.transpose(0, 1)
        if self.packed:
            # Lengths that only the sample itself decides.
            lengths = (x[:, 0, 0] > 0).long() * (t // 2) + (t - t // 2)
            given = nn.utils.rnn.pack_padded_sequence(given, lengths, batch_first=self.layer.batch_first, enforce_sorted=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
            out, states = self.layer(given)
        if self.packed:
            out = nn.utils.rnn.pad_packed_sequence(out, batch_first=self.layer.batch_first, total_length=t)[0]
        out = out if self.layer.batch_first else out.transpose(0, 1)
        if not self.states:
            return out
        states = states if isinstance(states, tuple) else (states,)
        return out + sum(z.sin().sum((0, 2)).view(n, 1, 1) for z in states)


def recurrent() -> list[Case]:
    """Every kind; layers, directions, projections, states that are used or not, packed sequences."""
    options = {
        "LSTM": lambda: Sequences(nn.LSTM(D, 5, batch_first=True)),
        "LSTM, two layers, both directions": lambda: Sequences(nn.LSTM(D, 4, 2, batch_first=True, bidirectional=True), states=True),
        "LSTM, projected, sequence first": lambda: Sequences(nn.LSTM(D, 5, 2, proj_size=3), states=True),
        "LSTM, packed": lambda: Sequences(nn.LSTM(D, 4, 2, batch_first=True, bidirectional=True), states=True, packed=True),
        "GRU": lambda: Sequences(nn.GRU(D, 5, 2, batch_first=True, bidirectional=True), states=True),
        "GRU without bias": lambda: Sequences(nn.GRU(D, 5, bias=False)),
        "GRU, packed": lambda: Sequences(nn.GRU(D, 4), states=True, packed=True),
        "RNN": lambda: Sequences(nn.RNN(D, 5, batch_first=True, bidirectional=True), states=True),
        "RNN, relu, packed": lambda: Sequences(nn.RNN(D, 5, 2, nonlinearity="relu", bidirectional=True), packed=True),
    }
    return [Case(name, build, floats) for name, build in options.items()]


class StateFromOutside(nn.Module):
    """A recurrent network whose first state depends on the sample."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Linear(D, layer.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.first(x[:, 0])).unsqueeze(0).expand(self.layer.num_layers, -1, -1).contiguous()
        out, _ = self.layer(x, (state, state.sin()) if isinstance(self.layer, nn.LSTM) else state)
        return out


class Experts(nn.Module):
    """Experts behind a router, over positions that are laid end to end."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 5), scrambled(experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        shares, chosen = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, chosen, shares).view(x.shape)


def experts(config: Any, module: Any, implementation: str) -> nn.Module:
    options = config(hidden_size=D, intermediate_size=4, num_local_experts=5, num_experts_per_tok=2)
    options._experts_implementation = implementation
    return Experts(module(options))


class Made(nn.Module):
    """A product with a weight that a function without a derivative of its backward makes of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.raw, self.function = nn.Parameter(torch.randn(5, 4)), function

    def forward(self, x: Tensor) -> Tensor:
        weight = self.function(self.raw)
        return nn.functional.linear(x[..., : weight.shape[1]], weight)


def bags_of(p: Tensor) -> Tensor:
    return nn.functional.embedding_bag(torch.tensor([[0, 1], [2, 4], [3, 3]]), p)


class NoForwardMode(torch.autograd.Function):
    """An operation with a backward but no forward-mode derivative; vmap goes through it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return b * w, (b * x).sum(tuple(range(x.dim() - 1)))


class OfOthers(torch.autograd.Function):
    """As most autograd functions are written: torch.func has no way through it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    backward = NoForwardMode.backward


class OnlyPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return OfOthers.apply(x, self.weight)


class MaskedWeight(nn.Module):
    """A mask as large as the weight, whose rows are a multiple of most numbers of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(60, D))
        self.register_buffer("mask", torch.rand(60, D) > 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask)


class OnlyVmap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(x, self.weight)


class Decides(OnlyVmap):
    """Asks for values, which cannot be told of many samples at once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(torch.isfinite(x).all()) else x


def conv1d() -> nn.Module:
    layer = Conv1D(5, D)
    nn.init.normal_(layer.bias)
    return layer


def scrambled(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, mean=0.5)
    return module


def in_eval(module: nn.Module) -> nn.Module:
    """A norm with running statistics of some run, which it uses."""
    module = scrambled(module).eval()
    module.running_mean.normal_(), module.running_var.uniform_(0.5, 2.0)
    return module


def frozen_bias() -> nn.Module:
    layer = nn.Linear(D, 5)
    layer.bias.requires_grad_(False)
    return layer


def frozen_weight() -> nn.Module:
    layer = nn.Linear(D, 5)
    layer.weight.requires_grad_(False)
    return layer


def convolutions() -> list[Case]:
    """One to three dimensions; strides, paddings of every kind, dilation, groups; several images per sample."""
    options: dict[str, tuple[int, dict[str, object]]] = {
        "1d": (1, {"padding": 1}),
        "1d, stride, no bias": (1, {"stride": 2, "padding": 2, "bias": False}),
        "1d, same": (1, {"padding": "same"}),
        "1d, same, uneven, replicated": (1, {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"}),
        "1d, circular, dilated": (1, {"dilation": 2, "padding": 1, "padding_mode": "circular", "kernel_size": 2}),
        "2d": (2, {"padding": 1}),
        "2d, stride and dilation": (2, {"padding": (2, 3), "stride": (2, 1), "dilation": (1, 2)}),
        "2d, groups": (2, {"padding": 1, "groups": 3}),
        "2d, depthwise, replicated": (2, {"padding": 1, "groups": D, "kernel_size": 2, "padding_mode": "replicate"}),
        "2d, one by one": (2, {"kernel_size": 1}),
        "3d": (3, {"padding": 1, "stride": 2}),
    }
    kinds: list[type[nn.Module]] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
    transposed: list[type[nn.Module]] = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    found = []
    for name, (dims, chosen) in options.items():
        arguments = {"kernel_size": 3} | chosen
        own = "padding_mode" not in chosen
        build = lambda kind=kinds[dims - 1], dims=dims, arguments=arguments: Grid(kind(D, D, **arguments), dims)  # noqa: E731
        found.append(Case(f"convolution {name}", build, floats))
        if own and name != "2d, one by one":
            extra = arguments | ({"output_padding": 1, "padding": 0} if arguments.get("stride") == 2 else {"padding": 0})
            build = lambda kind=transposed[dims - 1], dims=dims, extra=extra: Grid(kind(D, D, **extra), dims)  # noqa: E731
            found.append(Case(f"transposed convolution {name}", build, floats))
    return [
        *found,
        Case("convolution, two images each", lambda: Grid(nn.Conv2d(D, 5, 3, padding=1), 2, images=2), floats),
    ]


def bags() -> list[Case]:
    options = {"sum": {}, "mean": {}, "sum, padding_idx": {"padding_idx": 3}, "mean, padding_idx": {"padding_idx": 3}}
    return [
        Case(
            f"embedding bag, {name}",
            lambda name=name, chosen=chosen: nn.EmbeddingBag(11, D, mode=name.split(",")[0], **chosen),
            tokens,
        )
        for name, chosen in options.items()
    ]


CASES = [
    Case("linear", lambda: nn.Linear(D, 5), floats),
    Case("linear without bias", lambda: nn.Linear(D, 5, bias=False), floats),
    Case("linear, one position", lambda: nn.Linear(D, 5), flat_floats),
    Case("linear, frozen bias", frozen_bias, floats),
    Case("linear, frozen weight", frozen_weight, floats),
    Case("linear, flattened rows", lambda: Flattened(), floats),
    Case("Conv1D of transformers", conv1d, floats),
    Case("layer norm", lambda: scrambled(nn.LayerNorm(D)), floats),
    Case("layer norm without bias", lambda: scrambled(nn.LayerNorm(D, bias=False)), floats),
    Case(
        "layer norm over two dimensions",
        lambda: scrambled(nn.LayerNorm((4, D))),
        lambda n, t, g: torch.randn(n, 4, D, generator=g, dtype=torch.float64),
    ),
    Case("RMS norm of torch", lambda: scrambled(nn.RMSNorm(D)), floats),
    Case("RMS norm of Llama", lambda: scrambled(LlamaRMSNorm(D)), floats, accuracy=1e-6),
    Case("RMS norm of OLMo", lambda: scrambled(Olmo2RMSNorm(D)), floats, accuracy=1e-6),
    Case("RMS norm of T5", lambda: scrambled(T5LayerNorm(D)), floats, accuracy=1e-6),
    Case("RMS norm of Gemma", lambda: scrambled(GemmaRMSNorm(D)), floats, accuracy=1e-6),
    Case("embedding", lambda: nn.Embedding(11, D), tokens),
    Case("embedding with padding_idx", lambda: nn.Embedding(11, D, padding_idx=3), tokens),
    Case("weight used three times", lambda: Reused(), floats),
    Case("tied head, positions of batch 1", lambda: Tied(), tokens),
    Case("tied head with padding_idx", lambda: Tied(padding_idx=3), tokens),
    Case("positions without batch", lambda: UnbatchedPositions(), tokens),
    Case("raw parameters beside a child", lambda: RawScale(), floats),
    Case("raw table, token, bias and gate", lambda: RawTables(), floats, accuracy=1e-9),
    Case("raw weights of products", lambda: RawProducts(), floats),
    Case("raw parameter in an unknown operation", lambda: RawUnknown(), floats),
    Case("raw parameter beside its norm without gradient", lambda: CutOff(), floats),
    Case("children whose parameters are read", lambda: ReadChildren(), floats),
    Case("attention", lambda: Attention(), floats),
    Case("attention, sequence first", lambda: Attention(batch_first=False), floats),
    Case("attention to others", lambda: Attention(kdim=D, vdim=D, bias=False, cross=True), floats),
    Case("attention with more keys", lambda: Attention(add_bias_kv=True, add_zero_attn=True, cross=True), floats),
    Case("encoder", lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False), floats),
    Case("encoder, sequence first", lambda: Turned(encoder_layer(batch_first=False)), floats),
    Case("encoder in eval mode", lambda: nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False).eval(), floats),
    Case("decoder", lambda: Decoder(), floats),
    Case("decoder, sequence first", lambda: Decoder(batch_first=False), floats),
    Case("no forward-mode derivative", lambda: OnlyVmap(), floats),
    Case("neither that, nor many samples at once", lambda: Decides(), floats),
    Case("an autograd function of others", lambda: OnlyPlain(), floats),
    Case("masked weight", lambda: MaskedWeight(), floats),
    Case(
        "weight norm over all entries",
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 5), dim=None),
        floats,
    ),
    Case(
        "parametrised linear",
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)),
        floats,
    ),
    *[
        Case(f"weight made by {name}", lambda f=f: Made(f), floats)
        for name, f in {"exp": torch.exp, "distances": lambda p: torch.cdist(p, p.flip(1) + 1), "bags": bags_of}.items()
    ],
    *[
        Case(f"experts of {name}, {how}", lambda c=c, m=m, how=how: experts(c, m, how), floats)
        for name, c, m in (("Mixtral", MixtralConfig, MixtralExperts), ("GPT-OSS", GptOssConfig, GptOssExperts))
        for how in ("eager", "batched_mm")
    ],
    *convolutions(),
    *recurrent(),
    Case("LSTM, state from outside", lambda: StateFromOutside(nn.LSTM(D, 4, 2, batch_first=True)), floats),
    Case("GRU, state from outside", lambda: StateFromOutside(nn.GRU(D, 4, batch_first=True)), floats),
    Case("group norm", lambda: Grid(scrambled(nn.GroupNorm(3, D)), 2), floats),
    Case("group norm, two images each", lambda: Grid(scrambled(nn.GroupNorm(2, D)), 1, images=2), floats),
    Case("group norm of positions", lambda: Rows(scrambled(nn.GroupNorm(2, D))), floats),
    Case(
        "instance norm",
        lambda: Grid(scrambled(nn.InstanceNorm2d(D, affine=True)), 2),
        lambda n, t, g: floats(n, t + 1, g),
    ),
    Case(
        "instance norm, running statistics",
        lambda: Grid(in_eval(nn.InstanceNorm1d(D, affine=True, track_running_stats=True)), 1),
        floats,
    ),
    Case("batch norm in eval mode", lambda: Grid(in_eval(nn.BatchNorm2d(D)), 2), floats),
    Case("PReLU", lambda: nn.PReLU(), floats),
    Case("PReLU by channel", lambda: Grid(scrambled(nn.PReLU(D)), 2), floats),
    Case("bilinear", lambda: Twice(nn.Bilinear(D, D, 5)), floats),
    Case("bilinear without bias", lambda: Twice(nn.Bilinear(D, D, 5, bias=False)), flat_floats),
    *bags(),
    Case("embedding bag, weighted", lambda: Bags(), tokens),
    Case("embedding bag, offsets", lambda: Bags(offsets=True), tokens),
    Case("embedding bag, offsets to the last", lambda: Bags(offsets=True, last=True), tokens),
    Case("embedding bag, largest", lambda: nn.EmbeddingBag(11, D, mode="max"), tokens),
    Case("gelu between linears", lambda: nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.Linear(7, 3)), floats),
]


def model_of(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wrap(case.build()).double()


def position_mask(n: int, t: int, g: torch.Generator) -> Tensor:
    """Which positions count: at least one per sample, the rest padding."""
    mask = (torch.rand(n, t, generator=g) < 0.7).double()
    mask[:, 0] = 1.0
    return mask


def masked_sum(out: Tensor, mask: Tensor) -> Tensor:
    """Σ over unmasked positions of a nonlinear function of the output."""
    if out.dim() == 2:
        out = out.unsqueeze(1)
    weights = torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)
    return ((out * weights).sum(-1).square() * mask[:, : out.shape[1]].to(out.dtype)).sum()
