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

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.seam.probing import Probing, one_segment, whole_episode
from cached_transformers.state import State

from .parts.neighbour_index import NeighbourIndex
from .parts.options import NO_MEMORY, one_of


class Found(NamedTuple):
    """Which rows have a store that is not empty, and the log-sum-exp of the neighbours' logits."""

    any_B: Tensor
    lse_BHN: Tensor


class NeighbourStore(NamedTuple):
    """Unit keys and values of the last M tokens of each row, and how many tokens were ever stored.

    A ring: token number t lies in slot t mod M, and the oldest is overwritten.
    """

    k_BHME: Tensor
    v_BHME: Tensor
    written_B: Tensor

    @property
    def filled_B(self) -> Tensor:
        """Number of slots that hold something: the first ones."""
        return self.written_B.clamp(max=self.k_BHME.shape[2])


def store(state: NeighbourStore, k_BHNE: Tensor, v_BHNE: Tensor, padding_BN: Tensor | None = None) -> NeighbourStore:
    """Append tokens, without padding; of more than M the last M stay."""
    slots, n = state.k_BHME.shape[2], k_BHNE.shape[2]
    if padding_BN is None:
        rank_BN = torch.arange(n, device=k_BHNE.device).expand(k_BHNE.shape[0], n)
        real_BN = torch.ones_like(rank_BN, dtype=torch.bool)
    else:
        real_BN = ~padding_BN
        rank_BN = real_BN.cumsum(1) - 1
    total_B = real_BN.sum(1)
    kept_BN = real_BN & (rank_BN >= total_B[:, None] - slots)
    # One slot more takes what is not kept, so that nothing depends on how much that is.
    slot_BN = torch.where(kept_BN, (state.written_B[:, None] + rank_BN) % slots, slots)

    def put(old_BHME: Tensor, new_BHNE: Tensor) -> Tensor:
        new_BHNE = new_BHNE.detach().to(old_BHME.dtype)
        index = slot_BN[:, None, :, None].expand_as(new_BHNE)
        return F.pad(old_BHME, (0, 0, 0, 1)).scatter(2, index, new_BHNE)[:, :, :slots]

    return NeighbourStore(put(state.k_BHME, k_BHNE), put(state.v_BHME, v_BHNE), state.written_B + total_B)


@torch.no_grad()
def nearest(q_BHNE: Tensor, k_BHME: Tensor, filled_B: Tensor, neighbours: int) -> Tensor:
    """(B, H, N, K): slots of the keys with the largest products, the largest first; -1 where there is none."""
    with torch.autocast(q_BHNE.device.type, enabled=False):  # half precision would confuse near neighbours
        scores_BHNM = q_BHNE.to(k_BHME.dtype) @ k_BHME.mT
    filled_B111 = filled_B[:, None, None, None]
    empty_B11M = torch.arange(k_BHME.shape[2], device=k_BHME.device) >= filled_B111
    index = scores_BHNM.masked_fill(empty_B11M, -torch.inf).topk(neighbours, -1).indices
    return torch.where(torch.arange(neighbours, device=index.device) < filled_B111, index, -1)


def attend(q_BHNE: Tensor, state: NeighbourStore, index_BHNK: Tensor, scale_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, H, N, E) of each query over its own slots, 0 where it has none; log-sum-exp (B, H, N)."""
    real_BHNK = index_BHNK >= 0
    flat = index_BHNK.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, q_BHNE.shape[-1])
    k_BHNKE, v_BHNKE = (
        torch.where(real_BHNK[..., None], t.gather(2, flat).unflatten(2, index_BHNK.shape[2:]), 0)
        for t in (state.k_BHME, state.v_BHME)
    )
    logits_BHNK = scale_H[:, None, None] * (k_BHNKE @ q_BHNE[..., None]).squeeze(-1)
    # Not minus infinity, of which a query without neighbours would make NaN.
    logits_BHNK = logits_BHNK.masked_fill(~real_BHNK, torch.finfo(logits_BHNK.dtype).min)
    weights_BHNK = torch.where(real_BHNK, logits_BHNK.softmax(-1), 0)
    return (weights_BHNK[..., None, :] @ v_BHNKE).squeeze(-2), logits_BHNK.logsumexp(-1)


def _whole_store(segment: int, distance: int, depth: int) -> dict[str, int]:
    """All of the episode is in the store of the first layer, and nearly all of it is found."""
    length = whole_episode(segment, distance, depth)["length"]
    return {"length": length, "k": length, "layer": 1}


def _short_store(segment: int, distance: int, depth: int) -> dict[str, int]:
    return {**one_segment(segment, distance, depth), "k": segment, "layer": 1}


@MEMORIES.register(
    "memorizing",
    paper="arXiv:2203.08913",
    title="Memorizing Transformers",
    carries="keys and values of one layer; the nearest are attended",
    purpose="a choice out of a long past",
    equations="out = g_h V_m + (1 - g_h) V_c;  V_m = softmax(|s_h| q^ k^_J) v_J over the K nearest stored keys J",
    state="per row, in one layer: 8 M D + 8 bytes",
    cost="per token, in one layer: D M (scores) + 2 K D (attention over the neighbours) multiply-adds",
    reach="M tokens",
    gradient="none into the store; queries, scale and gate learn from it",
    without={"lse": "joint=False"},
    probe=Probing(_whole_store, _short_store),
)
class Memorizing(LayerMemory):
    """The nearest of the last `length` keys of one upper layer, mixed per head by a learned gate.

    Queries and keys are compared without positions and at unit length, times a learned factor per head. The layer's own
    attention is left as it is; the original normalises its queries and keys too. The store is read before the segment
    is written to it. With `joint` one softmax runs over neighbours and segment, which an attention core must support
    ("lse"), and b is added to the neighbours' logits. With an index of faiss the state stays the same tensors,
    and compiled code breaks at the search.

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

    Raises:
        ValueError: a size below 1, a layer that does not exist, a width that the heads do not divide, or an unknown
            choice. ImportError: faiss is asked for and not installed.
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
        if heads < 1 or width % heads:
            raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
        if layer is not None and (layer < 1 or (depth is not None and layer > depth)):
            last = "" if depth is None else f" to {depth}, the model's last"
            raise ValueError(
                f"layer={layer} must be a layer, counted from 1{last}; None takes three quarters of the depth"
            )
        one_of("empty", empty, ("bypass", "zero"))
        one_of("store", store, ("exact", "faiss"))
        if joint and empty == "zero":
            raise ValueError("joint=True has no zeros to mix in for an empty store; take empty='bypass'")
        if store == "exact" and faiss_index != "Flat":
            raise ValueError(f"faiss_index={faiss_index!r} needs store='faiss', got store={store!r}")
        if not initial_scale:
            raise ValueError("initial_scale=0 would read every neighbour alike and never learn; take 1, or more")
        self.heads, self.head_width, self.k, self.empty = heads, width // heads, k, empty
        self.length, self.eval_length = length, eval_length or length
        if layer is None and depth is not None:
            layer = math.ceil(0.75 * depth)
        self.here = index is None or layer is None or index + 1 == layer
        self.needs = self.needs | {"lse"} if joint and self.here else self.needs if self.here else frozenset()
        self.index = NeighbourIndex(faiss_index) if store == "faiss" else None
        if self.here:
            self.gate_H = nn.Parameter(torch.full((heads,), float(initial_gate)))
            self.scale_H = nn.Parameter(torch.full((heads,), float(initial_scale)))

    def init_state(self, batch_size: int, like: Tensor) -> State:
        if not self.here:
            return ()
        slots = self.length if self.training else self.eval_length
        k_BHME = like.new_zeros(batch_size, self.heads, slots, self.head_width)
        written_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return NeighbourStore(k_BHME, torch.zeros_like(k_BHME), written_B)

    def open(self, state: State, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> State:
        return state

    def read(self, opened: State, query: Query, project_kv: ProjectKV | None) -> Reading:
        if not self.here:
            return Reading()
        state: NeighbourStore = opened
        assert query.q_BHNE is not None
        q_BHNE = unit(query.q_BHNE)
        search = nearest if self.index is None else self.index.search
        index_BHNK = search(q_BHNE, state.k_BHME, state.filled_B, min(self.k, state.k_BHME.shape[2]))
        output_BHNE, lse_BHN = attend(q_BHNE.to(state.k_BHME.dtype), state, index_BHNK, self.scale_H.abs())
        return Reading(output_BHNE=output_BHNE, carry=Found(state.written_B > 0, lse_BHN))

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
        return store(state, unit(k_BHNE), v_BHNE, trace.query.padding_BN), None

    def close_gate(self) -> None:
        if self.here:
            with torch.no_grad():
                self.gate_H.fill_(-torch.inf)


def unit(t_BHNE: Tensor) -> Tensor:
    """Vectors of length 1; those shorter than 1e-6 are divided by that."""
    return F.normalize(t_BHNE, dim=-1, eps=1e-6)
