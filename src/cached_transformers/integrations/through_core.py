"""Compute one attention call of a host by an attention mechanism of this package.

The arguments of `scaled_dot_product_attention` (a mask, a causal flag, a scale, fewer heads of keys) are translated; a
call that the mechanism cannot compute is refused.

Legend: B rows, H heads, N queries, M keys, E key width, V value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.checks import insist
from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.capabilities import misfit, refuse_misfit

CORES = "which only attention 'softmax' can follow here"
"""Reason for refusing a mask that differs between queries."""


def through_core(
    core: Attention,
    q_BHNE: Tensor,
    k_BHME: Tensor,
    v_BHMV: Tensor,
    *,
    padding_BM: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    x_BND: Tensor | None = None,
) -> Tensor:
    """Values (B, H, N, V) of one call.

    Args:
        k_BHME, v_BHMV: may have fewer heads, each of which several heads of queries share.
        padding_BM: bool, True = padding.
        mask: broadcastable to (B, H, N, M), bool with True = visible, or added to the logits: a bias.
        scale: of the logits; 1 / sqrt(E) when None.
        x_BND: the layer's input.

    Raises:
        ValueError: the core cannot compute the call.
    """
    name, width = type(core).__name__, q_BHNE.shape[-1]
    if q_BHNE.dim() != 4 or 0 in q_BHNE.shape:
        shape = f"(rows, heads, tokens, width), at least one of each, not {tuple(q_BHNE.shape)}"
        raise ValueError(f"attention {name} takes queries {shape}")
    kind = q_BHNE.device.type
    if torch.is_autocast_enabled(kind):  # as autocast does for scaled_dot_product_attention
        low = torch.get_autocast_dtype(kind)
        q_BHNE, k_BHME, v_BHMV = (t if t.dtype == torch.float64 else t.to(low) for t in (q_BHNE, k_BHME, v_BHMV))
    if k_BHME.shape[1] != q_BHNE.shape[1]:
        k_BHME, v_BHMV = (t.repeat_interleave(q_BHNE.shape[1] // t.shape[1], 1) for t in (k_BHME, v_BHMV))
    if scale is not None and not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        q_BHNE = q_BHNE * (scale * width**0.5)
    if causal and q_BHNE.shape[2] != k_BHME.shape[2] and not isinstance(core, SoftmaxAttention):
        raise ValueError(
            f"a causal call with {q_BHNE.shape[2]} queries and {k_BHME.shape[2]} keys: attention {name} reads whole "
            "sequences; generate with use_cache=False"
        )
    inexact = misfit({"exact_padding": "the padding of this call"}, core.can, core.title, "pass rows of equal length")
    if padding_BM is not None and inexact is not None:
        insist(~padding_BM.any(), inexact)
        padding_BM = None
    bias_BHNM = None
    if mask is not None:
        way_out = "padding goes into the host's padding mask, and a causal mask of torch.nn needs is_causal=True"
        refuse_misfit({"bias": "the mask of this call"}, core.can, core.title, way_out)
        bias_BHNM = mask[(None,) * (4 - mask.dim())]
        if mask.dtype == torch.bool:
            bias_BHNM = torch.zeros_like(bias_BHNM, dtype=q_BHNE.dtype).masked_fill(~bias_BHNM, -torch.inf)
    out = core(q_BHNE, k_BHME, v_BHMV, causal=causal, key_padding_mask=padding_BM, bias_BHNM=bias_BHNM, x_BND=x_BND)
    if out.auxiliary_loss is not None and core.training and out.auxiliary_loss.requires_grad:
        raise ValueError(
            f"attention {name} is trained with an auxiliary loss, which a host model has no place for; switch it off "
            "in the attention's options (routing: commitment=0), or take a model of create_model"
        )
    values: Tensor = out.out_BHNV
    return values
