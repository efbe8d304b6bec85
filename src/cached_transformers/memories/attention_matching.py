"""Attention Matching (Zweiger et al. 2026, arXiv:2602.16284; github.com/adamzweiger/compaction).

A bounded cache that merges keys and values instead of dropping them. When there are more than slots, keys are chosen,
and get biases and values with which the last queries of the stream receive the mass and the output of all keys.

    slots = [sinks, merged keys with biases, newest tokens]

The queries are asked again right after the text, of keys at their places before and after the merging. The release
merges a whole text once, also for queries that the model invents. Here slots may be merged any number of times: a bias
stays between -3 and 3, and a value no longer than the longest one, which the release does not ask.

Legend: B rows, H heads, G heads of keys, N tokens or queries, Q queries of a head, M slots, T merged slots, L slots and
tokens, E head width, D model width, P position channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Trace
from cached_transformers.registry import MEMORIES

from .parts.attention_matching import importance, match_mass, perhaps_any, pursue, solve
from .parts.fifo_store import Rows, empty_rows, push, right_before, side_by_side
from .parts.options import check_choices
from .parts.scored_cache import STAYS, Candidates, ScoredCache, ScoredSlots


@MEMORIES.register(
    "attention_matching",
    paper="arXiv:2602.16284",
    title="Attention Matching",
    carries="in each head keys with biases and values that represent all keys, and the last queries",
    purpose="texts read once by a pretrained decoder, and merged into few slots",
    equations="w = argmin ||X_S w - X 1||, values = argmin ||softmax(Z_S + log w) C - softmax(Z) V||, for each head",
    state="per row and layer: 8 M D + 4 M H + Q (4 D + 8) + 16 bytes; with grouped keys M (8 G E + 4 G) + ...",
    cost="per token and layer: 2 M D + about Q (5 M + 2 N + Q) D / N multiply-adds, and 2 / N decompositions a head",
    reach="unbounded for keys that the last queries attend",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    probe=STAYS,
)
class AttentionMatching(ScoredCache):
    """Keys, values and biases that match the attention of the last queries to all tokens. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        choice: of keys: by "rms" (root mean square), "max" or "mean" of their weights, or matching pursuit, "omp".
        queries: Q, last queries of the stream that are matched.
        sinks, observe, relative: see `ScoredCache`; relative=False, since keys must be turned.
    """

    needs = ScoredCache.needs | {"turn", "bias"}
    carries_scores = True

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        choice: Literal["rms", "max", "mean", "omp"] = "rms",
        queries: int = 64,
        observe: int | None = None,
        sinks: int = 4,
        relative: bool = False,
    ) -> None:
        super().__init__(width, heads, length, sinks=sinks, observe=observe, relative=relative)
        check_choices(choice=(choice, ("rms", "max", "mean", "omp")))
        at_least_one(queries=queries)
        self.choice, self.queries = choice, queries

    def init_carried(self, batch_size: int, like: Tensor) -> Rows:
        return empty_rows(batch_size, self.queries, self.heads * self.stored_heads[1], like)

    def carry(self, carried: Rows, trace: Trace) -> Rows:
        query = trace.query
        assert query.q_BHNE is not None and query.positions_BNP is not None
        return push(carried, side_by_side(query.q_BHNE.detach()), query.positions_BNP[..., :1], query.padding_BN)

    def open(self, state: ScoredSlots, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        bias_BGM = state.scores_BGM.masked_fill(~state.valid_BM[:, None], 0)
        return super().open(state, first_B1P, project_kv)._replace(bias_BHM=bias_BGM)

    def write(self, state: ScoredSlots, trace: Trace) -> tuple[ScoredSlots, None]:
        found, carried = self._candidates(state, trace), self.carry(state.carried, trace)
        return self._merged(found, state._replace(carried=carried), state.k_BGME.shape[2]), None

    def compact(self, state: ScoredSlots, slots: int, turn: Callable[[Tensor, Tensor], Tensor]) -> ScoredSlots:
        """The state with at most `slots` filled slots (ValueError: out of range); `turn` gets positions from 0 on."""
        least, (k, v, _, bias, _), valid_BM = self.sinks + self.newest, state, state.valid_BM
        if not least <= slots <= self.length:
            raise ValueError(
                f"slots={slots}: from {least} (sinks and newest tokens) to {self.length}; take one of these"
            )
        last_B1P = state.count_B.new_full((len(k), 1, 1), self.length + self.queries - 1)
        found = Candidates(k, v, valid_BM, ~valid_BM, last_B1P, Query(k[:, 0], turn=turn), scores_BGL=bias)
        return self._merged(found, state, slots)

    @torch.no_grad()
    def _merged(self, found: Candidates, state: ScoredSlots, slots: int) -> ScoredSlots:
        """The state with `slots` slots for the candidates; a row with fewer of these keeps them as they are."""
        assert found.scores_BGL is not None
        first, last = self.length - slots + self.sinks, self.length - self.newest  # of merged slots in a full row
        overflows_B111 = (found.valid_BL.sum(1) > slots)[:, None, None, None]
        if first == last or not perhaps_any(overflows_B111):
            return self.best_of(found, found.scores_BGL, state, slots)
        z_BGNL = self._logits(found, state.carried, found.k_BGLE, found.scores_BGL)
        z_BGNL = z_BGNL.masked_fill((self.forced_BL(found) | ~found.valid_BL)[:, None, None], -torch.inf)
        if self.choice == "omp":
            score_BGL = pursue(z_BGNL, last - first, keys=4, interval=2).to(z_BGNL.dtype)
        else:
            score_BGL = importance(z_BGNL, self.choice)
        kept = self.best_of(found, score_BGL, state, slots)
        old_BGT = kept.scores_BGM[..., first:last]
        z_BGNT = self._logits(found, state.carried, kept.k_BGME, kept.scores_BGM)[..., first:last]
        bias_BGT = match_mass(z_BGNL, z_BGNT, old_BGT)
        v_BGLE, v_BGTE = (t.to(z_BGNL.dtype) for t in (found.v_BGLE, kept.v_BGME[:, :, first:last]))
        weight_BGNT = (z_BGNT + (bias_BGT - old_BGT)[:, :, None]).softmax(-1)
        matched_BGTE = solve(weight_BGNT, z_BGNL.softmax(-1) @ v_BGLE, v_BGTE)
        # Errors that the queries do not see would add up over merges.
        longest_BG11, length_BGT1 = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (v_BGLE, matched_BGTE))
        longest_BG11 = longest_BG11.amax(-2, keepdim=True).clamp(min=torch.finfo(v_BGLE.dtype).tiny)
        matched_BGTE = matched_BGTE * longest_BG11 / torch.maximum(longest_BG11, length_BGT1)
        v_BGTE = torch.where(overflows_B111, matched_BGTE, v_BGTE).to(kept.v_BGME.dtype)
        bias_BGT = torch.where(overflows_B111[..., 0], bias_BGT, old_BGT)
        v_BGME = kept.v_BGME.slice_scatter(v_BGTE, 2, first, last)
        return kept._replace(v_BGME=v_BGME, scores_BGM=kept.scores_BGM.slice_scatter(bias_BGT, 2, first, last))

    def _logits(self, found: Candidates, carried: Rows, k_BGLE: Tensor, bias_BGL: Tensor) -> Tensor:
        """(B, G, N, L): logits of a group's last queries, N of them in all heads, for keys right before them."""
        turn, (groups, width) = found.query.turn, self.stored_heads
        assert turn is not None
        q_BHQE = carried.hidden_BMD.unflatten(-1, (self.heads, width)).transpose(1, 2)
        # A stream of fewer queries asks the last one more than once.
        q_BHQE = torch.where(carried.valid_BM[:, None, :, None], q_BHQE, q_BHQE[:, :, -1:])
        after_B1P = found.places_BLP[:, -1:] + 1
        q_BHQE = turn(q_BHQE, right_before(after_B1P, self.queries)).to(bias_BGL.dtype)
        k_BGLE = turn(k_BGLE, right_before(after_B1P - self.queries, k_BGLE.shape[2])).to(bias_BGL.dtype)
        return q_BHQE.unflatten(1, (groups, -1)).flatten(2, 3) @ k_BGLE.mT / math.sqrt(width) + bias_BGL[:, :, None]
