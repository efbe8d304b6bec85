"""Sparse Sinkhorn attention (Tay, Bahri, Yang, Metzler, Juan 2020, arXiv:2002.11296; the authors' code is in
github.com/google-research/long-range-arena, without the balancing; github.com/lucidrains/sinkhorn-transformer has it).

Blocks are sorted softly, and each token attends its own block and the one that comes to be beside it:

    r_mn = score of block n for place m,  (r + Gumbel noise in training) / tau -> log R, by turns
    log R <- log R - logsumexp over m,  log R <- log R - logsumexp over n,
    K'_m = sum_n R_mn K_n,  V'_m = sum_n R_mn V_n,  out = softmax(s q [K, K']^T) [V, V']

Cost: 2 N W (E + V) + Q^2 W (E + V) + Q^2 E multiply-adds a head for Q = N / W blocks (the second term is what soft
sorting costs; none with `hard` in evaluation), and Q F (D + P) instead of the last with `sort_net="mlp"`. One block
alone costs N^2 (E + V). SortCut: k W (N + Q) (E + V) + Q^2 E. N is filled up to whole blocks; where that or padding
leaves blocks that are not full, N W + Q^2 W more.

What differs from the original, and why:
- A block does not come to be beside itself (`own_block`): its keys would count twice in one softmax. Two blocks are
  exact attention so, with any scores.
- The last step makes the sums over n 1, so that a sorted key is a mean of keys.
- Where some of the keys that mix are not there, the sorted key is the mean over the others, and counts by their share
  of R: ln of it is added to the logit. Blocks of padding alone take no part in the balancing. So rows are as trimmed.
- Causal: block n is open to m > n, m asks with the mean over all tokens up to its first one, and the sum over m runs
  over places up to the one at hand; over all of them it would tell earlier blocks about later ones. A first block
  has nothing beside it and needs no learned key.
- Scores are q . k / sqrt(E) of the blocks' means, which has no parameters and no longest length; "mlp" is the paper's.

Legend: B rows, H heads, N tokens, D model width, E key width, V value width, Q (also P) blocks, W tokens of a block,
F hidden units, S keys that a block sees.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, into_blocks, wide
from .parts.pattern import PatternAttention, in_sequence


@ATTENTIONS.register(
    "sinkhorn",
    paper="arXiv:2002.11296",
    title="Sparse Sinkhorn Attention",
    purpose="keys chosen by content",
    equation="softmax over the own block and a mixture of blocks by a doubly stochastic matrix, exp of balanced scores",
    order="N W + N^2 / W",
    cost="(2 N W + N^2 / W) (E + V) + (N / W)^2 E multiply-adds a head for blocks of W",
)
class SinkhornAttention(PatternAttention):
    """Attention in the own block and in one that a soft permutation of blocks puts beside it.

    Args:
        width: D; heads: H; length: tokens of the longest segment. For `sort_net="mlp"` alone.
        block: W.
        sort_net: "scores", the products of the blocks' mean queries and keys; or "mlp", per head, from the mean of the
            layer's input to one score for each block of the longest segment.
        hidden: F; the head's width when None.
        iterations: of balancing; temperature: tau; noise: Gumbel noise in training.
        hard: each block takes the one with its largest R alone; in training the gradient is that of the soft R.
        combine: "concat": one softmax over both blocks; "scores": keys and values of both blocks are added place by
            place, which adds their scores (the paper); "outputs": the sum of two softmaxes (Long Range Arena), which
            has no log-sum-exp and takes no context of a memory.
        sortcut: number of sorted blocks that all tokens attend, and nothing else. Not causal.
        own_block: a block may come to be beside itself.

    Raises:
        ValueError: sizes below 1, unknown names, an "mlp" without length, or a sortcut that is combined.
    """

    can = PatternAttention.can | {"causal"}

    def __init__(
        self,
        width: int,
        heads: int,
        block: int = 64,
        *,
        length: int | None = None,
        sort_net: str = "scores",
        hidden: int | None = None,
        iterations: int = 7,
        temperature: float = 0.75,
        noise: bool = True,
        hard: bool = False,
        combine: str = "concat",
        sortcut: int | None = None,
        own_block: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(block=block, hidden=hidden, iterations=iterations, sortcut=sortcut)
        if temperature <= 0.0:
            raise ValueError(f"temperature={temperature} must be above 0; hard=True is the limit at 0")
        if sort_net not in ("scores", "mlp"):
            raise ValueError(f"sort_net={sort_net!r} must be 'scores' or 'mlp'")
        if combine not in ("concat", "scores", "outputs"):
            raise ValueError(f"combine={combine!r} must be 'concat', 'scores' or 'outputs'")
        if sortcut is not None and combine != "concat":
            raise ValueError(f"sortcut={sortcut} leaves nothing to combine; leave combine={combine!r} out")
        self.block, self.iterations, self.temperature, self.noise = block, iterations, temperature, noise
        self.hard, self.combine, self.sortcut, self.own_block = hard, combine, sortcut, own_block
        self.sort_net = sort_net
        if combine == "outputs":
            self.can = self.can - {"context", "lse"}
        if sortcut is not None:  # all tokens see the same blocks
            self.can = self.can - {"causal"}
        if sort_net == "mlp":
            if length is None:
                raise ValueError("sort_net='mlp' has a score for each block of the longest segment; give its length")
            hidden, blocks = hidden or width // heads, -(-length // block)
            self.inner_HDF = nn.Parameter(torch.empty(heads, width, hidden).uniform_(-1, 1) * width**-0.5)
            self.inner_H1F = nn.Parameter(torch.zeros(heads, 1, hidden))
            self.outer_HFP = nn.Parameter(torch.empty(heads, hidden, blocks).uniform_(-1, 1) * hidden**-0.5)
            self.outer_H1P = nn.Parameter(torch.zeros(heads, 1, blocks))

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens = q_BHNE.shape[2]
        size = min(self.block, tokens)
        there_BN = torch.ones_like(q_BHNE[:, 0, :, 0], dtype=torch.bool)
        if call.key_padding_mask is not None:
            there_BN = ~call.key_padding_mask
        there_BQW = into_blocks(there_BN[:, None, :, None], size)[:, 0, ..., 0]
        whole = call.key_padding_mask is None and tokens % size == 0
        q, k, v = (into_blocks(t, size) for t in (q_BHNE, k_BHNE, v_BHNV))
        seen = there_BQW[:, None, :, None]
        if call.causal:
            seen = seen & torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        alone = q.shape[2] == 1 and self.sortcut is None and not self.own_block
        if alone:
            out, lse = attend(q, k, v, seen, dropout=self.drop, want_lse=call.want_lse)
            return in_sequence(out, lse, tokens)

        r_BHQP = self._permutation(q, k, there_BQW, call)[:, :, : self.sortcut]
        sorted_k, sorted_v = (self._mix(r_BHQP, t) for t in (k, v))
        if self.combine == "scores":
            out, lse = attend(q, k + sorted_k, v + sorted_v, seen, dropout=self.drop, want_lse=call.want_lse)
            return in_sequence(out, lse, tokens)
        if whole:
            share_BHQW = r_BHQP.sum(-1, keepdim=True).expand(-1, -1, -1, size)
            sorted_seen = share_BHQW > 0  # a first block that is causal has nothing beside it
        else:
            share_BHQW = r_BHQP @ there_BQW[:, None].to(r_BHQP.dtype)
            # Of a smaller share nothing is left in the softmax; a quotient by it would have no finite gradient.
            sorted_seen = share_BHQW > math.sqrt(torch.finfo(share_BHQW.dtype).tiny)
            share_BHQW = torch.where(sorted_seen, share_BHQW, 1.0)
            sorted_k, sorted_v = ((t / share_BHQW[..., None]).to(t.dtype) for t in (sorted_k, sorted_v))
            # The logarithm of the share is one more entry of the key, which the query multiplies by 1.
            bias = share_BHQW.log()[..., None].to(k.dtype)
            sorted_k = torch.cat([sorted_k, bias], -1)
            scale = math.sqrt(k.shape[-1] + 1)
            q_more = q * (scale / math.sqrt(k.shape[-1]))
            q_more = torch.cat([q_more, torch.full_like(q[..., :1], scale)], -1)
        queries = q if whole else q_more
        if self.sortcut is not None:
            sorted_k, sorted_v = sorted_k.flatten(2, 3), sorted_v.flatten(2, 3)
            key_seen = sorted_seen.flatten(2)[:, :, None]
            out, lse = attend(
                queries.flatten(2, 3), sorted_k, sorted_v, key_seen, dropout=self.drop, want_lse=call.want_lse
            )
            return AttentionOutput(out[:, :, :tokens], None if lse is None else lse[:, :, :tokens])
        sorted_seen = sorted_seen[..., None, :]
        if self.combine == "outputs":
            near, _ = attend(q, k, v, seen, dropout=self.drop)
            far, _ = attend(queries, sorted_k, sorted_v, sorted_seen, dropout=self.drop)
            return in_sequence(near + far, None, tokens)
        if not whole:
            k = F.pad(k, (0, 1))
        shape = (*q.shape[:3], seen.shape[-2], size)
        both = torch.cat([seen.expand(shape), sorted_seen.expand(shape)], -1)
        keys, values = torch.cat([k, sorted_k], 3), torch.cat([v, sorted_v], 3)
        out, lse = attend(queries, keys, values, both, dropout=self.drop, want_lse=call.want_lse)
        return in_sequence(out, lse, tokens)

    def _permutation(self, q: Tensor, k: Tensor, there_BQW: Tensor, call: Call) -> Tensor:
        """(B, H, Q, P): by how much each block is beside each place; a row of zeros where there is none."""
        blocks = q.shape[2]
        present_BQ = there_BQW.any(-1)
        allowed = present_BQ[:, None, :, None] & present_BQ[:, None, None]
        if call.causal:
            allowed = allowed & torch.ones(blocks, blocks, dtype=torch.bool, device=q.device).tril(-1)
        elif not self.own_block and self.sortcut is None:
            allowed = allowed & ~torch.eye(blocks, dtype=torch.bool, device=q.device)
        if self.sort_net == "scores":
            asked = _means(q, there_BQW[:, None], causal=call.causal)
            r_BHQP = asked @ _means(k, there_BQW[:, None], causal=False).mT / math.sqrt(q.shape[-1])
        else:
            r_BHQP = self._scores_of_input(there_BQW, call)
        r_BHQP = wide(r_BHQP)
        if self.noise and self.training:
            # The logarithm of an exponential variable is minus a Gumbel one.
            drawn = torch.empty_like(r_BHQP).exponential_(generator=call.generator)
            r_BHQP = r_BHQP - drawn.clamp(min=torch.finfo(r_BHQP.dtype).tiny).log()
        r_BHQP = balance(r_BHQP / self.temperature, allowed, self.iterations, causal=call.causal)
        if self.hard:
            chosen = F.one_hot(r_BHQP.argmax(-1), blocks) * allowed.any(-1, keepdim=True)
            chosen = chosen.to(r_BHQP.dtype)
            r_BHQP = chosen + (r_BHQP - r_BHQP.detach()) if self.training else chosen
        return r_BHQP

    def _scores_of_input(self, there_BQW: Tensor, call: Call) -> Tensor:
        x_BND, (blocks, size) = call.x_BND, there_BQW.shape[1:]
        if x_BND is None:
            raise ValueError("sort_net='mlp' sorts by the layer's input; give x_BND, or take sort_net='scores'")
        if blocks > self.outer_HFP.shape[-1]:
            raise ValueError(
                f"{blocks} blocks of {size} tokens are more than the {self.outer_HFP.shape[-1]} that sort_net='mlp' "
                f"was made for; give it a greater length"
            )
        mean_B1QD = _means(into_blocks(x_BND[:, None], size), there_BQW[:, None], causal=call.causal)
        inner = (mean_B1QD @ self.inner_HDF.to(mean_B1QD.dtype) + self.inner_H1F).relu()
        return inner @ self.outer_HFP[..., :blocks].to(inner.dtype) + self.outer_H1P[..., :blocks]

    def _mix(self, r_BHQP: Tensor, t_BHPWE: Tensor) -> Tensor:
        """(B, H, Q, W, E): the sorted blocks."""
        if self.hard and not self.training:
            chosen = r_BHQP.argmax(-1)[..., None, None].expand(-1, -1, -1, *t_BHPWE.shape[3:])
            return t_BHPWE.gather(2, chosen) * (r_BHQP.sum(-1) > 0)[..., None, None]
        return (r_BHQP.to(t_BHPWE.dtype) @ t_BHPWE.flatten(3)).unflatten(-1, t_BHPWE.shape[3:])


def balance(r_BHQP: Tensor, allowed: Tensor, iterations: int, *, causal: bool) -> Tensor:
    """exp of the scores, balanced by turns: sums over places, then sums over blocks. The latter are 1 at the end.

    Args:
        allowed: bool, which entries may be above 0.
        causal: sums over places run up to each place alone.
    """
    # Far from the lowest number, so that sums and differences of such numbers stay finite.
    lowest = torch.finfo(r_BHQP.dtype).min / 4
    for _ in range(iterations):
        r_BHQP = r_BHQP.masked_fill(~allowed, lowest)
        r_BHQP = r_BHQP - (r_BHQP.logcumsumexp(2) if causal else r_BHQP.logsumexp(2, keepdim=True))
        r_BHQP = r_BHQP.masked_fill(~allowed, lowest)
        r_BHQP = r_BHQP - r_BHQP.logsumexp(3, keepdim=True)
    return torch.where(allowed, r_BHQP, lowest).exp()


def _means(t_BHQWE: Tensor, there_B1QW: Tensor, *, causal: bool) -> Tensor:
    """(B, H, Q, E), float32 or wider: of each block; causal: of all tokens up to the first of each block."""
    t_BHQWE = wide(t_BHQWE).masked_fill(~there_B1QW[..., None], 0)
    sums_BHQE, counts_B1Q = t_BHQWE.sum(3), there_B1QW.sum(-1)
    if causal:
        # Of the blocks before; what comes later in the own block is not even subtracted.
        sums_BHQE = F.pad(sums_BHQE.cumsum(2)[:, :, :-1], (0, 0, 1, 0)) + t_BHQWE[:, :, :, 0]
        counts_B1Q = F.pad(counts_B1Q.cumsum(2)[:, :, :-1], (1, 0)) + there_B1QW[..., 0].long()
    return sums_BHQE / counts_B1Q.clamp(min=1)[..., None]
