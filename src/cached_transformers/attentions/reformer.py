"""Reformer's attention by locality-sensitive hashing (Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451; the original is
trax/layers/research/efficient_attention.py of github.com/google/trax).

Queries are the keys, too. Those that point in similar directions fall into one bucket; tokens are sorted by bucket and
cut into chunks, and each attends its own chunk and the one before it, in several rounds with other random rotations:

    bucket(q) = argmax [q R; -q R],  k_j = q_j / ||q_j||,
    out_i = sum_r sum_{j in P_i^r} exp(s q_i . k_j - ln N_ij - z_i) v_j,  N_ij = number of rounds with j in P_i^r

so that a key seen in several rounds counts once: one softmax over the union of the P_i^r. A token sees itself only if
it sees nothing else in any round. s is 1 / sqrt(E) here.

Cost: R N (E sum(buckets) / 2 + 2 C (E + V)) multiply-adds a head, for N filled up to chunks of C (one chunk alone is N
long and looks at itself: N^2 (E + V)), beside R N log N for sorting and R^2 N C comparisons for N_ij.

What differs from the original, and why:
- The look back from the first chunk goes to the last one of the same round, and of the tokens that are there; through
  all rounds (the original) it pairs unrelated buckets and is not even exact for two chunks.
- Padding has its own bucket after all others.
- Masks are of bools, and N_ij is made by seeing a key in the first of its rounds alone, which is the same sum: -1e5 on
  the own logit costs the log-sum-exp its precision.
- The causal form keeps those keys of the same bucket that are at most C after in it. The original masks later
  positions in its chunks, but later tokens move the borders of chunks (`allow_leak`).

Legend: B rows, H heads, N tokens (filled up to chunks in shapes), E key width, V value width, R rounds, C tokens of a
chunk, Q chunks, S keys that a chunk sees, F columns of rotations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.interfaces.memory import Context
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, into_blocks, merge, paired_logits, pick_rows, wide
from .parts.pattern import PatternAttention
from .parts.sizes import head_width

LOGITS = {
    "scaled": "q . k / sqrt(E)",
    "unscaled": "q . k, as in transformers",
    "lra": "sqrt(E) q . q, keys as they are",
}


class Sorted(NamedTuple):
    """Order of tokens in one round: bucket and rank (B, H, N), and the token at each rank."""

    bucket_BHN: Tensor
    rank_BHN: Tensor
    order_BHN: Tensor


@ATTENTIONS.register(
    "reformer",
    paper="arXiv:2001.04451",
    title="Reformer",
    purpose="keys chosen by content",
    equation="softmax over the keys of the own and the previous chunk in bucket order, in any round; keys q/||q||",
    order="N log N",
    cost="R N (E buckets / 2 + 2 C (E + V)) multiply-adds a head for chunks of C",
)
class ReformerAttention(PatternAttention):
    """Attention among tokens that hash to the same bucket, with queries as keys (the keys given are not read).

    Keys of a memory's context are made unit vectors as those of the segment, so that one softmax compares both. The
    rule of the own key is about the segment alone.

    Args:
        width: D; heads: H. They fix the size of the rotations, which are drawn once, for each head its own.
        chunk: C, tokens of a chunk; the causal form looks C keys back in the bucket.
        rounds: R, hash rounds.
        buckets: an even number, or several whose product is the number of buckets (two small hashes instead of a large
            one); 1 for no hashing. The power of two at or below 2 length / chunk when None, in two factors where it
            is above 2 chunk.
        length: tokens of the longest segment, for `buckets` alone.
        logits: "scaled" q.k / sqrt(E), "unscaled" q.k (transformers), or "lra" sqrt(E) q.q with keys as they are.
        see_self: "alone": only where no other key is seen; "always": as any other key (Long Range Arena).
        across_buckets: keys of the chunks seen count whatever their bucket; the strict causal form never lets them.
        count_once: a key seen in several rounds counts once; False counts each time, at R^2 N C comparisons less.
        redraw: other rotations at each call in training, as in the original; evaluation takes those saved.
        check_shared: refuse keys that are not equal to the queries (waits for the device; not under torch.compile).
        allow_leak: the published causal form, in which later tokens change what earlier ones see.

    Raises:
        ValueError: sizes below 1, numbers of buckets that are not even, unknown names, or neither buckets nor length.
    """

    can = PatternAttention.can | {"causal"}

    rotations: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        chunk: int = 64,
        rounds: int = 2,
        *,
        buckets: int | Sequence[int] | None = None,
        length: int | None = None,
        logits: str = "scaled",
        see_self: str = "alone",
        across_buckets: bool = True,
        count_once: bool = True,
        redraw: bool = False,
        check_shared: bool = False,
        allow_leak: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(chunk=chunk, rounds=rounds)
        size = head_width(width, heads)
        if logits not in LOGITS:
            raise ValueError(f"logits={logits!r} must be one of {', '.join(LOGITS)}")
        if see_self not in ("alone", "always"):
            raise ValueError(f"see_self={see_self!r} must be 'alone' or 'always'")
        if buckets is None:
            if length is None:
                raise ValueError(
                    "attention reformer: how many buckets depends on the length of a segment; give buckets, or length"
                )
            buckets = usual_buckets(length, chunk)
        factors = [buckets] if isinstance(buckets, int) else list(buckets)
        if not factors or (factors != [1] and any(factor < 2 or factor % 2 for factor in factors)):
            raise ValueError(f"buckets={buckets} must be even (a rotation and its opposite), or 1 for no hashing")
        self.chunk, self.rounds, self.factors = chunk, rounds, factors
        self.logits, self.see_self, self.across_buckets, self.count_once = logits, see_self, across_buckets, count_once
        self.redraw, self.check_shared, self.allow_leak = redraw, check_shared, allow_leak
        columns = sum(factor // 2 for factor in factors)
        self.register_buffer("rotations", torch.randn(heads, size, rounds, columns))

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        padding_BN = call.key_padding_mask
        shared = q_BHNE if padding_BN is None else q_BHNE.masked_fill(padding_BN[:, None, :, None], 0)
        if self.check_shared and not torch.equal(shared, k_BHNE):  # keys are 0 after padding
            raise ValueError("check_shared=True, but keys differ from queries; make both by one projection")
        if call.context is not None:
            keys = Context(self._keys(call.context.k_BHME), *call.context[1:])
            call = call._replace(context=keys)
        return super().attend(q_BHNE, k_BHNE, v_BHNV, call)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens = q_BHNE.shape[2]
        size = min(self.chunk, tokens)
        filler = -tokens % size
        there_BN = torch.ones(len(q_BHNE), tokens, dtype=torch.bool, device=q_BHNE.device)
        if call.key_padding_mask is not None:
            there_BN = ~call.key_padding_mask
        there_BN = F.pad(there_BN, (0, filler))
        qk_BHNE, value_BHNV = (F.pad(t, (0, 0, 0, filler)) for t in (q_BHNE, v_BHNV))
        key_BHNE = self._keys(qk_BHNE)
        # Every chunk is full but the last of those that hold tokens; the first chunk looks back to that one.
        last_B = (there_BN.sum(1) - 1).clamp(min=0) // size

        placed = self._sort(qk_BHNE, there_BN, call.generator)
        out_BHNV, lse_BHN = value_BHNV, None
        alone_BHN = there_BN[:, None].expand(qk_BHNE.shape[:3])
        for turn, here in enumerate(placed):
            qkv = [into_blocks(pick_rows(t, here.order_BHN), size) for t in (qk_BHNE, key_BHNE, value_BHNV)]
            q, k, v = qkv[0], *(_with_previous(t, last_B) for t in qkv[1:])
            seen_BHQCS = self._seen(placed[: turn + 1], there_BN, last_B, size, causal=call.causal)
            seen_BHN = pick_rows(seen_BHQCS.any(-1).flatten(2), here.rank_BHN)
            alone_BHN = alone_BHN & ~seen_BHN
            new, lse = attend(q, k, v, seen_BHQCS, dropout=self.drop, want_lse=call.want_lse or len(placed) > 1)
            new = pick_rows(new.flatten(2, 3), here.rank_BHN)
            lse = None if lse is None else pick_rows(lse.flatten(2, 3), here.rank_BHN)
            if lse is None or lse_BHN is None:
                out_BHNV, lse_BHN = new, lse
            else:
                out_BHNV, lse_BHN = merge(out_BHNV, lse_BHN, new, lse)
        if self.see_self == "alone":
            out_BHNV = torch.where(alone_BHN[..., None], value_BHNV, out_BHNV)
            if lse_BHN is not None:
                lse_BHN = torch.where(alone_BHN, paired_logits(qk_BHNE, key_BHNE), lse_BHN)
        lse_BHN = lse_BHN[:, :, :tokens] if call.want_lse and lse_BHN is not None else None
        return AttentionOutput(out_BHNV[:, :, :tokens], lse_BHN)

    def _keys(self, k_BHNE: Tensor) -> Tensor:
        """Keys that give the logits asked for once they are divided by sqrt(E), which `attend` does."""
        width = k_BHNE.shape[-1]
        if self.logits == "lra":
            return k_BHNE * width
        # Norms of float32: the bound below which a vector counts as zero is none in float16.
        unit = F.normalize(wide(k_BHNE), dim=-1)
        return (unit if self.logits == "scaled" else unit * math.sqrt(width)).to(k_BHNE.dtype)

    @torch.no_grad()
    def _sort(self, qk_BHNE: Tensor, there_BN: Tensor, generator: torch.Generator | None) -> list[Sorted]:
        """Each round's order by bucket, then by position; missing tokens come last."""
        rotations = self.rotations.to(qk_BHNE.dtype)
        if self.redraw and self.training:
            rotations = torch.randn(
                rotations.shape, generator=generator, dtype=rotations.dtype, device=rotations.device
            )
        heads, width, rounds, _ = rotations.shape
        turned_BHNF = qk_BHNE @ rotations.view(heads, width, -1)
        turned_BHNRF = turned_BHNF.unflatten(-1, (rounds, -1))
        bucket_BHNR = torch.zeros(turned_BHNRF.shape[:-1], dtype=torch.long, device=qk_BHNE.device)
        count, column = 1, 0
        for factor in self.factors:
            if factor == 1:
                break
            part = turned_BHNRF[..., column : column + factor // 2]
            bucket_BHNR = bucket_BHNR + count * torch.cat([part, -part], -1).argmax(-1)
            count, column = count * factor, column + factor // 2
        bucket_BHNR = torch.where(there_BN[:, None, :, None], bucket_BHNR, count)
        placed = []
        for bucket_BHN in bucket_BHNR.unbind(-1):
            order_BHN = bucket_BHN.argsort(dim=-1, stable=True)
            place = torch.arange(order_BHN.shape[-1], device=order_BHN.device).expand_as(order_BHN)
            placed.append(Sorted(bucket_BHN, torch.zeros_like(order_BHN).scatter(2, order_BHN, place), order_BHN))
        return placed

    @torch.no_grad()
    def _seen(self, placed: Sequence[Sorted], there_BN: Tensor, last_B: Tensor, size: int, *, causal: bool) -> Tensor:
        """(B, H, Q, C, S): the keys that tokens see in the last of these rounds, and in none before it."""
        here = placed[-1]
        strict = causal and not self.allow_leak

        def pair(t_BHN: Tensor) -> tuple[Tensor, Tensor]:
            """Data of each token, for queries (B, H, Q, C, 1) and keys (B, H, Q, 1, S) of this round."""
            query_BHQC1 = into_blocks(pick_rows(t_BHN, here.order_BHN)[..., None], size)
            return query_BHQC1, _with_previous(query_BHQC1, last_B).mT

        def near(there: Sorted) -> Tensor:
            """The pairs whose query finds the key in a given round, whatever their positions."""
            query, key = pair(there.rank_BHN)
            query_bucket, key_bucket = pair(there.bucket_BHN)
            if strict:
                return (query_bucket == key_bucket) & (query >= key) & (query - key <= size)
            query_chunk, key_chunk = query // size, key // size
            back = torch.where(query_chunk == 0, last_B[:, None, None, None, None], query_chunk - 1)
            found = (key_chunk == query_chunk) | (key_chunk == back)
            return found if self.across_buckets else found & (query_bucket == key_bucket)

        query, key = pair(torch.arange(there_BN.shape[1], device=there_BN.device).expand_as(here.rank_BHN))
        seen = near(here) & pair(there_BN[:, None].expand_as(here.rank_BHN))[1]
        if self.see_self == "alone":
            seen = seen & (query != key)
        if causal:
            seen = seen & (query >= key)
        if key.shape[-1] > size:
            # A first chunk whose predecessor is itself would see each key twice.
            own_B1S = (last_B == 0)[:, None, None].expand(-1, -1, size)
            twice_BQS = F.pad(own_B1S, (0, key.shape[-1] - size, 0, key.shape[2] - 1))
            seen = seen & ~twice_BQS[:, None, :, None]
        if self.count_once:
            for earlier in placed[:-1]:
                seen = seen & ~near(earlier)
        return seen


def usual_buckets(length: int, chunk: int) -> list[int]:
    """Half a chunk to a bucket: the power of two at or below 2 length / chunk, in two factors where it is large."""
    exponent = max(1, (2 * length // chunk).bit_length() - 1)
    if 2**exponent <= 2 * chunk or exponent < 2:
        return [2**exponent]
    return [2 ** (exponent // 2), 2 ** (exponent - exponent // 2)]


def _with_previous(t_BHQCE: Tensor, last_B: Tensor) -> Tensor:
    """(B, H, Q, 2 C, E): each chunk after the one before it, the first after the last that holds tokens."""
    if t_BHQCE.shape[2] == 1:
        return t_BHQCE
    wrapped = t_BHQCE[torch.arange(len(t_BHQCE), device=t_BHQCE.device), :, last_B]
    return torch.cat([torch.cat([wrapped[:, :, None], t_BHQCE[:, :, :-1]], 2), t_BHQCE], 3)
