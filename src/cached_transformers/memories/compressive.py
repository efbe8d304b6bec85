"""Compressive Transformer (Rae et al. 2019, arXiv:1911.05507; the authors published no code).

Transformer-XL's memory, but what falls out of it is compressed, `rate` hidden states to a slot, into an older memory.

    keys and values of [compressed, recent, segment]
recent' = [recent, SG(x)] minus evicted,  compressed' = [compressed, f(evicted)]
    f minimises || attn(SG(x), evicted) - attn(SG(x), f(evicted)) ||

Whole groups of `rate` leave the recent memory, so that up to rate - 1 more than `length` wait there, attended like the
others: nothing is lost, and no group is padded.

Legend: B rows, N tokens, M slots, G groups of C = rate, E = G C evicted states, H heads, D model width, P position
channels, S queries; K keys.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.registry import MEMORIES

from .parts.compression import FUNCTIONS, LEARNED
from .parts.fifo_store import (
    Pairs,
    Rows,
    empty_rows,
    lined_up,
    push,
    push_made,
    push_out,
    read_store,
    right_before,
    side_by_side,
    taken,
)
from .transformer_xl import TransformerXL


class CompressiveState(NamedTuple):
    """The older, compressed slots, and the hidden states that follow them; both first in, first out."""

    compressed: Rows | Pairs
    recent: Rows


@MEMORIES.register(
    "compressive",
    paper="arXiv:1911.05507",
    title="Compressive Transformer",
    carries="the last inputs of every layer, and older ones compressed",
    purpose="more of the past in as many slots",
    equations="keys and values of [f(evicted groups), last inputs, segment]; f trained to keep attention's result",
    state="per row and layer: (length + rate - 1 + compressed) (4 D + 8) + 16 bytes; in evaluation with keep='kv' 4 D "
    "compressed more",
    cost="per token and layer: 2 D^2 M / N (keys and values of all M slots; in evaluation with keep='kv' of the "
    "compressed ones 2 D^2 / rate) + 3 M D + D^2 "
    "(convolution) multiply-adds; training adds (2 D^2 + 2 N D) (1 + 1 / rate) for the attention loss",
    reach="layers x (length + rate x compressed) tokens",
    gradient="none into the memory; the compression learns from its own loss",
    exact_when="length >= tokens seen",
    without={
        "stored_kv": "keep='hidden'",
        "own_loss": "function='mean' or 'max', or loss='task'",
        "weights": "function='mean' or 'max'",
    },
    probe=Probing(
        lambda segment, distance, depth: {"length": segment, "compressed": (distance + 1) * segment // 2, "rate": 2},
        lambda *given: {**one_segment(*given), "compressed": 0, "rate": 1},
    ),
)
class Compressive(TransformerXL):
    """The last inputs of the layer, and before them older ones compressed.

    Args:
        width: D. heads: H.
        length: hidden states kept as they are (and up to rate - 1 that wait). compressed: slots for older ones; 0 makes
            it Transformer-XL. rate: c, hidden states in a slot.
        function: "mean", "max", "conv" (kernel and stride c), "dilated", or "most_used": of what leaves, one in c stays
            as it is, those with the largest attention weights in the segment that pushes them out.
        loss: what trains "conv" and "dilated": "attention" (the default), "autoencoding" (with a decoder), or "task"
            (the model's own, through later segments: bptt > 1). The first two are computed in training mode only.
        error: "norm" of the difference for each row (the paper), or its "mean_square", of the losses with a target.
        positions: "slots": a slot is one step long, whatever it holds. "age": it has the position of the middle of its
            group.
        relative, clamp, eval_length, keep, sinks: see `TransformerXL`; `keep` is of the compressed slots.
        eval_compressed: slots of states made in evaluation mode; as in training when None.
    """

    needs = frozenset({"state", "context", "own_loss"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        compressed: int = 128,
        rate: int = 4,
        *,
        function: Literal["mean", "max", "conv", "dilated", "most_used"] = "conv",
        loss: Literal["attention", "autoencoding", "task"] | None = None,
        error: Literal["norm", "mean_square"] = "norm",
        positions: Literal["slots", "age"] = "slots",
        relative: bool = True,
        clamp: int | None = None,
        eval_length: int | None = None,
        eval_compressed: int | None = None,
        keep: Literal["hidden", "kv"] = "hidden",
        sinks: int = 0,
    ) -> None:
        kept = {"eval_length": eval_length, "keep": keep, "sinks": sinks}
        super().__init__(width, heads, length, relative=relative, clamp=clamp, **kept)  # type: ignore[arg-type]
        self.rate, self.compressed, self.positions, self.error = rate, compressed, positions, error
        self.eval_compressed = compressed if eval_compressed is None else eval_compressed
        self._check(function, loss)
        make = FUNCTIONS[function]
        if function == "most_used" and compressed:
            self.needs = self.needs | {"weights"}
        self.function = make(rate, width) if make is not None and compressed else None
        self.loss = loss or ("attention" if function in LEARNED and compressed else None)
        if self.loss in (None, "task"):
            self.needs = self.needs - {"own_loss"}
        self.decoder = nn.Linear(width, rate * width) if self.loss == "autoencoding" else None

    def _check(self, function: str, loss: str | None) -> None:
        at_least_one(rate=self.rate)
        slots = {"compressed": self.compressed, "eval_compressed": self.eval_compressed}
        at_least_one("; 0 is a plain Transformer-XL", least=0, **slots)
        if (self.compressed == 0) != (self.eval_compressed == 0):
            raise ValueError(
                f"compressed={self.compressed} and eval_compressed={self.eval_compressed}: a model that compresses "
                "needs slots both times; make both 0 or both at least 1"
            )
        if loss is not None and (function not in LEARNED or self.compressed == 0):
            raise ValueError(
                f"loss={loss!r} would train nothing with function={function!r} and compressed={self.compressed}; take "
                "loss=None, or function='conv' or 'dilated' with slots"
            )
        if self.keep == "kv" and not self.compressed:
            raise ValueError("keep='kv' needs compressed slots, but compressed=0 has none; take keep='hidden'")
        if function == "dilated" and self.rate == 1:
            raise ValueError("function='dilated' needs rate of at least 2, got rate=1; take function='conv'")

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        length, slots = self._slots(), self.compressed if self.training else self.eval_compressed
        waiting = self.rate - 1 if slots else 0
        recent = empty_rows(batch_size, length + waiting, self.width, like)
        return self.beside_sinks(CompressiveState(self.empty(slots, batch_size, like), recent), batch_size, like)

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        assert project_kv is not None and first_B1P is not None
        compressed, recent = state.recent if self.sinks else state
        if isinstance(compressed, Pairs):
            recent_BMW = side_by_side(*project_kv(recent.clean_BMD))
            recent = Pairs(recent_BMW.to(compressed.pairs_BMW.dtype), *recent[1:])
        run = self.positions == "slots"
        rows = lined_up(compressed, recent)
        if self.sinks:
            rows = lined_up(state.sinks, rows)
        k_BHME, v_BHME, _ = read_store(rows, self, self.stored_heads[0], project_kv)
        places_BMP = right_before(first_B1P, k_BHME.shape[2]) if run else rows.positions_BMP
        return Context(k_BHME, v_BHME, places_BMP, rows.valid_BM, consecutive=run, clean=True)

    def store(self, state: CompressiveState, trace: Trace) -> tuple[CompressiveState, Tensor | None]:
        compressed, recent = state
        x_BND, positions_BNP, padding_BN = trace.x_BND.detach(), trace.query.positions_BNP, trace.query.padding_BN
        assert positions_BNP is not None
        if compressed.positions_BMP.shape[1] == 0:
            return CompressiveState(compressed, push(recent, x_BND, positions_BNP, padding_BN)), None
        gone = push_groups(recent, x_BND, positions_BNP, padding_BN, self.rate)
        if self.function is None:
            return CompressiveState(self._keep_most_used(state, gone, trace), gone.recent), None
        slots_BGD = self.function(gone.groups(self.rate))
        # The middle of a group represents it.
        places_BGP = gone.positions_BEP[:, (self.rate - 1) // 2 :: self.rate]
        empty_BG = ~gone.real_BE[:, :: self.rate]
        stored_BGD = slots_BGD if self.loss == "task" else slots_BGD.detach()
        after = CompressiveState(self._stored(compressed, stored_BGD, places_BGP, empty_BG, trace), gone.recent)
        if self.loss is None or not self.training:
            return after, None
        if self.loss == "attention":
            return after, self._attention_loss(gone, slots_BGD, ~empty_BG, trace)
        if self.decoder is not None:
            decoded_BED = self.decoder(slots_BGD).unflatten(-1, (self.rate, -1)).flatten(1, 2)
            return after, self._mean_error(decoded_BED - gone.hidden_BED, gone.real_BE, gone.some_B)
        return after, None

    def _stored(
        self, compressed: Rows | Pairs, hidden_BGD: Tensor, places_BGP: Tensor, empty_BG: Tensor, trace: Trace
    ) -> Rows | Pairs:
        """The compressed slots, and new ones after them."""
        return push_made(compressed, hidden_BGD, trace, places_BGP, empty_BG)

    def _keep_most_used(self, state: CompressiveState, gone: Gone, trace: Trace) -> Rows | Pairs:
        """The compressed slots with one in `rate` of what left, in the order of time."""
        x_BND, query = trace.x_BND, trace.query
        assert trace.weights_BHWL is not None and query.positions_BNP is not None
        usage_BL = mean_weight(trace.weights_BHWL)
        # The context begins with what `read` lined up: the recent states are its last ones.
        slots, n = sum(rows.positions_BMP.shape[1] for rows in state), x_BND.shape[1]
        m = state.recent.hidden_BMD.shape[1]
        before = Rows(usage_BL[:, slots - m : slots, None], state.recent.positions_BMP, state.recent.count_B)
        segment_BN1 = usage_BL[:, usage_BL.shape[1] - n :, None]
        used = push_groups(before, segment_BN1, query.positions_BNP, query.padding_BN, self.rate)
        weight_BE = used.hidden_BED[..., 0].masked_fill(~used.real_BE, -torch.inf)
        rank_BE = weight_BE.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        stays_BE = rank_BE < gone.real_BE.sum(1, keepdim=True) // self.rate
        return self._stored(state.compressed, gone.hidden_BED, gone.positions_BEP, ~stays_BE, trace)

    def _attention_loss(self, gone: Gone, slots_BGD: Tensor, real_BG: Tensor, trace: Trace) -> Tensor:
        """Difference between reads of the segment's queries, without positions, from the slots and from evicted
        states."""
        project_kv: ProjectKV = trace.reading.carry
        padding_BN, q = trace.query.padding_BN, trace.query.q_BHNE
        assert q is not None
        q = q.detach()
        none_B1 = ~gone.some_B[:, None]  # they read zeros, since a query needs a key; their difference is not counted
        with torch.no_grad():
            k, v = project_kv(gone.hidden_BED)
            target_BHNE = F.scaled_dot_product_attention(q, k, v, (gone.real_BE | none_B1)[:, None, None])
        k, v = project_kv(slots_BGD, frozen=True)
        got_BHNE = F.scaled_dot_product_attention(q, k, v, (real_BG | none_B1)[:, None, None])
        difference_BND = (got_BHNE - target_BHNE).transpose(1, 2).flatten(2)
        asks_BN = torch.ones_like(difference_BND[..., 0], dtype=torch.bool) if padding_BN is None else ~padding_BN
        return self._mean_error(difference_BND, asks_BN, gone.some_B)

    def _mean_error(self, difference_BND: Tensor, counted_BN: Tensor, some_B: Tensor) -> Tensor:
        """Mean over the rows that compressed something; 0 if none did."""
        wide_BND = difference_BND.to(torch.promote_types(difference_BND.dtype, torch.float32))
        wide_BND = torch.where((counted_BN & some_B[:, None])[..., None], wide_BND, 0)
        if self.error == "norm":
            error_B = torch.linalg.vector_norm(wide_BND, dim=(1, 2))
        else:
            error_B = wide_BND.square().sum((1, 2)) / (counted_BN.sum(1).clamp(min=1) * wide_BND.shape[2])
        return error_B.sum() / some_B.sum().clamp(min=1)


def mean_weight(weights_BHWL: Tensor) -> Tensor:
    """(B, L): weight of each key, mean over the heads and the tokens that see the key."""
    counted_BHWL = ~weights_BHWL.isnan()
    sums_BL = torch.where(counted_BHWL, weights_BHWL, 0).sum((1, 2))
    return sums_BL / counted_BHWL.sum((1, 2)).clamp(min=1)


class Gone(NamedTuple):
    """Kept states of the recent memory, and evicted ones: whole groups, oldest first, real ones first."""

    recent: Rows
    hidden_BED: Tensor
    positions_BEP: Tensor
    real_BE: Tensor

    @property
    def some_B(self) -> Tensor:
        """bool, the rows that something left."""
        return self.real_BE[:, 0]

    def groups(self, rate: int) -> Tensor:
        """(B, G, C, D)."""
        return self.hidden_BED.unflatten(1, (-1, rate))


def push_groups(recent: Rows, hidden_BND: Tensor, positions_BNP: Tensor, padding_BN: Tensor | None, rate: int) -> Gone:
    """Store hidden states; whole groups that exceed all slots except `rate` - 1 are evicted."""
    slots, n = recent.hidden_BMD.shape[1], hidden_BND.shape[1]
    kept, left = push_out(recent, hidden_BND, positions_BNP, padding_BN)
    total_B = kept.count_B + left.count_B
    leaving_B1 = ((total_B - (slots - rate + 1)).clamp(min=0) // rate * rate)[:, None]
    hidden_BLD = torch.cat([left.hidden_BMD, kept.hidden_BMD], 1)
    positions_BLP = torch.cat([left.positions_BMP, kept.positions_BMP], 1)
    place_E = torch.arange((n + rate - 1) // rate * rate, device=total_B.device)
    index_BE = (n + slots - total_B[:, None] + place_E).clamp(max=n + slots - 1)
    real_BE = place_E < leaving_B1
    # Poison of empty slots must not reach what compresses, whose weights would get it as a gradient.
    hidden_BED = torch.where(real_BE[..., None], taken(hidden_BLD, index_BE), 0)
    positions_BEP = taken(positions_BLP, index_BE)
    kept = kept._replace(count_B=total_B - leaving_B1[:, 0])
    positions_BMP = torch.where(kept.valid_BM[..., None], kept.positions_BMP, 0)
    return Gone(Rows(kept.clean_BMD, positions_BMP, kept.count_B), hidden_BED, positions_BEP, real_BE)
