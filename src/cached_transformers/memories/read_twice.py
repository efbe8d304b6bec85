"""ReadTwice (Zemlyanskiy et al. 2021, arXiv:2105.04241; google-research/google-research, readtwice).

A document is read in blocks, twice. The first read makes summaries of every block; the second attends them all.

    first read:   s_b = summary(H_b),  H_b = model(block b)                                          for every block b
    second read:  every layer, or one:  x + W_o sum_g softmax([q . k_0, q . k_g + bias(g - b)] / sqrt(E))_g v_g

    new_layers:   new layers(LayerNorm(H_b + W_o sum_g softmax(..)_g v_g)),   the released "cross_attend_once"

k_g and v_g are made of the summaries, k_0 is a learned key for "nothing", with the value 0. The second read trains the
first, where the `bptt` of the `SegmentLoop` (passes=2) covers the document. The original's "from_scratch" has the
summaries beside the keys of each layer (`attention="joint"`). A block is a segment, known by its first position.

Legend: B rows, N tokens, K summaries of a block, M slots, H heads, E head width, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.incremental import enter_segment
from cached_transformers.interfaces.memory import BlockRunner, Entry, ModelMemory, Offer, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES

from .memformer import SlotAttention
from .parts.fifo_store import Rows, empty_rows, push, recalled


class SideAttention(SlotAttention):
    """Attention of the tokens over a table of summaries, with the choice of attending nothing.

    Args:
        width: D. heads: H.
        top_k: each token and head attends only its best `top_k` summaries; None for all.
        clip: distances between blocks, up to this one, have a trained logit per head; None for no such bias.

    Cost in multiply-adds: 2 N D^2 + 2 M D^2 (projections) + 2 N M D (attention).
    """

    def __init__(self, width: int, heads: int, *, top_k: int | None = None, clip: int | None = None) -> None:
        super().__init__(width, heads, bias=False)  # what attends nothing must add nothing
        self.top_k, self.clip = top_k, clip
        self.nothing_HE = nn.Parameter(0.02 * torch.randn(heads, width // heads))
        self.place_bias = None if clip is None else nn.Parameter(torch.zeros(heads, 2 * clip + 1))

    def forward(  # type: ignore[override]
        self, x_BND: Tensor, slots_BMD: Tensor, valid_BM: Tensor, places_BM: Tensor
    ) -> Tensor:
        """Read of the valid slots; `places_BM` counts blocks from the tokens' own."""
        return self.read(x_BND, *self.open(slots_BMD, valid_BM, places_BM))

    def _asking(self, x_BND: Tensor) -> Tensor:
        """Input of the queries."""
        return self.norm(x_BND)  # type: ignore[no-any-return]

    def open(  # type: ignore[override]
        self, slots_BMD: Tensor, valid_BM: Tensor, places_BM: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values (B, H, M, E) of the slots, which are valid, and their biases (B, H, 1, M)."""
        bias = None
        if self.clip is not None and self.place_bias is not None:
            column_BM = places_BM.clamp(-self.clip, self.clip) + self.clip
            bias = self.place_bias[:, column_BM].transpose(0, 1)[:, :, None]
        return *super().open(slots_BMD, valid_BM), bias

    def read(self, x_BND: Tensor, *opened: Any) -> Tensor:
        k, v, valid_BM, bias_BH1M = opened
        q = self._heads(self.query(self._asking(x_BND)))
        logits_BHNM = q @ k.mT
        if bias_BH1M is not None:
            logits_BHNM = logits_BHNM + bias_BH1M.to(q.dtype)
        logits_BHNM = logits_BHNM.masked_fill(~valid_BM[:, None, None], -torch.inf)
        if self.top_k is not None and self.top_k < logits_BHNM.shape[-1]:
            best = logits_BHNM.topk(self.top_k, -1)
            logits_BHNM = torch.full_like(logits_BHNM, -torch.inf).scatter(-1, best.indices, best.values)
        nothing_BHN1 = (q * self.nothing_HE[:, None].to(q.dtype)).sum(-1, keepdim=True)
        logits = torch.cat([nothing_BHN1, logits_BHNM], -1) / q.shape[-1] ** 0.5
        out = logits.softmax(-1)[..., 1:].to(v.dtype) @ v
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SideAttentionOnce(SideAttention):
    """The same before a block, with a residual and a norm after it: a token that reads nothing is normalised."""

    in_front = True

    def _asking(self, x_BND: Tensor) -> Tensor:
        return x_BND

    def read(self, x_BND: Tensor, *opened: Any) -> Tensor:
        return self.norm(x_BND + super().read(x_BND, *opened))  # type: ignore[no-any-return]


class ReadTwiceState(NamedTuple):
    """The table of summaries, with (position of the block's first token, number of the block), and blocks read once."""

    table: Rows
    blocks_B: Tensor


class OpenedTable(NamedTuple):
    """Read of the table by the blocks during a segment, in one of two ways."""

    contexts: list[Offer | None] | None
    slots: tuple[Tensor, Tensor, Tensor] | None


@MEMORIES.register(
    "read_twice",
    paper="arXiv:2105.04241",
    title="ReadTwice",
    carries="summaries of all blocks, for a second read",
    purpose="a whole document, read more than once",
    equations="second read: x + side attention over summaries s_b = summary(H_b) of the first read, and a no-op key",
    state="per row, for the whole model: M (4 D + 16) + 16 bytes",
    cost="two reads of every token; per token and reading layer 2 D^2 (1 + M / N) + 2 M D multiply-adds",
    reads_again="its segment for each written token, with block_length",
    reach="all blocks of a document that the table holds, in both directions with scope='document'",
    gradient="through the summaries into the first read of every block that bptt covers",
    without={"slots": "attention='joint'"},
    probe=Probing(fixed(scope="earlier", first_read="plain", summary="mean"), passes=2),
)
class ReadTwice(ModelMemory):
    """Summaries of all blocks of a document, made by a first read and attended in a second (`SegmentLoop(passes=2)`).

    A block that a row has read is known by its position, so that both passes must cut a document alike, and a row that
    begins another document must be reset. In one pass every block is new: with `first_read="running"` it reads the
    summaries of earlier blocks, a recurrent form that one pass suffices for. A full table drops the oldest summaries.

    Args:
        width: D. heads: H.
        slots: M, summaries that the table holds; with one a block, the paper's 256 blocks.
        summary: of the last layer's outputs: "cls" (the token that has seen the whole block: the last one in a causal
            model, else the first), "ends" (a linear map of the first and the last) or "mean".
        every: make a summary of each `every` tokens; None for one a block.
        after: done to a summary: "none", "tanh" (of a linear map) or "place" (the block's number embedded, layer norm;
            numbers from M on share the last embedding).
        scope: blocks that the second read sees: all blocks of the "document", the "others" than its own, or the
            "earlier" ones. None for "earlier" in a causal model and "document" in others. In a causal language model
            "document" and "others" show each token the words it has to predict: only for targets that are not among
            the inputs.
        first_read: "plain" or "running", which needs scope="earlier"; None for "running" there and "plain" elsewhere.
        attention: "side" (a sublayer of its own) or "joint" (keys and values of each layer's own attention).
        layer: index of the one layer that reads, negative ones from the end; None for every layer.
        new_layers: layers of the second read alone, the last ones, as released: the table is read once, before
            them, and summaries are of the outputs of those below, which never meet it. With scope="earlier" one pass
            is then as good as two. 0 for a second read by all layers. The release has top_k=100.
        top_k, clip: see `SideAttention`.
        block_length: tokens of a block, where a segment holds several; None for whole segments.
        causal, depth: of the model, which hands them over.
    """

    needs = frozenset({"state", "slots"})

    def __init__(
        self,
        width: int,
        heads: int,
        slots: int = 256,
        *,
        summary: Literal["cls", "ends", "mean"] = "cls",
        every: int | None = None,
        after: Literal["none", "tanh", "place"] = "none",
        scope: Literal["document", "others", "earlier"] | None = None,
        first_read: Literal["plain", "running"] | None = None,
        attention: Literal["side", "joint"] = "side",
        layer: int | None = None,
        new_layers: int = 0,
        top_k: int | None = None,
        clip: int | None = None,
        block_length: int | None = None,
        causal: bool = True,
        depth: int = 1,
    ) -> None:
        super().__init__()
        at_least_one(slots=slots, every=every, top_k=top_k, clip=clip, block_length=block_length)
        scope = scope or ("earlier" if causal else "document")
        first_read = first_read or ("running" if scope == "earlier" else "plain")
        if first_read == "running" and scope != "earlier":
            raise ValueError(
                f"first_read='running' meets earlier blocks alone, scope={scope!r} wants others too; take "
                "first_read='plain' and two passes, or scope='earlier'"
            )
        if layer is not None and not -depth <= layer < depth:
            raise ValueError(
                f"layer={layer} is none of the {depth} layers; take {-depth} to {depth - 1}, or None for all"
            )
        if attention == "joint" and (top_k is not None or clip is not None):
            raise ValueError(
                f"top_k={top_k} and clip={clip} belong to a side attention; take attention='side', or leave them out"
            )
        if not 0 <= new_layers < depth:
            raise ValueError(
                f"new_layers={new_layers} must leave layers for the first read, of {depth}; take 0 to {depth - 1}"
            )
        if new_layers and (attention == "joint" or layer is not None):
            given = "attention='joint'" if attention == "joint" else f"layer={layer}"
            raise ValueError(
                f"new_layers={new_layers} are read to once, before them, which {given} contradicts; leave one out"
            )
        if attention == "joint":
            self.needs = frozenset({"state", "context"})
        if new_layers:
            self.needs = frozenset({"state", "slots_in_front", "layer_traces"})
        if block_length is not None:
            self.needs = self.needs | {"pieces"}
            self.whole_segments = f"block_length={block_length} cuts a segment into blocks"
        self.width, self.heads, self.slots, self.every, self.block_length = width, heads, slots, every, block_length
        self.summary, self.scope, self.first_read, self.attention = summary, scope, first_read, attention
        self.top_k, self.clip, self.causal_model, self.depth = top_k, clip, causal, depth
        self.rereads = scope == "earlier"
        self.first_layers = depth - new_layers  # of the first read
        self.readers = range(depth) if layer is None else (layer % depth,)
        if new_layers:
            self.readers = (self.first_layers,)
        self.norm = nn.LayerNorm(width)
        self.ends = nn.Linear(2 * width, width) if summary == "ends" else None
        self.tanh = nn.Linear(width, width) if after == "tanh" else None
        self.place = nn.Embedding(slots, width) if after == "place" else None
        self.place_norm = nn.LayerNorm(width) if after == "place" else None

    def slot_attention(self, index: int) -> SideAttention | None:
        if self.attention == "joint" or index not in self.readers:
            return None
        kind = SideAttention if self.first_layers == self.depth else SideAttentionOnce
        return kind(self.width, self.heads, top_k=self.top_k, clip=self.clip)

    def init_state(self, batch_size: int, like: Tensor) -> ReadTwiceState:
        table = empty_rows(batch_size, self.slots, self.width, like, channels=2)
        return ReadTwiceState(table, torch.zeros_like(table.count_B))

    def run(
        self, state: ReadTwiceState, tokens: Tokens, through: BlockRunner
    ) -> tuple[list[Tensor], ReadTwiceState, None]:
        outputs = []
        for block in tokens.split(self.block_length or tokens.x_BND.shape[1]):
            x_BND, traces = through(enter_segment(self, state, block, through.layers))
            x_BND, state, _ = self.exit(state, x_BND, traces)
            outputs.append(x_BND)
        return outputs, state, None

    def open(self, state: ReadTwiceState, tokens: Tokens, layers: Sequence[Projections]) -> OpenedTable:
        begin_BM, number_BM = state.table.positions_BMP.unbind(-1)
        visible_BM, _, number_B = self._look(state, tokens.positions_BNP)
        if self.attention == "joint":
            table_BMD, begin_BM1 = state.table.hidden_BMD, begin_BM[..., None]
            summaries = partial(recalled, hidden_BMD=table_BMD, positions_BMP=begin_BM1, valid_BM=visible_BM)
            return OpenedTable([summaries if index in self.readers else None for index in range(self.depth)], None)
        return OpenedTable(None, (state.table.hidden_BMD, visible_BM, number_BM - number_B[:, None]))

    def enter(self, opened: OpenedTable, tokens: Tokens) -> Entry:
        return Entry(tokens, opened.contexts, opened.slots)

    def next_pass(self, before: Any, after: Sequence[Any]) -> Any:
        # The same positions again: they identify the blocks of the first read.
        return before._replace(model=after[-1].model)

    def _look(self, state: ReadTwiceState, positions_BNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The slots that this block sees, whether it is new to the row, and its number in the document."""
        begin_BM, number_BM = state.table.positions_BMP.unbind(-1)
        here_B1 = positions_BNP[:, 0, :1].expand(begin_BM.shape[0], -1)
        valid_BM = state.table.valid_BM
        later_BM, here_BM = valid_BM & (begin_BM >= here_B1), valid_BM & (begin_BM == here_B1)
        new_B = ~later_BM.any(1)
        first_B = torch.where(later_BM, number_BM, state.blocks_B[:, None]).amin(1)
        number_B = first_B - (~new_B & ~here_BM.any(1)).to(first_B.dtype)
        visible_BM = valid_BM
        if self.scope == "earlier":
            visible_BM = valid_BM & ~later_BM
        elif self.scope == "others":
            visible_BM = valid_BM & ~here_BM
        if self.first_read == "plain":
            visible_BM = visible_BM & ~new_B[:, None]
        return visible_BM, new_B, number_B

    def exit(
        self, state: ReadTwiceState, x_BND: Tensor, traces: Sequence[Trace]
    ) -> tuple[Tensor, ReadTwiceState, None]:
        query = traces[0].query
        assert query.positions_BNP is not None
        _, new_B, number_B = self._look(state, query.positions_BNP)
        first_BND = x_BND if self.first_layers == self.depth else traces[self.first_layers - 1].y_BND
        summary_BKD, filled_BK = self._summaries(first_BND, query.padding_BN, number_B)
        here_B = query.positions_BNP[:, 0, 0].expand_as(number_B)
        place_BKP = torch.stack([here_B, number_B], -1)[:, None].expand(-1, summary_BKD.shape[1], -1)
        wrote_BK = filled_BK & new_B[:, None]
        table = push(state.table, summary_BKD, place_BKP, ~wrote_BK)
        return x_BND, ReadTwiceState(table, state.blocks_B + wrote_BK.any(1)), None

    def _summaries(self, x_BND: Tensor, padding_BN: Tensor | None, number_B: Tensor) -> tuple[Tensor, Tensor]:
        """Summaries (B, K, D) of the block, and which of them have any token."""
        rows, n = x_BND.shape[:2]
        valid_BN = x_BND.new_ones(rows, n, dtype=torch.bool) if padding_BN is None else ~padding_BN
        h_BND = self.norm(torch.where(valid_BN[..., None], x_BND, 0))
        rank_BN, count_B = valid_BN.cumsum(1) - 1, valid_BN.sum(1)
        every = min(self.every or n, n)
        first_K = torch.arange(0, n, every, device=x_BND.device)
        last_BK = torch.minimum(first_K + every, count_B[:, None]) - 1

        def take(rank_BK: Tensor) -> Tensor:
            return (valid_BN[:, None] & (rank_BN[:, None] == rank_BK[..., None])).to(h_BND.dtype) @ h_BND

        if self.summary == "mean":
            span_BKN = valid_BN[:, None] & (rank_BN[:, None] >= first_K[:, None])
            span_BKN = span_BKN & (rank_BN[:, None] <= last_BK[..., None])
            size_BK1 = span_BKN.sum(-1, keepdim=True).clamp(min=1)
            summary_BKD = (span_BKN.to(h_BND.dtype) @ h_BND) / size_BK1.to(h_BND.dtype)
        elif self.ends is not None:
            summary_BKD = self.ends(torch.cat([take(first_K.expand_as(last_BK)), take(last_BK)], -1))
        else:
            summary_BKD = take(last_BK if self.causal_model else first_K.expand_as(last_BK))
        if self.tanh is not None:
            summary_BKD = torch.tanh(self.tanh(summary_BKD))
        if self.place is not None and self.place_norm is not None:
            place_B1D = self.place(number_B.clamp(0, self.slots - 1))[:, None]
            summary_BKD = self.place_norm(summary_BKD + place_B1D)
        return summary_BKD, last_BK >= first_K
