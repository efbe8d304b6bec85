"""Cache-based recurrent transformer network (github.com/xyz961014/longterm, folder CRTN, docs/method-XL.tex, 2019).

A store of whole segments, each under one key; a query picks some, and the layers attend them as Transformer-XL
(arXiv:1901.02860) attends its memory, with values weighted by how well the keys match.

    alpha, Z  = topk(softmax(summary(X) Keys^T))                      Z: the inputs of all layers over a stored segment
    layer n   : keys of [SG(Z^{n-1}), h^{n-1}],  values of [alpha SG(Z^{n-1}), h^{n-1}],  positions as distances
    renew     : drop the oldest segment, store SG(h^{0..m-1}) under the key summary(h^m)

SG covers Z, not alpha, which trains the summary. X in the query is the segment before by default: with the text's own
X_t the last token chooses the first one's regions.

Legend: B rows, N tokens, L places of a segment, R regions, S = R L slots in the store, M slots recalled, V layers,
D model width, K key width, P position channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one, insist
from cached_transformers.interfaces.memory import BlockRunner, Entry, ModelMemory, Offer, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.memories.parts.fifo_store import recalled, right_before
from cached_transformers.memories.parts.options import NO_MEMORY, check_choices, check_positive
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.registry import MEMORIES

from .store import CRTNState, choose, masked_softmax, pack, renew, stored, windows
from .summaries import make_summary


def _all_regions(segment: int, distance: int, depth: int) -> dict[str, int]:
    regions = distance + 1
    return {"segment": segment, "regions": regions, "topk": regions, "scale": True, "rescale": True}


class OpenedRegions(NamedTuple):
    """Context of the layers during a segment, and the position of its first token."""

    contexts: list[Offer]
    first: Tensor


@MEMORIES.register(
    "crtn",
    paper="github.com/xyz961014/longterm",
    title="CRTN",
    carries="whole segments under a key each; the best few are recalled",
    purpose="a choice out of a long past",
    equations="alpha, Z = topk(softmax(summary(X) Keys^T)); keys of [SG(Z), h], values of "
    "[alpha SG(Z), h] in every layer",
    state="per row: R (4 L S D + 4 K + 8 S + 8) + 4 S D bytes, R = regions + short_memory, S = segment, K = key_width",
    cost="per token and layer: 2 D^2 M / N + 2 M D multiply-adds, M = (topk + short_memory) S, and for relative "
    "positions D^2 + H D (M + N) (packed: M D); compute_first: twice the model; scope='token': M = R S, one after the "
    "other, and the product with the values regions + 1 times",
    reads_again="its segment for each written token, with scope='token' or 'segment'",
    reach="regions x segment tokens, any of them at once",
    gradient="none into values; through alpha into keys, queries and the summary, as far as bptt reaches",
    without={"bias": "scope='previous'", "bidirectional": "scope='previous'"},
    probe=Probing(_all_regions, lambda *task: {"segment": one_segment(*task)["length"], "regions": 1, "topk": 1}),
)
class CRTN(ModelMemory):
    """Whole past segments under one key each; the best few are recalled in all layers, weighted by their match.

    Args:
        width: D. heads: H. depth: V, layers of the model.
        segment: L, places of a region; no segment of the stream may be longer.
        regions: how many segments are kept to choose from. topk: how many of them are recalled.
        query: "standard" asks with embeddings, "compute_first" with the top layer of a first run without the regions.
        scope: whose embeddings (or top layer): "previous" segment; "token", each token with the `segment` tokens that
            end with it; "segment", the present one as a whole, which shows every token the rest of its segment.
        allow_leak: let a causal model have scope="segment", for comparisons with the text; its loss means nothing.
        summary: "linear" (flatten, linear, ReLU), "mlp" (two of these), "bilstm", "last" (token) or "mean" (of tokens).
        key_width: K; D by default.
        weighted: multiply values by alpha. Without it nothing trains the summary.
        alpha_grad: gradient through alpha. False is the text to the letter.
        renormalise: "softmax", a second one over the alpha of recalled regions, or "none".
        rescale: multiply alpha by the number of regions recalled, so that the mean is 1 where alpha sums to 1. Without
            it alpha sums to 1 at most, and recalled regions have little weight in a fresh model.
        scale: divide scores by the root of K. temperature: divides scores.
        empty: empty regions are "masked", or "compete" for alpha and the first `topk` places with keys of zeros.
        placed: recalled tokens are at their own positions ("slot"), or right before the segment ("packed").
        short_memory: newest segments that are always recalled, unweighted, and no regions to choose yet (the authors'
            draft paper, there in tokens). The first run of "compute_first" sees them.
        relative: see `TransformerXL`.

    The authors' last code has query="compute_first", scope="token", summary="last", short_memory=1,
    renormalise="softmax", rescale=True and scale=True; its distances go wrong across unrecalled regions.
    """

    needs = frozenset({"state", "context", "layer_traces"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        depth: int,
        segment: int = 80,
        regions: int = 5,
        topk: int = 2,
        query: str = "standard",
        scope: str = "previous",
        allow_leak: bool = False,
        summary: str = "linear",
        key_width: int | None = None,
        weighted: bool = True,
        alpha_grad: bool = True,
        renormalise: str = "none",
        rescale: bool = False,
        scale: bool = False,
        temperature: float = 1.0,
        empty: str = "masked",
        placed: str = "slot",
        short_memory: int = 0,
        relative: bool = True,
    ) -> None:
        super().__init__()
        at_least_one(NO_MEMORY, depth=depth, segment=segment, regions=regions, topk=topk)
        if topk > regions:
            raise ValueError(f"topk={topk} regions cannot be recalled of regions={regions}; take topk <= regions")
        at_least_one("; 0 is for none", least=0, short_memory=short_memory)
        check_positive(temperature=temperature)
        check_choices(
            query=(query, ("standard", "compute_first")),
            scope=(scope, ("previous", "token", "segment")),
            renormalise=(renormalise, ("none", "softmax")),
            empty=(empty, ("masked", "compete")),
            placed=(placed, ("slot", "packed")),
        )
        if placed == "packed" and scope == "token":
            raise ValueError("placed='packed' would give each token its own distances; take 'slot' with scope='token'")
        if allow_leak and scope != "segment":
            raise ValueError(f"allow_leak=True is for scope='segment'; scope={scope!r} shows no token its future")
        self.width, self.heads, self.depth, self.relative = width, heads, depth, relative
        self.segment, self.regions, self.topk, self.short_memory = segment, regions, topk, short_memory
        self.query, self.scope, self.empty, self.placed = query, scope, empty, placed
        self.weighted, self.alpha_grad, self.renormalise, self.rescale = weighted, alpha_grad, renormalise, rescale
        if scope == "token":
            self.needs = self.needs | {"bias"}  # each token sees the regions that it chose
        if scope != "previous":
            self.whole_segments = f"scope={scope!r} asks with other tokens, too"
        if scope == "segment" and not allow_leak:
            self.needs = self.needs | {"bidirectional"}
        self.summary = make_summary(summary, segment, width, key_width)
        self.factor = 1 / (temperature * (math.sqrt(self.summary.key_width) if scale else 1))

    def position_scheme(self) -> Positions | None:
        return RelativePositions(self.heads, self.width // self.heads) if self.relative else None

    def init_state(self, batch_size: int, like: Tensor) -> CRTNState:
        regions, slots = self.regions + self.short_memory, (self.regions + self.short_memory) * self.segment
        counts = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return CRTNState(
            like.new_zeros(batch_size, regions, self.summary.key_width),
            like.new_zeros(batch_size, self.depth, slots, self.width),
            counts.new_zeros(batch_size, slots, 1),
            counts.new_zeros(batch_size, regions),
            like.new_zeros(batch_size, self.segment, self.width),
        )

    def open(self, state: CRTNState, tokens: Tokens, layers: Sequence[Projections]) -> OpenedRegions:
        offers = self._by_segment(state, tokens.positions_BNP, self._asked(state))
        return OpenedRegions(offers, tokens.positions_BNP[0, 0, 0])

    def enter(self, opened: OpenedRegions, tokens: Tokens) -> Entry:
        read = int(tokens.positions_BNP[0, -1, 0] - opened.first) + 1
        if read > self.segment:
            raise ValueError(self._too_long(read))
        return Entry(tokens, opened.contexts)

    def _too_long(self, n: int) -> str:
        return (
            f"a segment of {n} tokens, but crtn keeps segment={self.segment} for each region; cut the stream into "
            f"shorter segments (segment_length={self.segment}), or build the memory with segment={n}"
        )

    def run(self, state: CRTNState, tokens: Tokens, through: BlockRunner) -> tuple[list[Tensor], CRTNState, None]:
        x_BND, n = tokens.x_BND, tokens.x_BND.shape[1]
        if n > self.segment:
            if tokens.padding_BN is None:
                raise ValueError(self._too_long(n))
            # padding is kept nowhere
            insist(((~tokens.padding_BN).sum(1) <= self.segment).all(), self._too_long(n))
        source_BND = x_BND
        if self.query == "compute_first":
            recent = None
            if self.short_memory:
                recent = self._recall(state, tokens.positions_BNP, self._recent(x_BND.shape[0], x_BND.device))
            source_BND, _ = through(Entry(tokens, recent), write=False)
        contexts, state = self._ask(state, tokens, source_BND)
        x_BND, state, _ = self.exit(state, *through(Entry(tokens, contexts)))
        return [x_BND], state, None

    def _ask(self, state: CRTNState, tokens: Tokens, source_BND: Tensor) -> tuple[list[Offer], CRTNState]:
        """Context of the layers for the input of the queries; and the state that holds that input."""
        positions_BNP, padding_BN = tokens.positions_BNP, tokens.padding_BN
        source_BLD, size_B = pack(source_BND, padding_BN, self.segment)
        if self.scope == "token":
            x_BNLD, size_BN = windows(state, source_BND, padding_BN)
            query_BK = self.summary(x_BNLD.flatten(0, 1), size_BN.expand(x_BNLD.shape[:2]).flatten())
            offers = self._by_token(state, positions_BNP, query_BK.unflatten(0, x_BNLD.shape[:2]))
        else:
            query_BK = self.summary(source_BLD, size_B) if self.scope == "segment" else self._asked(state)
            offers = self._by_segment(state, positions_BNP, query_BK)
        wrote_B11 = (size_B > 0)[:, None, None]
        source_BLD = torch.where(wrote_B11, source_BLD.to(state.source_BLD.dtype), state.source_BLD)
        return offers, state._replace(source_BLD=source_BLD)

    def _asked(self, state: CRTNState) -> Tensor:
        """(B, K): query of the previous segment."""
        query_BK: Tensor = self.summary(state.source_BLD, state.size_BR[:, -1])
        return query_BK

    def _alpha(self, state: CRTNState, query_BNK: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, R) weights of the regions, and (B, N, topk) the chosen ones, the best first; some may be empty."""
        valid_BR = state.size_BR[:, : self.regions] > 0
        keys_BRK = torch.where(valid_BR[..., None], state.keys_BRK[:, : self.regions], 0).to(query_BNK.dtype)
        score_BNR = self.factor * query_BNK @ keys_BRK.mT
        alpha_BNR = masked_softmax(score_BNR, valid_BR[:, None] if self.empty == "masked" else None)
        # Equal weights go to the newer region; a sort that keeps the order makes this the same everywhere.
        best_BNR = alpha_BNR.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        chosen_BNR = self.regions - 1 - best_BNR[..., : self.topk]
        recalled_BNR = torch.zeros_like(alpha_BNR, dtype=torch.bool).scatter(-1, chosen_BNR, True) & valid_BR[:, None]
        if self.renormalise == "softmax":
            alpha_BNR = masked_softmax(alpha_BNR, recalled_BNR)
        if self.rescale:
            alpha_BNR = alpha_BNR * recalled_BNR.sum(-1, keepdim=True)
        alpha_BNR = torch.where(recalled_BNR, alpha_BNR, 0)
        return alpha_BNR if self.alpha_grad else alpha_BNR.detach(), chosen_BNR

    def _by_segment(self, state: CRTNState, positions_BNP: Tensor, query_BK: Tensor) -> list[Offer]:
        """All tokens recall what one query chooses."""
        alpha_BNR, chosen_BNR = self._alpha(state, query_BK[:, None])
        chosen_BC = chosen_BNR[:, 0].sort(1).values
        regions_BC = torch.cat([chosen_BC, self._recent(chosen_BC.shape[0], chosen_BC.device)], 1)
        weight_BR = F.pad(alpha_BNR[:, 0], (0, self.short_memory), value=1.0) if self.weighted else None
        return self._recall(state, positions_BNP, regions_BC, weight_BR)

    def _by_token(self, state: CRTNState, positions_BNP: Tensor, query_BNK: Tensor) -> list[Offer]:
        """Each token chooses: all regions are offered, with what each token sees of them."""
        alpha_BNR, chosen_BNR = self._alpha(state, query_BNK)
        rows, every = alpha_BNR.shape[0], torch.arange(self.regions + self.short_memory, device=chosen_BNR.device)
        visible_BNR = torch.zeros_like(alpha_BNR, dtype=torch.bool).scatter(-1, chosen_BNR, True)
        choice: dict[str, Any] = {"visible_BNR": visible_BNR, "weight_BNR": alpha_BNR if self.weighted else None}
        return self._recall(state, positions_BNP, every.expand(rows, -1), choice=choice)

    def _recent(self, rows: int, device: torch.device) -> Tensor:
        """(B, short_memory): the regions that are always recalled."""
        return torch.arange(self.regions, self.regions + self.short_memory, device=device).expand(rows, -1)

    def _recall(
        self,
        state: CRTNState,
        positions_BNP: Tensor,
        regions_BC: Tensor,
        weight_BR: Tensor | None = None,
        choice: dict[str, Any] | None = None,
    ) -> list[Offer]:
        """Context of some regions, equal for all tokens or by the `choice` of each, arguments of `choose`."""
        slots = stored(state, regions_BC)
        positions_BMP, count = slots.positions_BMP, slots.valid_BM.shape[1]
        if self.placed == "packed":
            positions_BMP = right_before(positions_BNP[:, :1, :1], count).expand_as(positions_BMP)
        # All regions, or the recent ones alone, are the tokens right before the segment, one after the other.
        whole = regions_BC.shape[1] in (self.short_memory, self.regions + self.short_memory)
        consecutive = whole or self.placed == "packed"
        weight_BM = None if weight_BR is None else weight_BR.gather(1, slots.region_BM)
        given: dict[str, Any] = {"positions_BMP": positions_BMP, "valid_BM": slots.valid_BM, "weight_BM": weight_BM}
        offers = [
            partial(recalled, hidden_BMD=t, **given, consecutive=consecutive) for t in slots.hidden_BVMD.unbind(1)
        ]
        if choice is None:
            return list(offers)
        region_BM = slots.region_BM.clamp(max=self.regions)
        return [partial(choose, offer, region_BM=region_BM, **choice) for offer in offers]

    def exit(self, state: CRTNState, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, CRTNState, None]:
        positions_BNP, padding_BN = traces[0].query.positions_BNP, traces[0].query.padding_BN
        assert positions_BNP is not None
        top_BLD, size_B = pack(x_BND, padding_BN, self.segment)
        key_BK = self.summary(top_BLD, size_B)
        hidden_BVLD = torch.stack([pack(trace.x_BND.detach(), padding_BN, self.segment)[0] for trace in traces], 1)
        positions_BLP, _ = pack(positions_BNP[..., :1].expand(x_BND.shape[0], -1, -1), padding_BN, self.segment)
        new = CRTNState(key_BK[:, None], hidden_BVLD, positions_BLP, size_B[:, None], state.source_BLD)
        return x_BND, renew(state, new), None
