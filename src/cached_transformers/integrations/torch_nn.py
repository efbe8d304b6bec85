"""Adapter for torch.nn.MultiheadAttention, alone and inside TransformerEncoder.

This layer never calls its output projection as a module, and TransformerEncoderLayer has a fused path in evaluation
that never calls the attention at all. So the layer's class is exchanged for a subclass whose forward is written out;
a hook on the layer keeps TransformerEncoderLayer from its fused path.

Legend: B rows, N tokens, H heads, E head width, D = H * E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..memories.base import LayerMemory, Query
from .adapters import Host, Site, no_mask, register_adapter


class MultiheadAttentionWithMemory(nn.MultiheadAttention):
    """nn.MultiheadAttention whose heads are mixed with a memory's before the output projection.

    Only for self-attention (query, key and value the same tensor) without an attention mask. The weights that it
    returns are those of the self branch.
    """

    memory: LayerMemory

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention.forward.

        Raises:
            ValueError: cross-attention, a causal flag or an attention mask: the cache holds the whole segment of the
            query.
        """
        if query is not key or key is not value:
            raise ValueError("a memory serves self-attention: query, key and value must be the same tensor")
        no_mask(attn_mask, is_causal)
        x_BND, batched = query, query.dim() == 3
        if not batched:
            x_BND = x_BND[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            x_BND = x_BND.transpose(0, 1)
        y_BND, weights = self._attend(x_BND, _as_padding(key_padding_mask), need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y_BND[0], None if weights is None else weights[0]
        return (y_BND if self.batch_first else y_BND.transpose(0, 1)), weights

    def _attend(self, x_BND: Tensor, padding_BN: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in F.linear(x_BND, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        mask = None if padding_BN is None else ~padding_BN[:, None, None]
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            logits = q @ k.transpose(-1, -2) * self.head_dim**-0.5
            weights = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)
            y_BHNE = F.dropout(weights, dropout) @ v
        else:
            weights = None
            y_BHNE = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        query = Query(x_BND, q, padding_BN=padding_BN)
        reading = self.memory.read((), query, None)
        y_BND = self.memory.project(y_BHNE, query, reading, self.out_proj, (self.out_proj.weight, self.out_proj.bias))
        return self.memory.finish(y_BND, query, reading), weights


def _as_padding(mask: Tensor | None) -> Tensor | None:
    """Padding as bool; TransformerEncoderLayer turns its bool mask into an additive one."""
    return mask if mask is None or mask.dtype == torch.bool else mask < 0


def _no_fused_path(layer: nn.Module, args: Any) -> None:
    """Does nothing; TransformerEncoderLayer leaves its fused path when a hook is attached below it."""


def _install(layer: nn.Module, memory: LayerMemory) -> None:
    layer.__class__ = MultiheadAttentionWithMemory
    layer.register_forward_pre_hook(_no_fused_path)


def _uninstall(layer: nn.Module) -> None:
    layer.__class__ = nn.MultiheadAttention
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is _no_fused_path:
            del layer._forward_pre_hooks[key]


@register_adapter("torch.nn.modules.activation.MultiheadAttention")
def multihead_attention(site: Site) -> Host | None:
    """Self-attention of encoders; a TransformerDecoderLayer's (causal, and cross) are left as they are."""
    layer = site.layer
    if isinstance(site.parent(), nn.TransformerDecoderLayer):
        return None
    assert isinstance(layer, nn.MultiheadAttention)
    if type(layer) not in (nn.MultiheadAttention, MultiheadAttentionWithMemory):
        raise ValueError(
            f"{type(layer).__qualname__} is a subclass of nn.MultiheadAttention with its own code; register an adapter"
        )
    if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError("nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn takes no memory")

    known = {"length": site.length()}
    return Host(layer.embed_dim, layer.num_heads, None, Query, known, _install, _uninstall)
