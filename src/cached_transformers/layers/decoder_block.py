"""The block of an encoder-decoder's decoder: causal attention, attention over the source, feed-forward.

Paper: arXiv:1706.03762, section 3.1. Attention is exact: memories are in the encoder, as in arXiv:2312.12742.

Legend: B rows, T target tokens, N source tokens, S keys, H heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .feed_forward import run_feed_forward


class KeysValues(NamedTuple):
    """Keys and values."""

    k_BHSE: Tensor
    v_BHSE: Tensor


class GrowingKeys(Protocol):
    """Interface of a KV cache."""

    def extend(self, new: KeysValues) -> KeysValues:
        """Append keys and values and return all of them."""
        ...


class _Attention(nn.Module):
    """Base of both attentions of a decoder block; subclasses name their projections.

    Args:
        width: D. inner: H E. heads: H. norm: applied to the input; identity when None. bias: of the projections.
        scale: factor of the logits; 1 / sqrt(E) when None. dropout: on the result. attention_dropout: on the weights.
    """

    projections: ClassVar[dict[str, int]]
    """Projections of the input by name, with the number of queries, keys and values in each."""

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        *,
        norm: nn.Module | None = None,
        bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.attention_dropout = heads, scale, attention_dropout
        self.norm = norm if norm is not None else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        for name, parts in self.projections.items():
            self.add_module(name, nn.Linear(width, parts * inner, bias=bias))
        self.output = nn.Linear(inner, width, bias=bias)

    def _split(self, t_BTK: Tensor, parts: int) -> tuple[Tensor, ...]:
        return t_BTK.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _attend(self, q: Tensor, keys: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        out = F.scaled_dot_product_attention(
            q,
            *keys,
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
        )
        return out.transpose(1, 2).flatten(2)


class CausalAttention(_Attention):
    """Causal self-attention of the target; arguments of the base class."""

    projections: ClassVar[dict[str, int]] = {"qkv": 3}
    qkv: nn.Linear

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None, before: GrowingKeys | None = None) -> Tensor:
        """Output of the sublayer.

        Args:
            mask: bool (True = visible) or added to the logits, for (B, H, T, S); None for the causal mask, or with
                `before` for all keys.
            before: KV cache of the text so far, which is extended.
        """
        q, k, v = self._split(self.qkv(self.norm(x_BTD)), 3)
        keys = KeysValues(k, v) if before is None else before.extend(KeysValues(k, v))
        y_BTD = self._attend(q, keys, mask, causal=mask is None and before is None)
        return self.dropout(self.output(y_BTD))  # type: ignore[no-any-return]


class CrossAttention(_Attention):
    """Attention of the target over the source; arguments of the base class."""

    projections: ClassVar[dict[str, int]] = {"query": 1, "key_value": 2}
    query: nn.Linear
    key_value: nn.Linear

    def keys_values(self, hidden_BND: Tensor) -> KeysValues:
        """Keys and values of the source."""
        return KeysValues(*self._split(self.key_value(hidden_BND), 2))

    def forward(self, x_BTD: Tensor, source: KeysValues, mask: Tensor | None = None) -> Tensor:
        """Output of the sublayer; `mask` (B, 1, 1, N) is bool, True = visible."""
        (q,) = self._split(self.query(self.norm(x_BTD)), 1)
        return self.dropout(self.output(self._attend(q, source, mask)))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """Causal attention, cross-attention and feed-forward, each with a residual connection.

    Args:
        attention, cross_attention, feed_forward: the sublayers, with their norms in a pre-norm block. The last one is a
            module for `run_feed_forward`.
        make_norm: makes the norms after the three residual sums of a post-norm block; None for a pre-norm block.
    """

    def __init__(
        self,
        attention: CausalAttention,
        cross_attention: CrossAttention,
        feed_forward: nn.Module,
        *,
        make_norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.feed_forward = attention, cross_attention, feed_forward
        norms = (nn.Identity() if make_norm is None else make_norm() for _ in range(3))
        self.attention_norm, self.cross_attention_norm, self.feed_forward_norm = norms

    def forward(
        self,
        x_BTD: Tensor,
        source: Tensor | KeysValues,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        before: GrowingKeys | None = None,
        padding_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output tokens, and the feed-forward's auxiliary loss or None.

        Args:
            source: output of the encoder (B, N, D), or its keys and values from `cross_attention`.
            mask, before: see `CausalAttention`. source_mask: see `CrossAttention`.
            padding_BT: bool, True = padding, for the capacity of experts.
        """
        x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, mask, before))
        keys = self.cross_attention.keys_values(source) if isinstance(source, Tensor) else source
        x_BTD = self.cross_attention_norm(x_BTD + self.cross_attention(x_BTD, keys, source_mask))
        y_BTD, loss = run_feed_forward(self.feed_forward, x_BTD, padding_BT)
        return self.feed_forward_norm(x_BTD + y_BTD), loss


def hide(bias_BHTS: Tensor | None, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention mask: `visible` (bool), or the bias with minus infinity at invisible keys."""
    return visible if bias_BHTS is None else bias_BHTS.to(dtype).masked_fill(~visible, -torch.inf)
