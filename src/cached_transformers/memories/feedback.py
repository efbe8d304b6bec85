"""Feedback Transformer (Fan et al. 2020, arXiv:2002.09402; github.com/facebookresearch/transformer-sequential).

One vector per past token, mixed of all its layers, is what every layer of later tokens attends: the lowest layer sees
the highest abstraction of the past, at the price that tokens are read one after the other.

    m_j = sum_n softmax(w)_n x_j^n,  n = 0 (embedding) .. L
    attention of token i in every layer: keys and values of m_{i-M} .. m_{i-1}, not of itself
    logit_ij = (q_i . k_j + q_i . e_{i-j}) / sqrt(E),  e shared by layers and heads

There is no exact way to read several tokens at once: layer 1 of token i + 1 needs m_i, hence all layers of token i.

Reach: unbounded, in a single layer already.

Legend: B rows, N tokens, M slots, H heads, E head width, D model width, P position channels, S sets of keys and values
(one, or one a layer), W = 2 S D channels of them, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import (
    BlockRunner,
    Context,
    Entry,
    LayerMemory,
    ModelMemory,
    Projections,
    Tokens,
    Trace,
)
from cached_transformers.interfaces.probing import Probing, whole_episode
from cached_transformers.memories.parts.late_gradients import late_gradients
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Rows, empty_rows, push, right_before, side_by_side
from .parts.options import NO_MEMORY
from .parts.sliding import Window

own_word("context_alone", "layers whose tokens attend the memory and nothing of their own segment")
own_word("pieces", "a segment that is read piece by piece, so that no token sees a later piece")


class LearnedDistances(Positions):
    """A trained vector for each distance M .. 1, whose product with the query joins the logit."""

    def __init__(self, table_EM: nn.Parameter) -> None:
        super().__init__()
        self.table_EM = table_EM

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        logits_BHNM = q_BHNE @ self.table_EM / math.sqrt(q_BHNE.shape[-1])
        length, n, keys = self.table_EM.shape[1], q_BHNE.shape[2], k_positions_BMP.shape[1]
        if causal_run and n == 1 and keys == length + 1:
            return logits_BHNM  # distances M .. 1; never the token itself
        distance_BNM = (q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]).clamp(1, length)
        index_BHNM = (length - distance_BNM)[:, None].expand(*logits_BHNM.shape[:3], keys)
        return logits_BHNM.gather(-1, index_BHNM)


class OpenedMixtures(NamedTuple):
    """During a segment: keys and values of the last tokens, in empty slots those of a vector of zeros (`zero_11W`).

    Where there is a `window`, they are there, and of `pairs` nothing counts but positions and counter. `new` holds
    mixture, position and padding of each token of this segment, `written_B` counts those that are real.
    """

    pairs: Rows
    window: Window | None
    zero_11W: Tensor
    new: tuple[tuple[Tensor, Tensor, Tensor | None], ...]
    written_B: Tensor
    layers: Sequence[Projections]


@MEMORIES.register(
    "feedback",
    paper="arXiv:2002.09402",
    title="Feedback Transformer",
    carries="one vector a token, mixed of all layers",
    purpose="higher layers' results in lower layers",
    equations="m_j = sum_n softmax(w)_n x_j^n; every layer of token i attends m_{i-M} .. m_{i-1}, and not itself",
    state="per row: M (4 D + 8) + 8 bytes; with keep='kv' M (8 S D + 8) + 8",
    cost="instead of self-attention, per token and layer: 3 M D; once (shared) or per layer: 2 D^2 (1 + M / N) "
    "multiply-adds; tokens in sequence",
    reach="unbounded, through the mixtures of the last M tokens",
    gradient="through the memory of the segments of one bptt window",
    exact_when="always: how a stream is cut changes nothing (without official_renorm)",
    probe=Probing(whole_episode),
)
class Feedback(ModelMemory):
    """The past as one vector a token, mixed of all layers, which every layer attends instead of the segment.

    Keys and values of the M mixtures are recomputed at each segment, so that projections learn from them. Training
    keeps 4 L M H bytes a token; with padding, another attention than softmax, attention dropout, or positions that turn
    the keys, 8 M D and more. A compiled step holds the graph of every token: take short segments.

    Args:
        width: D. heads: H. depth: layers, of the model. length: M, tokens that are attended.
        shared_kv: keys and values made once, by the first layer's norm and projections, for all layers (which then have
            projections of queries alone); False makes them per layer.
        positions: "learned" vectors for distances, one table for all layers; "relative" as Transformer-XL, per layer;
            None for the model's scheme.
        start: the memory of the first `length` tokens: an "empty" one, from which the first token gets
            nothing; or vectors of "zeros", which are attended, as the authors' code has it.
        keep: the carried tensors: "hidden" mixtures, or their keys and values ("kv"), which makes segments
            of one token cheap (no 2 D^2 M), but from which old tokens no longer train the projections.
        official_renorm: between segments, normalise the segment's mixtures with the first layer's norm, as the authors'
            code does in a pre-norm model (where it is then normalised twice); results then depend on how a text is cut.
    """

    needs = frozenset({"state", "context", "context_alone", "layer_traces", "pieces"})

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int = 1,
        length: int = 128,
        *,
        shared_kv: bool = True,
        positions: Literal["learned", "relative"] | None = "learned",
        start: Literal["empty", "zeros"] = "empty",
        keep: Literal["hidden", "kv"] = "hidden",
        official_renorm: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(NO_MEMORY, length=length, depth=depth)
        if official_renorm and keep == "kv":
            raise ValueError("official_renorm=True normalises hidden states, which keep='kv' drops; take keep='hidden'")
        self.width, self.heads, self.length, self.shared_kv = width, heads, length, shared_kv
        self.positions, self.start, self.keep, self.official_renorm = positions, start, keep, official_renorm
        self.sets = 1 if shared_kv else depth
        self.weight = nn.Parameter(torch.zeros(depth + 1))
        self.table_EM = None
        if positions == "learned":
            self.table_EM = nn.Parameter(torch.randn(width // heads, length) / math.sqrt(width // heads))

    def layer_memory(self, index: int) -> LayerMemory:
        memory = LayerMemory()
        if index == 0 or not self.shared_kv:
            memory.needs = frozenset({"context"})
        return memory

    def position_scheme(self) -> Positions | None:
        if self.table_EM is not None:
            return LearnedDistances(self.table_EM)
        return RelativePositions(self.heads, self.width // self.heads) if self.positions == "relative" else None

    def init_state(self, batch_size: int, like: Tensor) -> Rows:
        channels = self.width if self.keep == "hidden" else 2 * self.sets * self.width
        return empty_rows(batch_size, self.length, channels, like)

    def run(self, state: Rows, tokens: Tokens, through: BlockRunner) -> tuple[list[Tensor], Rows, None]:
        opened, outputs = self.open(state, tokens, through.layers), []
        if tokens.padding_BN is None and not torch.compiler.is_compiling():
            opened = opened._replace(window=Window(self._by_head(opened.pairs), tokens.x_BND.shape[1]))
        with late_gradients():
            for token in tokens.split(1):
                x_BND, traces = through(self.enter(opened, token))
                opened = self.advance(opened, x_BND, traces)
                outputs.append(x_BND)
        return outputs, self._close(state, opened), None

    def open(self, state: Rows, tokens: Tokens, layers: Sequence[Projections]) -> OpenedMixtures:
        zero_11W = side_by_side(*self._projected(state.hidden_BMD.new_zeros(1, 1, self.width), layers))
        made_BMW = state.hidden_BMD
        if self.keep != "kv":
            made_BMW = side_by_side(*self._projected(state.clean_BMD, layers))
        pairs = _filled(state._replace(hidden_BMD=made_BMW), zero_11W)
        return OpenedMixtures(pairs, None, zero_11W, (), torch.zeros_like(state.count_B), layers)

    def _close(self, state: Rows, opened: OpenedMixtures) -> Rows:
        """The state after the segment."""
        if self.keep == "kv":
            pairs = opened.pairs
            if opened.window is not None:
                pairs = pairs._replace(hidden_BMD=side_by_side(*opened.window.seen))
            return pairs._replace(hidden_BMD=pairs.clean_BMD)
        mixtures, positions, paddings = zip(*opened.new, strict=True)
        padding_BN = None if paddings[0] is None else torch.cat(paddings, 1)
        rows = push(state, torch.cat(mixtures, 1), torch.cat(positions, 1), padding_BN)
        if not self.official_renorm:
            return rows
        new_BM = torch.arange(self.length, device=rows.count_B.device) >= self.length - opened.written_B[:, None]
        again_BMD = opened.layers[0].norm(rows.clean_BMD).to(rows.hidden_BMD.dtype)
        return rows._replace(hidden_BMD=torch.where(new_BM[..., None], again_BMD, rows.hidden_BMD))

    def _projected(self, mixture_BND: Tensor, layers: Sequence[Projections]) -> list[Tensor]:
        """(B, H, N, E) each: keys and values of each set."""
        return [t for layer in layers[: self.sets] for t in layer.project_kv(mixture_BND)]

    def _by_head(self, pairs: Rows) -> list[Tensor]:
        """The same for stored mixtures."""
        return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in pairs.hidden_BMD.chunk(2 * self.sets, -1)]

    def enter(self, opened: OpenedMixtures, tokens: Tokens) -> Entry:
        pairs, valid_BM = opened.pairs, opened.pairs.valid_BM
        # An attended empty slot takes the position of the missing token.
        before_BMP = right_before(tokens.positions_BNP[:, :1], self.length)
        positions_BMP = torch.where(valid_BM[..., None], pairs.positions_BMP, before_BMP)
        if self.start == "zeros":
            valid_BM = torch.ones_like(valid_BM)
        heads = self._by_head(pairs) if opened.window is None else opened.window.seen
        attends: Any = [None] * self.sets if opened.window is None else opened.window.attends(valid_BM)
        contexts = [
            Context(k, v, positions_BMP, valid_BM, consecutive=True, clean=True, attend=attend)
            for k, v, attend in zip(heads[::2], heads[1::2], attends, strict=True)
        ]
        return Entry(tokens, contexts * len(opened.layers) if self.shared_kv else contexts)

    def advance(self, opened: OpenedMixtures, x_BND: Tensor, traces: Sequence[Trace]) -> OpenedMixtures:
        positions_BNP, padding_BN = traces[0].query.positions_BNP, traces[0].query.padding_BN
        assert positions_BNP is not None
        layers_LBND = torch.stack([traces[0].x_BND, *(trace.y_BND for trace in traces)])
        mixture_BND = (self.weight.softmax(0)[:, None, None, None] * layers_LBND).sum(0)
        new = self._projected(mixture_BND, opened.layers)
        if opened.window is not None:
            opened.window.slide(new)
            nothing = opened.pairs._replace(hidden_BMD=opened.pairs.hidden_BMD[..., :0])
            pairs = push(nothing, x_BND[..., :0], positions_BNP)
        else:
            pairs = push(opened.pairs, side_by_side(*new), positions_BNP, padding_BN)
        if padding_BN is not None:
            pairs = _filled(pairs, opened.zero_11W)  # padding leaves rows that are not full with zeros
        written = x_BND.shape[1] if padding_BN is None else (~padding_BN).sum(1)
        mixtures = (*opened.new, (mixture_BND, positions_BNP, padding_BN))
        return opened._replace(pairs=pairs, new=mixtures, written_B=opened.written_B + written)


def _filled(pairs: Rows, zero_11W: Tensor) -> Rows:
    """With keys and values of a vector of zeros in the empty slots."""
    hidden_BMD = torch.where(pairs.valid_BM[..., None], pairs.hidden_BMD, zero_11W.to(pairs.hidden_BMD.dtype))
    return pairs._replace(hidden_BMD=hidden_BMD)
