"""Infini-attention (Munkhdalai, Faruqui, Gopal 2024, arXiv:2404.07143; the authors have published no code).

Beside its softmax over the segment each head reads a matrix of all earlier segments; a gate mixes the two.

    A_mem = s(Q) M / (s(Q) z),    A = g A_mem + (1 - g) A_dot,    s(x) = elu(x) + 1,    g = sigmoid(beta), one a head
    M' = M + s(K)^T U,    z' = z + sum_t s(k_t)
    linear    u_t = v_t
    delta     u_t = v_t - s(k_t) M / (s(k_t) z)                 all tokens against M and z of the segment's begin
    exact     u_t = v_t - s(k_t) M_{t-1} / (s(k_t) z_{t-1})     each against the memory after the previous token

The fourth rule is the gated delta rule (arXiv:2412.06464; decays of channels, arXiv:2510.26692), with decays g and
shares b = sigmoid(w x) from the layer's input, keys and queries of length 1, and no z:

    gated_delta    M'_t = diag(e^{g_t}) M_{t-1},    M_t = M'_t + b_t k_t^T (v_t - k_t M'_t),    A_mem = Q M

But for "delta", M and z are a function of the tokens alone, wherever a stream is cut. In "exact", the corrections of a
chunk of tokens solve one triangular system: with M and z of before the chunk, G the part of s(K) s(K)^T below the
diagonal, and n = s(K) z + G 1,

    (I + diag(1 / n) G) U = V - diag(1 / n) s(K) M              rows of diag(1 / n) G sum to at most 1

Queries, keys and values are those of the layer, without positions, and queries without the 1 / sqrt(E) of the softmax.

Legend: B rows, N tokens, H heads, E head width (F a second one), D = H E model width, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from cached_transformers.attentions.parts.building_blocks import unit, wide
from cached_transformers.attentions.parts.decay import InputDecay, check_half_life
from cached_transformers.attentions.parts.linearised import elu_features
from cached_transformers.interfaces.memory import ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES
from cached_transformers.state import refuse_narrow

from .parts.fifo_store import filled
from .parts.options import check_choices, check_heads
from .parts.recurrent import Answer, Asked, Recurrent, beside, corrected, full_precision, shown

Update = Literal["linear", "delta", "exact", "gated_delta"]
Decay = Literal["none", "scalar", "channel"]
HALF_LIFE = (64.0, 4096.0)
CHUNK = 64
"""C: of "exact"; changes the cost alone."""
EPSILON = 1e-6
"""The least that is divided by: an empty z, or keys that resemble none of those stored, give 0."""


class InfiniMatrix(NamedTuple):
    """M and z of each head (of "gated_delta" no number), and how many tokens the row has written."""

    matrix_BHEF: Tensor
    mass_BHE: Tensor
    tokens_B: Tensor


class OpenedMatrix(NamedTuple):
    """M and after it z, (B, H, E, F + 1), or M alone; zeros where nothing was written, and the rows with something."""

    sums_BHEF: Tensor
    any_B: Tensor


def recall(features_BHNE: Tensor, matrix_BHEF: Tensor, mass_BHE: Tensor) -> Tensor:
    """Values stored under these features (B, H, N, F): sums become means weighted by the similarity of keys."""
    return features_BHNE @ matrix_BHEF * (features_BHNE @ mass_BHE[..., None]).clamp(min=EPSILON).reciprocal()


def store(
    matrix_BHEF: Tensor,
    mass_BHE: Tensor,
    features_BHNE: Tensor,
    values_BHNF: Tensor,
    update: Update,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """M and z with these pairs. Features of 0 (padding) leave both as they are."""
    size = min(chunk, features_BHNE.shape[2]) if update == "exact" else features_BHNE.shape[2]
    for s_BHCE, u_BHCF in zip(features_BHNE.split(size, 2), values_BHNF.split(size, 2), strict=True):
        if update == "delta":
            u_BHCF = u_BHCF - recall(s_BHCE, matrix_BHEF, mass_BHE)
        elif update == "exact":
            likeness_BHCC = (s_BHCE @ s_BHCE.mT).tril(-1)
            found_BHC1 = s_BHCE @ mass_BHE[..., None] + likeness_BHCC.sum(-1, keepdim=True)
            found_BHC1 = found_BHC1.clamp(min=EPSILON)
            u_BHCF = torch.linalg.solve_triangular(
                likeness_BHCC / found_BHC1, u_BHCF - s_BHCE @ matrix_BHEF / found_BHC1, upper=False, unitriangular=True
            )
        matrix_BHEF, mass_BHE = matrix_BHEF + s_BHCE.mT @ u_BHCF, mass_BHE + s_BHCE.sum(2)
    return matrix_BHEF, mass_BHE


@MEMORIES.register(
    "infini",
    paper="arXiv:2404.07143",
    title="Infini-attention",
    carries="a matrix in each head, to which all keys and values of a segment are added; a gate mixes what it answers",
    purpose="associations, as many as keys are wide",
    equations="A = g s(Q) M / (s(Q) z) + (1 - g) softmax(Q K^T) V;  M' = M + s(K)^T V, z' = z + sum s(K), "
    "s = elu + 1;  delta rules: V - s(K) M / (s(K) z) in the place of V;  "
    "gated_delta: M' = e^g M + b k (v - e^g M^T k)^T, A_mem = M^T q",
    state="per row and layer: 4 (D E + D) + 8 bytes, E = D / H; gated_delta 4 D E + 8",
    cost="per token and layer: D E + D (read) and D E (write; with a delta rule 2 D E + D, exact also 3 D C / 2, "
    "C = 64 tokens or N) multiply-adds; gated_delta 3 D E + 2 D C + 2 D H, decays of channels D^2 for D H",
    reach="unbounded; each write is diluted by all later ones, but for keys that differ",
    gradient="through the matrix, over `bptt` segments",
    probe=Probing(fixed()),
    presets={"trained": {"initial_gate": -4.0}},
)
class Infini(Recurrent):
    """A matrix in each head holds keys and values of all earlier segments; a gate per head mixes its answer with
    attention.

    It has no weights but the gates, and uses the layer's own queries, keys and values, before positions. M and z are
    float32 at least, under autocast too. Weight decay would pull the gates to g = 1/2: it is not for parameters whose
    names end in "gate_H".

    Args:
        width: D. heads: H.
        update: "linear", the sum of all pairs; "delta", the paper's rule, all tokens of a segment against the
            memory before it; "exact", the same token by token, in chunks: independent of the segment length;
            "gated_delta", the gated delta rule, which has no normaliser, and forgets.
        decay: of "gated_delta": "none", "scalar", a number a head from the layer's input, or "channel", one for each
            channel of the keys. half_life: of these at first, in tokens, the least and the greatest.
        first: output of a row without a past: A_dot ("bypass"), or the paper's (1 - g) A_dot ("gated").
        initial_gate: beta; 0 mixes halves. A model that was trained without the memory wants less, so that it changes
            little and the gate still learns: `preset="trained"` is -4 (g = 0.018).
        channels: of the layer's input, where they are not D. The model gives them.
    """

    needs = frozenset({"state", "head"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        update: Update = "linear",
        first: Literal["bypass", "gated"] = "bypass",
        initial_gate: float = 0.0,
        decay: Decay = "scalar",
        half_life: tuple[float, float] = HALF_LIFE,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        check_half_life(half_life)
        check_choices(decay=(decay, get_args(Decay)))
        if update != "gated_delta" and (decay, half_life) != ("scalar", HALF_LIFE):
            wrong = f"decay={decay!r} and half_life={half_life}"
            raise ValueError(f'{wrong} are of update="gated_delta"; leave them out with update={update!r}')
        self.heads, self.head_width = heads, width // heads
        self.groups, self.key_width = heads, self.head_width
        self.update: Update = update
        self.gated_first, self.sums_tokens = first == "gated", update == "linear"
        self.share, self.decay, channels = None, None, channels or width
        if update == "gated_delta":
            self.share = nn.Linear(channels, heads, bias=False)
            if decay != "none":
                count = self.head_width if decay == "channel" else 1
                self.decay = InputDecay(
                    channels, heads, count, gate="softplus", rank=None, half_life=half_life, least_rate=0.0
                )
        self.gate_H = nn.Parameter(torch.full((heads,), float(initial_gate)))

    def init_state(self, batch_size: int, like: Tensor) -> InfiniMatrix:
        sizes, wide = (batch_size, self.heads, self.head_width), torch.promote_types(like.dtype, torch.float32)
        matrix_BHEF = like.new_zeros(*sizes, self.head_width, dtype=wide)
        tokens_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        mass_BHE = matrix_BHEF.new_zeros(*sizes[:2], 0 if self.update == "gated_delta" else self.head_width)
        return InfiniMatrix(matrix_BHEF, mass_BHE, tokens_B)

    def snapshot(self, state: InfiniMatrix) -> Tensor:
        if self.update == "gated_delta":
            return state.matrix_BHEF
        return torch.cat([state.matrix_BHEF, state.mass_BHE[..., None]], -1)

    def open(self, state: InfiniMatrix, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedMatrix:
        refuse_narrow(state, "what Infini-attention adds to its sums")
        # where, not multiplication: no value of an empty state may reach a result, not even NaN
        any_B = state.tokens_B > 0
        return OpenedMatrix(filled(self.snapshot(state), any_B[:, None, None]), any_B)

    def matrices(self, opened: OpenedMatrix) -> Tensor:
        return opened.sums_BHEF

    def ask(self, opened: OpenedMatrix, query: Query) -> Asked:
        assert query.q_BHNE is not None and query.k_BHNE is not None
        q_BHNE = wide(shown(query.q_BHNE, query.padding_BN))
        return Asked(unit(q_BHNE) if self.update == "gated_delta" else elu_features(q_BHNE), query.k_BHNE)

    def online(self, opened: OpenedMatrix, query: Query, asked: Asked) -> Answer:
        return Answer(self.answer(opened.sums_BHEF, asked), opened.any_B)

    def answer(self, snapshot: Tensor, asked: Asked) -> Tensor:
        with full_precision(snapshot):
            return beside(asked.q_BGNK, snapshot.dim()).to(snapshot.dtype) @ snapshot

    def settle(self, found: Answer) -> Reading:
        output_BHNE = found.answer_BGNF
        if self.update != "gated_delta":
            sums_BHNE, mass_BHN1 = output_BHNE.split([output_BHNE.shape[-1] - 1, 1], -1)
            output_BHNE = sums_BHNE * mass_BHN1.clamp(min=EPSILON).reciprocal()
        return Reading(None, output_BHNE, found.any_B, any_B=None if self.gated_first else found.any_B)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        gate_BH11, read_BHNE = self.gate_H.sigmoid().view(-1, 1, 1), reading.output_BHNE
        assert read_BHNE is not None
        if not self.gated_first:  # a row without a past reads 0, and has a gate of 0
            gate_BH11 = gate_BH11 * reading.carry.view(-1, 1, 1, 1)
        return torch.lerp(y_BHNE.to(read_BHNE.dtype), read_BHNE, gate_BH11.to(read_BHNE.dtype)).to(y_BHNE.dtype)

    def write(self, state: InfiniMatrix, trace: Trace) -> tuple[InfiniMatrix, None]:
        k_BHNE, v_BHNE, padding_BN = trace.query.k_BHNE, trace.query.v_BHNE, trace.query.padding_BN
        assert k_BHNE is not None and v_BHNE is not None
        any_B1 = (state.tokens_B > 0)[:, None]
        matrix_BHEF, mass_BHE = filled(state.matrix_BHEF, any_B1[..., None]), filled(state.mass_BHE, any_B1)
        k_BHNE, v_BHNE = (shown(t, padding_BN).to(matrix_BHEF.dtype) for t in (k_BHNE, v_BHNE))
        if self.share is not None:
            x_BND = shown(trace.query.x_BND, padding_BN)
            beta_BHN1 = shown(wide(self.share(x_BND)).sigmoid().mT[..., None], padding_BN)
            g_BHNG = None if self.decay is None else shown(self.decay(x_BND)[0], padding_BN)
            matrix_BHEF = corrected(matrix_BHEF, k_BHNE, v_BHNE, beta_BHN1, g_BHNG)
        else:
            with torch.autocast(matrix_BHEF.device.type, enabled=False):
                s_BHNE = shown(elu_features(k_BHNE), padding_BN)
                matrix_BHEF, mass_BHE = store(matrix_BHEF, mass_BHE, s_BHNE, v_BHNE, self.update)
        tokens = k_BHNE.shape[2] if padding_BN is None else (~padding_BN).sum(1)
        return InfiniMatrix(matrix_BHEF, mass_BHE, state.tokens_B + tokens), None

    def close_gate(self) -> None:
        with torch.no_grad():
            self.gate_H.fill_(-torch.inf)
