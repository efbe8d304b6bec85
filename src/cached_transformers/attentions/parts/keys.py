"""Keys of a memory before those of the segment, for cores that take both as one set.

Legend: B rows, H heads, N keys of the segment, M keys of context and segment, E key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.seam.attention import Call
from cached_transformers.seam.memory import Context


def with_context(k_BHNE: Tensor, v_BHNV: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Keys and values of context and segment; a context of one row serves all."""
    if context is None:
        return k_BHNE, v_BHNV
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
