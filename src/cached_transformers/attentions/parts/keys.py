"""Keys of a memory before those of the segment, for cores that take both as one set, and who sees which of them.

Legend: B rows, H heads, N queries or keys of the segment, M keys of context and segment, E key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.attention import Call
from cached_transformers.interfaces.memory import Context


def with_context(k_BHNE: Tensor, v_BHNV: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Keys and values of context and segment; a context of one row serves all."""
    if context is None:
        return k_BHNE, v_BHNV
    if k_BHNE.shape[2] == 0:  # nothing of the segment: no copies
        return context.k_BHME.expand(len(k_BHNE), -1, -1, -1), context.v_BHME.expand(len(k_BHNE), -1, -1, -1)
    before = (t.expand(len(k_BHNE), -1, -1, -1) for t in (context.k_BHME, context.v_BHME))
    k_BHME, v_BHMV = (torch.cat(pair, 2) for pair in zip(before, (k_BHNE, v_BHNV), strict=True))
    return k_BHME, v_BHMV


def all_keys(k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of context and segment, and which of them are there (B, M); None where all of them are."""
    there_BM = None if call.key_padding_mask is None else ~call.key_padding_mask
    if call.context is not None:
        rows, _, tokens, _ = k_BHNE.shape
        there_BN = k_BHNE.new_ones(rows, tokens, dtype=torch.bool) if there_BM is None else there_BM
        there_BM = torch.cat([call.context.valid_BM.expand(rows, -1), there_BN], 1)
    return *with_context(k_BHNE, v_BHNV, call.context), there_BM


def visible(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    context: Context | None,
    bias_BHNM: Tensor | None,
) -> Tensor | None:
    """Mask for scaled_dot_product_attention over [context, segment]: bool (True = visible), or additive with a bias."""
    n, total = q_BHNE.shape[2], k_BHNE.shape[2]
    slots = 0 if context is None else context.k_BHME.shape[2]
    mask = None
    if causal:
        mask = torch.ones(n, total, dtype=torch.bool, device=q_BHNE.device).tril(slots)[None, None]
    if key_padding_mask is not None:
        keep = F.pad(~key_padding_mask, (slots, 0), value=True)[:, None, None]
        mask = keep if mask is None else mask & keep
    if context is not None:
        keep = F.pad(context.valid_BM, (0, total - slots), value=True)[:, None, None]
        mask = keep if mask is None else mask & keep
    if bias_BHNM is None:
        return mask
    bias_BHNM = bias_BHNM.to(q_BHNE.dtype)
    return bias_BHNM if mask is None else bias_BHNM.masked_fill(~mask, -torch.inf)
