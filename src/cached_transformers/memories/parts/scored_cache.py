"""A bounded cache of keys and values whose slots are chosen by a score, for memories that differ in the score.

When a segment ends, its keys join those of the slots; in each head of keys the M with the largest scores stay, in the
order of time, of equals the newest. The first tokens of a stream (sinks) and its newest ones stay whatever their
score: a softmax has to put its weight somewhere, and pretrained decoders put it on the first tokens.

    slots = best M of [slots, segment] by score + infinity (sinks, newest)

Heads keep other tokens, so that their places are those in the cache, right before the segment. Layers may have
unequal lengths, which PyramidKV (Cai et al. 2024, arXiv:2406.02069) makes fall from layer to layer:

    M_l = max - l (max - min) / (layers - 1),  min = M / beta,  max = 2 M - min;  the sum over layers is that of M

Legend: B rows, H heads, G heads of keys, N tokens, W observed queries, M slots, L = M + N, E head width, P position
channels.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, whole_episode
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.state import State

from .fifo_store import best, filled, from_last, kept, last_slots, right_before, stored_pair, taken
from .options import NO_MEMORY, check_choices
from .sinks import KeepsSinks

own_word("turn", "keys with positions, as the layer compares them")
STAYS = Probing(
    lambda *given: {"observe": 1, "sinks": 0, **whole_episode(*given)},
    why="tokens of high scores may stay for ever",
)
"""Probe of memories with the options of `ScoredCache`."""


class ScoredSlots(NamedTuple):
    """Unrotated keys and values of each head, oldest first, empty slots before all; how many are real, in all heads
    alike; scores of the slots, and the rule's own state; () for nothing."""

    k_BGME: Tensor
    v_BGME: Tensor
    count_B: Tensor
    scores_BGM: Any = ()
    carried: State = ()

    @property
    def valid_BM(self) -> Tensor:
        """bool, the slots that hold something."""
        return last_slots(self.count_B, self.k_BGME.shape[2])


class Candidates(NamedTuple):
    """Slots and tokens, oldest first, from which the slots are chosen; empty entries come first and hold zeros.

    Attributes:
        k_BGLE: as they are stored, without positions. places_BLP: positions of slots in the cache, and of tokens.
        weights_BHWL: see `Trace`; None if the memory does not need them.
        scores_BGL: that the slots carry, 0 for tokens; None without. new_BL: tokens of the segment.
        query: of the segment.
    """

    k_BGLE: Tensor
    v_BGLE: Tensor
    valid_BL: Tensor
    new_BL: Tensor
    places_BLP: Tensor
    query: Query
    weights_BHWL: Tensor | None = None
    scores_BGL: Tensor | None = None

    def rank_BL(self) -> Tensor:
        """Number of each token in the order of time, from 1."""
        return self.valid_BL.long().cumsum(1)

    def turned_keys(self) -> Tensor:
        """The keys with their positions."""
        assert self.query.turn is not None
        return self.query.turn(self.k_BGLE, self.places_BLP)


class ScoredCache(KeepsSinks):
    """Base of memories that override `score`. No parameters, no gradient.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        sinks: first tokens of a stream that stay whatever their score; pretrained decoders break without them.
        observe: number of newest tokens that stay whatever their score, and whose queries a score by attention uses; a
            quarter of the slots, at most 32, when None.
        budget: "uniform": each layer has `length` slots; "pyramid": the mean over layers is `length`, the first layer
            has most, the last least.
        beta: of budget="pyramid"; the last layer has length / beta slots.
        index, depth: which layer of how many this is, counted from 0; the model gives them.
        relative: see `TransformerXL`.
    """

    needs = frozenset({"state", "context", "stored_kv"})
    carries_scores = False
    """True if slots carry a score from segment to segment."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        sinks: int = 4,
        observe: int | None = None,
        budget: Literal["uniform", "pyramid"] = "uniform",
        beta: float = 20,
        index: int | None = None,
        depth: int | None = None,
        relative: bool = True,
    ) -> None:
        super().__init__()
        at_least_one(" slot" + NO_MEMORY, length=length)
        at_least_one("; 0 forces none", least=0, sinks=sinks, observe=observe)
        check_choices(budget=(budget, ("uniform", "pyramid")))
        self.width, self.heads, self.length, self.sinks, self.relative = width, heads, length, sinks, relative
        if not beta > 1:
            raise ValueError(f"beta={beta} must be above 1: the last layer has length / beta slots")
        self.slots = fewest = length
        if budget == "pyramid":
            if index is None or depth is None:
                raise ValueError("budget='pyramid' needs index and depth, which models give; take budget='uniform'")
            self.slots, fewest = pyramid(length, index, depth, beta), pyramid(length, 1, 2, beta)
        self.observe = self.newest = min(32, fewest // 4) if observe is None else observe
        if fewest < sinks + self.newest:
            of = f"length={length}" if budget == "uniform" else f"budget='pyramid': length={length} and beta={beta}"
            raise ValueError(
                f"{of} leave a layer {fewest} slots, which sinks={sinks} and observe={self.newest} exceed; take a "
                "longer one, or fewer of these"
            )

    def init_state(self, batch_size: int, like: Tensor) -> ScoredSlots:
        groups, width = self.stored_heads
        k_BGME, v_BGME = (like.new_zeros(batch_size, groups, self.slots, width) for _ in range(2))
        wide = torch.promote_types(like.dtype, torch.float32)
        scores: Any = like.new_zeros(batch_size, groups, self.slots, dtype=wide) if self.carries_scores else ()
        count_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return ScoredSlots(k_BGME, v_BGME, count_B, scores, self.init_carried(batch_size, like))

    def init_carried(self, batch_size: int, like: Tensor) -> State:
        """State of the rule beside the slots, before the first segment."""
        return ()

    def carry(self, carried: State, trace: Trace) -> State:
        """The same after the segment."""
        return carried

    def score(self, found: Candidates, carried: State) -> Tensor:
        """(B, G, L): the entries with the largest scores stay; slots carry them where `carries_scores`."""
        raise NotImplementedError("abstract: a rule scores its candidates")

    def position_scheme(self) -> Positions | None:
        return RelativePositions(self.heads, self.width // self.heads) if self.relative else None

    def open(self, state: ScoredSlots, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        assert first_B1P is not None
        positions_BMP = right_before(first_B1P, state.k_BGME.shape[2])
        return Context(state.k_BGME, state.v_BGME, positions_BMP, state.valid_BM, consecutive=True)

    def read(self, opened: Context, query: Query, project_kv: ProjectKV | None) -> Reading:
        return Reading(opened)

    def write(self, state: ScoredSlots, trace: Trace) -> tuple[ScoredSlots, None]:
        found, carried = self._candidates(state, trace), self.carry(state.carried, trace)
        score_BGL = self.score(found, carried)
        if self.carries_scores:
            found = found._replace(scores_BGL=score_BGL)
        return self.best_of(found, score_BGL, state._replace(carried=carried), state.k_BGME.shape[2]), None

    def best_of(self, found: Candidates, score_BGL: Tensor, state: ScoredSlots, slots: int) -> ScoredSlots:
        """The state with the best candidates, and their `scores_BGL`, as slots."""
        chosen_BGL = score_BGL.masked_fill(self.forced_BL(found)[:, None], torch.inf)
        valid_BGL = found.valid_BL[:, None].expand_as(score_BGL)
        empty = state.k_BGME.shape[2] - slots
        index_BGM, real_BGM = (F.pad(t, (empty, 0)) for t in best(chosen_BGL, valid_BGL, slots))
        pairs = (found.k_BGLE, state.k_BGME), (found.v_BGLE, state.v_BGME)
        k_BGME, v_BGME = (kept(old[:, :, :0], t, index_BGM, real_BGM) for t, old in pairs)
        scores: Any = ()
        if found.scores_BGL is not None:
            scores = torch.where(real_BGM, found.scores_BGL.gather(2, index_BGM), 0).to(state.scores_BGM.dtype)
        return ScoredSlots(k_BGME, v_BGME, real_BGM[:, 0].sum(1), scores, state.carried)

    def forced_BL(self, found: Candidates) -> Tensor:
        """bool, sinks and newest tokens, which stay whatever their score."""
        newest_BL = from_last(found.valid_BL) <= self.newest
        return newest_BL | (found.valid_BL & (found.rank_BL() <= self.sinks))

    def _candidates(self, state: ScoredSlots, trace: Trace) -> Candidates:
        query, weights_BHWL = trace.query, trace.weights_BHWL
        assert query.positions_BNP is not None
        k_BGNE, v_BGNE = stored_pair(query, self.stored_heads[0])
        rows, groups, n = k_BGNE.shape[:3]
        slots = state.k_BGME.shape[2]
        valid_BL = torch.cat([state.valid_BM, query.real_BN.expand(rows, -1)], 1)
        positions_BNP = query.positions_BNP.expand(rows, -1, -1)
        places_BLP = torch.cat([right_before(positions_BNP[:, :1], slots), positions_BNP], 1)
        new_BL = torch.arange(slots + n, device=valid_BL.device).expand(rows, -1) >= slots
        scores_BGL = None
        if self.carries_scores:
            scores_BGL = torch.cat([state.scores_BGM, state.scores_BGM.new_zeros(rows, groups, n)], 2)
        if weights_BHWL is not None:  # the context may begin with slots of other memories
            weights_BHWL = weights_BHWL[..., weights_BHWL.shape[-1] - n - slots :]
        pairs = (state.k_BGME, k_BGNE), (state.v_BGME, v_BGNE)
        k_BGLE, v_BGLE = (torch.cat([filled(old.to(new.dtype), state.valid_BM[:, None]), new], 2) for old, new in pairs)
        if query.padding_BN is not None:  # before all tokens, so that it is no neighbour of one
            order_BL = valid_BL.long().argsort(dim=1, stable=True)
            valid_BL, new_BL = (t.gather(1, order_BL) for t in (valid_BL, new_BL))
            places_BLP = taken(places_BLP, order_BL)
            k_BGLE, v_BGLE = (t.take_along_dim(order_BL[:, None, :, None], 2) for t in (k_BGLE, v_BGLE))
            if scores_BGL is not None:
                scores_BGL = scores_BGL.take_along_dim(order_BL[:, None], 2)
            if weights_BHWL is not None:
                weights_BHWL = weights_BHWL.take_along_dim(order_BL[:, None, None], 3)
            k_BGLE, v_BGLE = (torch.where(valid_BL[:, None, :, None], t, 0) for t in (k_BGLE, v_BGLE))
        return Candidates(k_BGLE, v_BGLE, valid_BL, new_BL, places_BLP, query, weights_BHWL, scores_BGL)


def pyramid(length: int, index: int, depth: int, beta: float) -> int:
    """Slots of layer `index` of `depth` by PyramidKV's rule."""
    least = length / beta
    most = 2 * length - least
    return round(most - index * (most - least) / max(depth - 1, 1)) if depth > 1 else length
