"""The slow twin of Memory Caching: one token of one row and head after the other, over slow states that it keeps whole.

Legend: N tokens, G groups, K width of keys, E head width, D model width, P numbers of a net.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from memories import ttt_twin
from memories.titans_twin import SlowTitans, cut, slow_learn, slow_net
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.infini import Infini
from cached_transformers.memories.memory_caching import MemoryCaching
from cached_transformers.memories.titans.titans import Titans
from cached_transformers.memories.ttt import TTT


def lifted(t: Tensor) -> Tensor:
    """elu + 1 of each number."""
    return torch.stack([x + 1 if x > 0 else x.exp() for x in t])


class SlowInfini:
    """A state is (M, z) of one head; what it says is s(q) M and s(q) z."""

    def __init__(self, layer: SelfAttention, memory: Infini) -> None:
        self.layer, self.memory, self.groups = layer, memory, memory.heads

    def begin(self, group: int) -> tuple[Tensor, ...]:
        e = self.memory.head_width
        return torch.zeros(e, e, dtype=torch.float64), torch.zeros(e, dtype=torch.float64)

    def _projected(self, x_D: Tensor, group: int, which: int) -> Tensor:
        return self.layer.qkv(x_D).chunk(3)[which].chunk(self.groups)[group]

    def key(self, x_D: Tensor, group: int) -> Tensor:
        return self._projected(x_D, group, 1)

    def ask(self, state: tuple[Tensor, ...], x_D: Tensor, group: int) -> Tensor:
        s_E = lifted(self._projected(x_D, group, 0))
        return torch.cat([s_E @ state[0], (s_E @ state[1])[None]])

    def segment(self, state: tuple[Tensor, ...], xs: list[Tensor], group: int) -> tuple[list[Any], tuple[Tensor, ...]]:
        M, z = state
        for x_D in xs:
            s_E, v_E = lifted(self.key(x_D, group)), self._projected(x_D, group, 2)
            answer_E = s_E @ state[0] / (s_E @ state[1]) if state[1].any() else torch.zeros_like(v_E)
            u_E = v_E - answer_E if self.memory.update == "delta" else v_E
            M, z = M + torch.outer(s_E, u_E), z + s_E
        return [state] * len(xs), (M, z)

    def combine(self, y: list[Tensor], answers: list[Tensor]) -> list[Tensor]:
        if not answers[0][-1]:
            return y
        g = self.memory.gate_H.sigmoid()
        return [g[h] * a[:-1] / a[-1] + (1 - g[h]) * y[h] for h, a in enumerate(answers)]


class SlowCachedTitans:
    """A state is (weights, momentum) of one net; what it says is what the net gives for the query."""

    def __init__(self, layer: SelfAttention, memory: Titans) -> None:
        self.memory, self.slow, self.groups = memory, SlowTitans(memory), memory.nets

    def begin(self, group: int) -> tuple[Tensor, ...]:
        initial_P = self.memory.memory.initial_GP[group]
        return initial_P, torch.zeros_like(initial_P)

    def key(self, x_D: Tensor, group: int) -> Tensor:
        return self.slow._asks(self.memory.key, x_D, group)

    def ask(self, state: tuple[Tensor, ...], x_D: Tensor, group: int) -> Tensor:
        net = self.memory.memory
        return slow_net(cut(net, state[0]), self.slow._asks(self.memory.query, x_D, group), net.activation)

    def segment(self, state: tuple[Tensor, ...], xs: list[Tensor], group: int) -> tuple[list[Any], tuple[Tensor, ...]]:
        within: list[Tensor] = []
        tokens = [self.slow._token(x_D, group) for x_D in xs]
        _, *after = slow_learn(self.memory.memory, *state, tokens, within)
        return [(weights_P,) for weights_P in within], tuple(after)

    def combine(self, y: list[Tensor], answers: list[Tensor]) -> list[Tensor]:
        def normed(x: Tensor, norm: Any) -> Tensor:
            return x / (x.square().mean() + 1e-5).sqrt() * norm.weight

        heads, mixed = torch.cat(answers).chunk(self.memory.heads), []
        for h, m_E in enumerate(heads):
            share, m = self.memory.share_H[h], normed(m_E, self.memory.norm)
            if self.memory.attention_norm is None:
                mixed.append(y[h] + share * m)
            else:
                mixed.append((1 - share) * y[h] + share * normed(y[h], self.memory.attention_norm) * torch.sigmoid(m))
        return mixed


class SlowCachedTTT:
    """A state is what a head's model is read with, and its weights, open sums and tokens; it says f of the query.

    Queries are turned by the place of their token, which is known by the vector that is asked with.
    """

    def __init__(self, layer: SelfAttention, memory: TTT) -> None:
        self.memory, self.slow, self.groups = memory, ttt_twin.SlowTTT(memory), memory.heads
        self.tokens: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.asked: dict[int, Tensor] = {}

    def begin(self, group: int) -> tuple[Any, ...]:
        initial_P = self.memory.inner.initial_GP[group]
        return initial_P, initial_P, torch.zeros_like(initial_P), 0

    def key(self, x_D: Tensor, group: int) -> Tensor:
        return self.memory.key(x_D).chunk(self.groups)[group]  # type: ignore[no-any-return]

    def ask(self, state: tuple[Tensor, ...], x_D: Tensor, group: int) -> Tensor:
        self.asked[group] = self.tokens[id(x_D), group][0]
        return ttt_twin.model(ttt_twin.cut(self.memory.inner, state[0]), self.asked[group])

    def segment(self, state: tuple[Any, ...], xs: list[Tensor], group: int) -> tuple[list[Any], tuple[Any, ...]]:
        inner, (_, *learned, seen), within = self.memory.inner, state, []
        tokens = [self.slow._token(x, group, (seen + i) % inner.mini_batch) for i, x in enumerate(xs)]
        self.tokens |= {(id(x), group): token for x, token in zip(xs, tokens, strict=True)}
        _, *after = ttt_twin.slow_learn(inner, group, *learned, seen, tokens, within)
        return [(weights_P,) for weights_P in within], (within[-1], *after, seen + len(xs))

    def combine(self, y: list[Tensor], answers: list[Tensor]) -> list[Tensor]:
        fast = self.memory
        z_D = torch.cat([self.asked[g] + ttt_twin.normed(f, fast.inner, g) for g, f in enumerate(answers)])
        out = F.layer_norm(z_D, z_D.shape, fast.norm.weight, fast.norm.bias, 1e-6).chunk(fast.heads)
        return [y[h] + fast.share_H[h] * out[h] for h in range(fast.heads)]


SLOW: dict[type, Any] = {Infini: SlowInfini, Titans: SlowCachedTitans, TTT: SlowCachedTTT}


def slowly(layer: SelfAttention, segments: list[Tensor], padding: list[Tensor]) -> list[dict[tuple[int, int], Tensor]]:
    """Of each segment the layer's outputs (D) by row and place, where there is no padding."""
    memory: Any = layer.memory
    outs: list[dict[tuple[int, int], Tensor]] = [{} for _ in segments]
    for row in range(len(segments[0])):
        below: Any = SLOW[type(memory.over)](layer, memory.over)
        states = [below.begin(g) for g in range(below.groups)]
        kept: list[tuple[list[Any], list[Tensor]]] = []  # the states and mean keys of each group, newest last
        counts: list[int] = []  # of segments in each of them, where they are merged
        for index, (x_BND, hidden_BN) in enumerate(zip(segments, padding, strict=True)):
            places = [n for n in range(x_BND.shape[1]) if not hidden_BN[row, n]]
            xs = [x_BND[row, n] for n in places]
            if not xs:
                continue
            now = [below.segment(states[g], xs, g) for g in range(below.groups)]
            keys = [[below.key(x_D, g) for x_D in xs] for g in range(below.groups)]
            for i, n in enumerate(places):
                answers = []
                for g in range(below.groups):
                    others = [(s[g], c[g]) for s, c in kept]
                    own = now[g][0][i], torch.stack(keys[g][: i + 1]).mean(0)
                    answers.append(_mixed(memory, below, xs[i], g, others, own))
                y = below.combine(_attended(layer, xs, i), answers)
                outs[index][row, n] = layer.output(torch.cat(y))
            ends = [after for _, after in now]
            kept.append((ends, [torch.stack(k).mean(0) for k in keys]))
            if memory.merges:
                _carry_over(kept, counts, memory.slots)
            kept = kept[len(kept) - memory.slots :] if memory.slots < len(kept) else kept
            states = [below.begin(g) for g in range(below.groups)] if memory.restarts else ends
    return outs


def _carry_over(kept: list[tuple[list[Any], list[Tensor]]], counts: list[int], slots: int) -> None:
    """Merge equal numbers of segments, newest first; the largest number takes up all that comes."""
    counts.append(1)
    while len(kept) > 1 and min(counts[-2], 2 ** (slots - 1)) == counts[-1]:
        (states, means), (others, other_means) = kept.pop(), kept.pop()
        m, n = counts.pop(), counts.pop()
        merged = [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(states, others, strict=True)]
        kept.append((merged, [(m * a + n * b) / (m + n) for a, b in zip(means, other_means, strict=True)]))
        counts.append(m + n)


def _mixed(memory: MemoryCaching, below: Any, x_D: Tensor, g: int, others: list[Any], own: Any) -> Tensor:
    """What the snapshots and the online state, pairs of a state and a mean key, say together to one token."""
    if memory.look_for is None:
        return torch.stack([below.ask(state, x_D, g) for state, _ in (*others, own)]).sum(0)
    u_K = memory.look_for(x_D).chunk(below.groups)[g]
    logits = [(float(u_K.detach() @ c.detach()), i) for i, (_, c) in enumerate(others)]
    if memory.topk is not None:
        others = [others[i] for _, i in sorted(logits, reverse=True)[: memory.topk]]
    weights = torch.stack([u_K @ c for _, c in (*others, own)]).softmax(0)
    if memory.soup:
        state = sum(w * s[0] for w, (s, _) in zip(weights, (*others, own), strict=True))
        return below.ask((state,), x_D, g)  # type: ignore[no-any-return]
    answers = [below.ask(state, x_D, g) for state, _ in (*others, own)]
    return torch.stack([w * a for w, a in zip(weights, answers, strict=True)]).sum(0)


def _attended(layer: SelfAttention, xs: list[Tensor], i: int) -> list[Tensor]:
    """Of each head, what token i attends among the tokens up to itself."""
    q, *kv = layer.qkv(torch.stack(xs[: i + 1])).chunk(3, -1)
    heads = []
    for h in range(layer.heads):
        q_E, k_NE, v_NE = q[i].chunk(layer.heads)[h], *(t.chunk(layer.heads, -1)[h] for t in kv)
        weights = (k_NE @ q_E / math.sqrt(len(q_E))).softmax(0)
        heads.append(weights @ v_NE)
    return heads
