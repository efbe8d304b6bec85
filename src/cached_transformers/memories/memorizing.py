"""Memorizing Transformers (Wu et al. 2022, arXiv:2203.08913; github.com/google-research/meliad).

One upper layer also attends those of its earlier keys that are nearest to each query; a gate per head mixes.

    J_i = the K slots with the largest q^_i . k^_j,        q^ = q / |q|, k^ = k / |k|, no positions
    V_m = sum_{j in J_i} softmax_j(|s_h| q^_i . k^_j) v_j
    out = g_h V_m + (1 - g_h) V_c,   g_h = sigmoid(b_h),   V_c the layer's own attention

One softmax over neighbours and segment is the same mix with g_ih = sigmoid(b_h + lse_m - lse_c), where lse is the
log-sum-exp of either side's logits and b = 0 (lucidrains/memorizing-transformers-pytorch).

Legend: B rows, N tokens, M slots, K neighbours, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.nearest import nearest
from .parts.neighbour_index import NeighbourIndex
from .parts.options import NO_MEMORY, check_heads, chosen_layers
from .parts.ring import write_rings

ALL = 2
"""A store of up to this many times the neighbours is read by one softmax over all of it: no gathering is faster."""


SHARP = {"initial_scale": 10.0}
"""Logits of unit vectors lie within the scale: with 1, the default, the best of 16 neighbours gets at most a third of
the weight, and the scale grows by a learning rate a step at most."""


class Found(NamedTuple):
    """Rows with a non-empty store, and the log-sum-exp of the neighbours' logits."""

    any_B: Tensor
    lse_BHN: Tensor


class NeighbourStore(NamedTuple):
    """Unit keys and values of the last M tokens of each row, token t in slot t mod M, and how many were ever stored."""

    k_BHME: Tensor
    v_BHME: Tensor
    written_B: Tensor

    @property
    def filled_B(self) -> Tensor:
        """Number of slots that hold something: the first ones."""
        return self.written_B.clamp(max=self.k_BHME.shape[2])


def store(state: NeighbourStore, k_BHNE: Tensor, v_BHNE: Tensor, padding_BN: Tensor | None = None) -> NeighbourStore:
    """Append tokens, without padding; of more than M the last M stay. In place where `state.may_change` says so."""
    (k_BHME, v_BHME), written_B = write_rings(state[:2], (k_BHNE, v_BHNE), state.written_B, padding_BN, dim=2)
    return NeighbourStore(k_BHME, v_BHME, written_B)


def attend(q_BHNE: Tensor, state: NeighbourStore, index_BHNK: Tensor, scale_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, H, N, E) of each query over its own slots, 0 where it has none; log-sum-exp (B, H, N)."""
    real_BHNK = index_BHNK >= 0
    rows, heads, slots, _ = state.k_BHME.shape
    first_BH11 = slots * torch.arange(rows * heads, device=index_BHNK.device).view(rows, heads, 1, 1)
    flat = (index_BHNK.clamp(min=0) + first_BH11).flatten()
    k_BHNKE, v_BHNKE = (
        t.flatten(0, 2).index_select(0, flat).view(*index_BHNK.shape, -1) for t in (state.k_BHME, state.v_BHME)
    )
    on_cpu = q_BHNE.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere asking would cost more
    if not (on_cpu and bool(real_BHNK.all())):
        k_BHNKE, v_BHNKE = (torch.where(real_BHNK[..., None], t, 0) for t in (k_BHNKE, v_BHNKE))
    logits_BHNK = scale_H[:, None, None] * (k_BHNKE @ q_BHNE[..., None]).squeeze(-1)
    # Not minus infinity: a query without neighbours would become NaN.
    logits_BHNK = logits_BHNK.masked_fill(~real_BHNK, torch.finfo(logits_BHNK.dtype).min)
    weights_BHNK = torch.where(real_BHNK, logits_BHNK.softmax(-1), 0)
    return (weights_BHNK[..., None, :] @ v_BHNKE).squeeze(-2), logits_BHNK.logsumexp(-1)


def attend_all(q_BHNE: Tensor, state: NeighbourStore, neighbours: int, scale_H: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` over the `nearest` slots, by one softmax over all: for stores of little more than that many slots."""
    slots = state.k_BHME.shape[2]
    real_B1M1 = (torch.arange(slots, device=q_BHNE.device) < state.filled_B[:, None])[:, None, :, None]
    k_BHME, v_BHME = (torch.where(real_B1M1, t, 0) for t in (state.k_BHME, state.v_BHME))
    with torch.autocast(q_BHNE.device.type, enabled=False):  # as in `nearest`
        scores_BHNM = q_BHNE @ k_BHME.mT
    read_BHNM = real_B1M1.mT.expand_as(scores_BHNM)
    if neighbours < slots:
        index_BHNK = scores_BHNM.detach().masked_fill(~read_BHNM, -torch.inf).topk(neighbours, -1, sorted=False).indices
        read_BHNM = torch.zeros_like(read_BHNM).scatter(-1, index_BHNK, True) & read_BHNM
    logits_BHNM = (scale_H[:, None, None] * scores_BHNM).masked_fill(~read_BHNM, torch.finfo(scores_BHNM.dtype).min)
    weights_BHNM = torch.where(read_BHNM, logits_BHNM.softmax(-1), 0)
    return weights_BHNM @ v_BHME, logits_BHNM.logsumexp(-1)


@MEMORIES.register(
    "memorizing",
    paper="arXiv:2203.08913",
    title="Memorizing Transformers",
    carries="keys and values of one layer; the nearest are attended",
    purpose="a choice out of a long past",
    equations="out = g_h V_m + (1 - g_h) V_c;  V_m = softmax(|s_h| q^ k^_J) v_J over the K nearest stored keys J",
    state="per row, in one layer: 8 M D + 8 bytes",
    cost="per token, in one layer: D M (scores) + min(2 K, M) D (attention over the neighbours) multiply-adds",
    reach="M tokens",
    gradient="none into the store; queries, scale and gate learn from it",
    without={"lse": "joint=False"},
    probe=Probing(
        lambda n, distance, depth: dict.fromkeys(("length", "k"), (distance + 1) * n) | {"layer": 1, **SHARP},
        lambda *task: {**one_segment(*task), "k": task[0], "layer": 1},
    ),
    presets={"long": SHARP},
)
class Memorizing(LayerMemory):
    """The nearest of the last `length` keys of one upper layer, mixed per head by a learned gate.

    Queries and keys are compared without positions and at unit length, times a learned factor per head. With an index
    of faiss the state stays the same tensors, and compiled code breaks at the search.

    Args:
        width: D. heads: H.
        length: M, slots. eval_length: M of states made in evaluation mode; `length` when None.
        k: neighbours of a query; a store of fewer slots is read whole.
        layer: the layer that has the store, counted from 1; three quarters of the depth when None (9 of 12).
        joint: one softmax instead of two mixed by the gate.
        empty: an empty store is left out ("bypass"), or read as zeros that the gate mixes in ("zero", the original).
        store: "exact" (all products, then the largest), or "faiss", which needs the extra "memory".
        faiss_index: "Flat" (exact) or "HNSW<links>" (approximate).
        initial_gate: b. initial_scale: s.
        index, depth: which layer of how many this is, counted from 0; the model gives them.
    """

    needs = frozenset({"state", "head"})  # nothing in the layers that have no store

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 1024,
        *,
        eval_length: int | None = None,
        k: int = 32,
        layer: int | None = None,
        joint: bool = False,
        empty: Literal["bypass", "zero"] = "bypass",
        store: Literal["exact", "faiss"] = "exact",
        faiss_index: str = "Flat",
        initial_gate: float = 0.0,
        initial_scale: float = 1.0,
        index: int | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(NO_MEMORY, length=length, eval_length=eval_length, k=k)
        check_heads(width, heads)
        if joint and empty == "zero":
            raise ValueError("joint=True has no zeros to mix in for an empty store; take empty='bypass'")
        if store == "exact" and faiss_index != "Flat":
            raise ValueError(f"faiss_index={faiss_index!r} needs store='faiss', got store={store!r}")
        if not initial_scale:
            raise ValueError("initial_scale=0 would read every neighbour alike and never learn; take 1, or more")
        self.heads, self.head_width, self.k, self.empty = heads, width // heads, k, empty
        self.length, self.eval_length = length, eval_length or length
        chosen = chosen_layers("layer", layer, depth, 3 / 4)
        self.here = index is None or chosen is None or index + 1 in chosen
        self.needs = self.needs | {"lse"} if joint and self.here else self.needs if self.here else frozenset()
        self.index = NeighbourIndex(faiss_index) if store == "faiss" else None
        if self.here:
            self.gate_H = nn.Parameter(torch.full((heads,), float(initial_gate)))
            self.scale_H = nn.Parameter(torch.full((heads,), float(initial_scale)))

    def init_state(self, batch_size: int, like: Tensor) -> State:
        if not self.here:
            return ()
        slots = self.length if self.training else self.eval_length
        # One number until the state is sealed: a large store must never exist twice.
        empty_BHME = like.new_zeros(()).expand(batch_size, self.heads, slots, self.head_width)
        return NeighbourStore(empty_BHME, empty_BHME, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def open(self, state: State, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> State:
        return state

    def read(self, opened: State, query: Query, project_kv: ProjectKV | None) -> Reading:
        if not self.here:
            return Reading()
        state: NeighbourStore = opened
        assert query.q_BHNE is not None
        q_BHNE = unit(query.q_BHNE)
        slots, scale_H = state.k_BHME.shape[2], self.scale_H.abs()
        neighbours = min(self.k, slots)
        if self.index is None and slots <= ALL * neighbours:
            output_BHNE, lse_BHN = attend_all(q_BHNE.to(state.k_BHME.dtype), state, neighbours, scale_H)
        else:
            asked = (q_BHNE, state.k_BHME)
            if self.index is None:
                index_BHNK = nearest(*asked, state.filled_B, neighbours)
            else:
                index_BHNK = self.index.search(*asked, state.written_B, neighbours)
            output_BHNE, lse_BHN = attend(q_BHNE.to(state.k_BHME.dtype), state, index_BHNK, scale_H)
        any_B = state.written_B > 0
        return Reading(None, output_BHNE, Found(any_B, lse_BHN), any_B=None if self.empty == "zero" else any_B)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if reading.output_BHNE is None:
            return y_BHNE
        logit = self.gate_H[:, None, None]
        if reading.lse_BHN is not None:
            logit = logit + (reading.carry.lse_BHN - reading.lse_BHN)[..., None]
        gate = logit.sigmoid()
        mixed_BHNE = (gate * reading.output_BHNE + (1 - gate) * y_BHNE).to(y_BHNE.dtype)
        if self.empty == "zero":
            return mixed_BHNE
        return torch.where(reading.carry.any_B[:, None, None, None], mixed_BHNE, y_BHNE)

    def write(self, state: State, trace: Trace) -> tuple[State, None]:
        if not self.here:
            return state, None
        k_BHNE, v_BHNE = trace.query.k_BHNE, trace.query.v_BHNE
        assert k_BHNE is not None and v_BHNE is not None
        known = self.index is not None and self.index.knows(state.k_BHME)
        after = store(state, unit(k_BHNE), v_BHNE, trace.query.padding_BN)
        if self.index is not None and known and after.k_BHME is state.k_BHME:
            self.index.follow(after.k_BHME)
        return after, None

    def close_gate(self) -> None:
        if self.here:
            with torch.no_grad():
                self.gate_H.fill_(-torch.inf)


def unit(t_BHNE: Tensor) -> Tensor:
    """Vectors of length 1; those shorter than 1e-6 are divided by that."""
    return F.normalize(t_BHNE, dim=-1, eps=1e-6)
