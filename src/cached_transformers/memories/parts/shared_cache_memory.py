"""The layer memory of a shared cache: attention mixed, per head, with attention over the cache.

A subclass builds the cache; this class reads it, mixes what was read into the layer's attention (arXiv:2312.12742,
equations 1 and 2), and in evaluation makes keys and values of a constant cache constants ("folding").

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, E head width, F = C / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.linear_maps import plain_weights
from cached_transformers.interfaces.memory import LayerMemory, Linear, ProjectKV, Query, Reading, Weights
from cached_transformers.state import State

from .memory_branch import MemoryBranch, PositionalConvolution
from .shared_cache import SharedCache


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
        ratios = ", ".join(f"{k * heads / width:g}" for k in range(1, width // heads + 1))
        raise ValueError(
            f"ratio={ratio} gives a cache of {result} channels, which heads={heads} do not divide; "
            f"with width={width} these ratios work: {ratios}"
        )
    return result


class SharedCacheMemory(LayerMemory):
    """A shared cache, which a second branch attends beside the layer's attention.

    Args:
        cache: the shared cache. branch: attention over it, and the mix.
        source: what feeds the cache: the first C channels of the attention's "input", or of its "output".
        mix: "heads", before the output projection, or "outputs", after separate ones.
        convolution: added to the attention's output; None for none.
    """

    needs = frozenset({"head", "whole_segment"})
    shared = True

    def __init__(
        self,
        cache: SharedCache,
        branch: MemoryBranch,
        *,
        source: Literal["input", "output"] = "input",
        mix: Literal["heads", "outputs"] = "heads",
        convolution: PositionalConvolution | None = None,
    ) -> None:
        super().__init__()
        self.source, self.mix = source, mix
        self.cache, self.branch, self.convolution = cache, branch, convolution
        if convolution is not None:
            self.needs = self.needs | {"token_map"}
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
        return self.branch.blend(y_BHNE, self._output(y_BHNE, query, reading))

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        if self.mix == "outputs" or weights is None or torch.compiler.is_compiling():
            y_BND = super().project(y_BHNE, query, reading, linear, weights)
        else:
            y_BND = self.branch.blend_and_project(y_BHNE, self._output(y_BHNE, query, reading), *weights)
        if self.mix == "outputs":
            o_BHNF = reading.output_BHNE if reading.output_BHNE is not None else self._recall(y_BND, query)
            y_BHNE = y_BND.unflatten(-1, (self.branch.heads, -1)).transpose(1, 2)
            y_BND = self.branch.blend(y_BHNE, self.branch.project(o_BHNF)).transpose(1, 2).flatten(2)
        if self.convolution is not None:
            y_BND = y_BND + self.convolution(query.x_BND, query.size)
        return y_BND

    def _recall(self, source_BND: Tensor, query: Query) -> Tensor:
        """Per-head result of the memory branch, after the update of the cache by `source_BND` where there is one."""
        x_BNC = query.x_BND[..., : self.cache.width]
        frozen = not self.training and self.cache.constant_in_evaluation
        if frozen and self._folded is not None:
            if self._folded.holds(self):
                return self.branch(x_BNC, self._folded.k_BHMF, self._folded.v_BHMF)
            if self._folded.outdated(self):
                self._folded = None  # who merges adapters later may leave weights that look as they did
        source_BNC = x_BNC if source_BND is query.x_BND else source_BND[..., : self.cache.width]
        cache = self.cache(source_BNC, query.padding_BN, query.size)
        return self.branch(x_BNC, *self.branch.keys_values(cache, self.cache.size))

    def fold(self) -> SharedCacheMemory:
        """Make keys and values of the stored cache constants, until `unfold` or `train`; for inference and export.

        `eval()` does this too, for eager inference, and checks at each call that no weight has changed since (a write
        through `.data` leaves no trace; call `eval()` after one). Compiled or exported code cannot check, and takes
        the constants only after this call.

        Raises:
            ValueError: the module is training, or its gates run in evaluation too (attend="sample").
        """
        if self.training or not self.cache.constant_in_evaluation:
            why = (
                "it is in training mode; call eval() first"
                if self.training
                else "attend='sample' runs the gates at each call"
            )
            raise ValueError(f"the cache cannot be folded: {why}")
        self._folded = _Folded(self, lasting=True)
        return self

    def unfold(self) -> SharedCacheMemory:
        """Compute keys and values from the cache again at each call."""
        self._folded = None
        return self

    def train(self, mode: bool = True) -> SharedCacheMemory:
        super().train(mode)
        self._folded = None
        if not mode and self.cache.constant_in_evaluation and _watchable(self):
            self._folded = _Folded(self, lasting=False)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> SharedCacheMemory:
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
        """sigmoid(lambda), (H,): the share of the memory in each head.

        Reports draw what a method of this name gives, of any module of a model.
        """
        return torch.sigmoid(self.branch.gate_H)

    def record(self, note: Callable[[Tensor, Tensor], None] | None) -> None:
        """Call `note(y_BHNE, o_BHNF)` with what self-attention and the cache give, at each forward; None: no more.

        Reports draw maps of any module that has this method and `prefix`.
        """
        self.branch.record = note

    @property
    def prefix(self) -> int:
        """Class tokens, which stand before those of the map."""
        return self.cache.prefix


class _Folded:
    """Keys and values of a frozen cache, with what is needed to see that they are still true."""

    def __init__(self, memory: SharedCacheMemory, lasting: bool) -> None:
        self.lasting = lasting
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, which a later graph may hold
            self.k_BHMF, self.v_BHMF = (
                t.contiguous() for t in memory.branch.keys_values(memory.cache.cache_MC, memory.cache.size)
            )
        self.stamp = [] if lasting else _stamp(memory)

    def holds(self, memory: SharedCacheMemory) -> bool:
        if self.lasting:
            return True
        if torch.compiler.is_compiling():
            return False
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in _sources(memory))
        return not wanted and not self.outdated(memory)

    def outdated(self, memory: SharedCacheMemory) -> bool:
        """Whether something was written, moved or exchanged since; compiled code cannot tell."""
        return not self.lasting and not torch.compiler.is_compiling() and self.stamp != _stamp(memory)


def _has_values(t: Tensor) -> bool:
    """Whether `t` can be computed with here and now (no sharded, fake or meta tensor) and has a version to watch."""
    return type(t) in (Tensor, nn.Parameter) and not t.is_meta and not t.is_inference()


def _watchable(memory: SharedCacheMemory) -> bool:
    """Whether keys and values are a function of tensors that can be watched: adapters are switched on and off, and
    quantised weights are no parameters."""
    reduction = memory.branch.reduction or nn.Identity()
    known = all(type(m).__module__.startswith(("torch.nn.", "cached_transformers.")) for m in reduction.modules())
    return known and plain_weights(memory.branch.key_value) is not None and all(map(_has_values, _sources(memory)))


def _sources(memory: SharedCacheMemory) -> list[Tensor]:
    """Everything that keys and values are made of."""
    reduction = memory.branch.reduction
    more = list(reduction.parameters()) if reduction is not None else []
    return [memory.cache.cache_MC, *memory.branch.key_value.parameters(), *more]


def _stamp(memory: SharedCacheMemory) -> list[tuple[int, int]]:
    """Address and version of the sources."""
    return [(t.data_ptr(), t._version) for t in _sources(memory)]


def fold(model: nn.Module) -> nn.Module:
    """Fold every frozen cache of `model` (see `SharedCacheMemory.fold`); returns the model."""
    for module in model.modules():
        if isinstance(module, SharedCacheMemory):
            module.fold()
    return model


def unfold(model: nn.Module) -> nn.Module:
    """Undo `fold` in every layer of `model`; returns the model."""
    for module in model.modules():
        if isinstance(module, SharedCacheMemory):
            module.unfold()
    return model
