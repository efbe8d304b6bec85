"""What an attention mechanism ("core") is: it mixes the tokens of one segment, head by head, and declares what it can
do.

Projections and positions live outside, so the same core serves in a plain layer, inside a GRC layer and in models of
others.

Legend: B rows, H heads, N queries, M keys of a context, E key width, V value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..memories.base import Context


class AttentionOutput(NamedTuple):
    """Result of a core: values, the log-sum-exp of the logits where it is defined and asked for, an auxiliary loss."""

    out_BHNV: Tensor
    lse_BHN: Tensor | None = None
    auxiliary_loss: Tensor | None = None


class Attention(nn.Module):
    """Base of all cores. A subclass sets the flags and writes `attend`.

    Attributes:
        accepts_context: can attend the keys and values that a "kv" memory offers.
        supports_causal: has a causal form, in which no output depends on a later token.
        supports_cross: queries and keys may differ in number.
        supports_bias: takes an additive bias on the logits.
        exact_padding: a padded row gives the same outputs as the trimmed row.
        gives_lse: has `log_sum_exp`, so that a memory can share one softmax with it.
    """

    accepts_context: bool = False
    supports_causal: bool = False
    supports_cross: bool = False
    supports_bias: bool = False
    exact_padding: bool = False
    gives_lse: bool = False

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"attention dropout={dropout} must lie in [0, 1)")
        self.dropout = dropout

    def forward(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        *,
        causal: bool = False,
        key_padding_mask: Tensor | None = None,
        context: Context | None = None,
        bias_BHNM: Tensor | None = None,
        x_BND: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> AttentionOutput:
        """Attend.

        Args:
            q_BHNE: queries, with positions applied already, as `k_BHNE` and the keys of `context`.
            k_BHNE: keys.
            v_BHNV: values.
            causal: token i sees the whole context and the keys up to i.
            key_padding_mask: (B, N) bool, True = padding, over the keys of the segment.
            context: keys and values of a memory, placed before those of the segment.
            bias_BHNM: added to the logits, over context and segment.
            x_BND: the layer's input, for mechanisms that need more than q, k and v.
            generator: source of randomness of mechanisms that draw.

        Raises:
            ValueError: the core does not support the call; the message names the core and what it lacks.
        """
        needs = {
            "accepts_context": context is not None,
            "supports_causal": causal,
            "supports_cross": q_BHNE.shape[2] != k_BHNE.shape[2],
            "supports_bias": bias_BHNM is not None,
        }
        for flag, needed in needs.items():
            if needed and not getattr(self, flag):
                raise ValueError(
                    f"attention {type(self).__name__} has {flag}=False and cannot serve this call; "
                    f"`cached list attentions` shows which cores can"
                )
        return self.attend(
            q_BHNE,
            k_BHNE,
            v_BHNV,
            causal=causal,
            key_padding_mask=key_padding_mask,
            context=context,
            bias_BHNM=bias_BHNM,
            x_BND=x_BND,
            generator=generator,
        )

    def attend(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        *,
        causal: bool,
        key_padding_mask: Tensor | None,
        context: Context | None,
        bias_BHNM: Tensor | None,
        x_BND: Tensor | None,
        generator: torch.Generator | None,
    ) -> AttentionOutput:
        """The mechanism itself; arguments as in `forward`, already checked against the flags."""
        raise NotImplementedError("abstract: a core writes attend()")

    def log_sum_exp(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        *,
        causal: bool = False,
        key_padding_mask: Tensor | None = None,
        context: Context | None = None,
        bias_BHNM: Tensor | None = None,
    ) -> Tensor:
        """(B, H, N): log-sum-exp of each query's logits, where the core has `gives_lse`; arguments as in `forward`."""
        raise NotImplementedError(f"attention {type(self).__name__} has no log-sum-exp (gives_lse=False)")
