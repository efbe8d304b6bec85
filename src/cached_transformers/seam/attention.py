"""What an attention mechanism ("core") is: it mixes the tokens of one segment, head by head, and declares what it can
do.

Projections and positions live outside, so the same core serves in a plain layer, inside a GRC layer and in models of
others. A core whose result is one softmax over a pattern of keys derives from `PatternAttention`, which adds what a
memory offers; one that is something else from `Attention`.

Legend: B rows, H heads, N queries, M keys of a context, E key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.attentions.parts.building_blocks import attend, merge

from .memory import Context


class Call(NamedTuple):
    """What one call of a core asks for beside queries, keys and values; already checked against the core's flags.

    Attributes:
        causal: token i sees the whole context and the keys up to i.
        key_padding_mask: (B, N) bool, True = padding, over the keys of the segment; None without padding.
        context: keys and values of a memory, which every query sees.
        bias_BHNM: added to the logits, over context and segment.
        x_BND: the layer's input, for mechanisms that need more than q, k and v.
        generator: source of randomness of mechanisms that draw; torch's global one when None.
        want_lse: give the log-sum-exp of the logits, too.
    """

    causal: bool = False
    key_padding_mask: Tensor | None = None
    context: Context | None = None
    bias_BHNM: Tensor | None = None
    x_BND: Tensor | None = None
    generator: torch.Generator | None = None
    want_lse: bool = False


class AttentionOutput(NamedTuple):
    """Result of a core: values, the log-sum-exp of the logits where it is defined and asked for, an auxiliary loss.

    A query that sees no key has values of 0 and the lowest finite number as its log-sum-exp (float32 or wider).
    """

    out_BHNV: Tensor
    lse_BHN: Tensor | None = None
    auxiliary_loss: Tensor | None = None


ABILITIES = {
    "supports_causal": "causal",
    "supports_cross": "other keys than queries",
    "supports_bias": "bias",
    "accepts_context": "keys of a memory",
    "exact_padding": "exact padding",
    "gives_lse": "log-sum-exp",
}
"""What the flags of a core mean, in a list."""


class Attention(nn.Module):
    """Base of all cores. A subclass sets the flags and writes `attend`.

    Options that a core has in common with the model get the model's value unless the user set them: `width`, `heads`,
    `length` (the longest segment, where the model knows one), `prefix` (class tokens), `size` (of the token map),
    `causal`, `index` (of the layer), `depth`.

    Attributes:
        accepts_context: can attend the keys and values that a "kv" memory offers.
        supports_causal: has a causal form, in which no output depends on a later token.
        supports_cross: queries and keys may differ in number.
        supports_bias: takes an additive bias on the logits.
        exact_padding: a padded row gives the same outputs as the trimmed row.
        gives_lse: gives the log-sum-exp of the logits, so that a memory can share one softmax with it.
        only_causal: has a causal form alone; a call that is not causal is refused.
        can: these, in words.
    """

    accepts_context: bool = False
    supports_causal: bool = False
    supports_cross: bool = False
    supports_bias: bool = False
    exact_padding: bool = False
    gives_lse: bool = False
    only_causal: bool = False

    can: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        can = ", ".join(word for flag, word in ABILITIES.items() if getattr(cls, flag)) or "only what all can"
        cls.can = can.replace("causal", "causal alone") if cls.only_causal else can

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"attention dropout={dropout} must lie in [0, 1)")
        self.dropout = dropout

    @property
    def drop(self) -> float:
        """The share of weights to drop now."""
        return self.dropout if self.training else 0.0

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
        want_lse: bool = False,
    ) -> AttentionOutput:
        """Attend.

        Args:
            q_BHNE: queries, with positions applied already, as `k_BHNE` and the keys of `context`.
            k_BHNE: keys.
            v_BHNV: values.
            causal, key_padding_mask, context, bias_BHNM, x_BND, generator, want_lse: see `Call`.

        Raises:
            ValueError: the core does not support the call; the message names the core and what it lacks.
        """
        needs = {
            "accepts_context": context is not None,
            "supports_causal": causal,
            "supports_cross": q_BHNE.shape[2] != k_BHNE.shape[2],
            "supports_bias": bias_BHNM is not None,
            "gives_lse": want_lse,
        }
        for flag, needed in needs.items():
            if needed and not getattr(self, flag):
                raise ValueError(
                    f"attention {type(self).__name__} has {flag}=False and cannot serve this call; "
                    f"`cached list attentions` shows which cores can"
                )
        if self.only_causal and not causal:
            raise ValueError(
                f"attention {type(self).__name__} has no other than a causal form (only_causal=True); "
                "call it with causal=True, or build the layer with it"
            )
        call = Call(causal, key_padding_mask, context, bias_BHNM, x_BND, generator, want_lse)
        return self.attend(q_BHNE, k_BHNE, v_BHNV, call)

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The mechanism itself."""
        raise NotImplementedError("abstract: a core writes attend()")


class PatternAttention(Attention):
    """Base of cores in which each query has one softmax over some of the keys. A subclass writes `pattern`.

    A context is a set of keys that every query sees: it is attended densely, and both results are put together by their
    log-sum-exps, which is one softmax over all (N M (E + V) multiply-adds a head for M slots).
    """

    accepts_context = True
    exact_padding = True
    gives_lse = True

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The result over the keys of the segment alone, with the log-sum-exp where the call wants it."""
        raise NotImplementedError("abstract: a core writes pattern()")

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        context = call.context
        if context is None:
            return self.pattern(q_BHNE, k_BHNE, v_BHNV, call)
        own = self.pattern(q_BHNE, k_BHNE, v_BHNV, call._replace(context=None, want_lse=True))
        k_BHME, v_BHME = (t.expand(len(q_BHNE), -1, -1, -1) for t in (context.k_BHME, context.v_BHME))
        seen_B11M = context.valid_BM[:, None, None]
        other, other_lse = attend(q_BHNE, k_BHME, v_BHME, seen_B11M, dropout=self.drop, want_lse=True)
        assert own.lse_BHN is not None and other_lse is not None
        out_BHNV, lse_BHN = merge(own.out_BHNV, own.lse_BHN, other, other_lse)
        return AttentionOutput(out_BHNV, lse_BHN if call.want_lse else None, own.auxiliary_loss)


def abilities(core: Attention) -> frozenset[str]:
    """TEMPORARY bridge."""
    flags = {
        "supports_causal": "causal",
        "supports_cross": "cross",
        "supports_bias": "bias",
        "accepts_context": "context",
        "exact_padding": "exact_padding",
        "gives_lse": "lse",
    }
    words = {w for f, w in flags.items() if getattr(core, f)}
    if not core.only_causal:
        words.add("bidirectional")
    if type(core).__name__ == "SoftmaxAttention":
        words.add("weights")
    return frozenset(words)
