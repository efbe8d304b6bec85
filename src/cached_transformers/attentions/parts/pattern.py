"""Base of cores in which each query has one softmax over some of the keys.

Legend: B rows, H heads, N queries, M keys of a context, E key width, V value width, Q blocks, W queries of a block.
"""

from __future__ import annotations

from torch import Tensor

from cached_transformers.seam.attention import Attention, AttentionOutput, Call, sees_nothing

from .building_blocks import attend, merge, out_of_blocks


class PatternAttention(Attention):
    """One softmax for each query over some of the keys. A subclass writes `pattern`.

    A context is a set of keys that every query sees: it is attended densely, and both results are put together by their
    log-sum-exps, which is one softmax over all (N M (E + V) multiply-adds a head for M slots).
    """

    can = frozenset({"bidirectional", "context", "exact_padding", "lse"})

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The result over the keys of the segment alone, with the log-sum-exp where the call wants it."""
        raise NotImplementedError("abstract: a core writes pattern()")

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        context = call.context
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
