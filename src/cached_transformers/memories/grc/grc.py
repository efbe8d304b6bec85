"""Gated recurrent cache attention for images and encoders: one cache for all rows and training steps.

Paper: "Cached Transformers: Improving Transformers with Differentiable Memory Cache" (arXiv:2312.12742), equations
1-5 and Algorithm 1. Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py.

With X the first C = ratio * D channels of a layer's input, S = interpolate(X, M) and a cache K of M slots:

    u = sigmoid(W_u [S, K] + b_u)        r = sigmoid(W_r [S, K] + b_r)        c = f(W_c [S, r * K] + b_c)
    proposal = (1 - u) * K + u * c       averaged over the rows of the batch

f is the identity in the paper's equation 5 (candidate="affine", unbounded: it has diverged), LayerNorm(GELU(.)) in the
released code ("norm", the default), or tanh. In a causal model this cache leaks the future; see `stream.py`.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, F = C / H.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn

from cached_transformers.annotations import checked
from cached_transformers.linear_maps import matrix_of
from cached_transformers.memories.parts.interpolation import Interpolation, coarser_map, nearest_map
from cached_transformers.registry import MEMORIES

from .equations import Candidate, GateWeights, StreamCandidate, gate_update, mean_gate_update, plain
from .shared_cache import SharedCache, Sync
from .shared_cache_memory import MemoryBranch, PositionalConvolution, SharedCacheMemory, cache_width

_ALGORITHM_1: dict[str, Any] = {
    "candidate": "norm",
    "attend": "mean",
    "source": "input",
    "mix": "heads",
    "initial_gate": 0.0,
    "positional_convolution": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "algorithm1": _ALGORITHM_1,
    "paper": {**_ALGORITHM_1, "candidate": "affine"},
    "released": {
        "candidate": "norm",
        "attend": "sample",
        "source": "output",
        "mix": "outputs",
        "initial_gate": -1.0,
        "positional_convolution": True,
    },
}


class CacheGates(nn.Module):
    """Parameters of the gated update.

    Args:
        width: C.
        candidate: "norm" (LayerNorm of GELU), "tanh", or "affine" (the paper's equation 5, unbounded).
        update_bias: initial bias of the update gate; below 0 for a slow cache.

    Parameters: 6 C^2 + 3 C, and 2 C with candidate="norm"; 2 C^2 + C with "copy".
    """

    def __init__(self, width: int, *, candidate: StreamCandidate = "norm", update_bias: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.candidate: StreamCandidate = candidate
        maps = 1 if candidate == "copy" else 3
        self.from_tokens = nn.Linear(width, maps * width)
        self.from_cache = nn.Linear(width, maps * width, bias=False)
        self.norm = nn.LayerNorm(width) if candidate == "norm" else None
        # Uniform within 1 / sqrt(2 C), as a linear map from 2 C channels.
        bound = 1 / math.sqrt(2 * width)
        for weight in (self.from_tokens.weight, self.from_cache.weight):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(self.from_tokens.bias)
        nn.init.constant_(self.from_tokens.bias[:width], update_bias)

    @property
    def weights(self) -> GateWeights:
        """The parameters in the form that `gate_update` takes."""
        norm = None if self.norm is None else (self.norm.weight, self.norm.bias, self.norm.eps)
        tokens, bias = matrix_of(self.from_tokens)
        assert bias is not None
        return GateWeights(tokens, bias, matrix_of(self.from_cache)[0], norm)


@checked
class GatedRecurrentCache(SharedCache):
    """A shared cache updated by gates, in 4 B M C^2 + 2 M C^2 multiply-adds; options as of `CacheGates`, `SharedCache`.

    Args:
        attend: "mean" gives the batch mean of the update (Algorithm 1), "sample" each row's own update.
    """

    def __init__(
        self,
        width: int,
        length: int,
        *,
        candidate: Candidate = "norm",
        update_bias: float = 0.0,
        attend: Literal["mean", "sample"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__(width, length, attend=attend, **options)
        gates = CacheGates(width, candidate=candidate, update_bias=update_bias)
        self.candidate = candidate
        self.from_tokens, self.from_cache, self.norm = gates.from_tokens, gates.from_cache, gates.norm

    weights: Any = CacheGates.weights

    def update(self, s_BMC: Tensor, cache_MC: Tensor) -> Tensor:
        return gate_update(s_BMC, cache_MC, self.weights, self.candidate)

    def mean_update(
        self, x_BNC: Tensor, padding_BN: Tensor | None, size: tuple[int, int] | None, cache_MC: Tensor
    ) -> Tensor:
        weight_B = None if padding_BN is None else (~padding_BN).any(1)
        few = 4 * x_BNC.shape[1] <= 3 * self.length  # for nearly as many, spreading the maps costs more than it saves
        spread_BMN = None
        if few and self.interpolation == "nearest" and self.size is None and not plain():
            spread_BMN = nearest_map(x_BNC, self.length, padding_BN)
            if padding_BN is not None:
                x_BNC = x_BNC.masked_fill(padding_BN[..., None], 0)  # a NaN would survive a factor of 0
        else:
            x_BNC = self.slots(x_BNC, padding_BN, size)
        return mean_gate_update(x_BNC, cache_MC, self.weights, self.candidate, weight_B, spread_BMN)


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
        stride: side of the square of a map whose tokens share a slot, 1 in the paper. 2 keeps a quarter of the slots,
            at about a quarter of the cost. interpolation="area" averages the tokens of a slot, "nearest" takes the
            first. `length` and `size` are those of the tokens.
        variant: "algorithm1" (Algorithm 1 with the released code's bounded candidate), "paper" (Algorithm 1 with
            equation 5 as printed), or "released" (the published code). Sets `candidate`, `attend`, `source`, `mix`,
            `initial_gate` and `positional_convolution` where these are None.
        ratio: C / D.
        candidate, update_bias: see `CacheGates`.
        attend: "mean", all rows read the batch mean of the update, or "sample", each reads its own. In evaluation
            "mean" reads the stored cache, "sample" runs the gates on it.
        source: input of the update: the first C channels of the attention's "input" or "output".
        mix: "heads", before the output projection, or "outputs", after separate ones.
        initial_gate: initial lambda.
        positional_convolution: add a grouped 3 x 3 convolution of the input to the output (released code).
        interpolation, size, prefix, sync: see `SharedCache`.
        combine, bias, dropout, reduction, window: see `MemoryBranch`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        stride: int = 1,
        variant: Literal["algorithm1", "paper", "released"] = "algorithm1",
        ratio: float = 0.5,
        candidate: Candidate | None = None,
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
        given: dict[str, Any] = {"candidate": candidate, "attend": attend, "source": source, "mix": mix}
        given |= {"initial_gate": initial_gate, "positional_convolution": positional_convolution}
        chosen = VARIANTS[variant] | {name: value for name, value in given.items() if value is not None}
        slots: dict[str, Any] = {"interpolation": interpolation, "size": size, "prefix": prefix, "sync": sync}
        gates = {"candidate": chosen["candidate"], "update_bias": update_bias}
        reads = {"mix": chosen["mix"], "initial_gate": chosen["initial_gate"], "combine": combine, "window": window}
        super().__init__(
            GatedRecurrentCache(c, length, attend=chosen["attend"], **gates, **slots),
            MemoryBranch(width, heads, c, bias=bias, dropout=dropout, reduction=reduction, **reads),
            source=chosen["source"],
            mix=chosen["mix"],
            convolution=PositionalConvolution(width, c, prefix) if chosen["positional_convolution"] else None,
        )
