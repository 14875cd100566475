"""Whole credit by brute force, in float64: every sample has an optimizer memory of its own. Shares no code with inrun.

The optimizers' memories are linear in what is pushed into them. So each sample's gradient is pushed into a memory of its own, as is
coupled weight decay, by the formulas of torch's documentation; the memories must add up to the move that torch really made.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from reference import gradients


def adam(m, z, group, count, state):
    m = group["betas"][0] * m + (1 - group["betas"][0]) * z
    return m, m


def sgd(m, z, group, count, state):
    if group["momentum"] == 0:
        return m, z
    m = z if count == 1 else group["momentum"] * m + (1 - group["dampening"]) * z
    return m, z + group["momentum"] * m if group["nesterov"] else m


def nadam(m, z, group, count, state):
    b1, psi = group["betas"][0], group["momentum_decay"]
    mu = [b1 * (1 - 0.5 * 0.96 ** (i * psi)) for i in range(1, count + 2)]
    m = b1 * m + (1 - b1) * z
    product = float(state["mu_product"])  # which torch keeps in single precision
    assert abs(product / math.prod(mu[:count]) - 1) < 1e-6
    return m, mu[count] * m / (1 - product * mu[count]) + (1 - mu[count - 1]) * z / (1 - product)


def lion(m, z, group, count, state):
    b1, b2 = group["betas"]
    return b2 * m + (1 - b2) * z, b1 * m + (1 - b1) * z


def divided(m, z, group, count, state):
    """RMSprop with momentum: every push is divided by the size of its own step."""
    variance = state["square_avg"] - state["grad_avg"] ** 2 if group["centered"] else state["square_avg"]
    m = group["momentum"] * m + z / (variance.sqrt() + group["eps"])
    return m, m


def none(m, z, group, count, state):
    return m, z


def adam_gain(state, group, t, q):
    v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return group["lr"] / (1 - group["betas"][0] ** t) / ((v / (1 - group["betas"][1] ** t)).sqrt() + group["eps"])


def nadam_gain(state, group, t, q):
    return group["lr"] / ((state["exp_avg_sq"] / (1 - group["betas"][1] ** t)).sqrt() + group["eps"])


def radam_gain(state, group, t, q):
    (b1, b2), longest = group["betas"], 2 / (1 - group["betas"][1]) - 1
    rho = longest - 2 * t * b2**t / (1 - b2**t)
    if rho <= 5:
        return group["lr"] / (1 - b1**t)
    rect = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
    return group["lr"] / (1 - b1**t) * rect * math.sqrt(1 - b2**t) / (state["exp_avg_sq"].sqrt() + group["eps"])


def adamax_gain(state, group, t, q):
    return group["lr"] / (1 - group["betas"][0] ** t) / state["exp_inf"]


def lion_gain(state, group, t, q):
    return group["lr"] * torch.where(q == 0, 0.0, torch.sign(q) / torch.where(q == 0, 1.0, q))


def lr_gain(state, group, t, q):
    return group["lr"]


class Brute:
    """Watches a run from outside; ``step`` is called when the optimizer has stepped."""

    def __init__(self, parameters: list[nn.Parameter], push: Callable, gain: Callable | None, early: int, points: int) -> None:
        """``early`` steps of a tensor have one factor for all of it."""
        self.parameters, self.push, self.gain, self.early = parameters, push, gain, early
        self.nodes = np.polynomial.legendre.leggauss(points)
        self.count = [0] * len(parameters)
        #: By step, sample and parameter; the last player of all is decay.
        self.memories: list[list[list[Tensor]]] = []
        self.decay = [torch.zeros_like(p) for p in parameters]
        self.credit: list[Tensor] = []
        self.own: list[Tensor] = []
        self.books: list[dict[str, float]] = []
        #: How far the memories are from the real move.
        self.off = 0.0

    def _average(self, loss, before, after):
        average = [torch.zeros_like(p) for p in self.parameters]
        for x, w in zip(*self.nodes, strict=True):
            self._put([b + (a - b) * (x + 1) / 2 for b, a in zip(before, after, strict=True)])
            for total, part in zip(average, gradients(loss(), self.parameters), strict=True):
                total += part * (w / 2)
        return average

    @torch.no_grad()
    def _put(self, values):
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

    def step(self, g, before, loss, options, shrinks, stepped):
        """``g[n][i]`` as the optimizer used it; ``options[i]`` = (state after, group); ``shrinks[i]`` = (beside, entering)."""
        after = [p.detach().clone() for p in self.parameters]
        average = self._average(loss, before, after)
        self._put(before)
        start = float(loss().detach())
        self._put(after)
        books = {"fall": start - float(loss().detach()), "decay": 0.0}
        self.memories.append([[torch.zeros_like(p) for p in self.parameters] for _ in g])
        self.credit.append(torch.zeros(len(g), dtype=torch.float64))
        paid = [torch.zeros_like(c) for c in self.credit]
        for i in range(len(self.parameters)):
            if not stepped[i]:
                continue
            self.count[i] += 1
            (state, group), (beside, entering) = options[i], shrinks[i]
            sign = -1.0 if group.get("maximize") else 1.0
            parts = []
            for s, of_step in enumerate(self.memories):
                for n, mine in enumerate(of_step):
                    z = sign * g[n][i] if s == len(self.memories) - 1 else torch.zeros_like(before[i])
                    mine[i], q = self.push(mine[i], z, group, self.count[i], state)
                    parts.append((s, n, q))
            self.decay[i], decayed = self.push(self.decay[i], entering * before[i], group, self.count[i], state)
            whole = sum((q for *_, q in parts), decayed)
            real = before[i] - after[i] - beside * before[i]
            if self.gain is None:
                gain = torch.where(whole == 0, 0.0, real / torch.where(whole == 0, 1.0, whole))
            else:
                gain = self.gain(state, group, self.count[i], whole)
                clear = whole.abs() > 1e-12 * whole.abs().max()  # a sum that cancels to rounding has no sign
                missed = torch.where(clear, gain * whole - real, 0.0)
                self.off = max(self.off, float(missed.abs().max() / real.abs().max().clamp_min(1e-300)))
            d = gain * average[i]
            if self.count[i] <= self.early:
                d = whole * ((whole * d).sum() / (whole * whole).sum().clamp_min(1e-300))
            books["decay"] += beside * float((before[i] * average[i]).sum()) + float((decayed * d).sum())
            for s, n, q in parts:
                paid[s][n] += float((q * d).sum())
        for total, part in zip(self.credit, paid, strict=True):
            total += part
        self.own.append(paid[-1])
        books["data"] = float(torch.cat(paid).sum())
        books["residual"] = books["fall"] - books["data"] - books["decay"]
        books["spread"] = float(torch.cat(paid).abs().sum())
        self.books.append(books)
