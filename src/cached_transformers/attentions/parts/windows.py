"""Parts of neighbourhood patterns: blocks of queries with the keys around them, and global tokens.

Legend: B rows, H heads, N tokens, E key width, V value width, Q blocks, W queries of a block, S keys that a block sees,
G tokens seen by all, T classes of tokens, L tokens of a class; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.attention import AttentionOutput, Call

from .building_blocks import attend, merge, overlapping, seen_places

Sees = Callable[[Tensor, Tensor], Tensor]
"""Predicate of whether a query at one place sees a key at another; places broadcast."""
Body = Callable[[Tensor, Tensor, Tensor, Call], AttentionOutput]


def one_block_is_cheaper(tokens: int, size: int, before: int, after: int) -> bool:
    """True if all pairs are no more than the blocks' pairs: sequences of little more than a block."""
    blocks = -(-tokens // size)
    return tokens * tokens <= blocks * size * (before + size + after)


def local_attention(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNV: Tensor,
    call: Call,
    sees: Sees,
    *,
    size: int,
    before: int = 0,
    after: int = 0,
    stride: int = 1,
    everywhere_G: Tensor | None = None,
    dropout: float = 0.0,
) -> AttentionOutput:
    """One softmax of each query over the keys near its block that it `sees`, and over those at `everywhere_G`.

    Tokens whose places are equal modulo `stride` form a class, and only tokens of one class meet; blocks, and what lies
    before and after them, are counted in tokens of a class.

    Args:
        call: padding, `causal` (which here only limits the keys seen by all) and `want_lse` are read.
        sees: of a query and a key; both given by their places in the sequence.
        size: W, queries of a block. before, after: keys of S that lie before and after the block.
        everywhere_G: places of keys that each query sees; without `call.causal`, later ones too. They count once.

    Cost: T Q W (before + W + after + G) (E + V) multiply-adds a head, Q = ceil(ceil(N / T) / W); one block of all
    tokens of a class where that is cheaper.
    """
    tokens, device = q_BHNE.shape[2], q_BHNE.device
    length = -(-tokens // stride)
    if one_block_is_cheaper(length, size, before, after):
        size, before, after = length, 0, 0
    q, k, v = _slabs(q_BHNE, stride, size), *(_slabs(t, stride, size, before, after) for t in (k_BHNE, v_BHNV))
    class_T11 = torch.arange(stride, device=device)[:, None, None]
    first_Q1 = torch.arange(-(-length // size), device=device)[:, None] * size
    query = (class_T11 + stride * (first_Q1 + torch.arange(size, device=device))).flatten(0, 1)[..., None]
    key = (class_T11 + stride * (first_Q1 + torch.arange(-before, size + after, device=device))).flatten(0, 1)[:, None]
    mask = seen_places(key, tokens, call.key_padding_mask) & sees(query, key)
    if everywhere_G is not None:
        everywhere_N = torch.zeros(tokens, dtype=torch.bool, device=device).index_fill(0, everywhere_G, True)
        mask = mask & ~everywhere_N[key.clamp(0, tokens - 1)]
        seen = seen_places(everywhere_G.expand(1, 1, -1), tokens, call.key_padding_mask)
        seen = seen & (query >= everywhere_G if call.causal else torch.ones_like(query, dtype=torch.bool))
        lead = torch.broadcast_shapes(mask.shape[:-1], seen.shape[:-1])
        mask = torch.cat([t.expand(*lead, -1) for t in (mask, seen)], -1)
        extra = (t[:, :, everywhere_G][:, :, None].expand(-1, -1, q.shape[2], -1, -1) for t in (k_BHNE, v_BHNV))
        k, v = (torch.cat(pair, 3) for pair in zip((k, v), extra, strict=True))
    out, lse = attend(q, k, v, mask, dropout=dropout, want_lse=call.want_lse)
    return AttentionOutput(
        _in_order(out, stride, length, tokens),
        None if lse is None else _in_order(lse[..., None], stride, length, tokens)[..., 0],
    )


def _slabs(t_BHNE: Tensor, stride: int, size: int, before: int = 0, after: int = 0) -> Tensor:
    """(B, H, T Q, before + W + after, E): the blocks of each class with what lies before and after; zeros outside."""
    t_BHTLE = _padded(t_BHNE, 0, -t_BHNE.shape[2] % stride).unflatten(2, (-1, stride)).transpose(2, 3)
    t_BHTLE = _padded(t_BHTLE, before, -t_BHTLE.shape[3] % size + after)
    if before + after == 0:
        return t_BHTLE.unflatten(3, (-1, size)).flatten(2, 3)
    # Overlapping views, which fused attention takes and keeps for the backward pass without a copy (of one class).
    return overlapping(t_BHTLE, before + size + after, size).flatten(2, 3)


def _padded(t: Tensor, front: int, back: int) -> Tensor:
    """Zeros before and after the tokens; without any, no copy, which F.pad would make."""
    return F.pad(t, (0, 0, front, back)) if front + back else t


def _in_order(t_BHQWV: Tensor, stride: int, length: int, tokens: int) -> Tensor:
    """(B, H, N, V): blocks of queries of each class, back in the order of the sequence."""
    t_BHTLV = t_BHQWV.unflatten(2, (stride, -1)).flatten(3, 4)[:, :, :, :length]
    return t_BHTLV.transpose(2, 3).flatten(2, 3)[:, :, :tokens]


def attend_all(
    q_BHGE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, place_G: Tensor, *, dropout: float
) -> AttentionOutput:
    """Queries at the given places over all keys, or over those up to the query where the call is causal."""
    mask = None if call.key_padding_mask is None else ~call.key_padding_mask[:, None, None]
    if call.causal:
        causal_GN = place_G[:, None] >= torch.arange(k_BHNE.shape[2], device=k_BHNE.device)
        mask = causal_GN if mask is None else mask & causal_GN
    return AttentionOutput(*attend(q_BHGE, k_BHNE, v_BHNV, mask, dropout=dropout, want_lse=call.want_lse))


def beside_class_tokens(
    body: Body, count: int, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, *, dropout: float
) -> AttentionOutput:
    """A pattern over the tokens after `count` class tokens, which see all and are seen by all (as far as causal).

    `body` gets the other tokens alone, places counted from the first of them, and must give its log-sum-exp when asked:
    both are put together as one softmax.

    Cost: that of the body, and 2 N G (E + V) multiply-adds a head for G class tokens.
    """
    count = min(count, q_BHNE.shape[2])
    if count == 0:
        return body(q_BHNE, k_BHNE, v_BHNV, call)
    padding = call.key_padding_mask
    reach = count if call.causal else k_BHNE.shape[2]
    first = attend_all(
        q_BHNE[:, :, :count],
        k_BHNE[:, :, :reach],
        v_BHNV[:, :, :reach],
        call._replace(key_padding_mask=None if padding is None else padding[:, :reach]),
        torch.arange(count, device=q_BHNE.device),
        dropout=dropout,
    )
    if count == q_BHNE.shape[2]:
        return first
    q, k, v = (t[:, :, count:] for t in (q_BHNE, k_BHNE, v_BHNV))
    inner = call._replace(key_padding_mask=None if padding is None else padding[:, count:], want_lse=True)
    rest = body(q, k, v, inner)
    seen = None if padding is None else ~padding[:, None, None, :count]
    of_class, class_lse = attend(q, k_BHNE[:, :, :count], v_BHNV[:, :, :count], seen, dropout=dropout, want_lse=True)
    assert rest.lse_BHN is not None and class_lse is not None
    out, lse = merge(rest.out_BHNV, rest.lse_BHN, of_class, class_lse)
    whole = torch.cat([first.out_BHNV, out], 2)
    return AttentionOutput(whole, None if first.lse_BHN is None else torch.cat([first.lse_BHN, lse], 2))
