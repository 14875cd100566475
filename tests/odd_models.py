"""Models that use rows and parameters in odd ways, each of which scored wrongly at some time; and what must become of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

D, WORDS = 6, 11


def draw(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(100 * n + sum(shape) + seed), dtype=torch.float64)


def words(n: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (n, t), generator=torch.Generator().manual_seed(100 * n + t + seed))


class Model(nn.Module):
    """A model made of named parts and a function of itself and its inputs."""

    def __init__(self, run: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def model(run: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Model(run, {name: make() for name, make in parts.items()})


def linear(i: int = D, o: int = D) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o)


def table(rows: int = WORDS, width: int = D) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(rows, width)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.rand(*shape) + 0.5)


@dataclass
class Odd:
    """A model and its batches, a tuple of inputs each; samples are the rows of the first."""

    build: Callable[[], nn.Module]
    batches: Sequence[tuple[Any, ...]]
    held: tuple[Any, ...]
    #: The error that the last batch must give, if it cannot be scored.
    refused: str = ""
    audit_every: int = 1
    #: How the model is called by its loop.
    call: Callable[..., Tensor] = lambda m, *x: m(*x)
    near: float = 1e-9
    #: What is done to the model before each batch.
    before: Callable[[Any, int], Any] = lambda m, step: None


def odd(build: Callable[[], nn.Module], *shapes: Sequence[int], make: Any = draw, held: Any = None, **options: Any) -> Odd:
    """Batches of one tensor, by shape; the held-out rows are shaped like the first."""
    batches = [(make(*shape, seed=i),) for i, shape in enumerate(shapes)]
    return Odd(build, batches, (make(2, *shapes[0][1:], seed=99),) if held is None else held, **options)


MOVED = "RowOwnershipError: .*reads rows of the batch that the model has mixed or put into another order"
MEET = "RowOwnershipError: .*mixes samples"
UNKNOWN = "RowOwnershipError: .*which rows are whose is not known"

# Where the samples lie


def windows(m: Any, x: Tensor) -> Tensor:
    n, t, d = x.shape
    return m.inner(x.transpose(0, 1).reshape(n * t, d)).view(t, n, d).transpose(0, 1)


def sorted_by(order: Callable[[int], Sequence[int]]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        places = torch.tensor(order(len(x)))
        return m.inner(x[places])[places.argsort()]

    return run


def unsorted(m: Any, x: Tensor) -> Tensor:
    return m.inner(x[torch.arange(len(x)).flip(0)])


def mixup(m: Any, x: Tensor) -> Tensor:
    return m.inner(0.7 * x + 0.3 * x.roll(1, 0))


def over_batch(m: Any, x: Tensor) -> Tensor:
    return m.attention(x, x, x)[0]


def tokens(way: str) -> Callable[[], nn.Module]:
    def run(m: Any, x: Tensor) -> Tensor:
        if way == "sequence-first":
            return m.inner(torch.tanh(m.words(x.t()))).transpose(0, 1)
        if way == "end to end":
            return m.inner(torch.tanh(m.words(x.flatten()))).view(*x.shape, D)
        return m.inner(torch.tanh(m.words(x)))

    return model(run, words=table(), inner=linear())


def documents(mixed: bool) -> Callable[[], nn.Module]:
    """Several documents per query."""

    def run(m: Any, q: Tensor, d: Tensor) -> Tensor:
        d = d.roll(1, 0) if mixed else d
        encode = lambda x: m.inner(torch.tanh(m.first(x)))  # noqa: E731
        return (encode(q).unsqueeze(1) * encode(d).view(len(q), -1, D)).sum(-1)

    return model(run, first=linear(), inner=linear())


def padded(end_to_end: bool) -> Callable[[], nn.Module]:
    """The longest sample decides how many positions there are; optionally only tokens that are none of the padding go on."""

    def run(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(m.recurrent(packed)[0], batch_first=True)
        inside = (torch.arange(made.shape[1]) < lengths[:, None]).unsqueeze(-1)
        if end_to_end:
            made = torch.zeros_like(made).masked_scatter(inside, m.inner(made[inside.squeeze(-1)]))
        else:
            made = m.inner(made)
        return made * inside

    return model(run, recurrent=lambda: nn.GRU(D, D, batch_first=True), inner=linear())


def of_lengths(*batches: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(draw(len(one), 6, D, seed=sum(one)), torch.tensor(one)) for one in batches]


def unpadded(m: Any, x: Tensor) -> Tensor:
    y = m.head(torch.tanh(m.words(x[x > 0])))
    out = y.new_zeros(*x.shape, 3)
    out[x > 0] = y
    return out


def with_zeros(seed: int) -> tuple[Tensor]:
    x = words(4, 6, seed).clamp(min=1)
    x[1, 4:] = x[3, 4:] = 0  # 20 rows are a multiple of 4, too
    return (x,)


def almost_equal(n: int, t: int, place: int) -> tuple[Tensor]:
    x = torch.arange(t).repeat(n, 1)
    x[-1, place] = 9
    return (x,)


LAYOUTS = {
    **{
        f"{name}, {t} positions": odd(model(run, inner=linear()), (3, t, D), (3, t, D))
        for name, run in {
            "sequence-first": lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1),
            "windows": windows,
            "shuffled and put back": sorted_by(lambda n: range(n)[::-1]),
            "two change places": sorted_by(lambda n: [0, *range(n)[:0:-1]]),
        }.items()
        for t in (3, 5)
    },
    "shuffled, not put back": odd(model(unsorted, inner=linear()), (4, 3, D), refused=MOVED),
    "mixed rows": odd(model(mixup, inner=linear()), (4, 3, D), refused=MOVED),
    "attention over the batch": odd(model(over_batch, attention=lambda: nn.MultiheadAttention(D, 2)), (4, 4, D), refused=MEET),
    "rows meet behind a layer": odd(
        model(lambda m, x: m.head(m.inner(x) + m.inner(x).mean(0)), inner=linear(), head=linear()), (4, 3, D), refused=MEET
    ),
    **{f"tokens {way}": odd(tokens(way), (4, 4), make=words) for way in ("batch-first", "sequence-first", "end to end")},
    **{
        f"tokens {way}, samples differ at {place} of {t}": Odd(tokens(way), [almost_equal(2, t, place)], (words(2, 4),))
        for way in ("sequence-first", "end to end")
        for t in (2, 3)
        for place in (0, 1)
    },
    "several rows per sample": Odd(documents(False), [(draw(4, D), draw(12, D))] * 2, (draw(2, D), draw(6, D))),
    "rows of several samples": Odd(documents(True), [(draw(4, D), draw(12, D))], (draw(2, D), draw(6, D)), MOVED),
    "padded to the longest": Odd(
        padded(False), of_lengths((5, 3, 2, 4), (3, 6, 2, 2), (2, 2, 2, 6), (1, 1, 1, 1)), of_lengths((2, 3))[0]
    ),
    **{
        f"without padding, audits {every}": Odd(
            padded(True), of_lengths(*[(4, 4, 4, 4)] * 5, (5, 3, 4, 4), (2, 2, 6, 6)), of_lengths((2, 3))[0], audit_every=every
        )
        for every in (0, 1)
    },
    "padding that comes later": Odd(
        model(unpadded, words=table(), head=linear(D, 3)),
        [*((words(4, 6, i).clamp(min=1),) for i in range(5)), with_zeros(5), with_zeros(6)],
        (words(4, 6),),
        audit_every=0,
    ),
}

# Masks, queries, positions: what has no sample dimension


def attention(mask: Callable[[int, int], dict[str, Tensor]]) -> Callable[[], nn.Module]:
    run = lambda m, x: m.inner(x, x, x, need_weights=False, **mask(len(x), x.shape[1]))[0]  # noqa: E731
    return model(run, inner=lambda: nn.MultiheadAttention(D, 2, batch_first=True))


def causal(t: int) -> Tensor:
    return torch.triu(torch.full((t, t), float("-inf"), dtype=torch.float64), 1)


def relative(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    bias = m.table((places[None, :] - places[:, None]).abs()).permute(2, 0, 1).tanh()[None]
    scores = (x @ x.transpose(1, 2))[:, None] + bias
    return m.inner((scores.softmax(-1) * bias).sum(-1).transpose(1, 2) + x)


def read_pairs(m: Any, x: Tensor) -> Tensor:
    places, h = torch.arange(x.shape[1]), m.words(x)
    bias = m.table[places[:, None] - places[None] + 16].squeeze(-1)
    return (h @ h.transpose(1, 2) + bias).softmax(-1) @ h


def slopes(m: Any, x: Tensor) -> Tensor:
    n, t, _ = x.shape
    q = m.query(x).view(n, t, 2, 3).transpose(1, 2)
    far = (torch.arange(t)[:, None] - torch.arange(t)[None]).abs().double()
    return ((q @ q.transpose(-1, -2) - m.slopes.view(2, 1, 1) * far).softmax(-1) @ q).transpose(1, 2).reshape(n, t, D)


def used_twice(use: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The same on what the samples have, ``[n, d]``, and on a table of nine rows, or of one more than there are positions."""

    def run(m: Any, x: Tensor) -> Tensor:
        rows = m.rows[: 9 if x.shape[1] == 5 else x.shape[1] + 1]
        return m.head(torch.tanh(use(m, torch.tanh(m.words(x)).mean(1)) + use(m, rows).mean(-2)))

    return model(run, words=table(), rows=lambda: torch.randn(16, D), head=linear(D, 3), **parts)


def decoder(batch_first: bool) -> Callable[[], nn.Module]:
    """Learned queries into a decoder: its first layers see no sample."""

    def run(m: Any, x: Tensor) -> Tensor:
        if batch_first:
            return m.decoder(m.queries.unsqueeze(0).expand(len(x), -1, -1), x)
        return m.decoder(m.queries.unsqueeze(1).expand(-1, len(x), -1), x.transpose(0, 1)).transpose(0, 1)

    layer = lambda: nn.TransformerDecoderLayer(D, 2, 8, 0.0, batch_first=batch_first)  # noqa: E731
    return model(run, decoder=lambda: nn.TransformerDecoder(layer(), 1), queries=weight(7, D))


def loss_behind(returns: str) -> Callable[[], nn.Module]:
    """A parameter behind the last layer, sequence-first; returns its loss, or what it has computed."""

    def run(m: Any, x: Tensor) -> Tensor:
        made = m.head(torch.tanh(m.words(x))).transpose(0, 1) * m.scale
        return made.square().sum() if returns == "loss" else made if returns == "sequence-first" else made.transpose(0, 1)

    return model(run, words=table(), head=linear(D, WORDS), scale=weight(WORDS))


POSITIONS: dict[str, Callable[[], nn.Module]] = {
    "positions": model(lambda m, x: m.inner(x + m.table(torch.arange(x.shape[1]))), table=table(16), inner=linear()),
    "positions [1, t]": model(lambda m, x: m.inner(x + m.table(torch.arange(x.shape[1]))[None]), table=table(16), inner=linear()),
    "positions behind": model(
        lambda m, x: torch.tanh(m.inner(x)) + m.table(torch.arange(x.shape[1])), table=table(16), inner=linear()
    ),
    "positions as a weight": model(lambda m, x: m.inner(F.linear(x, m.table(torch.arange(D)))), table=table(16), inner=linear()),
    "relative positions": model(relative, table=table(16), inner=linear()),
}
OF_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "scaled table": model(
        lambda m, x: m.head(torch.tanh(m.words(x) + m.scale * m.rows[: x.shape[1]])),
        words=table(), scale=weight(D), rows=lambda: torch.randn(16, D), head=linear(D, 3),
    ),
    "multiplied table": model(
        lambda m, x: m.head(torch.tanh(m.words(x) + F.linear(m.rows[: x.shape[1]], m.weight))),
        words=table(), weight=weight(D, D), rows=lambda: torch.randn(16, D), head=linear(D, 3),
    ),
    "pairs that are read": model(read_pairs, words=table(), table=weight(32, 1)),
    "positions of tokens": model(
        lambda m, x: m.head(torch.tanh(m.words(x) + m.places(torch.arange(x.shape[1])))),
        words=table(), places=table(16), head=linear(),
    ),
    "scale used twice": used_twice(lambda m, x: m.scale * x, scale=weight(D)),
    "layer used twice": used_twice(lambda m, x: m.layer(x), layer=linear()),
}  # fmt: skip
SIZES = {
    "fewer": [(12, 16), (12, 16), (8, 16), (8, 16)],
    "square": [(8, 12), (8, 12), (8, 16), (8, 8)],
    "late": [*[(8, 5)] * 4, (9, 5), (16, 15), (5, 5)],
}
TABLES = {
    **{f"{name} {n}, {t}": odd(build, (n, t, D)) for name, build in POSITIONS.items() for n, t in ((3, 3), (4, 3), (1, 3), (6, 6))},
    **{
        f"{name}, {sizes}, audits {every}": odd(build, *SIZES[sizes], make=words, audit_every=every)
        for name, build in OF_TOKENS.items()
        for sizes in SIZES
        for every in (0, 1)
    },
    **{
        f"mask {name}": odd(attention(mask), (6, 6, D))
        for name, mask in {
            "none": lambda n, t: {},
            "[t, t]": lambda n, t: {"attn_mask": causal(t)},
            "padding": lambda n, t: {"key_padding_mask": torch.arange(t).expand(n, t) >= t - 1},
            "one per head": lambda n, t: {"attn_mask": causal(t).expand(2 * n, t, t)},
        }.items()
    },
    "slopes of attention": odd(model(slopes, slopes=weight(2), query=linear()), *[(12, 16, D)] * 4, (8, 16, D), (16, 16, D)),
    "a mix of three layers": odd(
        model(
            lambda m, x: (m.weights.softmax(0).view(-1, 1, 1, 1) * torch.stack([torch.tanh(f(x)) for f in m.layers])).sum(0),
            weights=weight(3), layers=lambda: nn.ModuleList([nn.Linear(D, D) for _ in range(3)]),
        ),
        (4, 5, D), (4, 5, D), (3, 5, D), (5, 5, D), audit_every=0,
    ),
    **{f"queries {first} {n}": odd(decoder(first), (n, 5, D)) for first in (True, False) for n in (4, 5, 7)},
    "a parameter expanded to positions": odd(
        model(lambda m, x: m.head(torch.tanh(m.words(x) * m.scale.expand(x.shape[1], -1))),
              words=table(), scale=weight(D), head=linear(D, 3)),
        (12, 16), (8, 12), make=words,
    ),
    "as many positions as samples": odd(
        model(lambda m, x: m.head(torch.tanh(m.words(x) * m.scale.expand(x.shape[1], -1))),
              words=table(), scale=weight(D), head=linear(D, 3)),
        (8, 12), (8, 8), make=words, refused=MEET,
    ),
    "a table of a module without samples": odd(model(lambda m, x: torch.tanh(x + m.table * 1.0), table=weight(3, D)), (3, 3, D)),
    **{
        f"behind the last layer, {returns}, {t}": odd(loss_behind(returns), (4, t), make=words)
        for returns in ("loss", "batch-first", "sequence-first")
        for t in (4, 5)
    },
    "copies that nothing shows": odd(
        model(lambda m, x: (m.inner(x).sum(1) * m.query.expand(len(x), -1)).square().sum(), query=weight(D), inner=linear()),
        (4, 5, D), refused=UNKNOWN,
    ),
    **{
        f"one row, {name}": odd(
            model(lambda m, x, use=use: m.inner(torch.tanh(x) * use(m.table(torch.tensor([1])))), table=table(3), inner=linear()),
            (3, D),
        )
        for name, use in {"as it is": lambda r: r, "its entry": lambda r: r[0], "mean": lambda r: r.mean(0),
                          "number": lambda r: r.mean()}.items()
    },
}  # fmt: skip

# How parameters are used


def complex_weight(m: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(m.inner(x).transpose(1, 2))
    mixed = torch.einsum("bil,iol->bol", spectrum, torch.view_as_complex(m.weight))
    return torch.fft.irfft(mixed, n=x.shape[1]).tanh()


def rotated(m: Any, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]).double(), m.frequencies)
    turned = torch.view_as_complex(m.inner(x).view(*x.shape[:2], 3, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2).tanh()


def written(how: str) -> Callable[[], nn.Module]:
    """Writes into what is made of a parameter, or of a layer that sees no sample, before that meets the samples."""

    def run(m: Any, x: Tensor) -> Tensor:
        made = m.weight.clone()
        if how == "entries":
            before = made * 0.5
            made[1:3] = 0.0
            made = made + before
        elif how == "whole":
            made.mul_(m.rows).tanh_()
        elif how == "a view":
            made.view(-1).mul_(3.0)
        elif how == "behind a view":
            other = made.view(-1)
            made.mul_(3.0)
            made = made + other.view(D, D)
        else:
            made = F.leaky_relu(m.outer(F.relu(m.inner(m.rows), inplace=True)).t(), 0.1, True).t()
            return (F.linear(x, m.weight) + made[: x.shape[1]]).tanh()
        return F.linear(x, made).tanh()

    return model(run, weight=weight(D, D), inner=linear(), outer=linear(), rows=lambda: torch.randn(D, D))


def late(how: str) -> Callable[[], nn.Module]:
    """What stands beside a parameter is written to after its use, from some step on."""

    def run(m: Any, x: Tensor) -> Tensor:
        made = m.shift * 2.0
        other = {"a view": m.mean.view(-1), "what was made": made}.get(how, m.mean)
        factor = torch.exp(0.1 * (m.scale + other)) * (1.0 + 0.1 * m.count)
        if how == "complex numbers":
            factor = torch.view_as_real(torch.view_as_complex(factor.view(-1, 2)) * 1.0).reshape(-1)
        out = m.inner(x) * factor + made
        if m.writes and m.training:
            if how == "a number":
                m.count += 1
            elif how != "what was made":
                (other.data if how == "behind autograd's back" else other).add_(0.5)
        return out

    made = model(run, inner=linear(), scale=weight(D), shift=weight(D), mean=lambda: torch.randn(D) * 0.1)

    def build() -> nn.Module:
        found = made()
        found.writes, found.count = False, 0
        return found

    return build


def writes(m: Any, step: int) -> None:
    m.writes = step > 0


def containers(m: Any, x: Tensor) -> Tensor:
    """Parameters in containers, which have no forward, one of them shared by two blocks."""
    for block in m.blocks:
        whole = torch.view_as_complex(torch.stack([p.tanh() for p in (*block.nested[0], *block.bank.values())]).view(-1, 2))
        x = block.inner(x) * torch.view_as_real(whole).reshape(-1, D).prod(0) + x
    return m.head(x).tanh()


def blocks() -> nn.Module:
    bank = nn.ParameterDict({"both": torch.randn(D)})

    def block() -> nn.Module:
        made = nn.Module()
        made.inner, made.nested = nn.Linear(D, D), nn.ModuleList([nn.ParameterList([torch.randn(D), torch.randn(D)])])
        made.bank = bank
        return made

    return nn.ModuleList([block(), block()])


def sparse(m: Any, x: Tensor) -> Tensor:
    places = torch.stack([torch.arange(D), torch.arange(D).flip(0)])
    weight = torch.eye(D, dtype=x.dtype) + torch.sparse_coo_tensor(places, m.entries * 2.0, (D, D))
    return F.linear(m.inner(x), weight).tanh()


class Recurrent(nn.Module):
    """A recurrent network with a parametrised weight; its last states have the samples in the second dimension."""

    def __init__(self, kind: Any, uses: str, layers: int) -> None:
        super().__init__()
        self.given = (kind, uses, layers)
        self.inner = kind(D, D, num_layers=layers, batch_first=uses != "sequence-first")
        parametrizations.weight_norm(self.inner, "weight_hh_l0")
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        uses = self.given[1]
        if uses == "sequence-first":
            return self.head(self.inner(x.transpose(0, 1))[0].transpose(0, 1)).tanh()
        out, last = self.inner(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(out if uses == "outputs" else out * last.sum(0).unsqueeze(1)).tanh()

    def __deepcopy__(self, memo: Any) -> Recurrent:
        """What torch keeps of the weights in a list cannot be copied."""
        twin = Recurrent(*self.given).double()
        twin.load_state_dict(self.state_dict())
        return twin


def same_memory(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.a) + torch.tanh(F.linear(x, m.b))


def interleaved() -> dict[str, Callable[[], Any]]:
    both = torch.randn(3, 2 * D, dtype=torch.float64)
    return {"a": lambda: nn.Parameter(both[:, :D].clone()), "b": lambda: nn.Parameter(both[:, D:])}


def again(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(m.a(x))
    x = x.unsqueeze(1) * torch.linspace(0, 1, 7, dtype=x.dtype)[:, None]
    return torch.tanh(F.linear(x, m.a.weight, m.b.bias)).mean(1)


def overwrites(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    h = x.exp() * m.gate
    x += h
    return x


def hooked() -> nn.Module:
    """Hooks that change what a parameter meets."""
    scaled = Model(lambda m, x: torch.tanh(x * m.g), {"g": nn.Parameter(torch.randn(D))})
    scaled.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
    scaled.register_forward_hook(lambda m, args, out: out + 0.1 * out.square())
    return nn.Sequential(scaled, nn.Linear(D, 3))


def transposed() -> nn.Module:
    made = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 13))
    for layer in (made[0], made[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return made


def channels_last() -> nn.Module:
    made = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 3, (2, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
    return made.to(memory_format=torch.channels_last)


def in_one_vector() -> nn.Module:
    made = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    flat, start = torch.cat([p.detach().reshape(-1) for p in made.parameters()]), 0
    for p in made.parameters():
        p.data, start = flat[start : start + p.numel()].view(p.shape), start + p.numel()
    return made


def adversarial(m: Any, *x: Any) -> Tensor:
    """The same layers once with their weights frozen."""
    if len(x) == 1:
        return m(*x)
    m[1].requires_grad_(False)
    first = m(x[0])
    m[1].requires_grad_(True)
    return first * m(x[1])


def taught(m: Any, *x: Any) -> Tensor:
    """Beside the model's own weights others are used, which are trained by nobody, and others that are."""
    if len(x) == 1:
        return m(*x)
    teacher = {k: 1.3 * v.detach() for k, v in m.named_parameters()}
    apart = {k: v.detach().clone().requires_grad_() for k, v in m.named_parameters()}
    torch.func.functional_call(m, apart, (x[0],)).sum().backward()
    return m(x[0]) - torch.func.functional_call(m, teacher, (x[1],))


def uses_late(m: Any, step: int) -> None:
    m.on = step >= 4


def bag_of_parts(m: Any, x: Tensor) -> Tensor:
    offsets = torch.arange(len(x)) * x.shape[1]
    return m.bag(x.reshape(-1), offsets)


PAIRS = [(draw(3, D), draw(3, D, seed=1))] * 2
half = model(lambda m, x: torch.tanh(x * m.a + 0 * m.b), a=weight(D), b=weight(D))
USES = {
    "complex weight": odd(model(complex_weight, inner=linear(), weight=weight(D, D, 3, 2)), (4, 5, D)),
    "rotations": odd(model(rotated, inner=linear(), frequencies=weight(3)), (4, 5, D)),
    **{f"written, {how}": odd(written(how), (4, 5, D)) for how in ("entries", "whole", "a view", "behind a view", "a layer")},
    **{
        f"written later, {how}, audits {every}": odd(late(how), *[(4, 5, D)] * 3, before=writes, audit_every=every)
        for how in ("a buffer", "a view", "what was made", "a number", "behind autograd's back", "complex numbers")
        for every in (0, 1)
    },
    "containers": odd(model(containers, blocks=blocks, head=linear()), (4, 5, D)),
    "sparse matrix": odd(model(sparse, inner=linear(), entries=weight(D)), (4, 5, D)),
    **{
        f"{kind.__name__}, {uses}, {layers} layers": odd(lambda kind=kind, uses=uses, n=layers: Recurrent(kind, uses, n), (4, 5, D))
        for kind in (nn.LSTM, nn.GRU)
        for uses in ("outputs", "last states", "sequence-first")
        for layers in (1, 4)
    },
    "a number that is made of two": odd(model(lambda m, x: torch.tanh(x + (m.a + m.b)), a=weight(D), b=weight(D)), (3, D)),
    "one matrix many times": odd(model(again, a=linear(), b=linear()), (4, D)),
    "interleaved memory": odd(model(same_memory, **interleaved()), (4, D)),
    "transposed memory": odd(transposed, (4, D)),
    "channels last": odd(channels_last, (4, D)),
    "one vector": odd(in_one_vector, (4, D)),
    "its input is overwritten": odd(model(overwrites, gate=weight(D)), (3, D)),
    "activations in place": odd(
        lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(True), nn.Conv1d(2, 3, 1), nn.ReLU(True)), (3, 2, D)
    ),
    "begins at zero": odd(
        model(lambda m, x: x + F.linear(m.a(x), m.b), a=linear(D, 2), b=lambda: nn.Parameter(torch.zeros(D, 2))), *[(3, D)] * 3
    ),
    "a parameter without gradient": odd(half, (3, D), (3, D)),
    "frozen for one of two uses": Odd(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), PAIRS, (draw(2, D),), call=adversarial, audit_every=0
    ),
    "frozen for one of two uses, read": Odd(
        lambda: nn.Sequential(nn.Linear(D, D), half()), PAIRS, (draw(2, D),), call=adversarial, audit_every=0
    ),
    "other weights beside its own": Odd(lambda: nn.Sequential(half(), nn.Linear(D, D)), PAIRS, (draw(2, D),), call=taught),
    "used from some step on": odd(
        model(lambda m, x: torch.tanh(m.a(x)) @ m.b if m.on else torch.tanh(m.a(x)), a=linear(), b=weight(D, D)),
        *[(3, D)] * 6, before=uses_late, audit_every=2,
    ),
    "another use from some step on": odd(
        model(lambda m, x: m.head(torch.einsum("ntd,d->ntd", m.words(x), m.scale)) if m.on
              else m.head(m.words(x) + m.scale * m.rows[: x.shape[1]]),
              words=table(), scale=weight(D), rows=lambda: torch.randn(16, D), head=linear()),
        *[(8, 16)] * 6, make=words, before=uses_late, audit_every=0,
    ),
    "hooks": odd(hooked, (4, D)),
    "spectral norm": odd(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, 4)).eval(), nn.Tanh(), nn.Linear(4, 3)), (4, D)
    ),
    "bags with offsets": odd(model(bag_of_parts, bag=lambda: nn.EmbeddingBag(WORDS, D)), (4, 2), make=words),
    "bags of rows": odd(lambda: nn.EmbeddingBag(WORDS, D), (4, 2), make=words),
    "bags of the largest, equal samples": Odd(
        model(lambda m, x, y: m.bag(x) * y, bag=lambda: nn.EmbeddingBag(WORDS, 3, mode="max")),
        [(torch.full((2, 1), 4), draw(2, 1))], (torch.full((1, 1), 4), draw(1, 1)),
    ),
}  # fmt: skip


# How models are given their batches, and called


def from_object(m: Any, batch: Any) -> Tensor:
    x = batch() if callable(batch) else batch.rows
    x = x.flip(0) if m.way == "mixed" else x
    if m.way == "sequence-first":
        return m.inner(x.transpose(0, 1)).square().sum()
    return m.inner(x)


def boxed(way: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = model(from_object, inner=linear())()
        made.way = way
        return made

    return build


BOXES: dict[str, Callable[[Tensor], Any]] = {
    "attributes": lambda x: SimpleNamespace(rows=x),
    "a function": lambda x: lambda: x,
}


def by_parts(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, x: m.second(torch.tanh(m.first(change(x))))


parts = model(lambda m, x: x, first=linear(), second=linear())
CALLS = {
    **{
        f"a batch in {box}, {t} positions": odd(boxed("rows"), (6, t, D), call=lambda m, x, box=box: m(BOXES[box](x)))
        for box in BOXES
        for t in (5, 6)
    },
    **{
        f"a batch in {box}, mixed": odd(boxed("mixed"), (6, 6, D), call=lambda m, x, box=box: m(BOXES[box](x)), refused=MOVED)
        for box in BOXES
    },
    **{
        f"a batch in {box}, whose layout only the loss shows": odd(
            boxed("sequence-first"), (6, 6, D), call=lambda m, x, box=box: m(BOXES[box](x)), refused=UNKNOWN
        )
        for box in BOXES
    },
    "parts outside of the model": odd(parts, (3, 3, D), call=by_parts(lambda x: x)),
    "parts outside of the model, sequence-first": odd(
        parts, (3, 3, D), call=by_parts(lambda x: x.transpose(0, 1)), refused=UNKNOWN
    ),
    "parts outside of the model, mixed": odd(
        parts, (3, 3, D), call=by_parts(lambda x: x.roll(1, 0)), refused=f"({UNKNOWN}|{MOVED})"
    ),
}
ODD = {**LAYOUTS, **TABLES, **USES, **CALLS}
