"""The decoder of an encoder-decoder, and its KV cache.

Legend: B rows (sentences), K continuations of each, T target tokens, N source tokens, S cached keys, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers.layers.decoder_block import CausalAttention, CrossAttention, DecoderBlock, KeysValues, hide
from cached_transformers.layers.kv_cache import Continuations, KVCache
from cached_transformers.positions import BucketedPositions, Positions
from cached_transformers.state import State

from ..stack_model import feed_forward_of
from ..stack_options import StackOptions


class Encoded(NamedTuple):
    """Output of the encoder; the auxiliary loss is a scalar."""

    hidden_BND: Tensor
    padding_BN: Tensor | None
    state: State
    auxiliary_loss: Tensor


class DecoderCache:
    """Keys and values of source and target so far, for K continuations of each sentence."""

    def __init__(self, source: list[KeysValues], source_mask: Tensor | None, rows: int, device: torch.device) -> None:
        self.source, self.source_mask = source, source_mask
        self.layers = [KVCache() for _ in source]
        self.text = Continuations(rows, device)

    @property
    def continuations(self) -> int:
        """K."""
        return self.text.count

    def multiply(self, times: int) -> None:
        """Repeat each continuation `times` times."""
        self.text.multiply(times)

    def choose(self, rows_B: Tensor, parent_BK: Tensor) -> None:
        """Reorder sentences by `rows_B` and the continuations of each by `parent_BK`."""
        if self.text.choose(rows_B, parent_BK):
            self.source = [KeysValues(*(t.index_select(0, rows_B) for t in keys)) for keys in self.source]
            if self.source_mask is not None:
                self.source_mask = self.source_mask.index_select(0, rows_B)
            for layer in self.layers:
                layer.choose(rows_B)


class Decoder(nn.Module):
    """Blocks over embedded target tokens, with a final norm.

    Args:
        blocks: decoder blocks. positions: embedded, or `BucketedPositions` as a bias of all layers.
        norm: after the last block; identity when None. embedding_norm: after the embedding; likewise.
        dropout: after the embedding.
    """

    def __init__(
        self,
        blocks: list[DecoderBlock],
        *,
        positions: Positions,
        norm: nn.Module | None,
        embedding_norm: nn.Module | None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.positions = positions
        self.norm = norm if norm is not None else nn.Identity()
        self.embedding_norm = embedding_norm if embedding_norm is not None else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.activation_checkpointing = False

    def forward(self, x_BTD: Tensor, encoded: Encoded, padding_BT: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Causal outputs of embedded tokens, and auxiliary losses; padding (True) only affects experts."""
        t = x_BTD.shape[1]
        place_1T1 = torch.arange(t, device=x_BTD.device)[None, :, None]
        mask = None
        if isinstance(self.positions, BucketedPositions):
            visible = torch.ones(t, t, dtype=torch.bool, device=x_BTD.device).tril()
            mask = hide(self.positions.bias(None, place_1T1, place_1T1), visible, x_BTD.dtype)
        x_BTD = self._enter(x_BTD, place_1T1)
        losses, source = [], source_mask(encoded)
        for block in self.blocks:
            x_BTD, loss = self._run(block, x_BTD, encoded.hidden_BND, mask, source, None, padding_BT)
            if loss is not None:
                losses.append(loss)
        return self.norm(x_BTD), losses

    def begin(self, encoded: Encoded) -> DecoderCache:
        """Cache of the sources for `step`, without target tokens."""
        keys = [block.cross_attention.keys_values(encoded.hidden_BND) for block in self.blocks]  # type: ignore[operator, union-attr]
        return DecoderCache(keys, source_mask(encoded), len(encoded.hidden_BND), encoded.hidden_BND.device)

    def step(self, x_BKD: Tensor, cache: DecoderCache) -> Tensor:
        """Outputs (B, K, D) of the next token of each continuation, which is appended to the cache."""
        text = cache.text
        place = text.step_S.new_full((1, 1, 1), text.step)
        text.grow()
        mask = None
        if isinstance(self.positions, BucketedPositions):
            bias = self.positions.bias(None, place, text.step_S[None, :, None])
            mask = hide(bias, text.visible_BKS[:, None], x_BKD.dtype)
        elif text.count > 1:
            mask = text.visible_BKS[:, None]
        x_BKD = self._enter(x_BKD, place)
        for block, source, own in zip(self.blocks, cache.source, cache.layers, strict=True):
            x_BKD, _ = block(x_BKD, source, mask, cache.source_mask, own)
        return self.norm(x_BKD)  # type: ignore[no-any-return]

    def _enter(self, x_BTD: Tensor, place_1T1: Tensor) -> Tensor:
        placed = self.positions.embed(place_1T1)
        x_BTD = x_BTD if placed is None else x_BTD + placed.to(x_BTD.dtype)
        return self.dropout(self.embedding_norm(x_BTD))  # type: ignore[no-any-return]

    def _run(self, block: nn.Module, *args: Any) -> Any:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


def source_mask(encoded: Encoded) -> Tensor | None:
    """(B, 1, 1, N) bool, True = visible; None for all."""
    return None if encoded.padding_BN is None else ~encoded.padding_BN[:, None, None]


def make_decoder(options: StackOptions, *, positions: Positions, embedding_norm: bool) -> Decoder:
    """Build a decoder of `options.depth` blocks without memory; arguments as in `EncoderDecoder`."""
    width, heads = options.width, options.heads
    inner = width if options.head_width is None else heads * options.head_width
    common: dict[str, Any] = {
        "bias": options.bias,
        "scale": options.attention_scale,
        "dropout": options.dropout,
        "attention_dropout": options.attention_dropout,
    }
    blocks = [
        DecoderBlock(
            CausalAttention(width, inner, heads, norm=options.norm_before(), **common),
            CrossAttention(width, inner, heads, norm=options.norm_before(), **common),
            feed_forward_of(options, index),
            make_norm=options.make_norm if options.norm == "post" else None,
        )
        for index in range(options.depth)
    ]
    return Decoder(
        blocks,
        positions=positions,
        norm=options.make_norm() if options.normed else None,
        embedding_norm=options.make_norm() if embedding_norm else None,
        dropout=options.dropout,
    )
