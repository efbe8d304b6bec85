"""Scores of blocks of keys for the last queries of a segment, of every layer.

    attention   sum over heads h, and keys j of the block, of softmax_j(q_h k_j / sqrt(E)) over the keys of all blocks
    mean        sum over heads of q_h . mean_j k_j                                (as InfLLM, arXiv:2402.04617)
    bounds      sum over heads of sum_e max(q_he min_j k_je, q_he max_j k_je)     (Quest, arXiv:2406.10774)

Queries and keys are unrotated. "attention" takes the very last query, which asks for the next token; the other two the
sum over the last w.

Legend: B rows, C blocks, b tokens of a block, V layers, H heads, G heads of keys, E head width, N tokens, w observed
queries, Q = w H / G queries of a head of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Trace

from .blocks import Blocks

CHUNK = 2**24
"""Bytes of keys that are scored at once."""


def _attention(q_B1VGQE: Tensor, k_BCVGbE: Tensor) -> Tensor:
    logits_BCVGQb = q_B1VGQE @ k_BCVGbE.mT / q_B1VGQE.shape[-1] ** 0.5
    return logits_BCVGQb.logsumexp(-1)


def _mean(q_B1VGQE: Tensor, k_BCVGbE: Tensor) -> Tensor:
    return (q_B1VGQE @ k_BCVGbE.mean(-2)[..., None]).squeeze(-1)


def _bounds(q_B1VGQE: Tensor, k_BCVGbE: Tensor) -> Tensor:
    low, high = k_BCVGbE.amin(-2, keepdim=True), k_BCVGbE.amax(-2, keepdim=True)
    return torch.maximum(q_B1VGQE * low, q_B1VGQE * high).sum(-1)


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"attention": _attention, "mean": _mean, "bounds": _bounds}
"""Score (B, C, V, G, Q) of each query, for "attention" the log-sum-exp of the block's logits."""


def last_queries(traces: Sequence[Trace], groups: int, observe: int) -> Tensor:
    """(B, V, G, Q, E): the last w real queries of a segment in every layer, 0 for those that a row lacks."""
    padding_BN = traces[0].query.padding_BN
    queries = []
    for trace in traces:
        q_BHNE = trace.query.q_BHNE
        assert q_BHNE is not None
        q_BHwE = q_BHNE.detach()[:, :, -observe:]
        if padding_BN is not None:
            last_Bw = (~padding_BN).to(torch.uint8).argsort(dim=1, stable=True)[:, -observe:]
            q_BHwE = q_BHNE.detach().take_along_dim(last_Bw[:, None, :, None], 2)
            q_BHwE = torch.where(padding_BN.gather(1, last_Bw)[:, None, :, None], 0, q_BHwE)
        queries.append(q_BHwE.unflatten(1, (groups, -1)).flatten(2, 3))
    return torch.stack(queries, 1)


@torch.no_grad()
def scores(rule: str, q_BVGQE: Tensor, blocks_BCXbE: Tensor, written_B: Tensor) -> Tensor:
    """(B, C, V): score of each block in each layer; arbitrary where none was written."""
    by_head, layers, groups = RULES[rule], *q_BVGQE.shape[1:3]
    q_BVGQE = q_BVGQE.to(torch.promote_types(q_BVGQE.dtype, torch.float32))
    with torch.autocast(q_BVGQE.device.type, enabled=False):

        def scored(q_BVGQE: Tensor, keys_BCXbE: Tensor) -> Tensor:
            k_BCVGbE = keys_BCXbE.to(q_BVGQE.dtype).unflatten(2, (layers, groups))
            return by_head(q_BVGQE[:, None], k_BCVGbE)

        if isinstance(blocks_BCXbE, Blocks):
            raw_BCVGQ = blocks_BCXbE.map_keys(q_BVGQE, scored, CHUNK)
        else:
            keys_BCXbE = blocks_BCXbE[:, :, : layers * groups]
            size = keys_BCXbE[:, :1].numel() * keys_BCXbE.element_size()
            chunks = keys_BCXbE.split(max(CHUNK // max(size, 1), 1), 1)
            raw_BCVGQ = torch.cat([scored(q_BVGQE, chunk) for chunk in chunks], 1)
    if rule == "attention":
        # Not minus infinity: a row without any block would be NaN.
        empty_BC = torch.arange(raw_BCVGQ.shape[1], device=written_B.device) >= written_B[:, None]
        lowest = torch.finfo(raw_BCVGQ.dtype).min
        raw_BCVGQ = raw_BCVGQ.masked_fill(empty_BC[..., None, None, None], lowest).softmax(1)
    return raw_BCVGQ.sum((-2, -1))
