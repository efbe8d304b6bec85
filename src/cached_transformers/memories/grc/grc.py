"""GRC attention as a memory: self-attention mixed, per head, with attention over a gated recurrent cache.

Paper: "Cached Transformers: Improving Transformers with Differentiable Memory Cache" (arXiv:2312.12742), equations
1-5 and Algorithm 1. Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py.

    o_mem = softmax(q k^T / sqrt(E')) v   with q from X's first C = ratio * D channels, k and v from the cache
    (equation 1)
    o     = sigmoid(lambda_h) o_mem + (1 - sigmoid(lambda_h)) o_self                         per head h
    (equation 2)

The paper and its released code differ; `variant="paper"` and `variant="released"` set every switch at once, and each
switch can be set by itself. `GRC` keeps one cache for all rows and steps, as the paper does for images and encoders.
In a causal model that leaks the future, because the cache already holds the whole segment; `StreamGRC` is the causal
form, with a cache per row that is updated one segment late.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, E head width, F = C / H.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.memories.parts.gates import CUT, GATES, Gate
from cached_transformers.memories.parts.interpolation import Interpolation
from cached_transformers.memories.parts.memory_branch import MemoryBranch, PositionalConvolution
from cached_transformers.memories.parts.options import one_of
from cached_transformers.memories.parts.shared_cache import (
    Sync,
    caches,
    commit_caches,
    hold_caches,
    reset_caches,
    resize_caches,
    shuffle_caches,
)
from cached_transformers.memories.parts.shared_cache_memory import SharedCacheMemory, cache_width, fold, unfold
from cached_transformers.registry import MEMORIES, unknown_name

from .coarser import coarser_map
from .equations import Candidate, gate_update
from .gated_recurrent_cache import CacheGates, GatedRecurrentCache

__all__ = [
    "GRC",
    "StreamGRC",
    "cache_width",
    "caches",
    "commit_caches",
    "fold",
    "hold_caches",
    "reset_caches",
    "resize_caches",
    "shuffle_caches",
    "unfold",
]

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        "attend": "mean",
        "source": "input",
        "mix": "heads",
        "initial_gate": 0.0,
        "positional_convolution": False,
    },
    "released": {
        "attend": "sample",
        "source": "output",
        "mix": "outputs",
        "initial_gate": -1.0,
        "positional_convolution": True,
    },
}


class GRCOptions(NamedTuple):
    """Every switch between the paper and the released code; see `GRC` for their meaning."""

    attend: Literal["mean", "sample"]
    source: Literal["input", "output"]
    mix: Literal["heads", "outputs"]
    initial_gate: float
    positional_convolution: bool

    @classmethod
    def of(cls, variant: str, **chosen: Any) -> GRCOptions:
        """The variant's settings, with those that are not None in `chosen` put in their place."""
        if variant not in VARIANTS:
            raise ValueError(unknown_name("GRC variant", variant, list(VARIANTS)))
        values = VARIANTS[variant] | {k: v for k, v in chosen.items() if v is not None}
        one_of("source", values["source"], ("input", "output"))
        one_of("mix", values["mix"], ("heads", "outputs"))
        return cls(**values)


@MEMORIES.register(
    "grc",
    paper="arXiv:2312.12742",
    title="Cached Transformers",
    carries="a cache that gates update, of all rows (images, encoders)",
    purpose="a cache for images and encoders",
    equations="C_t = mean_B[(1 - u) C + u c~];  o = sigmoid(lambda) o_mem + (1 - sigmoid(lambda)) o_self",
    state="one cache (M, ratio * D) for all rows and steps, a buffer of the layer",
    cost="multiply-adds per row and layer, N = M: (5 + 4 / B) N C^2 + 2 N^2 C in training, N C^2 + 2 N^2 C folded",
    reach="all earlier training steps, through the gates; the same for all rows",
    gradient="through C_t within the step, into gates and tokens; C_{t-1} is a constant",
)
class GRC(SharedCacheMemory):
    """Gated recurrent cache shared by all rows and steps (images, encoders); constant and folded in evaluation.

    Args:
        width: D, of the layer. heads: H.
        length: M, slots; the paper takes the number of tokens (64 for translation).
        stride: side of the square of a map whose tokens share a slot, 1 in the paper: with 2 there are a quarter of the
            slots, which costs about a quarter. interpolation="area" makes a slot of the mean of its tokens, "nearest"
            of the first. `length` and `size` are those of the tokens.
        variant: "paper" (Algorithm 1) or "released" (the published code); sets `attend`, `source`, `mix`,
            `initial_gate` and `positional_convolution` where these are None.
        ratio: C / D.
        attend: "mean", all rows read the batch mean of the update, or "sample", each reads its own; in evaluation
            "mean" reads the stored cache, "sample" runs the gates on it.
        source: what feeds the cache: the first C channels of the attention's "input", or of its "output".
        mix: "heads", before the output projection, or "outputs", after separate ones.
        initial_gate: lambda at the start.
        positional_convolution: add a grouped 3 x 3 convolution of the input to the output (released code).
        candidate, interpolation, size, prefix, update_bias, sync: see `CacheGates` and `SharedCache`.
        combine, bias, dropout, reduction, window: see `MemoryBranch`.

    Raises:
        ValueError: ratio, heads or widths do not fit; a stride where there is no map; or a switch has an unknown value.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        stride: int = 1,
        variant: Literal["paper", "released"] = "paper",
        ratio: float = 0.5,
        candidate: Candidate = "norm",
        attend: Literal["mean", "sample"] | None = None,
        source: Literal["input", "output"] | None = None,
        mix: Literal["heads", "outputs"] | None = None,
        combine: Literal["pad", "project"] = "pad",
        interpolation: Interpolation = "nearest",
        size: tuple[int, int] | None = None,
        prefix: int = 0,
        initial_gate: float | None = None,
        update_bias: float = 0.0,
        positional_convolution: bool | None = None,
        sync: Sync = "broadcast",
        bias: bool = True,
        dropout: float = 0.0,
        reduction: nn.Module | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        c = cache_width(width, heads, ratio)
        length, size = coarser_map(length, size, prefix, stride)
        options = GRCOptions.of(
            variant,
            attend=attend,
            source=source,
            mix=mix,
            initial_gate=initial_gate,
            positional_convolution=positional_convolution,
        )
        super().__init__(
            GatedRecurrentCache(
                c,
                length,
                candidate=candidate,
                attend=options.attend,
                interpolation=interpolation,
                size=size,
                prefix=prefix,
                update_bias=update_bias,
                sync=sync,
            ),
            MemoryBranch(
                width,
                heads,
                c,
                combine=combine,
                mix=options.mix,
                initial_gate=options.initial_gate,
                bias=bias,
                dropout=dropout,
                reduction=reduction,
                window=window,
            ),
            source=options.source,
            mix=options.mix,
            convolution=PositionalConvolution(width, c, prefix) if options.positional_convolution else None,
        )


LONG = {"update_gate": "stretched", "update_bias": -2.0}
"""Options of `StreamGRC` with which slots keep what they hold until something is to be written."""


class StreamGRCState(NamedTuple):
    """The cache before the last segment, that segment's slots (not yet written), and the number of segments seen."""

    cache_BMC: Tensor
    source_BMC: Tensor
    segments_B: Tensor


class StreamGRCOpened(NamedTuple):
    """During a segment: the cache updated by the last one, its keys and values, the shares of each head, and the rows
    that have seen a segment."""

    cache_BMC: Tensor
    k_BHMF: Tensor
    v_BHMF: Tensor
    ratio_B1H1: Tensor
    rest_B1H1: Tensor
    any_B: Tensor


@MEMORIES.register(
    "grc_stream",
    paper="arXiv:2312.12742",
    title="Cached Transformers",
    carries="a cache that gates update, of each row (text)",
    purpose="a state of fixed size, written by what training needs",
    equations="C_{t-1} = GRC(S_{t-1}, C_{t-2}) computed at segment t with gradient; o = sigmoid(lambda) o_mem + ...",
    state="per row: cache (M, C), slots of the last segment (M, C), segments seen; 2 M C * itemsize + 8 bytes",
    cost="per row and layer: 6 M C^2 (gates) + N C^2 + 2 M C^2 (queries, keys, values) + 2 N M C multiply-adds",
    reach="unbounded, through the gates",
    gradient="through C_{t-1} into the gates; further back as far as the segment loop does not detach",
    probe=Probing(
        lambda segment, distance, depth: {"length": 2 * segment, "ratio": 1.0},
        # A sigmoid lets every segment that says nothing wear off a share of what is kept.
        farther=lambda segment, distance, depth: {"length": segment, "ratio": 1.0, **LONG},
    ),
    presets={"long": LONG},
)
class StreamGRC(LayerMemory):
    """Gated recurrent cache of a stream: per row, updated one segment late, so that no token sees a later one.

    Attending the updated cache C_t would show each token the rest of its segment, and attending the stored C_{t-1}
    would give the gates no gradient. So the last segment's slots are kept, and the update by them is made when the
    next segment reads. A row that has seen no segment yet is not mixed at all: an empty memory is no memory.

    Args: as `GRC`, without what concerns maps and evaluation; `length` defaults to 64 slots.
        update_gate: "sigmoid" as in the paper, which never is 0; "stretched" can close (arXiv:1712.01312), so that a
            slot outlives any number of segments. Stretched, begin with an `update_bias` of -2 (open by 4 per cent).

    Raises:
        ValueError: an `update_bias` beyond +-2.39 of a stretched gate, which begins cut everywhere and learns nothing.
    """

    needs = frozenset({"state", "head"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 64,
        *,
        ratio: float = 0.5,
        candidate: Candidate = "norm",
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
        self.update_gate = one_of("update_gate", update_gate, GATES)
        if update_gate == "stretched" and not -CUT < update_bias < CUT:
            raise ValueError(
                f"update_bias={update_bias} leaves the stretched update gate where it is cut, so that it would learn "
                f"nothing; take one between {-CUT:.2f} and {CUT:.2f}, e.g. -2, or update_gate='sigmoid'"
            )
        self.gates = CacheGates(c, length, candidate=candidate, interpolation=interpolation, update_bias=update_bias)
        self.branch = MemoryBranch(
            width,
            heads,
            c,
            combine=combine,
            mix="heads",
            initial_gate=initial_gate,
            bias=bias,
            dropout=dropout,
            reduction=None,
            window=None,
        )

    def init_state(self, batch_size: int, like: Tensor) -> StreamGRCState:
        zeros = like.new_zeros(batch_size, self.gates.length, self.gates.width)
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return StreamGRCState(zeros, zeros.clone(), segments_B)

    def open(self, state: StreamGRCState, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> StreamGRCOpened:
        segments_B11 = state.segments_B[:, None, None]
        # where, not multiplication: nothing that stands in an empty slot may reach a result, not even NaN
        cache_BMC = torch.where(segments_B11 > 1, state.cache_BMC, 0)
        source_BMC = torch.where(segments_B11 > 0, state.source_BMC, 0)
        updated_BMC = gate_update(
            source_BMC, cache_BMC, self.gates.weights, self.gates.candidate, update_gate=self.update_gate
        )
        cache_BMC = torch.where(segments_B11 > 0, updated_BMC, cache_BMC)
        k_BHMF, v_BHMF = self.branch.keys_values(cache_BMC)
        if not torch.is_grad_enabled():  # read again and again where a text is written token by token
            k_BHMF, v_BHMF = k_BHMF.contiguous(), v_BHMF.contiguous()
        any_B = state.segments_B > 0
        return StreamGRCOpened(cache_BMC, k_BHMF, v_BHMF, *self.branch.shares(k_BHMF.dtype, any_B), any_B)

    def read(self, opened: StreamGRCOpened, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        output = self.branch(query.x_BND[..., : self.gates.width], opened.k_BHMF, opened.v_BHMF)
        return Reading(output_BHNE=output, carry=opened, any_B=opened.any_B)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        return self.branch.blend(y_BHNE, reading.output_BHNE, (reading.carry.ratio_B1H1, reading.carry.rest_B1H1))

    def write(self, state: StreamGRCState, trace: Trace) -> tuple[StreamGRCState, None]:
        cache_BMC = trace.reading.carry.cache_BMC
        padding_BN = trace.query.padding_BN
        source_BMC = self.gates.slots(trace.query.x_BND[..., : self.gates.width], padding_BN)
        new = StreamGRCState(cache_BMC, source_BMC.to(state.source_BMC.dtype), state.segments_B + 1)
        if padding_BN is None:
            return new, None
        wrote = ~padding_BN.all(1)  # a row of nothing but padding has no new segment
        kept = [torch.where(wrote.view(-1, *[1] * (o.dim() - 1)), n, o) for n, o in zip(new, state, strict=True)]
        return StreamGRCState(*kept), None

    def close_gate(self) -> None:
        with torch.no_grad():
            self.branch.gate_H.fill_(-torch.inf)

    def mixing_ratio(self) -> Tensor:
        """sigmoid(lambda), (H,): the share of the memory in each head; reports draw it."""
        return torch.sigmoid(self.branch.gate_H)
