"""The slow twin of TTT: one token of one row and head after the other, its inner gradient from autograd.

Legend: B rows, N tokens, H heads, E head width, D model width, P numbers of a head's model, C tokens of a mini-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from memories.harness import HEADS, SlowMemory
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.memory import ProjectKV, Query, Reading, Trace
from cached_transformers.memories.parts.fast_weights import FastState
from cached_transformers.memories.ttt import TTT, InnerModel


def heads(t_BND: Tensor) -> Tensor:
    return t_BND.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def passed(memory: Any, x_BND: Tensor, cuts: list[int], state: Any = None) -> tuple[Tensor, FastState]:
    """What is read, (B, H, N, E), of a stream that is cut into such pieces, and the state behind it."""
    state = memory.init_state(len(x_BND), x_BND) if state is None else state
    outs = []
    for piece in x_BND.split(cuts, 1):
        reading = memory.read(state, Query(piece))
        state = memory.write(state, Trace(piece, piece, Query(piece), reading))[0]
        outs.append(reading.output_BHNE)
    return torch.cat(outs, 2), state


def cut(inner: InnerModel, flat_P: Tensor) -> list[Tensor]:
    """Weights and biases of one head's model: W_1, b_1, and so on."""
    return [part for t in inner.matrices(flat_P[None, None]) for part in (t[0, 0, :-1], t[0, 0, -1])]


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def model(parts: list[Tensor], x_E: Tensor) -> Tensor:
    f = x_E @ parts[0] + parts[1]
    return f if len(parts) == 2 else F.gelu(f, approximate="tanh") @ parts[2] + parts[3]


def limited(parts: list[Tensor], limit: float) -> list[Tensor]:
    kept = []
    for W, b in zip(parts[::2], parts[1::2], strict=True):
        size = torch.cat([W.flatten(), b]).square().mean().sqrt()
        kept += [W * limit / size, b * limit / size] if size > limit else [W, b]
    return kept


def normed(f_E: Tensor, inner: InnerModel, head: int) -> Tensor:
    return F.layer_norm(f_E, f_E.shape, inner.norm_weight_GV[head], inner.norm_bias_GV[head], 1e-6)


def slow_learn(
    inner: InnerModel,
    head: int,
    weights_P: Tensor,
    sums_P: Tensor,
    seen: int,
    tokens: list[tuple[Tensor, ...]],
    within: list[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """f(q_i; W_i) of each token (q, k, v, lr) of one head, and its W and S behind them; each W_i goes to `within`."""
    base, outputs = cut(inner, weights_P), []
    sums = cut(inner, sums_P)
    for t, (q, k, v, rate) in enumerate(tokens):
        place = (seen + t) % inner.mini_batch
        if place == 0:
            base = base if inner.limit is None else limited(base, inner.limit)
        base = [part if part.requires_grad else part.clone().requires_grad_() for part in base]
        with torch.enable_grad():
            loss = (normed(model(base, k), inner, head) - (v - k)).square().sum() / 2
            gradients = torch.autograd.grad(loss, base, create_graph=True)
        sums = [s - rate * g for s, g in zip(sums, gradients, strict=True)]
        share = (1 / (place + 1) + inner.tau_C[place]).clamp(min=0)
        now = [w + share * s for w, s in zip(base, sums, strict=True)]
        outputs.append(model(now, q))
        if within is not None:
            within.append(joined(now))
        if place == inner.mini_batch - 1:
            base, sums = now, [torch.zeros_like(s) for s in sums]
    return outputs, joined(base), joined(sums)


def turned(x_E: Tensor, place: int) -> Tensor:
    """Pairs of channels, turned by the place."""
    out = []
    for pair in range(len(x_E) // 2):
        angle = torch.tensor(place * 10000 ** (-2 * pair / len(x_E)))
        a, b = x_E[2 * pair], x_E[2 * pair + 1]
        out += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.stack(out)


class SlowTTT(SlowMemory):
    """A layer's TTT by loops over rows, heads and tokens, with the parameters of the fast one."""

    fast: TTT

    def _token(self, x_D: Tensor, head: int, place: int) -> tuple[Tensor, ...]:
        fast = self.fast
        q, k, v = (linear(x_D).chunk(fast.heads)[head] for linear in (fast.query, fast.key, fast.value))
        if fast.positions is not None:
            q, k = turned(q, place), turned(k, place)
        return q, k, v, fast.rate * torch.sigmoid(fast.step(x_D)[head])

    def read(self, opened: FastState, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        fast, inner, x_BND = self.fast, self.fast.inner, query.x_BND
        rows, n, width = x_BND.shape
        z = torch.zeros(rows, n, width, dtype=x_BND.dtype)
        states: list[list[Tensor]] = [[], [], []]
        for row in range(rows):
            seen = int(opened.tokens_B[row])
            there = [t for t in range(n) if query.padding_BN is None or not query.padding_BN[row, t]]
            by_head, learned = [], []
            for head in range(fast.heads):
                begin = inner.initial_GP[head], torch.zeros_like(inner.initial_GP[head])
                if seen:
                    begin = opened.weights_BGP[row, head], opened.sums_BGP[row, head]
                tokens = [self._token(x_BND[row, t], head, (seen + i) % inner.mini_batch) for i, t in enumerate(there)]
                out, *after = slow_learn(inner, head, *begin, seen, tokens)
                by_head.append([q + normed(f, inner, head) for f, (q, *_) in zip(out, tokens, strict=True)])
                learned.append(after)
            for i, t in enumerate(there):
                z = z.index_put((torch.tensor(row), torch.tensor(t)), torch.cat([head[i] for head in by_head]))
            for part, old in enumerate(opened[:2]):
                states[part].append(torch.stack([one[part] for one in learned]) if there else old[row])
            states[2].append(torch.tensor(seen + len(there)))
        out_BND = F.layer_norm(z, (width,), fast.norm.weight, fast.norm.bias, 1e-6)
        out_BHNE = out_BND.unflatten(-1, (fast.heads, -1)).transpose(1, 2)
        return Reading(output_BHNE=out_BHNE, carry=FastState(*(torch.stack(part) for part in states)))

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        return y_BHNE + self.fast.share_H[:, None, None] * reading.output_BHNE

    def write(self, state: FastState, trace: Trace) -> tuple[FastState, None]:
        return trace.reading.carry, None
