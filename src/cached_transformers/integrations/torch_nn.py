"""Adapter for torch.nn.MultiheadAttention, by itself and inside TransformerEncoder.

This layer never calls its output projection as a module, and TransformerEncoderLayer has a fused path in evaluation
that never calls the attention at all. So the layer's class is replaced by a subclass with a forward of its own, for a
memory and for another attention; a hook on the layer keeps TransformerEncoderLayer from its fused path.

Legend: B rows, N tokens, H heads, E head width, D = H * E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Query
from cached_transformers.linear_maps import plain_weights

from .hosts import Host, HostAttention, Site, register_adapter
from .masks import no_mask
from .memory_lookup import memory_of, refuse_frozen
from .through_core import through_core


class HostedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with a memory, which is mixed in before the output projection, or another core, or both.

    Only for self-attention (query, key and value the same tensor); with a memory, without an attention mask. It returns
    the weights of the self branch.
    """

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
        """Drop-in replacement for nn.MultiheadAttention.forward.

        Raises:
            ValueError: cross-attention; beside a memory, a causal flag or an attention mask: the cache holds the whole
                segment of the query; a call that the core cannot compute.
        """
        memory: Any = memory_of(self) if "memory" in self._modules else None
        if query is not key or key is not value:
            what = "a memory" if memory is not None else "another attention"
            raise ValueError(f"{what} serves self-attention: query, key and value must be the same tensor")
        if memory is not None:
            no_mask(attn_mask, is_causal)
            refuse_frozen(memory)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, as in torch.nn; pass the mask, too")
        x_BND, batched = query, query.dim() == 3
        if not batched:
            x_BND = x_BND[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            x_BND = x_BND.transpose(0, 1)
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in F.linear(x_BND, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        padding_BN = key_padding_mask
        if padding_BN is not None and padding_BN.dtype != torch.bool:  # TransformerEncoderLayer makes it additive
            padding_BN = padding_BN < 0
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        visible = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        y_BHNE, weights = self._attend(q, k, v, x_BND, padding_BN, visible, need_weights, is_causal)
        if memory is None:
            y_BND = self.out_proj(y_BHNE.transpose(1, 2).flatten(2))
        else:
            asked = Query(x_BND, q, padding_BN=padding_BN)
            reading = read_segment(memory, (), asked, None)
            y_BND = memory.project(y_BHNE, asked, reading, self.out_proj, plain_weights(self.out_proj))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y_BND[0], None if weights is None else weights[0]
        return (y_BND if self.batch_first else y_BND.transpose(0, 1)), weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x_BND: Tensor,
        padding_BN: Tensor | None,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Values (B, H, N, E), and weights (B, H, N, N) where they are needed; `mask` is bool, True = visible, or
        additive."""
        core: Attention | None = getattr(self, "core", None)
        exact = core is None or isinstance(core, SoftmaxAttention)
        if need_weights and not exact:
            raise ValueError(f"attention {type(core).__name__} returns no weights; call with need_weights=False")
        if core is not None and not need_weights:
            # In torch the causal flag is a hint about the mask. Exact attention takes the mask itself.
            causal = is_causal and (mask is None or not exact)
            mask = None if causal else mask
            out = through_core(core, q, k, v, padding_BM=padding_BN, mask=mask, causal=causal, x_BND=x_BND)
            return out, None
        dropout = (self.dropout if core is None else core.dropout) if self.training else 0.0
        hidden = None if padding_BN is None else padding_BN[:, None, None]
        if not need_weights:
            keep = None if hidden is None else ~hidden
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout), None
        logits = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        return F.dropout(weights, dropout) @ v, weights


def _no_fused_path(layer: nn.Module, args: Any) -> None:
    """Do nothing; TransformerEncoderLayer leaves its fused path when a hook is registered below it."""


def _install(layer: nn.Module, memory: LayerMemory | None = None) -> None:
    if not isinstance(layer, HostedMultiheadAttention):
        layer.__class__ = HostedMultiheadAttention
        layer.register_forward_pre_hook(_no_fused_path)


def _uninstall(layer: nn.Module) -> None:
    """Restore the class once there is neither a memory nor a core."""
    if {"memory", "core"} & layer._modules.keys():
        return
    layer.__class__ = nn.MultiheadAttention
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is _no_fused_path:
            del layer._forward_pre_hooks[key]


def settle_nested_tensors(model: nn.Module) -> None:
    """Switch off TransformerEncoder's shortcut for padded inputs while a layer has a memory or a core, which cannot
    read the nested tensors that it gives its layers."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder):
            continue
        ours = any({"uninstall_memory", "exchange"} & vars(layer).keys() for layer in module.modules())
        if ours and "nested_before" not in vars(module):
            module.nested_before = module.use_nested_tensor  # type: ignore[assignment]
            module.use_nested_tensor = False
        elif not ours and "nested_before" in vars(module):
            module.use_nested_tensor = vars(module).pop("nested_before")


@register_adapter("torch.nn.modules.activation.MultiheadAttention")
def multihead_attention(site: Site) -> Host | None:
    """Self-attention of encoders; the attentions of a TransformerDecoderLayer remain as they are."""
    layer = site.layer
    if isinstance(site.parent(), nn.TransformerDecoderLayer):
        return None
    assert isinstance(layer, nn.MultiheadAttention)
    if type(layer) not in (nn.MultiheadAttention, HostedMultiheadAttention):
        raise ValueError(
            f"{type(layer).__qualname__} is a subclass of nn.MultiheadAttention with its own code; register an adapter"
        )
    if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:
        what = "memory" if site.memory else "other attention"
        raise ValueError(f"nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn takes no {what}")
    facts = {"length": _patches(site) if "length" not in site.settings and _patches(site) else site.length()}
    attention = HostAttention(frozenset(), layer.dropout, install=_install, uninstall=_uninstall)
    return Host(layer.embed_dim, layer.num_heads, None, Query, facts, _install, _uninstall, attention)


def _patches(site: Site) -> int:
    """Number of tokens of torchvision's ViT, a class token and the patches; 0 for any other model."""
    body: Any = site.holder("class_token")
    if not all(hasattr(body, name) for name in ("class_token", "image_size", "patch_size")):
        return 0
    return 1 + (int(body.image_size) // int(body.patch_size)) ** 2
