"""One softmax by FlexAttention of torch (arXiv:2412.05496), which computes the pairs of a block mask and nothing else.

A pattern is a `Rule`: who sees whom by places alone. The blocks in which it shows anything are found once for a rule
and its lengths, and kept; data that differ between calls (padding, empty slots of a memory, logits of positions) are
in tensors, which mask and scores look up.

    out_i = softmax over {j there: a slot, or shown to i by the rule} of (q_i k_j / sqrt(E) + b_ij + d_i,(i - j)) v_j

Legend: B rows, H heads, N queries, M keys of context and segment, E key width, V value width, Q blocks of queries,
K blocks of keys or, of logits by distance, distances.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.attention import AttentionOutput, Call

from .keys import all_keys

BLOCK = 128
"""Tokens of a block of the mask."""

Sees = Callable[[Any, Any, Any, Any], Tensor]
"""Bool of whether, in a row and head, the query at one place sees the key at another; arguments broadcast."""


class Rule(Protocol):
    """Attention mask as a function of places. Equal rules have equal hashes, since blocks are kept by rule."""

    def bind(self, length: int, device: torch.device) -> Sees:
        """The rule for places below `length`, with the tensors that it looks up."""
        ...

    def __hash__(self) -> int: ...


class Everything(NamedTuple):
    """The rule that shows every key to every query."""

    def bind(self, length: int, device: torch.device) -> Sees:
        return lambda row, head, i, j: (i >= 0) & (j >= 0)


class Shown(NamedTuple):
    """A rule with the blocks in which it shows anything: what FlexAttention is to compute.

    Attributes:
        sees: of places of the segment.
        blocks: a `BlockMask` over the keys of context and segment; its own mask is not used.
    """

    sees: Sees
    blocks: Any


class Lengths(NamedTuple):
    """Sizes of a call: heads, queries, slots of the context, keys of the segment; `causal` hides later keys."""

    heads: int
    queries: int
    slots: int
    keys: int
    causal: bool
    device: torch.device

    @property
    def longest(self) -> int:
        """A bound of all places of queries and keys, in whole blocks."""
        return whole_blocks(max(self.queries, self.slots + self.keys))


def lengths_of(q_BHNE: Tensor, k_BHNE: Tensor, call: Call) -> Lengths:
    """Tensors of a call."""
    slots = 0 if call.context is None else call.context.k_BHME.shape[2]
    return Lengths(q_BHNE.shape[1], q_BHNE.shape[2], slots, k_BHNE.shape[2], call.causal, q_BHNE.device)


def whole_blocks(count: int) -> int:
    """The least multiple of a block that is no less."""
    return -(-count // BLOCK) * BLOCK


@functools.lru_cache(maxsize=128)
def shown(rule: Rule, lengths: Lengths) -> Shown:
    """Mask of a rule at these lengths. N (M + N) evaluations of the rule per head, a block of queries at a time."""
    heads, queries, slots, keys, causal, device = lengths
    with torch.inference_mode(False), torch.no_grad():  # kept for any mode
        sees = rule.bind(lengths.longest, device)
        head_H11 = torch.arange(heads, device=device)[:, None, None]
        j_M = torch.arange(-slots, whole_blocks(slots + keys) - slots, device=device)
        rows = []
        for first in range(0, queries, BLOCK):
            i_W1 = torch.arange(first, min(first + BLOCK, queries), device=device)[:, None]
            seen_HWM = sees(0, head_H11, i_W1, j_M.clamp(min=0)).view(-1, len(i_W1), len(j_M))
            seen_HWM = seen_HWM & (j_M <= i_W1) if causal else seen_HWM
            seen_HWM = (seen_HWM | (j_M < 0)) & (j_M < keys)
            rows.append(seen_HWM.unflatten(-1, (-1, BLOCK)).any(-1).any(1))
        return Shown(sees, block_mask(torch.stack(rows, 1)[None]))


def shown_blocks(seen_BHQQ: Tensor, size: int, lengths: Lengths) -> Shown:
    """Mask of a table of blocks of `size` tokens, for this call only; it may differ per row."""
    queries, slots, keys = lengths[1:4]
    near_QI = _touched(seen_BHQQ.shape[2], size, 0, whole_blocks(queries), lengths.device)
    near_QJ = _touched(seen_BHQQ.shape[2], size, slots, whole_blocks(slots + keys), lengths.device)
    near_BHIJ = (near_QI.mT @ seen_BHQQ.float() @ near_QJ) > 0
    near_BHIJ[..., : -(-slots // BLOCK)] = True
    return Shown(by_blocks(seen_BHQQ, size), block_mask(near_BHIJ))


def _touched(blocks: int, size: int, before: int, length: int, device: torch.device) -> Tensor:
    """(Q, K) of 0 and 1: blocks of FlexAttention in which there are tokens of those blocks, which begin at `before`."""
    first_Q1 = before + torch.arange(blocks, device=device)[:, None] * size
    first_K = torch.arange(0, length, BLOCK, device=device)
    return ((first_Q1 < first_K + BLOCK) & (first_K < first_Q1 + size)).float()


def by_blocks(seen_BHQQ: Tensor, size: int) -> Sees:
    """By a table of blocks of `size` tokens; one row of it may serve all."""
    one, last = len(seen_BHQQ) == 1, seen_BHQQ.shape[-1] - 1
    seen_BHQQ = seen_BHQQ[0] if one else seen_BHQQ

    def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
        at = (head, (i // size).clamp(max=last), (j // size).clamp(max=last))
        return seen_BHQQ[at if one else (row, *at)]

    return sees


def block_mask(near_BHQK: Tensor) -> Any:
    """A `BlockMask` of the blocks of queries and keys that are True; which of their pairs are seen is said later."""
    from torch.nn.attention.flex_attention import BlockMask

    count_BHQ = near_BHQK.sum(-1, dtype=torch.int32)
    order_BHQK = near_BHQK.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(count_BHQ, order_BHQK, BLOCK_SIZE=BLOCK)


def flex_attend(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, what: Shown) -> AttentionOutput:
    """One softmax of each query over the context and the keys that it is shown.

    Args:
        call: all but `x_BND`, randomness and states is read.
        what: it is shown.
    """
    # What mask and scores close over is compiled with them: tensors where it may differ from call to call.
    rows, causal, sees = len(q_BHNE), call.causal, what.sees
    queries, segment = q_BHNE.shape[2], k_BHNE.shape[2]
    k_BHME, v_BHMV, there = all_keys(k_BHNE, v_BHNV, call)
    keys = k_BHME.shape[2]
    behind, below = whole_blocks(keys) - keys, whole_blocks(queries) - queries
    there = q_BHNE.new_ones(rows, keys, dtype=torch.bool) if there is None else there
    there_BM = F.pad(there, (0, behind), value=False)
    place_M = F.pad(torch.arange(segment - keys, segment, device=q_BHNE.device), (0, behind))

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = place_M[j]
        seen = sees(b, h, i, place.clamp(min=0))
        return there_BM[b, j] & ((place < 0) | (seen & (place <= i) if causal else seen))

    blocks = copy.copy(what.blocks)
    blocks.mask_mod = mask
    dtype = v_BHNV.dtype
    if torch.is_autocast_enabled(q_BHNE.device.type):
        dtype = torch.get_autocast_dtype(q_BHNE.device.type)
    q = F.pad(q_BHNE, (0, 0, 0, below)).to(dtype)
    k, v = (F.pad(t, (0, 0, 0, behind)).to(dtype) for t in (k_BHME, v_BHMV))
    bias = None if call.bias_BHNM is None else _look_up(call.bias_BHNM, below, behind)
    distances = None if call.distances_BHNK is None else _look_up(call.distances_BHNK, below, max(below, behind))

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias is not None:
            logit = logit + bias(b, h, i, j)
        if distances is not None:
            logit = logit + distances(b, h, i, (i - place_M[j]).clamp(min=0))
        return logit

    changed = None if bias is None and distances is None else score
    found = compiled_flex()(q, k, v, score_mod=changed, block_mask=blocks, return_lse=call.want_lse)
    if not call.want_lse:
        return AttentionOutput(found[:, :, :queries])
    out, lse = (t[:, :, :queries] for t in found)
    return AttentionOutput(out, lse.clamp(min=torch.finfo(lse.dtype).min))


def _look_up(t_BHNK: Tensor, below: int, behind: int) -> Callable[..., Tensor]:
    """Look up a tensor by row, head, query and key, each of which may broadcast; 0 in the fill of blocks."""
    several = tuple(size > 1 for size in t_BHNK.shape)
    filled = F.pad(t_BHNK, (0, behind if several[3] else 0, 0, below if several[2] else 0))
    filled = filled[tuple(slice(None) if many else 0 for many in several)]

    def of(*at: Tensor) -> Tensor:
        return filled[tuple(index for index, many in zip(at, several, strict=True) if many)]

    return of


@functools.cache
def compiled_flex() -> Any:
    """Without a compiler FlexAttention makes all pairs; it must not go back to that after too many compilations,
    either, which `fullgraph` turns into an error."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)
