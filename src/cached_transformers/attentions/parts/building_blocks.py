"""Building blocks: blocks and their neighbours, tables of blocks and of keys, and one softmax from several
parts.

Everything runs and trains on every device: keys are gathered into dense blocks, which fused attention then takes.
Masks are bool, True = visible. A query that sees no key gives 0, and the lowest finite number as its log-sum-exp.

Legend: B rows, H heads, N queries, M keys, E key width, V value width, Q blocks of queries, W tokens of a block, S keys
that a block sees, K entries of a table; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(t: Tensor) -> Tensor:
    """Convert to float32, unless wider."""
    return t if t.dtype in (torch.float32, torch.float64) else t.to(torch.promote_types(t.dtype, torch.float32))


def unit(t: Tensor) -> Tensor:
    """Vectors of length 1, in float32 or wider; 0 stays 0."""
    t = wide(t)
    return t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def product(q: Tensor, k: Tensor) -> Tensor:
    """(..., N, M): q k^T in float32 or wider, whatever the inputs are, and under autocast too.

    Logits of half precision have three digits, and in float16 end at 65504. Fused kernels keep theirs in float32.
    """
    with torch.autocast(q.device.type, enabled=False):
        return wide(q) @ wide(k).mT


def paired_logits(q: Tensor, k: Tensor) -> Tensor:
    """(...): the logit of each query with the key at its place, in float32 or wider."""
    return (wide(q) * wide(k)).sum(-1) / math.sqrt(q.shape[-1])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, want_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over the last two dimensions, and the log-sum-exp of the logits where it is wanted.

    Args:
        q: (..., N, E). k: (..., M, E). v: (..., M, V). mask: bool, broadcastable to (..., N, M).
        dropout: share of the weights to drop; 0 outside training.
        want_lse: also give (..., N), float32 or wider; the fused kernels keep none, so that logits are then made here.

    Cost: N M (E + V) multiply-adds for each of the leading entries.
    """
    if not want_lse:
        return _fused(q, k, v, mask, dropout), None
    weights, lse = one_softmax(product(wide(q) / math.sqrt(q.shape[-1]), k), mask, dropout=dropout, want_lse=True)
    return zero_unseen(weights.to(v.dtype) @ v, mask), lse


def one_softmax(
    logits: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, want_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Weights (..., N, M) and log-sum-exp (..., N) of logits, float32 or wider, for cores that make their own logits.

    Weights of a query that sees no key are no weights; what they give is to go through `zero_unseen`.

    Args:
        logits: a result that no other code reads, since it is overwritten; the mask must not be larger.
        mask, dropout, want_lse: as of `attend`.
    """
    logits = wide(logits)
    lowest = torch.finfo(logits.dtype).min
    if mask is not None:
        with torch.no_grad():  # the softmax gives masked logits no gradient; recorded, the mask would be applied to it
            logits.masked_fill_(~mask, lowest)
    if not want_lse:
        return F.dropout(logits.softmax(-1), dropout, dropout > 0), None
    weights, lse = _SoftmaxAndSum.apply(logits)
    # The sum of M times the lowest number is no longer the lowest number.
    lse = lse if mask is None else torch.where(mask.any(-1), lse, lowest)
    return F.dropout(weights, dropout, dropout > 0), lse


class _SoftmaxAndSum(torch.autograd.Function):
    """Softmax w and log-sum-exp: d logits = w (d w - w . d w + d lse), without the gradients of two maxima."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.softmax(-1)
        # The largest weight is exp(largest logit - lse): no second pass of exponentials.
        return weights, logits.amax(-1) - weights.amax(-1).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor, d_lse: Tensor) -> Tensor:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        from_weights = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        return torch.addcmul(from_weights, weights, d_lse[..., None])


def zero_unseen(out: Tensor, mask: Tensor | None) -> Tensor:
    """Results (..., N, V) of weights, with 0 for queries that see no key of the mask (..., N, M)."""
    return out if mask is None else torch.where(mask.any(-1, keepdim=True), out, 0)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The fused kernels take two leading dimensions: all but one are folded."""
    lead = q.shape[:-2]
    if len(lead) <= 2:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    if mask is not None:
        mask = mask.view((1,) * (q.dim() - mask.dim()) + mask.shape)
        if all(size == 1 for size in mask.shape[: len(lead) - 1]):
            mask = mask.flatten(0, len(lead) - 2)
        else:
            mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, len(lead) - 2)
    q, k, v = (t.flatten(0, len(lead) - 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).unflatten(0, lead[:-1])


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two disjoint sets of keys, from the result (..., V) and log-sum-exp (...) over each of them."""
    share = torch.sigmoid(lse - other_lse)[..., None]
    return (share * out + (1 - share) * other).to(out.dtype), torch.logaddexp(lse, other_lse)


def into_blocks(t_BHNE: Tensor, size: int) -> Tensor:
    """(B, H, Q, size, E): cut into blocks, the last one filled up with zeros."""
    missing = -t_BHNE.shape[2] % size
    if missing:  # cat: in torch 2.6, F.pad refuses E = 0
        t_BHNE = torch.cat([t_BHNE, t_BHNE.new_zeros(*t_BHNE.shape[:2], missing, t_BHNE.shape[3])], 2)
    return t_BHNE.unflatten(2, (-1, size))


def out_of_blocks(t_BHQWE: Tensor, tokens: int) -> Tensor:
    """(B, H, tokens, E): the blocks laid end to end, without what filled up the last one."""
    return t_BHQWE.flatten(2, 3)[:, :, :tokens]


def with_neighbours(t_BHQWE: Tensor, before: int, after: int) -> Tensor:
    """(B, H, Q, S, E), S = (before + 1 + after) W: each block with its neighbours on both sides; zeros outside."""
    size = t_BHQWE.shape[3]
    t_BHNE = F.pad(t_BHQWE.flatten(2, 3), (0, 0, before * size, after * size))
    return overlapping(t_BHNE, (before + 1 + after) * size, size)


def overlapping(t: Tensor, window: int, step: int) -> Tensor:
    """(..., Q, window, E): stretches of (..., N, E) that begin every `step` tokens, as views, which copy nothing."""
    stretches: Tensor = _Overlapping.apply(t, window, step)
    return stretches


class _Overlapping(torch.autograd.Function):
    """`Tensor.unfold`, whose own gradient goes number by number, with one that adds up shifted blocks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, window: int, step: int) -> Tensor:
        return t.unfold(-2, window, step).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.tokens, ctx.window, ctx.step = inputs[0].shape[-2], *inputs[1:]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (*lead, blocks, window, width), step = d.shape, ctx.step
        parts = -(-window // step)
        total = d.new_zeros(*lead, blocks + parts - 1, step, width)
        for index in range(parts):
            part = d[..., index * step : (index + 1) * step, :]
            total[..., index : index + blocks, : part.shape[-2], :] += part
        total = total.flatten(-3, -2)
        return F.pad(total, (0, 0, 0, ctx.tokens - total.shape[-2])), None, None


def block_places(blocks: int, size: int, before: int, after: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the queries (Q, W, 1) and of the keys (Q, 1, S) of `with_neighbours`; those outside are no places."""
    first_Q = torch.arange(blocks, device=device)[:, None] * size
    query_QW = first_Q + torch.arange(size, device=device)
    key_QS = first_Q + torch.arange(-before * size, (after + 1) * size, device=device)
    return query_QW[..., None], key_QS[:, None]


def seen_places(place: Tensor, tokens: int, key_padding_mask: Tensor | None) -> Tensor:
    """Mask of real keys at these places: (...) inside the sequence, or (B, 1, ...) if rows are padded."""
    inside = (place >= 0) & (place < tokens)
    if key_padding_mask is None:
        return inside
    index = place.clamp(0, tokens - 1).flatten()
    return inside & ~key_padding_mask[:, index].unflatten(1, place.shape)[:, None]


def gather_blocks(t_BHQWE: Tensor, table_HQK: Tensor) -> Tensor:
    """(B, H, Q', K W, E): the blocks that a table names for each block of queries; the table's H may be 1."""
    heads, (queries, count) = t_BHQWE.shape[1], table_HQK.shape[1:]
    head_H11 = torch.arange(heads, device=table_HQK.device)[:, None, None]
    picked = t_BHQWE[:, head_H11.expand(heads, queries, count), table_HQK.expand(heads, queries, count)]
    return picked.flatten(3, 4)


def gather_keys(t_BHME: Tensor, index: Tensor) -> Tensor:
    """(B, H, N, K, E): the keys that a table names for each query; the table is (N, K), (H, N, K) or (B, H, N, K)."""
    return pick_rows(t_BHME, index.expand(*t_BHME.shape[:2], -1, -1))


def pick_rows(t: Tensor, index: Tensor) -> Tensor:
    """(B, H, ..., E): whole rows of (B, H, M, E) at the places (B, H, ...); of (B, H, M) single numbers, (B, H, ...).

    Rows are copied as wholes, which is many times faster than `gather`, whose index names every number.
    """
    rows, heads, places = t.shape[:3]
    first = torch.arange(rows * heads, device=t.device).view(rows, heads, 1) * places
    picked = t.flatten(0, 2).index_select(0, (index.flatten(2) + first).flatten())
    return picked.view(*index.shape, *t.shape[3:])


def largest(t: Tensor, count: int) -> Tensor:
    """(..., count): places of the largest numbers, the largest first; of equals the first one, in a padded row, too.

    Equals the first entries of a stable sort, in a fraction of its time where few are wanted.
    """
    size = t.shape[-1]
    if 4 * count > size:
        return t.argsort(dim=-1, descending=True, stable=True)[..., :count]
    values, place = t.topk(count)
    above = values > values[..., -1:]
    # Only of those that equal the least one is it open which are taken.
    early = torch.arange(size, 0, -1, device=t.device, dtype=torch.float32)
    first = ((t == values[..., -1:]) * early).topk(count).indices
    nth = torch.arange(count, device=t.device) - above.sum(-1, keepdim=True)
    place = torch.where(above, place, first.gather(-1, nth.clamp(min=0))).sort(dim=-1).values
    return place.gather(-1, t.gather(-1, place).argsort(dim=-1, descending=True, stable=True))
