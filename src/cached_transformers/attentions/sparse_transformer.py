"""Sparse Transformer (Child et al. 2019, arXiv:1904.10509; github.com/openai/sparse_attention, attention.py).

Full attention is factored into two sets of keys, near and far; each is small, and together they reach everything in two
steps. With the stride l and the number c of summary tokens:

    strided   near A1(i) = {j: i - l < j <= i},                  far A2(i) = {j <= i: l divides i - j}
    fixed     near A1(i) = {j <= i: floor(j / l) = floor(i / l)}, far A2(i) = {j <= i: j mod l >= l - c}
    out_i = softmax over A(i) of (q_i k_j / sqrt(E)) v_j,   A = A1 + A2, or A1 and A2 by turns of layers or heads

Without causal order: |i - j| < l in the strided A1, and no j <= i elsewhere. The union is one softmax over a set: a key
of both parts counts once.

Cost of both parts: N (1.5 l - 1 + N / l) (E + V) multiply-adds a head for strided (2.5 l - 2 + N / l without causal
order), N (l + c N / l) (E + V) for fixed, for N a multiple of l and l even; least at l near sqrt(N).

What differs: the paper writes i - l <= j in the strided A1, its code keeps l keys with i itself, as here; class tokens
(`prefix`) see all and are seen by all, and places are counted after them. A query that comes before the first summary
token sees nothing in the far part of "fixed", where that is used alone, and gets 0.

Legend: B rows, H heads, N tokens, E key width, V value width, K summary tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.attention import AttentionOutput, Call, StepsFrom
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, gather_keys, merge, seen_places
from .parts.flex import Sees
from .parts.kernels import FlexKernel
from .parts.pattern import PatternAttention
from .parts.windows import beside_class_tokens, local_attention


@ATTENTIONS.register(
    "sparse_transformer",
    paper="arXiv:1904.10509",
    title="Sparse Transformer",
    purpose="a regular pattern",
    equation="softmax over a window or block of l keys and a grid of far ones of (q k^T / sqrt(E)) v",
    order="N sqrt(N)",
    cost="strided: N (2.5 l + N / l) (E + V) multiply-adds a head, N (1.5 l + N / l) (E + V) causally; "
    "fixed: N (l + c N / l) (E + V); for l = stride and c = summary",
)
class SparseTransformerAttention(PatternAttention):
    """Near keys and a regular grid of far ones, in one softmax or by turns.

    Args:
        stride: l.
        pattern: "strided" (for what has rows of l: images, some music) or "fixed" (text).
        summary: c, summary tokens at the end of each block of "fixed".
        slices: heads take different summary tokens by turns: the last c of a block, the c before these, and so on up
            to this many (1: all heads the last c, as in the equation; the paper prefers several).
        combine: "union" (both parts in one softmax), "layers" (near in layers of even index, far in odd ones) or
            "heads" (near in heads of even index, far in odd ones).
        heads: H, to check `combine`. index: of the layer.
        prefix: class tokens before the others, which see all and are seen by all.

    Raises:
        ValueError: a stride below 1; summary tokens that do not fit a block; an unknown pattern or combination; a
            single head whose turn never comes.
    """

    can = PatternAttention.can | {"causal"}
    steps_from: StepsFrom = "keys"

    def __init__(
        self,
        *,
        stride: int = 128,
        pattern: str = "strided",
        summary: int = 8,
        slices: int = 1,
        combine: str = "union",
        heads: int | None = None,
        index: int = 0,
        prefix: int = 0,
        kernel: FlexKernel = "plain",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout, kernel=kernel)
        if stride < 1:
            raise ValueError(f"stride={stride} must be at least 1; about sqrt(tokens) is cheapest")
        if pattern not in ("strided", "fixed"):
            raise ValueError(f"pattern={pattern!r} must be 'strided' or 'fixed'")
        if pattern == "fixed" and (summary < 1 or slices < 1 or slices * summary > stride):
            raise ValueError(
                f"slices={slices} of summary={summary} tokens must be at least 1 each, and fit into stride={stride}"
            )
        if slices != 1 and pattern != "fixed":
            raise ValueError(f"slices={slices} are of summary tokens; take pattern='fixed' with them")
        if combine not in ("union", "layers", "heads"):
            raise ValueError(f"combine={combine!r} must be 'union', 'layers' or 'heads'")
        if combine == "heads" and heads == 1:
            raise ValueError("combine='heads' needs at least 2 heads; take 'union' or 'layers' with one")
        if prefix < 0:
            raise ValueError(f"prefix={prefix} must be a number of class tokens, or 0")
        self.stride, self.kind, self.summary, self.combine = stride, pattern, summary, combine
        self.slices, self.index, self.prefix, self.told_heads = slices, index, prefix, heads or 1
        if heads is None and (combine == "heads" or slices > 1):
            self.steps_from = None  # which keys a head sees depends on how many there are

    def rule(self, heads: int, tokens: int, causal: bool) -> _Grid:
        part = ("near", "far")[self.index % 2] if self.combine == "layers" else self.combine
        return _Grid(self.stride, self.kind == "fixed", self.summary, self.slices, part, self.prefix)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        return beside_class_tokens(self._body, self.prefix, q_BHNE, k_BHNE, v_BHNV, call, dropout=self.drop)

    def _body(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        near, far = (self._near, self._residues if self.kind == "strided" else self._summaries)
        if self.combine == "layers":
            part = far if self.index % 2 else near
            return part(q_BHNE, k_BHNE, v_BHNV, call, False)
        if self.combine == "heads":
            even, odd = (
                part(q_BHNE[:, turn::2], k_BHNE[:, turn::2], v_BHNV[:, turn::2], call, False)
                for turn, part in enumerate((near, far))
            )
            back = [head // 2 + head % 2 * even.out_BHNV.shape[1] for head in range(q_BHNE.shape[1])]
            out = torch.cat([even.out_BHNV, odd.out_BHNV], 1)[:, back]
            if even.lse_BHN is None or odd.lse_BHN is None:
                return AttentionOutput(out)
            return AttentionOutput(out, torch.cat([even.lse_BHN, odd.lse_BHN], 1)[:, back])
        parts = [part(q_BHNE, k_BHNE, v_BHNV, call._replace(want_lse=True), True) for part in (near, far)]
        (out, lse), (other, other_lse) = (part[:2] for part in parts)
        assert lse is not None and other_lse is not None
        out, lse = merge(out, lse, other, other_lse)
        return AttentionOutput(out, lse if call.want_lse else None)

    def _near(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, union: bool) -> AttentionOutput:
        """A1. In a union, without the key that the strided A2 has, too: the query's own."""
        stride, reach = self.stride, self.stride - 1

        def strided(i: Tensor, j: Tensor) -> Tensor:
            near = (i - j < stride) & (j - i < (1 if call.causal else stride))
            return near & (i != j) if union else near

        def fixed(i: Tensor, j: Tensor) -> Tensor:
            same = i // stride == j // stride
            return same & (j <= i) if call.causal else same

        if self.kind == "fixed":
            return local_attention(q_BHNE, k_BHNE, v_BHNV, call, fixed, size=stride, dropout=self.drop)
        after, size = 0 if call.causal else reach, max(1, stride // 2)
        return local_attention(
            q_BHNE, k_BHNE, v_BHNV, call, strided, size=size, before=reach, after=after, dropout=self.drop
        )

    def _residues(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, union: bool) -> AttentionOutput:
        """The strided A2: all tokens whose places are equal modulo the stride."""

        def sees(i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) | (not call.causal)

        size = -(-q_BHNE.shape[2] // self.stride)
        return local_attention(q_BHNE, k_BHNE, v_BHNV, call, sees, size=size, stride=self.stride, dropout=self.drop)

    def _summaries(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, union: bool) -> AttentionOutput:
        """The fixed A2: the summary tokens of all blocks; in a union, of all but the query's own, which A1 has."""
        heads, tokens, device = q_BHNE.shape[1], q_BHNE.shape[2], q_BHNE.device
        stride, summary = self.stride, self.summary
        blocks, rest = tokens // stride, tokens % stride
        # Places ascend, so that those beyond the end come last; the slice nearest a block's start has fewest of them.
        first_slice = stride - min(self.slices, heads) * summary
        count = max(1, blocks * summary + min(summary, max(0, rest - first_slice)))
        slice_H1 = torch.arange(heads if self.slices > 1 else 1, device=device)[:, None] % self.slices
        key_K = torch.arange(count, device=device)
        place_H1K = (key_K // summary * stride + stride - (slice_H1 + 1) * summary + key_K % summary)[:, None]
        mask = seen_places(place_H1K, tokens, call.key_padding_mask)
        mask = mask[:, 0] if call.key_padding_mask is not None else mask
        query_N1 = torch.arange(tokens, device=device)[:, None]
        if union:
            mask = mask & (place_H1K // stride != query_N1 // stride)
        if call.causal:
            mask = mask & (place_H1K <= query_N1)
        index_H1K = place_H1K.clamp(max=tokens - 1)
        k, v = (gather_keys(t, index_H1K)[:, :, 0] for t in (k_BHNE, v_BHNV))
        return AttentionOutput(*attend(q_BHNE, k, v, mask, dropout=self.drop, want_lse=call.want_lse))


class _Grid(NamedTuple):
    """Near keys, far ones, both, or each in every other head; class tokens see all and are seen by all."""

    stride: int
    fixed: bool
    summary: int
    slices: int
    part: str
    prefix: int

    def bind(self, length: int, device: torch.device) -> Sees:
        stride, prefix, halves = self.stride, self.prefix, self.part == "heads"

        def near(i: Any, j: Any) -> Tensor:
            return i // stride == j // stride if self.fixed else (i - j < stride) & (j - i < stride)

        def far(head: Any, i: Any, j: Any) -> Tensor:
            if not self.fixed:
                return (i - j) % stride == 0
            # Where far keys are for every other head, each half of the heads counts its slices again.
            turn = (head // 2 if halves else head) % self.slices if self.slices > 1 else 0
            first, rest = stride - (turn + 1) * self.summary, j % stride
            return (rest >= first) & (rest < first + self.summary)

        def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            of_class = (i < prefix) | (j < prefix)
            i, j = i - prefix, j - prefix
            if self.part == "near":
                return near(i, j) | of_class
            if self.part == "far":
                return far(head, i, j) | of_class
            if halves:
                odd = head % 2 == 1
                return (odd & far(head, i, j)) | (~odd & near(i, j)) | of_class
            return near(i, j) | far(head, i, j) | of_class

        return sees
