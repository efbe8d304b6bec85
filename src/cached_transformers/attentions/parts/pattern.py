"""Base of cores in which each query has one softmax over some of the keys.

Legend: B rows, H heads, N queries, M keys of a context, E key width, V value width, Q blocks, W queries of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.annotations import checked
from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call, sees_nothing

from .building_blocks import attend, merge, out_of_blocks, pick_rows
from .flex import Lengths, Rule, Shown, flex_attend, lengths_of, shown
from .kernels import FlexKernel, takes_flex


@checked
class PatternAttention(Attention):
    """One softmax for each query over some of the keys. A subclass writes `pattern`, and `rule` where that is a
    function of places, by which texts are read token by token and FlexAttention computes the pattern.

    A context is a set of keys that every query sees: it is attended densely, and both results are put together by their
    log-sum-exps, which is one softmax over all (N M (E + V) multiply-adds a head for M slots).

    Places are counted without padding: it is moved after the tokens, unless it fills cells of a map (`on_map`).

    Args:
        kernel: "plain", "flex" (FlexAttention, refused where it cannot) or "auto".
    """

    can = frozenset({"bidirectional", "context", "exact_padding", "lse"})
    told_heads: int = 1
    """Number of heads with different patterns."""
    on_map: bool = False

    def __init__(self, *, dropout: float = 0.0, kernel: FlexKernel = "plain") -> None:
        super().__init__(dropout=dropout)
        self.kernel = kernel

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The result over the keys of the segment alone, with the log-sum-exp where the call wants it."""
        raise NotImplementedError("abstract: a core writes pattern()")

    def rule(self, heads: int, tokens: int, causal: bool) -> Rule:
        """Attention mask of a sequence of this many tokens; the caller keeps a causal order.

        Raises:
            ValueError: the pattern is not of this many heads or tokens.
        """
        raise NotImplementedError(f"abstract: {self.title} writes no rule()")

    def sees(self, place: int, place_S: Tensor) -> Tensor | None:
        sees = self.rule(self.told_heads, place + 1, True).bind(place + 1, place_S.device)
        return sees(0, torch.arange(self.told_heads, device=place_S.device)[:, None], place, place_S)

    def shown(self, lengths: Lengths, call: Call) -> Shown:
        """Rule of a call for FlexAttention."""
        return shown(self.rule(lengths.heads, lengths.keys, lengths.causal), lengths)

    def takes_flex(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor) -> bool:
        """True if FlexAttention computes the pattern.

        Raises:
            ValueError: it was asked for by name, and cannot.
        """
        return takes_flex(self.kernel, q_BHNE, k_BHNE, v_BHNV, self.drop)

    def by_flex(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The result over context and segment, by FlexAttention."""
        return flex_attend(q_BHNE, k_BHNE, v_BHNV, call, self.shown(lengths_of(q_BHNE, k_BHNE, call), call))

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        padding_BM, itself = call.key_padding_mask, q_BHNE.shape[2] == k_BHNE.shape[2]
        if padding_BM is None or self.on_map:
            return self._attend(q_BHNE, k_BHNE, v_BHNV, call)
        order_BM = padding_BM.long().argsort(dim=1, stable=True)
        at_BHM, back_BHM = (t[:, None].expand(-1, k_BHNE.shape[1], -1) for t in (order_BM, order_BM.argsort(dim=1)))
        k_BHNE, v_BHNV = pick_rows(k_BHNE, at_BHM), pick_rows(v_BHNV, at_BHM)
        call = call._replace(key_padding_mask=padding_BM.gather(1, order_BM))
        if not itself:
            return self._attend(q_BHNE, k_BHNE, v_BHNV, call)
        if call.x_BND is not None:
            call = call._replace(x_BND=call.x_BND.take_along_dim(order_BM[..., None], 1))
        found = self._attend(pick_rows(q_BHNE, at_BHM), k_BHNE, v_BHNV, call)
        lse_BHN = None if found.lse_BHN is None else pick_rows(found.lse_BHN, back_BHM)
        return found._replace(out_BHNV=pick_rows(found.out_BHNV, back_BHM), lse_BHN=lse_BHN)

    def _attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        context = call.context
        if self.takes_flex(q_BHNE, k_BHNE, v_BHNV):
            return self.by_flex(q_BHNE, k_BHNE, v_BHNV, call)
        if context is None:
            return self.pattern(q_BHNE, k_BHNE, v_BHNV, call)
        if k_BHNE.shape[2] == 0:
            near = sees_nothing(q_BHNE, v_BHNV, want_lse=True)
        else:
            near = self.pattern(q_BHNE, k_BHNE, v_BHNV, call._replace(context=None, want_lse=True))
        k_BHME, v_BHME = (t.expand(len(q_BHNE), -1, -1, -1) for t in (context.k_BHME, context.v_BHME))
        valid_B11M = context.valid_BM[:, None, None]
        far, far_lse = attend(q_BHNE, k_BHME, v_BHME, valid_B11M, dropout=self.drop, want_lse=True)
        assert near.lse_BHN is not None and far_lse is not None
        out_BHNV, lse_BHN = merge(near.out_BHNV, near.lse_BHN, far, far_lse)
        return AttentionOutput(out_BHNV, lse_BHN if call.want_lse else None, near.auxiliary_loss)


def in_sequence(out_BHQWV: Tensor, lse_BHQW: Tensor | None, tokens: int) -> AttentionOutput:
    """The results of blocks of queries, laid end to end, without what filled up the last one."""
    lse_BHN = None if lse_BHQW is None else out_of_blocks(lse_BHQW, tokens)
    return AttentionOutput(out_of_blocks(out_BHQWV, tokens), lse_BHN)
