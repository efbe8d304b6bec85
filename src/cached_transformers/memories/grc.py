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

from ..registry import MEMORIES, unknown_name
from ..state import State
from .base import LayerMemory, Linear, ProjectKV, Query, Reading, Trace, Weights
from .gate_update import Candidate, gate_update
from .gated_recurrent_cache import (
    CacheGates,
    GatedRecurrentCache,
    Sync,
    caches,
    commit_caches,
    hold_caches,
    one_of,
    reset_caches,
    resize_caches,
    shuffle_caches,
)
from .interpolation import Interpolation
from .memory_branch import MemoryBranch, PositionalConvolution

__all__ = [
    "GRC",
    "StreamGRC",
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


def cache_width(width: int, heads: int, ratio: float) -> int:
    """C = ratio * width.

    Raises:
        ValueError: the ratio is outside (0, 1], or C is not a positive multiple of the number of heads.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must lie in (0, 1]; the paper uses 0.5")
    if width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}")
    result = int(ratio * width + 1e-6)
    if result < heads or result % heads:
        known = ", ".join(f"{k * heads / width:g}" for k in range(1, width // heads + 1))
        raise ValueError(
            f"ratio={ratio} gives a cache of {result} channels, which heads={heads} do not divide; "
            f"with width={width} these ratios work: {known}"
        )
    return result


@MEMORIES.register(
    "grc",
    paper="arXiv:2312.12742",
    equations="C_t = mean_B[(1 - u) C + u c~];  o = sigmoid(lambda) o_mem + (1 - sigmoid(lambda)) o_self",
    state="one cache (M, ratio * D) for all rows and steps, a buffer of the layer",
    cost="multiply-adds per row and layer, N = M: 5 N C^2 + 2 N^2 C in training, N C^2 + 2 N^2 C folded",
    gradient="through C_t within the step, into gates and tokens; C_{t-1} is a constant",
)
class GRC(LayerMemory):
    """Gated recurrent cache shared by all rows and steps (images, encoders); constant and folded in evaluation.

    Args:
        width: D, of the layer. heads: H.
        length: M, slots; the paper takes the number of tokens (64 for translation).
        variant: "paper" (Algorithm 1) or "released" (the published code); sets `attend`, `source`, `mix`,
            `initial_gate` and `positional_convolution` where these are None.
        ratio: C / D.
        attend: "mean", all rows read the batch mean of the update, or "sample", each reads its own; in evaluation
            "mean" reads the stored cache, "sample" runs the gates on it.
        source: what feeds the cache: the first C channels of the attention's "input", or of its "output".
        mix: "heads", before the output projection, or "outputs", after separate ones.
        initial_gate: lambda at the start.
        positional_convolution: add a grouped 3 x 3 convolution of the input to the output (released code).
        candidate, interpolation, size, prefix, update_bias, sync: see `GatedRecurrentCache`.
        combine, bias, dropout, reduction, window: see `MemoryBranch`.

    Raises:
        ValueError: ratio, heads or widths do not fit; or a switch has an unknown value.
    """

    insertion = "head"
    shared = True
    causal = False

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
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
        super().__init__()
        c = cache_width(width, heads, ratio)
        options = GRCOptions.of(
            variant,
            attend=attend,
            source=source,
            mix=mix,
            initial_gate=initial_gate,
            positional_convolution=positional_convolution,
        )
        self.source, self.mix = options.source, options.mix
        self.cache = GatedRecurrentCache(
            c,
            length,
            candidate=candidate,
            attend=options.attend,
            interpolation=interpolation,
            size=tuple(size) if size is not None else None,  # type: ignore[arg-type]
            prefix=prefix,
            update_bias=update_bias,
            sync=sync,
        )
        self.branch = MemoryBranch(
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
        )
        self.convolution = PositionalConvolution(width, c, prefix) if options.positional_convolution else None
        self._folded: _Folded | None = None

    def read(self, state: State, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        if self.source == "output":
            return Reading()
        return Reading(output_BHNE=self._recall(query.x_BND, query))

    def _output(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if reading.output_BHNE is not None:
            return reading.output_BHNE
        return self._recall(y_BHNE.transpose(1, 2).flatten(2), query)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if self.mix == "outputs":
            return y_BHNE
        return self.branch.mix(y_BHNE, self._output(y_BHNE, query, reading))

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        if self.mix == "outputs" or weights is None or torch.compiler.is_compiling():
            return super().project(y_BHNE, query, reading, linear, weights)
        return self.branch.mix_and_project(y_BHNE, self._output(y_BHNE, query, reading), *weights)

    def finish(self, y_BND: Tensor, query: Query, reading: Reading) -> Tensor:
        if self.mix == "outputs":
            o_BHNF = reading.output_BHNE if reading.output_BHNE is not None else self._recall(y_BND, query)
            y_BHNE = y_BND.unflatten(-1, (self.branch.heads, -1)).transpose(1, 2)
            y_BND = self.branch.mix(y_BHNE, self.branch.project(o_BHNF)).transpose(1, 2).flatten(2)
        if self.convolution is not None:
            y_BND = y_BND + self.convolution(query.x_BND, query.size)
        return y_BND

    def _recall(self, source_BND: Tensor, query: Query) -> Tensor:
        """Per-head result of the memory branch, after the update of the cache by `source_BND` where there is one."""
        x_BNC = query.x_BND[..., : self.cache.width]
        frozen = not self.training and self.cache.attend == "mean"
        if frozen and self._folded is not None and self._folded.holds(self):
            return self.branch(x_BNC, self._folded.k_BHMF, self._folded.v_BHMF)
        source_BNC = x_BNC if source_BND is query.x_BND else source_BND[..., : self.cache.width]
        cache = self.cache(source_BNC, query.padding_BN, query.size)
        return self.branch(x_BNC, *self.branch.keys_values(cache, self.cache.size))

    def fold(self) -> GRC:
        """Make keys and values of the stored cache constants, until `unfold` or `train`; for inference and export.

        `eval()` does this too, for eager inference, and checks at each call that no weight has changed since (a write
        through `.data` leaves no trace; call `eval()` after one). Compiled or exported code cannot check, and takes
        the constants only after this call.

        Raises:
            ValueError: the module is training, or its gates run in evaluation too (attend="sample").
        """
        if self.training or self.cache.attend == "sample":
            why = (
                "it is in training mode; call eval() first"
                if self.training
                else "attend='sample' runs the gates at each call"
            )
            raise ValueError(f"the cache cannot be folded: {why}")
        self._folded = _Folded(self, lasting=True)
        return self

    def unfold(self) -> GRC:
        """Compute keys and values from the cache again at each call."""
        self._folded = None
        return self

    def train(self, mode: bool = True) -> GRC:
        super().train(mode)
        self._folded = None
        if not mode and self.cache.attend == "mean" and all(map(_has_values, _sources(self))):
            self._folded = _Folded(self, lasting=False)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> GRC:
        super()._apply(fn, recurse)
        if self._folded is not None:
            self._folded = _Folded(self, self._folded.lasting)
        return self

    def close_gate(self) -> None:
        with torch.no_grad():
            self.branch.gate_H.fill_(-torch.inf)
            if self.convolution is not None:
                self.convolution.convolution.weight.zero_()
                self.convolution.convolution.bias.zero_()  # type: ignore[union-attr]

    def mixing_ratio(self) -> Tensor:
        """sigmoid(lambda), (H,): the share of the memory in each head."""
        return torch.sigmoid(self.branch.gate_H)


class _Folded:
    """Keys and values of a frozen cache, with what is needed to see that they are still true."""

    def __init__(self, memory: GRC, lasting: bool) -> None:
        self.lasting = lasting
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, which a later graph may hold
            self.k_BHMF, self.v_BHMF = (
                t.contiguous() for t in memory.branch.keys_values(memory.cache.cache_MC, memory.cache.size)
            )
        self.stamp = [] if lasting else _stamp(memory)

    def holds(self, memory: GRC) -> bool:
        if self.lasting:
            return True
        if torch.compiler.is_compiling():
            return False
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in _sources(memory))
        return not wanted and self.stamp == _stamp(memory)


def _has_values(t: Tensor) -> bool:
    """Whether `t` can be computed with here and now (no sharded, fake or meta tensor) and has a version to watch."""
    return type(t) in (Tensor, nn.Parameter) and not t.is_meta and not t.is_inference()


def _sources(memory: GRC) -> list[Tensor]:
    """Everything that keys and values are made of."""
    reduction = memory.branch.reduction
    more = list(reduction.parameters()) if reduction is not None else []
    return [memory.cache.cache_MC, *memory.branch.key_value.parameters(), *more]


def _stamp(memory: GRC) -> list[tuple[int, int]]:
    """Address and version of the sources."""
    return [(t.data_ptr(), t._version) for t in _sources(memory)]


def fold(model: nn.Module) -> nn.Module:
    """Fold every frozen cache of `model` (see `GRC.fold`); returns the model."""
    for module in model.modules():
        if isinstance(module, GRC):
            module.fold()
    return model


def unfold(model: nn.Module) -> nn.Module:
    """Undo `fold` in every layer of `model`; returns the model."""
    for module in model.modules():
        if isinstance(module, GRC):
            module.unfold()
    return model


class StreamGRCState(NamedTuple):
    """The cache before the last segment, that segment's slots (not yet written), and the number of segments seen."""

    cache_BMC: Tensor
    source_BMC: Tensor
    segments_B: Tensor


@MEMORIES.register(
    "grc_stream",
    paper="arXiv:2312.12742",
    equations="C_{t-1} = GRC(S_{t-1}, C_{t-2}) computed at segment t with gradient; o = sigmoid(lambda) o_mem + ...",
    state="per row: cache (M, C), slots of the last segment (M, C), segments seen; 2 M C * itemsize + 8 bytes",
    cost="per row and layer: 6 M C^2 (gates) + N C^2 + 2 M C^2 (queries, keys, values) + 2 N M C multiply-adds",
    reach="unbounded, through the gates",
    gradient="through C_{t-1} into the gates; further back as far as the segment loop does not detach",
)
class StreamGRC(LayerMemory):
    """Gated recurrent cache of a stream: per row, updated one segment late, so that no token sees a later one.

    Attending the updated cache C_t would show each token the rest of its segment, and attending the stored C_{t-1}
    would give the gates no gradient. So the last segment's slots are kept, and the update by them is made when the
    next segment reads. A row that has seen no segment yet is not mixed at all: an empty memory is no memory.

    Args: as `GRC`, without what concerns maps and evaluation; `length` defaults to 64 slots.
    """

    insertion = "head"

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
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        c = cache_width(width, heads, ratio)
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
        seen = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return StreamGRCState(zeros, zeros.clone(), seen)

    def read(self, state: StreamGRCState, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        seen = state.segments_B[:, None, None]
        # where, not multiplication: nothing that stands in an empty slot may reach a result, not even NaN
        cache_BMC = torch.where(seen > 1, state.cache_BMC, 0)
        source_BMC = torch.where(seen > 0, state.source_BMC, 0)
        updated_BMC = gate_update(source_BMC, cache_BMC, self.gates.weights, self.gates.candidate)
        cache_BMC = torch.where(seen > 0, updated_BMC, cache_BMC)
        output = self.branch(query.x_BND[..., : self.gates.width], *self.branch.keys_values(cache_BMC))
        return Reading(output_BHNE=output, carry=(cache_BMC, state))

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        seen_B = reading.carry[1].segments_B > 0
        return self.branch.mix(y_BHNE, reading.output_BHNE, seen_B)

    def write(self, state: StreamGRCState, trace: Trace) -> tuple[StreamGRCState, None]:
        cache_BMC = trace.reading.carry[0]
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
        """sigmoid(lambda), (H,): the share of the memory in each head."""
        return torch.sigmoid(self.branch.gate_H)
