"""The slow twin of Titans: one token of one row and net after the other, its inner gradient from autograd.

Legend: B rows, G nets, N tokens, K width of a net, P numbers of a net, H heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from memories.harness import SlowMemory
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading, Trace
from cached_transformers.memories.parts.fast_weights import FastState
from cached_transformers.memories.titans.neural_memory import NeuralMemory
from cached_transformers.memories.titans.titans import Titans, WindowedState


def slow_net(weights: list[Tensor], x_K: Tensor, activation: str) -> Tensor:
    for layer, matrix in enumerate(weights):
        x_K = (x_K if layer == 0 else getattr(F, activation)(x_K)) @ matrix
    return x_K


def _limited(t: Tensor, limit: float) -> Tensor:
    size = t.square().mean().sqrt()
    return t * limit / size if size > limit else t


def _loss(error_K: Tensor, memory: NeuralMemory) -> Tensor:
    if memory.loss == "lp":
        return error_K.abs().pow(memory.power).sum() / memory.power
    length, bound = error_K.square().sum().sqrt(), memory.bound * len(error_K) ** 0.5
    if memory.loss == "huber" and length > bound:
        return bound * (length - bound / 2)
    return length.square() / 2


def cut(memory: NeuralMemory, flat_P: Tensor) -> list[Tensor]:
    """The matrices of one net."""
    return [t[0, 0] for t in memory.matrices(flat_P[None, None])]


def orthogonalised(t_IO: Tensor) -> Tensor:
    """Five steps of Newton and Schulz, in the form of Muon."""
    x = t_IO / (t_IO.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def slow_learn(
    memory: NeuralMemory,
    weights_P: Tensor,
    momentum_P: Tensor,
    tokens: list[tuple[Tensor, ...]],
    within: list[Tensor] | None = None,
    before: Sequence[tuple[Tensor, ...]] = (),
) -> tuple[list[Tensor], Tensor, Tensor]:
    """What one net gives for each token (q, k, v, theta, alpha, 1 - eta), and its weights and momentum behind them.

    Its weights behind each token are appended to `within`. With a window or `orthogonal` a token also has its gamma;
    `before` are key, value and gamma of tokens of earlier segments.
    """
    W, S, outputs, recent, thetas = cut(memory, weights_P), cut(memory, momentum_P), [], list(before), []
    base = W
    for t, (q, k, v, theta, alpha, damping, *gamma) in enumerate(tokens):
        if t % memory.chunk == 0:
            limited = [_limited(m, memory.limit) for m in W]
            W = base = [m if m.requires_grad else m.clone().requires_grad_() for m in limited]
            thetas = []
        recent = [*recent, (k, v, *(gamma or [torch.ones_like(theta)]))][-memory.window :]
        with torch.enable_grad():
            losses = [g * _loss(slow_net(base, k, memory.activation) - v, memory) for k, v, g in recent]
            gradients = torch.autograd.grad(sum(losses), base, create_graph=True, allow_unused=True)
        thetas.append(theta)
        by = torch.ones_like(theta) if memory.orthogonal else theta
        S = [(1 - damping) * s - by * g for s, g in zip(S, gradients, strict=True)]
        W = [(1 - alpha) * w for w in W]
        if not memory.orthogonal:
            W = [w + s for w, s in zip(W, S, strict=True)]
        outputs.append(slow_net(W, q, memory.activation))
        if memory.orthogonal and (t + 1 == len(tokens) or len(thetas) == memory.chunk):
            W = [w + torch.stack(thetas).mean() * orthogonalised(s) for w, s in zip(W, S, strict=True)]
        if within is not None:
            within.append(torch.cat([m.flatten() for m in W]))
    return outputs, *(torch.cat([m.flatten() for m in matrices]) for matrices in (W, S))


class SlowTitans(SlowMemory):
    """A layer's Titans, read and written by loops over rows, nets and tokens, with the parameters of the fast one."""

    fast: Titans

    def _begin(self, state: FastState, row: int, net: int) -> tuple[Tensor, Tensor]:
        if state.tokens_B[row] == 0:
            initial_P = self.fast.memory.initial_GP[net]
            return initial_P, torch.zeros_like(initial_P)
        return state.weights_BGP[row, net], state.sums_BGP[row, net]

    def _before(self, state: Any, row: int, net: int) -> list[tuple[Tensor, ...]]:
        """Key, value and gamma of the last tokens of earlier segments."""
        if self.fast.net.window == 1:
            return []
        width = self.fast.key_width
        there = min(int(state.tokens_B[row]), self.fast.net.window - 1)
        tokens = state.recent_BGMF[row, net].flip(0)[:there].flip(0)
        return [(t[:width], t[width:-1], t[-1]) for t in tokens]

    def _asks(self, linear: torch.nn.Module, x_D: Tensor, net: int) -> Tensor:
        t_K = F.silu(linear(x_D)).chunk(self.fast.nets)[net]
        return t_K / t_K.square().sum().sqrt()

    def _token(self, x_D: Tensor, net: int) -> tuple[Tensor, ...]:
        fast = self.fast
        theta, alpha, eta, *gamma = (part[net] for part in fast.gate(x_D).split(fast.nets))
        shares = []
        for logit in (theta, alpha, *gamma):
            share = torch.sigmoid(logit)
            if fast.gates == "stretched":
                share = (1.2 * share - 0.1).clamp(0, 1)
            shares.append(share)
        damping = 1 - torch.sigmoid(eta)
        v_K = F.silu(fast.value(x_D)).chunk(fast.nets)[net]
        q_K, k_K = self._asks(fast.query, x_D, net), self._asks(fast.key, x_D, net)
        theta = shares[0] * fast.rate * (1 if fast.orthogonal else damping)
        return q_K, k_K, v_K, theta, shares[1], damping, *shares[2:]

    def _learn(self, state: FastState, x_BND: Tensor, padding_BN: Tensor | None) -> tuple[list[Any], FastState]:
        """Of each row the outputs (D) by place, and the state behind the segment."""
        rows, nets = x_BND.shape[0], self.fast.nets
        outputs, weights, momentum, counts, recent = [], [], [], [], []
        for row in range(rows):
            there = [t for t in range(x_BND.shape[1]) if padding_BN is None or not padding_BN[row, t]]
            by_net, learned, last = [], [], []
            for net in range(nets):
                given = [self._token(x_BND[row, t], net) for t in there]
                before = self._before(state, row, net)
                out, *after = slow_learn(self.fast.memory, *self._begin(state, row, net), given, before=before)
                seen = [*before, *((k, v, *gamma) for _, k, v, _, _, _, *gamma in given)]
                last.append([torch.cat([k, v, g[None]]) for k, v, g in seen] if self.fast.net.window > 1 else [])
                by_net.append(out)
                learned.append(after)
            outputs.append({t: torch.cat([out[i] for out in by_net]) for i, t in enumerate(there)})
            weights.append(torch.stack([w for w, _ in learned]) if there else state.weights_BGP[row])
            momentum.append(torch.stack([s for _, s in learned]) if there else state.sums_BGP[row])
            counts.append(len(there))
            recent.append(last)
        after = FastState(torch.stack(weights), torch.stack(momentum), state.tokens_B + torch.tensor(counts))
        if self.fast.net.window == 1:
            return outputs, after
        none = torch.zeros(self.fast.net.window - 1, 2 * self.fast.key_width + 1, dtype=x_BND.dtype)
        padded = [[torch.stack([*none, *tokens])[-len(none) :] for tokens in by_net] for by_net in recent]
        return outputs, WindowedState(*after, torch.stack([torch.stack(by_net) for by_net in padded]))

    def read(self, opened: FastState, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        fast, x_BND = self.fast, query.x_BND
        rows, n, width = x_BND.shape
        if fast.place != "context":
            outputs, after = self._learn(opened, x_BND, query.padding_BN)
            zero = torch.zeros(width, dtype=x_BND.dtype)
            m_BND = torch.stack([torch.stack([outs.get(t, zero) for t in range(n)]) for outs in outputs])
            return Reading(output_BHNE=m_BND.unflatten(-1, (fast.heads, -1)).transpose(1, 2), carry=after)
        assert project_kv is not None and query.positions_BNP is not None
        h = []
        for row in range(rows):
            for t in range(n):
                for net in range(fast.nets):
                    weights = cut(fast.memory, self._begin(opened, row, net)[0])
                    h.append(slow_net(weights, self._asks(fast.query, x_BND[row, t], net), fast.memory.activation))
        h_BND = torch.cat(h).view(rows, n, width)
        persistent = [] if fast.persistent_MD is None else list(fast.persistent_MD)
        p = len(persistent)
        given_BMD = torch.stack([torch.stack([*persistent, *h_ND]) for h_ND in h_BND])
        valid_BM, visible_BHNM = torch.ones(rows, p + n, dtype=torch.bool), torch.ones(1, 1, n, p + n, dtype=torch.bool)
        for t in range(n):
            for row in range(rows):
                padded = query.padding_BN is not None and query.padding_BN[row, t]
                valid_BM[row, p + t] = bool(opened.tokens_B[row] > 0) and not padded
            visible_BHNM[..., t, p + t + 1 :] = False
        first_B1P = query.positions_BNP[:, :1]
        places_BMP = torch.cat([*(first_B1P - p + i for i in range(p)), query.positions_BNP], 1)
        return Reading(Context(*project_kv(given_BMD), places_BMP, valid_BM, visible_BHNM=visible_BHNM))

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if reading.output_BHNE is None:
            return y_BHNE

        def normed(x: Tensor, norm: torch.nn.RMSNorm) -> Tensor:
            assert norm.weight is not None
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

        fast, share_H11 = self.fast, self.fast.share_H[:, None, None]
        m_BHNE = normed(reading.output_BHNE, fast.norm)
        if fast.mix == "sum":
            return y_BHNE + share_H11 * m_BHNE
        if fast.mix == "alone":
            return (1 - share_H11) * y_BHNE + share_H11 * m_BHNE
        assert fast.attention_norm is not None
        return (1 - share_H11) * y_BHNE + share_H11 * normed(y_BHNE, fast.attention_norm) * torch.sigmoid(m_BHNE)

    def write(self, state: FastState, trace: Trace) -> tuple[FastState, None]:
        if self.fast.place != "context":
            return trace.reading.carry, None
        y_BND = trace.y_BND / (trace.y_BND.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return self._learn(state, y_BND, trace.query.padding_BN)[1], None
