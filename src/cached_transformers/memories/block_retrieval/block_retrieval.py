"""Block retrieval: earlier blocks of tokens, found again by the model's own attention, without training.

After InfLLM (Xiao et al. 2024, arXiv:2402.04617; github.com/thunlp/InfLLM) and Quest (Tang et al. 2024,
arXiv:2406.10774; github.com/mit-han-lab/Quest). Every layer attends, before its segment,

    [S sinks | k blocks out of all earlier ones, the oldest first | at least W recent tokens]

Tokens that are no longer recent leave in whole blocks of b into the store, with the keys and values that they had, each
key unrotated. The last queries of a segment choose for the next one, so that no token sees its future, and all layers
take the same blocks: each layer votes with its scores (`scores.py`). InfLLM lets every layer choose for itself, by the
queries of the present text, and its released code attends some keys twice; here each key is attended once.

A prompt may ask first: its last, partial segment is read once only for its queries, then again with their choice.

Legend: B rows, N tokens, L tokens with recent ones, S sinks, W slots of recent tokens, C blocks, b tokens of a block,
J blocks that may leave at once, K chosen blocks, U = 1 or V choices, V layers, G heads of keys, E head width,
X = 2 V G heads of keys, then of values, Y = X E, M slots of the context, P position channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import BlockRunner, Context, Entry, ModelMemory, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.memories.parts.fifo_store import (
    Rows,
    best,
    empty_rows,
    last_slots,
    push,
    right_before,
    stored_pair,
    taken,
)
from cached_transformers.memories.parts.options import check_heads
from cached_transformers.memories.parts.ring import write_rings
from cached_transformers.registry import MEMORIES

from .blocks import append, pick
from .scores import last_queries, scores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class BlockRetrievalState(NamedTuple):
    """Keys and values of the first tokens, of the last ones, and of the blocks between them.

    Attributes:
        sinks, recent: (B, S or W, Y) of all layers, newest last.
        blocks_BCXbE: block number n of a row in place n mod C.
        written_B: blocks ever written. chosen_BUK: numbers of the blocks for the next segment, -1 for none, the oldest
            first.
    """

    sinks: Rows
    recent: Rows
    blocks_BCXbE: Tensor
    written_B: Tensor
    chosen_BUK: Tensor


@MEMORIES.register(
    "block_retrieval",
    paper="arXiv:2402.04617",
    title="Block retrieval",
    carries="the first and the last tokens, and all blocks between; the best few are attended",
    purpose="facts far back in a text, found by a pretrained decoder without training",
    equations="keys and values of [first S; the k blocks with the most attention of the segment before, summed over "
    "layers; last W; segment]; positions in the cache",
    state="per row: 8 V G E (S + W + b - 1 + C b) + 8 k + 24 bytes, C blocks; k V for vote='layer'",
    cost="per token and layer: 2 (S + k b + W + b - 1) D, and C b D / N for the choice, multiply-adds",
    reach="capacity x block tokens, without limit when None",
    gradient="none into the store; keys and values stay as they were made",
    exact_when="sinks + recent >= tokens seen, or topk x block covers all blocks; places='cache'",
    probe=Probing(
        lambda n, distance, depth: {"sinks": 0, "recent": n, "block": n, "topk": distance},
        lambda *task: {"sinks": 0, "recent": one_segment(*task)["length"] // 2, "block": 1, "topk": 1, "capacity": 1},
    ),
)
class BlockRetrieval(ModelMemory):
    """The first and last tokens of a text, and the blocks between that the last queries attend most. No parameters.

    Args:
        width: D. heads: H. depth: V, layers of the model.
        sinks: S, first tokens that stay. recent: W, the least number of last tokens that stay.
        block: b, tokens of a block. topk: k, blocks that are attended.
        score: of blocks: "attention", of the very last query; "mean" or "bounds" of keys, see `scores.py`.
        observe: last queries that ask, for "mean" and "bounds".
        vote: all layers take the same blocks, by the sum of their scores ("layers"), or each its own ("layer").
        retrieve: "always": a segment reads the blocks that the segment before chose, and prompts ask first; "prompts":
            the blocks that the last prompt chose, none before it; "segments": no prompt asks first. A prompt is the
            segment after which `generate` or `Session.generate` begins to write.
        places: of found blocks: "cache", consecutive before the recent tokens; "same", with the sinks all at the place
            before these (InfLLM).
        capacity: the number of newest blocks that stay; None for no limit. With a limit, and in memory,
            the state has one size, as compiled code needs.
        store: "memory", or "file": blocks are in a file that vanishes with the process. folder: of that file.
        dtype: of stored blocks: "float32", "bfloat16", "int8" (with a scale for each key and head); None for the
            model's.
    """

    needs = frozenset({"state", "context", "layer_traces", "stored_kv"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        depth: int,
        sinks: int = 4,
        recent: int = 508,
        block: int = 64,
        topk: int = 4,
        score: Literal["attention", "mean", "bounds"] = "attention",
        observe: int = 1,
        vote: Literal["layers", "layer"] = "layers",
        retrieve: Literal["always", "prompts", "segments"] = "always",
        places: Literal["cache", "same"] = "cache",
        capacity: int | None = None,
        store: Literal["memory", "file"] = "memory",
        folder: str | Path | None = None,
        dtype: Literal["float32", "bfloat16", "int8"] | None = None,
    ) -> None:
        super().__init__()
        at_least_one(depth=depth, recent=recent, block=block, topk=topk, observe=observe, capacity=capacity)
        at_least_one("; 0 keeps none", least=0, sinks=sinks)
        check_heads(width, heads)
        if observe > 1 and score == "attention":
            raise ValueError(f"observe={observe}: score='attention' asks with the last query; take 1, or 'mean'")
        if (store == "file") != (folder is not None):
            raise ValueError(f"store={store!r} with folder={folder!r}: a file needs a folder, memory takes none")
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder={folder!r}: is no folder; make it first")
        self.width, self.heads, self.depth = width, heads, depth
        self.sinks, self.recent, self.block, self.topk = sinks, recent, block, topk
        self.score, self.observe, self.vote, self.retrieve, self.places = score, observe, vote, retrieve, places
        self.capacity, self.folder, self.dtype = capacity, folder, dtype
        self.grows = capacity is None or folder is not None or dtype == "int8"
        self.asks = retrieve != "segments"

    @property
    def stored_heads(self) -> tuple[int, int]:
        """(G, E): number and width of a layer's heads of keys."""
        return self.key_shape or (self.heads, self.width // self.heads)

    def init_state(self, batch_size: int, like: Tensor) -> BlockRetrievalState:
        groups, width = self.stored_heads
        heads = 2 * self.depth * groups
        sinks, recent = (
            empty_rows(batch_size, slots, heads * width, like, channels=0)
            for slots in (self.sinks, self.recent + self.block - 1)
        )
        kept = like if self.grows or self.dtype is None else like.new_empty(0, dtype=DTYPES[self.dtype])
        # One number until the state is sealed: a large store must never exist twice.
        places = 0 if self.grows or self.capacity is None else self.capacity
        blocks_BCXbE = kept.new_zeros(()).expand(batch_size, places, heads, self.block, width)
        choices = 1 if self.vote == "layers" else self.depth
        chosen_BUK = torch.full((batch_size, choices, self.topk), -1, device=like.device)
        written_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return BlockRetrievalState(sinks, recent, blocks_BCXbE, written_B, chosen_BUK)

    def open(self, state: BlockRetrievalState, tokens: Tokens, layers: Sequence[Projections]) -> list[Context]:
        heads, dtype = 2 * self.depth * self.stored_heads[0], state.recent.hidden_BMD.dtype
        valid_BUK, first_B1P, contexts = state.chosen_BUK >= 0, tokens.positions_BNP[:, :1], []
        for number_BK, valid_BK in zip(state.chosen_BUK.unbind(1), valid_BUK.unbind(1), strict=True):
            found_BKXbE = pick(state.blocks_BCXbE, number_BK).to(dtype)
            found_BKXbE = torch.where(valid_BK[:, :, None, None, None], found_BKXbE, 0)
            found_BLY = found_BKXbE.transpose(2, 3).flatten(3).flatten(1, 2)
            valid_BM = torch.cat(
                [state.sinks.valid_BM, valid_BK.repeat_interleave(self.block, 1), state.recent.valid_BM], 1
            )
            order_BM = valid_BM.to(torch.uint8).argsort(dim=1, stable=True)  # empty slots first
            slots_BMY = torch.cat([state.sinks.clean_BMD, found_BLY, state.recent.clean_BMD], 1)
            slots_BXME = taken(slots_BMY, order_BM).unflatten(-1, (heads, -1)).transpose(1, 2)
            contexts.append((slots_BXME, valid_BM.gather(1, order_BM)))
        return [self._context(*contexts[index % len(contexts)], index, first_B1P, state) for index in range(self.depth)]

    def _context(
        self, slots_BXME: Tensor, valid_BM: Tensor, index: int, first_B1P: Tensor, state: BlockRetrievalState
    ) -> Context:
        """Slots of one layer."""
        groups, values = self.stored_heads[0], self.depth * self.stored_heads[0]
        k_BGME, v_BGME = (slots_BXME[:, at : at + groups] for at in (index * groups, values + index * groups))
        positions_BMP = right_before(first_B1P, valid_BM.shape[1])
        if self.places == "same":
            before_B11 = first_B1P - state.recent.count_B[:, None, None] - 1
            positions_BMP = torch.maximum(positions_BMP, before_B11)
        cache = self.places == "cache"
        return Context(k_BGME, v_BGME, positions_BMP, valid_BM, consecutive=cache, clean=True)

    def enter(self, opened: list[Context], tokens: Tokens) -> Entry:
        return Entry(tokens, opened)

    def exit(
        self, state: BlockRetrievalState, x_BND: Tensor, traces: Sequence[Trace]
    ) -> tuple[Tensor, BlockRetrievalState, None]:
        if self.grows and torch.compiler.is_compiling():
            raise ValueError(
                f"capacity={self.capacity}, folder={self.folder!r}, dtype={self.dtype!r}: compiled code needs a store "
                "of one size; give a capacity, store='memory' and no 'int8', or do not compile"
            )
        groups = self.stored_heads[0]
        padding_BN = ~traces[0].query.real_BN
        pairs = [stored_pair(trace.query, groups) for trace in traces]
        kept_BNY = torch.cat([pair[half].transpose(1, 2).flatten(2) for half in (0, 1) for pair in pairs], 2)
        rank_BN, sinks = state.sinks.count_B[:, None] + (~padding_BN).cumsum(1), state.sinks
        if self.sinks:
            later_BN = padding_BN | (rank_BN > self.sinks)
            order_BS = later_BN.to(torch.uint8).argsort(dim=1, stable=True)[:, : self.sinks]
            positions_BS0 = sinks.positions_BMP.new_empty(*order_BS.shape, 0)
            sinks = push(sinks, taken(kept_BNY, order_BS), positions_BS0, later_BN.gather(1, order_BS))
        recent, left_BJXbE, count_B = self._recent(state.recent, kept_BNY, padding_BN | (rank_BN <= self.sinks))
        empty_BJ = torch.arange(left_BJXbE.shape[1], device=count_B.device) >= count_B[:, None]
        if self.grows:
            kept = left_BJXbE.dtype if self.dtype is None else DTYPES[self.dtype]
            more: dict[str, Any] = {"capacity": self.capacity, "dtype": kept, "folder": self.folder}
            blocks_BCXbE: Tensor = append(state.blocks_BCXbE, left_BJXbE, state.written_B, count_B, **more)
        else:
            old = (state.blocks_BCXbE,)
            (blocks_BCXbE,), _ = write_rings(old, (left_BJXbE,), state.written_B, empty_BJ, dim=1)
        after = state._replace(
            sinks=sinks, recent=recent, blocks_BCXbE=blocks_BCXbE, written_B=state.written_B + count_B
        )
        return x_BND, after if self.retrieve == "prompts" else self._choosing(after, traces), None

    def _recent(self, recent: Rows, kept_BNY: Tensor, padding_BN: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """The recent tokens after a segment; blocks that leave, (B, J, X, b, E), and how many of them are real."""
        slots, n, heads = recent.hidden_BMD.shape[1], kept_BNY.shape[1], 2 * self.depth * self.stored_heads[0]
        both_BLY = torch.cat([recent.hidden_BMD, kept_BNY.to(recent.hidden_BMD.dtype)], 1)
        valid_BL = torch.cat([recent.valid_BM, ~padding_BN], 1)
        order_BL, total_B = valid_BL.to(torch.uint8).argsort(dim=1, stable=True), valid_BL.sum(1)  # real ones last
        most = (slots + n - self.recent) // self.block
        count_B = torch.div(total_B - self.recent, self.block, rounding_mode="floor").clamp(min=0)
        place_L = torch.arange(most * self.block, device=count_B.device)
        place_BL = (slots + n - total_B[:, None] + place_L).clamp(max=slots + n - 1)
        left_BLY = taken(both_BLY, order_BL.gather(1, place_BL))
        left_BJXbE = left_BLY.unflatten(1, (most, self.block)).unflatten(-1, (heads, -1)).transpose(2, 3)
        count_after_B = total_B - count_B * self.block
        hidden_BWY = torch.where(last_slots(count_after_B, slots)[..., None], taken(both_BLY, order_BL[:, n:]), 0)
        return Rows(hidden_BWY, recent.positions_BMP, count_after_B), left_BJXbE, count_B

    def _choosing(self, state: BlockRetrievalState, traces: Sequence[Trace]) -> BlockRetrievalState:
        """The state with the blocks of the best scores for the last queries; rows without a token keep theirs."""
        places = state.blocks_BCXbE.shape[1]
        if not places:
            return state
        q_BVGRE = last_queries(traces, self.stored_heads[0], 1 if self.score == "attention" else self.observe)
        # In order of age: the oldest block that is kept, and those after it.
        oldest_B1 = (state.written_B[:, None] - places).clamp(min=0)
        number_BC = oldest_B1 + torch.arange(places, device=oldest_B1.device)
        real_BC = number_BC < state.written_B[:, None]
        score_BCV = scores(self.score, q_BVGRE, state.blocks_BCXbE, state.written_B)
        score_BCV = score_BCV.take_along_dim((number_BC % places)[..., None], 1)
        score_BUC = (score_BCV.sum(-1, keepdim=True) if self.vote == "layers" else score_BCV).transpose(1, 2)
        real_BUC = real_BC[:, None].expand_as(score_BUC)
        index_BUK, real_BUK = best(score_BUC, real_BUC, self.topk)
        chosen_BUK = torch.where(real_BUK, number_BC[:, None].expand_as(score_BUC).gather(2, index_BUK), -1)
        chosen_BUK = F.pad(chosen_BUK, (self.topk - chosen_BUK.shape[-1], 0), value=-1)
        padding_BN = traces[0].query.padding_BN
        if padding_BN is not None:
            chosen_BUK = torch.where(padding_BN.all(1)[:, None, None], state.chosen_BUK, chosen_BUK)
        return state._replace(chosen_BUK=chosen_BUK)

    def ask(self, state: BlockRetrievalState, tokens: Tokens, through: BlockRunner) -> BlockRetrievalState:
        opened = self.open(state, tokens, through.layers)
        _, traces = through(self.enter(opened, tokens), write=False)
        return self._choosing(state, traces)
