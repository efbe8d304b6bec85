"""Titans (Behrouz, Zhong and Mirrokni 2024, arXiv:2501.00663): a neural memory, which learns as it reads, beside
attention or before it. The authors have published no code.

`neural_memory.py` has the learning rule. With x_t after the layer's norm:

    k_t, q_t = SiLU(W x_t) / |SiLU(W x_t)|,  v_t = SiLU(W_V x_t)
    eta_t = sigmoid(.),  alpha_t = gate(.),  theta_t = (1 - eta_t) rate gate(.) / C                 of W_g x_t + b

    place="gate" (MAG): m_t = M_t(q_t) of each token, M_t after its own write. With the attention's y_t, head by head,
        mix="product":  o = norm(y) * sigmoid(norm(m)),   and s o + (1 - s) y of that
        mix="sum":      o = y + s norm(m)                 one learned share s a head, 1 at first; 0 closes the gate
        mix="alone":    o = s norm(m) + (1 - s) y         with s = 1 the memory without attention (LMM)
    place="layer" (MAL): the same, of y = x_t, channels by heads: what attention makes queries, keys and values of is o.
    place="context" (MAC): h_t = M(q_t) of the memory before the segment. Keys and values are made of [P; h; x]; token i
        sees all persistent tokens P, and h_j for j <= i. The layer's outputs are written when the segment ends.

window=c takes the gradients of the last c tokens at every step (Omega), orthogonal=True makes ATLAS of that:
`neural_memory.py`. gamma_t = gate(.) of one number a net more. With a window theta is divided by c, too; the step of
ATLAS has a size of its own, theta_t = rate gate(.).

theta is divided because gradients of C tokens add up at the same weights, and momentum makes each 1 / (1 - eta) times
as large: up to rate=1 a linear memory does not diverge; for other nets the weights are limited.

Legend: B rows, N tokens, M slots of a context, G nets, H heads, E head width, D model width, C tokens of a chunk, P
numbers of a net.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.linear_maps import side_by_side
from cached_transformers.memories.parts import fast_weights
from cached_transformers.memories.parts.fast_weights import FastMemory, FastState, Learned, OpenChunk, Soup, normed
from cached_transformers.memories.parts.fifo_store import taken
from cached_transformers.memories.parts.options import NO_MEMORY, STRETCH, Gate, check_positive, gated
from cached_transformers.memories.parts.recurrent import Answer, Asked, shown
from cached_transformers.registry import MEMORIES

from .neural_memory import Activation, Gates, Loss, NeuralMemory

own_word("in_front", "a result per head, mixed with the layer's input before queries, keys and values are made of it")

EPSILON = 1e-5
"""Epsilon of root mean squares."""


class WindowedState(NamedTuple):
    """`FastState`, and the last tokens of a window (B, G, c - 1, 2 K + 1): key, value, gamma."""

    weights_BGP: Tensor
    sums_BGP: Tensor
    tokens_B: Tensor
    recent_BGMF: Tensor


class WindowLearned(NamedTuple):
    """`Learned`, and the last tokens of a window."""

    weights_BGP: Tensor
    sums_BGP: Tensor
    recent_BGMF: Tensor


LONG = {"gates": "stretched"}
"""Options with which a segment may write and forget nothing at all."""


def logit(share: float, gate: Gate) -> float:
    """The logit at which the gate equals `share`."""
    share = (share + STRETCH) / (1 + 2 * STRETCH) if gate == "stretched" else share
    return math.log(share / (1 - share))


@MEMORIES.register(
    "titans",
    paper="arXiv:2501.00663",
    title="Titans",
    carries="weights and momentum of small nets, which learn by gradient descent while they read",
    purpose="associations, as many as keys are wide",
    equations="S_t = eta S_{t-1} - theta grad |M(k_t) - v_t|^2 / 2, M_t = (1 - alpha) M_{t-1} + S_t; "
    "o = norm(y) sigmoid(norm(M_t(q_t))), or M(q) of the memory before the segment as keys and values; or attention of "
    "x + norm(M_t(q_t))",
    state="per row: 8 bytes, and 8 G P, P = (D / G)^2, or 2 expansion (D / G)^2 with layers=2; and with a window of c "
    "4 (c - 1) (2 D + G)",
    cost="per token and layer, K = D / G: 3 D^2 + 3 D G (projections, gates) + G (5 P + 2 C K + C^2 + C) "
    "multiply-adds, with layers=2 G (5.5 P + 2 C K (expansion + 1) + C^2 + C); place='context': "
    "5 D^2 + 3 D G + D K + 2 N D + G (3 P + C^2 + C); window and orthogonal D G more, and c - 1 gradients a chunk",
    reads_again="its segment for each written token, with place='context', window or orthogonal",
    reach="unbounded, as far as forgetting lets it; with layers=1 as many keys as K are independent",
    gradient="through the weights and every step of their learning, over `bptt` segments",
    without={"bias": "place='gate'", "context": "place='gate'", "in_front": "place='gate'"},
    probe=Probing(farther=fixed(**LONG)),
    presets={"long": LONG},
)
class Titans(FastMemory):
    """Small nets of each row that learn online what value is stored under what key, in training and evaluation alike.

    The state is float32 at least: it is the sum of many small steps.

    Args:
        width: D. heads: H.
        place: "gate", "context" or "layer".
        mix: of "gate" and "layer": "product", "sum" or "alone"; "product" for a gate and "sum" for a layer when None.
        nets: G, nets side by side, each D / G wide; one a head when None.
        layers: L, 1 for a matrix; more help with length, the paper finds. expansion: width of the layers between, over
            D / G.
        activation: between the layers of a net: "silu" or "gelu".
        chunk: C; the chunks restart with each segment, whose last one may be short.
        loss, bound, power, limit: see `NeuralMemory`.
        rate: how large theta may be, times c C / (1 - eta); up to 1 nothing diverges, but for loss="lp".
        window: c, tokens whose gradients each step takes, those before its segment included; 1 is Titans.
        orthogonal: bring the singular values of a chunk's step near 1 (ATLAS), which the next chunk reads.
        momentum: eta at first. half_life: tokens after which half is forgotten, at first.
        gates: of theta and alpha: a "sigmoid", which never is 0, or "stretched", which can close and open fully.
        persistent: of place="context": learned tokens before every segment, which are no memory.
        initial_share: s, at first, of "gate" and "layer".
        channels: of the layer's input, where they are not D. The model gives them.
        causal: of the model, which hands it over: whether token i is kept from h_j, j > i.
    """

    needs = frozenset({"state", "head"})
    open_gate: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        place: Literal["gate", "context", "layer"] = "gate",
        mix: Literal["product", "sum", "alone"] | None = None,
        nets: int | None = None,
        layers: int = 1,
        expansion: int = 4,
        activation: Activation = "silu",
        chunk: int = 16,
        loss: Loss = "l2",
        bound: float = 1.0,
        power: float = 3.0,
        limit: float = 10.0,
        rate: float = 1.0,
        momentum: float = 0.5,
        half_life: float = 4096.0,
        gates: Gate = "sigmoid",
        persistent: int = 0,
        initial_share: float = 1.0,
        window: int = 1,
        orthogonal: bool = False,
        causal: bool = True,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        nets = heads if nets is None else nets
        channels = channels or width
        width = width if place == "gate" else channels  # as wide as the tensor that it mixes with or replaces
        mix = ("sum" if place == "layer" else "product") if mix is None else mix
        at_least_one(NO_MEMORY, nets=nets, layers=layers, expansion=expansion, chunk=chunk, window=window)
        if not 2 <= power < math.inf:
            raise ValueError(f"power={power} must be at least 2, which is loss='l2', and finite")
        _check(width, nets, place, persistent, momentum, bound=bound, limit=limit, rate=rate, half_life=half_life)
        self.heads, self.nets, self.place, self.mix, self.gates, self.causal = heads, nets, place, mix, gates, causal
        self.groups, self.key_width, self.linear = nets, width // nets, layers == 1
        self.orthogonal = orthogonal
        self.rate = rate if orthogonal else rate / (chunk * window)
        shared = window > 1 or orthogonal
        self.memory = NeuralMemory(
            nets,
            width // nets,
            layers=layers,
            expansion=expansion,
            chunk=chunk,
            activation=activation,
            loss=loss,
            bound=bound,
            power=power,
            limit=limit,
            window=window,
            orthogonal=orthogonal,
        )
        self.query, self.key, self.value = (nn.Linear(channels, width, bias=False) for _ in range(3))
        at_first = [logit(0.5, gates), logit(1 - 0.5 ** (1 / half_life), gates), logit(momentum, "sigmoid")]
        if shared:
            at_first.append(logit(0.5, gates))
            self.whole_segments = f"window={window}, orthogonal={orthogonal} learn from several tokens at once"
        self.gate = nn.Linear(channels, len(at_first) * nets)
        with torch.no_grad():
            self.gate.weight.mul_(0.1)
            self.gate.bias.copy_(torch.tensor(at_first)[:, None].expand(-1, nets).flatten())
        if place != "context":
            self.needs = frozenset({"state", "head" if place == "gate" else "in_front"})
            self.share_H = nn.Parameter(torch.full((heads,), float(initial_share)))
            self.norm = nn.RMSNorm(width // heads, eps=EPSILON)
            self.attention_norm = nn.RMSNorm(width // heads, eps=EPSILON) if mix == "product" else None
        else:
            self.needs = frozenset({"state", "context"}) | ({"bias"} if causal else set())
            self.whole_segments = "place='context' makes keys and values of each token"
            self.no_snapshots = "place='context' reads keys and values, which no weights mix; take place='gate'"
            self.persistent_MD = nn.Parameter(torch.randn(persistent, width) / width**0.5) if persistent else None
            self.register_buffer("open_gate", torch.tensor(True))

    @property
    def net(self) -> NeuralMemory:
        return self.memory

    def snapshot(self, state: FastState) -> Tensor:
        return state.weights_BGP

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        state = super().init_state(batch_size, like)
        if self.net.window == 1:
            return state
        tokens = (batch_size, self.nets, self.net.window - 1, 2 * self.key_width + 1)
        return WindowedState(*state, state.weights_BGP.new_zeros(tokens))

    def learned(self, state: Any) -> Any:
        found = super().learned(state)
        if self.net.window == 1:
            return found
        empty_B111 = (state.tokens_B == 0)[:, None, None, None]
        return WindowLearned(*found, state.recent_BGMF.masked_fill(empty_B111, 0))

    def begin(self, state: FastState, learned: Learned, x_BND: Tensor) -> OpenChunk:
        weights, sums = (tuple(self.net.matrices(t)) for t in learned)
        project = side_by_side([self.query, self.key, self.value, self.gate])
        for t in project.keywords.values():  # 1 - alpha is the gate of minus its logit
            t[-2 * self.nets : -self.nets].neg_()
        open_tokens = x_BND.shape[1] % self.memory.chunk
        before = self.read(state, Query(x_BND[:, :-open_tokens])).carry if open_tokens else learned
        begun = tuple(map(self.net.limited, self.net.matrices(before.weights_BGP)))
        maps = fast_weights.TokenMaps(project, self.net.error)
        return OpenChunk(begun, weights if open_tokens else begun, sums, maps, open_tokens, (0,))

    def ask(self, opened: FastState | OpenChunk, query: Query) -> Asked:
        if isinstance(opened, OpenChunk):
            t_B3GNK, logits_BNG = self.projected(opened, query.x_BND)
            t_B3GNK = F.silu(t_B3GNK)
            placed = t_B3GNK[:, :2]
            placed = placed / torch.linalg.vector_norm(placed, dim=-1, keepdim=True).clamp_min(1e-12)
            (q_BGNK, k_BGNK), logits = placed.unbind(1), logits_BNG.view(len(query.x_BND), 3, -1, 1, 1)
            theta, kept, eta = gated(logits, self.gates).unbind(1)
            if self.gates != "sigmoid":
                eta = logits[:, 2].sigmoid()
            push = torch.addcmul(theta, theta, eta, value=-1)
            return Asked(q_BGNK, k_BGNK, (q_BGNK, k_BGNK, t_B3GNK[:, 2], kept, eta, push, self.rate))
        x_BND = shown(query.x_BND, query.padding_BN)
        return Asked(self._unit(self.query(x_BND)), self._unit(self.key(x_BND)))

    def online(self, opened: FastState | OpenChunk, query: Query, asked: Asked, soup: Soup | None = None) -> Answer:
        if isinstance(opened, OpenChunk):
            now_BGNV, nets = self.net.step(opened, asked, soup)
            return Answer(now_BGNV, carry=nets)
        learned, n = self.learned(opened), query.x_BND.shape[1]
        start, length = query.segment or (0, n)
        x_BND = query.x_BND[:, start : start + length]
        padding_BN = None if query.padding_BN is None else query.padding_BN[:, start : start + length]

        def cut(first: int, tokens: int) -> tuple[Tensor, Tensor, Soup | None]:
            part = soup and soup.narrow(first, tokens)
            return asked.q_BGNK.narrow(2, first, tokens), asked.k_BGNK.narrow(2, first, tokens), part

        m_BGNV, after = self._learn(learned, x_BND, *cut(start, length), padding_BN)
        assert m_BGNV is not None
        if length < n:  # a model memory's own tokens write nothing
            (front, _, first), (back, _, last) = cut(0, start), cut(start + length, n - start - length)
            told = self.told(learned.weights_BGP, front, first), self.told(after.weights_BGP, back, last)
            m_BGNV = torch.cat([told[0], m_BGNV, told[1]], 2)
        return Answer(m_BGNV, carry=after)

    def settle(self, found: Answer) -> Reading:
        m_BHNE = found.answer_BGNF
        if self.nets != self.heads:
            m_BHNE = m_BHNE.transpose(1, 2).flatten(2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return Reading(output_BHNE=m_BHNE, carry=found.carry)

    def read_with(self, opened: FastState | OpenChunk, query: Query, project_kv: ProjectKV | None) -> Reading:
        if self.place != "context":
            return super().read_with(opened, query, project_kv)
        assert not isinstance(opened, OpenChunk) and project_kv is not None
        return Reading(self._context(opened, self.learned(opened), query, project_kv), any_B=opened.tokens_B > 0)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        m_BHNE, dtype = reading.output_BHNE, y_BHNE.dtype
        if m_BHNE is None:
            return y_BHNE
        norms = [self.norm] if self.attention_norm is None else [self.norm, self.attention_norm]
        scales = torch.stack([norm.weight for norm in norms])[:, None, None, None]  # all norms in one
        both = torch.stack([t.to(scales.dtype) for t in (m_BHNE, y_BHNE)[: len(norms)]])
        m_BHNE, *beside = (normed(both, 1 / both.shape[-1], EPSILON) * scales).to(dtype).unbind()
        share_H11 = self.share_H.to(dtype).view(-1, 1, 1)
        if self.mix == "sum":
            return torch.addcmul(y_BHNE, share_H11, m_BHNE)
        if beside:
            m_BHNE = beside[0] * m_BHNE.sigmoid()
        return torch.lerp(y_BHNE, m_BHNE, share_H11)  # which is either of the two, to the bit, at both ends

    def write(self, state: Any, trace: Trace) -> tuple[Any, None]:
        padding_BN = trace.query.padding_BN
        after = trace.reading.carry
        if self.place == "context":
            y_BND = F.rms_norm(trace.y_BND, trace.y_BND.shape[-1:], eps=EPSILON)
            k_BGNK = self._unit(self.key(shown(y_BND, padding_BN)))
            _, after = self._learn(self.learned(state), y_BND, None, k_BGNK, None, padding_BN)
        written_state = self.after(state, after, trace)
        return (WindowedState(*written_state, after.recent_BGMF) if self.net.window > 1 else written_state), None

    def close_gate(self) -> None:
        with torch.no_grad():
            if self.place != "context":
                self.share_H.zero_()
            else:
                self.open_gate.fill_(False)

    def _unit(self, t_BND: Tensor) -> Tensor:
        return normed(self.by_net(F.silu(wide(t_BND))), 1.0, 1e-24)

    def _gates(self, x_BND: Tensor, padding_BN: Tensor | None) -> tuple[Gates, Tensor | None]:
        """Gates of all tokens, and gamma, where it is used."""
        logits = wide(self.gate(x_BND)).mT.unflatten(1, (-1, self.nets)).unbind(1)
        damping_BGN = torch.sigmoid(-logits[2])
        theta_BGN = self.rate * (1 if self.orthogonal else damping_BGN) * gated(logits[0], self.gates)
        found = [theta_BGN, gated(logits[1], self.gates), damping_BGN, torch.ones_like(damping_BGN)]
        found += [gated(t, self.gates) for t in logits[3:]]
        if padding_BN is not None:
            found = [gate.masked_fill(padding_BN[:, None], 0) for gate in found]
        return Gates(*found[:4]), (found[4] if logits[3:] else None)

    def _learn(
        self,
        learned: Sequence[Tensor],
        x_BND: Tensor,
        q_BGNK: Tensor | None,
        k_BGNK: Tensor,
        soup: Soup | None,
        padding_BN: Tensor | None,
    ) -> tuple[Tensor | None, Any]:
        """Reads of the tokens, each after its own write, (B, G, N, V), if there are queries; and the new weights."""
        order_BN = None
        if padding_BN is not None:
            # Padding goes to the end, so that it moves no token into another chunk; its contents reach nothing.
            order_BN = padding_BN.to(torch.uint8).argsort(dim=1, stable=True)
            x_BND = taken(x_BND, order_BN)
            padding_BN = padding_BN.gather(1, order_BN)
            x_BND = shown(x_BND, padding_BN)
            k_BGNK = _ordered(k_BGNK, order_BN)
            q_BGNK = None if q_BGNK is None else _ordered(q_BGNK, order_BN)
            soup = None if soup is None else Soup(soup.matrices, _ordered(soup.weights, order_BN))
        v_BGNV = self.by_net(F.silu(wide(self.value(x_BND))))
        gates, shares_BGN = self._gates(x_BND, padding_BN)
        if self.net.window > 1:
            assert shares_BGN is not None
            seen_BGNF = torch.cat([learned[2], torch.cat([k_BGNK, v_BGNV, shares_BGN[..., None]], -1)], 2)
            k_BGNK, v_BGNV, shares_BGN1 = seen_BGNF.split([self.key_width, self.key_width, 1], -1)
            shares_BGN = shares_BGN1[..., 0]
        after: Any
        m_BGNV, after = self.memory(Learned(*learned[:2]), q_BGNK, k_BGNK, v_BGNV, gates, soup, shares_BGN)
        if self.net.window > 1:
            after = WindowLearned(after.weights_BGP, after.sums_BGP, self._last(seen_BGNF, padding_BN))
        if m_BGNV is not None and order_BN is not None:
            index_BGNV = order_BN[:, None, :, None].expand_as(m_BGNV)
            m_BGNV = torch.zeros_like(m_BGNV).scatter(2, index_BGNV, m_BGNV)
        return m_BGNV, after

    def _last(self, seen_BGNF: Tensor, padding_BN: Tensor | None) -> Tensor:
        """The last tokens of a window, of those before a segment and then its own, padding last."""
        count = self.net.window - 1
        if padding_BN is None:
            return seen_BGNF[:, :, seen_BGNF.shape[2] - count :]
        index_BM = (~padding_BN).sum(1)[:, None] + torch.arange(count, device=padding_BN.device)
        index_BGMF = index_BM[:, None, :, None].expand(-1, seen_BGNF.shape[1], -1, seen_BGNF.shape[-1])
        return seen_BGNF.gather(2, index_BGMF)

    def _context(self, state: FastState, learned: Learned, query: Query, project_kv: ProjectKV) -> Context:
        """Keys and values of persistent tokens, and of the memory's answers before the segment."""
        rows, n = query.x_BND.shape[:2]
        h_BGNV = self.told(learned.weights_BGP, self._unit(self.query(query.x_BND)))
        h_BND = h_BGNV.transpose(1, 2).flatten(2).to(query.x_BND.dtype)
        fixed = 0 if self.persistent_MD is None else len(self.persistent_MD)
        if self.persistent_MD is not None:
            h_BND = torch.cat([self.persistent_MD.to(h_BND.dtype).expand(rows, -1, -1), h_BND], 1)
        k_BHME, v_BHME = project_kv(h_BND)
        valid_BN = (state.tokens_B > 0)[:, None].expand(-1, n)
        if query.padding_BN is not None:
            valid_BN = valid_BN & ~query.padding_BN
        valid_BM = F.pad(valid_BN, (fixed, 0), value=True) & self.open_gate
        positions_BNP = query.positions_BNP
        if positions_BNP is None:
            positions_BNP = torch.zeros(rows, n, 1, dtype=torch.long, device=h_BND.device)
        steps_M1 = torch.arange(-fixed, 0, device=h_BND.device)[:, None]
        positions_BMP = torch.cat([positions_BNP[:, :1] + steps_M1, positions_BNP], 1)
        visible_BHNM = None
        if self.causal:
            visible_BHNM = F.pad(
                torch.ones(n, n, dtype=torch.bool, device=h_BND.device).tril(), (fixed, 0), value=True
            )[None, None]
        return Context(k_BHME, v_BHME, positions_BMP, valid_BM, visible_BHNM=visible_BHNM)


def _ordered(t_BGNK: Tensor, order_BN: Tensor) -> Tensor:
    """Tokens in this order."""
    return t_BGNK.gather(2, order_BN[:, None, :, None].expand_as(t_BGNK))


def _check(width: int, nets: int, place: str, persistent: int, momentum: float, **above_zero: float) -> None:
    """Refuse (ValueError) numbers that do not fit."""
    if width % nets:
        raise ValueError(f"nets={nets} must divide width={width}: each net has an equal part of the channels")
    check_positive(**above_zero)
    if not 0 < momentum < 1:
        raise ValueError(f"momentum={momentum} must lie between 0 and 1; 0.01 begins with next to none")
    if persistent < 0 or (persistent and place != "context"):
        raise ValueError(
            f"persistent={persistent} tokens are attended beside the segment, which place='context' does; take "
            "place='context', or persistent=0"
        )
