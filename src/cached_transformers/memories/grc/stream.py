"""The causal form of GRC: a cache per row, updated one segment late, so that no token sees a later one.

Attending the updated cache C_t would show each token the rest of its segment, and attending the stored C_{t-1} would
give the gates no gradient. So the state holds the last segment's slots, and the update by them runs when the next
segment reads. Equations and paper: see `grc.py`.

With mix="joint" (ours) the slots' keys and values, by the layer's own projections, are beside those of the segment, at
the positions right before it, in one softmax: each token gives the memory a share of its own, and slots have an order.
With candidate="copy" (ours) slots are running means of tokens, C_t = (1 - u) C_{t-1} + u S_t.

Legend: B rows, N tokens, M slots, H heads, C cache width, F = C / H.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Context, LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.memories.parts.fifo_store import right_before
from cached_transformers.memories.parts.interpolation import Interpolation, check_size, interpolate
from cached_transformers.memories.parts.options import CUT, Gate
from cached_transformers.registry import MEMORIES

from .equations import StreamCandidate, gate_update
from .grc import CacheGates
from .shared_cache_memory import MemoryBranch, cache_width

LONG = {"update_gate": "stretched", "update_bias": -2.0}
"""Options of `StreamGRC` with which slots keep their content until a segment writes."""
TEXT = {"mix": "joint", "candidate": "copy", "ratio": 1.0}
"""Options for text, found on validation with as many slots as a segment has tokens."""


class StreamGRCState(NamedTuple):
    """The cache before the last segment, that segment's slots (not yet written), and the number of segments seen."""

    cache_BMC: Tensor
    source_BMC: Tensor
    segments_B: Tensor


class StreamGRCOpened(NamedTuple):
    """The cache updated by the last segment, its keys and values, the heads' shares, and rows that saw a segment."""

    cache_BMC: Tensor
    any_B: Tensor
    k_BHMF: Tensor
    v_BHMF: Tensor
    ratio_B1H1: Tensor
    rest_B1H1: Tensor


class StreamGRCContext(NamedTuple):
    """With mix="joint": the cache updated by the last segment, rows that saw a segment, and keys and values."""

    cache_BMC: Tensor
    any_B: Tensor
    context: Context


@MEMORIES.register(
    "grc_stream",
    paper="arXiv:2312.12742",
    title="Cached Transformers",
    carries="a cache that gates update, of each row (text)",
    purpose="a state of fixed size, written by what training needs",
    equations="C_{t-1} = GRC(S_{t-1}, C_{t-2}) computed at segment t with gradient; o = sigmoid(lambda) o_mem + ...",
    state="per row: cache (M, C), slots of the last segment (M, C), segments seen; 2 M C * itemsize + 8 bytes",
    cost="per row and layer: 6 M C^2 (gates) + N C^2 + 2 M C^2 (queries, keys, values) + 2 N M C multiply-adds; with "
    'candidate="copy" 2 M C^2 for 6 M C^2, with mix="joint" no N C^2',
    reach="unbounded, through the gates",
    gradient="through C_{t-1} into the gates; further back as far as the segment loop does not detach",
    probe=Probing(
        lambda segment, distance, depth: {"length": 2 * segment, "ratio": 1.0},
        # With a sigmoid, every segment without news still erases a share of the cache.
        farther=lambda segment, distance, depth: {"length": segment, "ratio": 1.0, **LONG},
    ),
    presets={"long": LONG, "text": TEXT},
)
class StreamGRC(LayerMemory):
    """Gated recurrent cache of a stream: per row, updated one segment late, so that no token sees a later one.

    A row that has seen no segment yet is not mixed at all: an empty memory is no memory.

    Args:
        width: D, of the layer. heads: H.
        length: M, slots; with preset="text" best as many as a segment has tokens. ratio: C / D.
        mix: "ratio", the paper's second attention with a share per head, or "joint", one softmax over slots and
            segment, which needs ratio=1 and has none of `combine`, `initial_gate`, `bias`, `dropout`.
        candidate: as in `CacheGates`, or "copy" (ours), the tokens themselves: slots are running means, at the rates of
            the update gate.
        update_bias: see `CacheGates`. interpolation: see `SharedCache`.
        combine, initial_gate, bias, dropout: see `MemoryBranch`.
        update_gate: "sigmoid" as in the paper, which never is 0; "stretched" can close (arXiv:1712.01312), so that a
            slot outlives any number of segments. With it, start from an `update_bias` of -2 (open by 4 per cent).
    """

    needs = frozenset({"state", "head"})
    reads_heads = False

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 64,
        *,
        ratio: float = 0.5,
        mix: Literal["ratio", "joint"] = "ratio",
        candidate: StreamCandidate = "norm",
        combine: Literal["pad", "project"] = "pad",
        interpolation: Interpolation = "nearest",
        initial_gate: float = 0.0,
        update_bias: float = 0.0,
        update_gate: Gate = "sigmoid",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        c = cache_width(width, heads, ratio)
        self.update_gate = update_gate
        if update_gate == "stretched" and not -CUT < update_bias < CUT:
            raise ValueError(
                f"update_bias={update_bias} saturates the stretched update gate, which then learns nothing; take one "
                f"between {-CUT:.2f} and {CUT:.2f}, e.g. -2, or update_gate='sigmoid'"
            )
        check_size(length, None, 0)
        self.length, self.interpolation = length, interpolation
        self.gates = CacheGates(c, candidate=candidate, update_bias=update_bias)
        reads: dict[str, Any] = {"combine": combine, "initial_gate": initial_gate, "bias": bias, "dropout": dropout}
        self.branch = MemoryBranch(width, heads, c, **reads) if mix == "ratio" else None
        if self.branch is None:
            self.needs = frozenset({"state", "context"})
            if reads != {"combine": "pad", "initial_gate": 0.0, "bias": True, "dropout": 0.0} or c < width:
                raise ValueError(
                    f'mix="joint" reads with the layer\'s own heads: it takes ratio=1, not {ratio}, and {reads} are '
                    'options of mix="ratio"; leave them out'
                )

    def init_state(self, batch_size: int, like: Tensor) -> StreamGRCState:
        zeros = like.new_zeros(batch_size, self.length, self.gates.width)
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return StreamGRCState(zeros, zeros.clone(), segments_B)

    def open(
        self, state: StreamGRCState, first_B1P: Tensor | None, project_kv: ProjectKV | None
    ) -> StreamGRCOpened | StreamGRCContext:
        segments_B11 = state.segments_B[:, None, None]
        # where, not multiplication: an empty slot may hold NaN
        cache_BMC = torch.where(segments_B11 > 1, state.cache_BMC, 0)
        source_BMC = torch.where(segments_B11 > 0, state.source_BMC, 0)
        updated_BMC = gate_update(
            source_BMC, cache_BMC, self.gates.weights, self.gates.candidate, update_gate=self.update_gate
        )
        cache_BMC = torch.where(segments_B11 > 0, updated_BMC, cache_BMC)
        any_B = state.segments_B > 0
        if self.branch is None:
            assert project_kv is not None and first_B1P is not None
            slots = (*project_kv(cache_BMC, normed=True), right_before(first_B1P, self.length))
            valid_BM = any_B[:, None].expand(-1, self.length)
            return StreamGRCContext(cache_BMC, any_B, Context(*slots, valid_BM, consecutive=True))
        k_BHMF, v_BHMF = self.branch.keys_values(cache_BMC)
        if not torch.is_grad_enabled():  # generation reads them once per token
            k_BHMF, v_BHMF = k_BHMF.contiguous(), v_BHMF.contiguous()
        return StreamGRCOpened(cache_BMC, any_B, k_BHMF, v_BHMF, *self.branch.shares(k_BHMF.dtype, any_B))

    def read(
        self, opened: StreamGRCOpened | StreamGRCContext, query: Query, project_kv: ProjectKV | None = None
    ) -> Reading:
        if isinstance(opened, StreamGRCContext):
            return Reading(opened.context, carry=opened)
        assert self.branch is not None
        output = self.branch(query.x_BND[..., : self.gates.width], opened.k_BHMF, opened.v_BHMF)
        return Reading(output_BHNE=output, carry=opened, any_B=opened.any_B)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if self.branch is None:
            return y_BHNE
        assert reading.output_BHNE is not None
        return self.branch.blend(y_BHNE, reading.output_BHNE, (reading.carry.ratio_B1H1, reading.carry.rest_B1H1))

    def write(self, state: StreamGRCState, trace: Trace) -> tuple[StreamGRCState, None]:
        cache_BMC = trace.reading.carry.cache_BMC
        padding_BN = trace.query.padding_BN
        x_BNC = trace.query.x_BND[..., : self.gates.width]
        source_BMC = interpolate(x_BNC, self.length, self.interpolation, padding_BN)
        new = StreamGRCState(cache_BMC, source_BMC.to(state.source_BMC.dtype), state.segments_B + 1)
        if padding_BN is None:
            return new, None
        wrote = ~padding_BN.all(1)  # a row that is all padding has no new segment
        kept = [torch.where(wrote.view(-1, *[1] * (o.dim() - 1)), n, o) for n, o in zip(new, state, strict=True)]
        return StreamGRCState(*kept), None

    def close_gate(self) -> None:
        if self.branch is None:
            return super().close_gate()
        with torch.no_grad():
            self.branch.gate_H.fill_(-torch.inf)

    def mixing_ratio(self) -> Tensor | None:
        """sigmoid(lambda), (H,): the share of the memory in each head; reports call any method of this name."""
        return None if self.branch is None else torch.sigmoid(self.branch.gate_H)
