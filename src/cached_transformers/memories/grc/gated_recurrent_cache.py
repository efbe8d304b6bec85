"""The gated recurrent cache of GRC attention: the parameters of its update, and the shared cache that it updates.

Paper: "Cached Transformers: Improving Transformers with Differentiable Memory Cache" (arXiv:2312.12742), equations
3-5 and Algorithm 1, lines 2-6. Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py.

With X the first C channels of a layer's input, S = interpolate(X, M) and a cache K of M slots:

    u = sigmoid(W_u [S, K] + b_u)        r = sigmoid(W_r [S, K] + b_r)        c = f(W_c [S, r * K] + b_c)
    proposal = (1 - u) * K + u * c       averaged over the rows of the batch

where f is the identity in the paper ("affine"), LayerNorm(GELU(.)) in the released code ("norm", our default), or tanh.
The affine form has an unbounded recurrence that receives no gradient over several steps; it has been seen to diverge.

Legend: B rows, N tokens, M slots, C cache width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.linear_maps import matrix_of
from cached_transformers.memories.parts.interpolation import nearest_map
from cached_transformers.memories.parts.options import one_of
from cached_transformers.memories.parts.shared_cache import CacheSlots, SharedCache

from .equations import Candidate, GateWeights, gate_update
from .fused_gates import mean_gate_update


class CacheGates(CacheSlots):
    """The gates of a gated recurrent cache: parameters of the update, and the way from tokens to slots.

    Args:
        candidate: "norm" (LayerNorm of GELU), "tanh", or "affine" (the paper's equation 5, unbounded).
        width, length, others: see `CacheSlots`.
        update_bias: initial bias of the update gate; below 0 for a slow cache.

    Parameters: 6 C^2 + 3 C, and 2 C with candidate="norm".
    """

    def __init__(
        self,
        width: int,
        length: int,
        *,
        candidate: Candidate = "norm",
        update_bias: float = 0.0,
        **slots: Any,
    ) -> None:
        super().__init__(width, length, **slots)
        one_of("candidate", candidate, ("norm", "tanh", "affine"))
        self.candidate, self.update_bias = candidate, update_bias
        self.from_tokens = nn.Linear(width, 3 * width)
        self.from_cache = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width) if candidate == "norm" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(2 C), as a linear map from 2 C channels; biases zero but for the update gate's."""
        bound = 1 / math.sqrt(2 * self.width)
        for weight in (self.from_tokens.weight, self.from_cache.weight):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(self.from_tokens.bias)
        nn.init.constant_(self.from_tokens.bias[: self.width], self.update_bias)

    @property
    def weights(self) -> GateWeights:
        """The parameters as the pure functions take them."""
        norm = None if self.norm is None else (self.norm.weight, self.norm.bias, self.norm.eps)
        tokens, bias = matrix_of(self.from_tokens)
        assert bias is not None
        return GateWeights(tokens, bias, matrix_of(self.from_cache)[0], norm)

    def extra_repr(self) -> str:
        return f"{self.width}, length={self.length}, candidate={self.candidate!r}"


class GatedRecurrentCache(CacheGates, SharedCache):
    """A shared cache that is updated by gates.

    Args:
        attend: "mean" gives the batch mean of the update (Algorithm 1), "sample" each row's own update; the mean is
            what is stored in either case.
        width, length, others: see `CacheGates` and `SharedCache`.

    Cost (multiply-adds): with N = M, 4 B M C^2 for the rows and 2 M C^2 once per batch.
    """

    def __init__(self, width: int, length: int, *, attend: Literal["mean", "sample"] = "mean", **others: Any) -> None:
        super().__init__(width, length, attend=one_of("attend", attend, ("mean", "sample")), **others)

    def update(self, s_BMC: Tensor, cache_MC: Tensor) -> Tensor:
        return gate_update(s_BMC, cache_MC, self.weights, self.candidate)

    def mean_update(self, s_BMC: Tensor, cache_MC: Tensor, weight_B: Tensor | None) -> Tensor:
        return mean_gate_update(s_BMC, cache_MC, self.weights, self.candidate, weight_B)

    def mean_update_by(
        self, x_BNC: Tensor, padding_BN: Tensor | None, size: tuple[int, int] | None, cache_MC: Tensor
    ) -> Tensor:
        few = 4 * x_BNC.shape[1] <= 3 * self.length  # nearly as many: spreading maps costs more than it saves
        if not few or self.interpolation != "nearest" or self.size is not None or torch.compiler.is_compiling():
            return super().mean_update_by(x_BNC, padding_BN, size, cache_MC)
        spread_BMN = nearest_map(x_BNC, self.length, padding_BN)
        weight_B = None
        if padding_BN is not None:
            weight_B = (~padding_BN).any(1)
            x_BNC = x_BNC.masked_fill(padding_BN[..., None], 0)  # a NaN would survive a factor of 0
        return mean_gate_update(x_BNC, cache_MC, self.weights, self.candidate, weight_B, spread_BMN)
