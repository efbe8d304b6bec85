"""A control, not a memory: only the positional convolution that the released GRC code adds to every attention layer.

The published comparisons lack it: the cached models have this convolution, the plain ones do not, and a convolution
alone is worth accuracy (arXiv:2312.12742; annosubmission/GRC-Cache, core/GRC_Attention.py). A claim about the cache
needs this control.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, Linear, Query, Reading, Weights
from cached_transformers.registry import MEMORIES

from .grc.shared_cache_memory import PositionalConvolution, cache_width
from .parts.fifo_store import taken
from .parts.recurrent import shown


@MEMORIES.register(
    "convolution",
    paper="arXiv:2312.12742 (control)",
    title="Cached Transformers",
    carries="nothing: the released code's convolution, a control",
    purpose="a control that carries nothing",
    equations="y + conv3x3(x), D channels in ratio * D groups, class tokens excluded",
    state="none",
    cost="9 N D / ratio multiply-adds per row and layer",
    reach="nothing is carried",
    gradient="everywhere",
)
class ConvolutionControl(LayerMemory):
    """No memory; adds the released code's grouped 3 x 3 convolution of the input to the attention's output.

    Args:
        width: D. heads: H.
        ratio: the number of groups is ratio * D, as beside a cache of that ratio.
        prefix: class tokens, which the convolution skips.
        sequence: convolve along one dimension (text) with 3 taps instead of over a map.
    """

    needs = frozenset({"bidirectional", "token_map"})

    def __init__(self, width: int, heads: int, *, ratio: float = 0.5, prefix: int = 0, sequence: bool = False) -> None:
        super().__init__()
        groups = cache_width(width, heads, ratio)
        if width % groups:
            raise ValueError(
                f"convolution: ratio={ratio} makes {groups} groups, which do not divide width={width}; "
                "choose a ratio of 1 / n"
            )
        self.sequence = sequence
        if sequence:
            self.needs = self.needs - {"token_map"}
        self.convolution: nn.Module = (
            nn.Conv1d(width, width, 3, padding=1, groups=groups)
            if sequence
            else PositionalConvolution(width, groups, prefix)
        )

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        y_BND = super().project(y_BHNE, query, reading, linear, weights)
        if not self.sequence:
            return y_BND + self.convolution(query.x_BND, query.size)
        if not query.x_BND.shape[1]:
            raise ValueError(f"inputs of shape {tuple(query.x_BND.shape)} have no token; leave the call out")
        padding_BN = torch.zeros_like(y_BND[..., 0], dtype=torch.bool) if query.padding_BN is None else query.padding_BN
        order_BN = padding_BN.long().argsort(dim=1, stable=True)  # a row's tokens are neighbours
        x_BND = taken(shown(query.x_BND, padding_BN), order_BN)
        convolved_BND = self.convolution(x_BND.transpose(1, 2)).transpose(1, 2)
        return y_BND + taken(convolved_BND, order_BN.argsort(dim=1))

    def close_gate(self) -> None:
        for parameter in self.convolution.parameters():
            nn.init.zeros_(parameter)
