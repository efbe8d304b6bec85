"""Short causal convolution before attention, per channel.

Papers: "Zoology" (Arora et al. 2023, arXiv:2312.04927; code HazyResearch/zoology, mixers/base_conv.py), which puts one
before every mixer; H3 (Fu et al. 2022, arXiv:2212.14052), with a shift of keys; and, as a residual branch, "Canon
layers" (Allen-Zhu 2025, Physics of Language Models, part 4.1).

    y_t = x_t + sum_{w=0}^{K-1} c_w * x_{t-w}      c_w in R^D;  x before a row's first token is 0

It binds a key and an adjacent value into one token, which otherwise needs a layer of attention. The last K - 1 tokens
of a segment are carried into the next.

Legend: B rows, N tokens, K taps, T = K - 1 carried tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.state import State


class ShiftedState(NamedTuple):
    """State of a layer with a short convolution: its last inputs, and the layer's own state."""

    recent_BTD: Tensor
    layer: State


def begun(layers: Iterable[State], clock_B: Tensor) -> tuple[State, ...]:
    """The states of layers, with finite last inputs in rows that have read nothing."""

    def of_layer(state: ShiftedState) -> State:
        empty_BTD = (clock_B == 0)[:, None, None] & ~state.recent_BTD.isfinite()
        return state._replace(recent_BTD=state.recent_BTD.masked_fill(empty_BTD, 0))

    return tuple(of_layer(state) if isinstance(state, ShiftedState) else state for state in layers)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution with a residual connection.

    Args:
        width: D. taps: K, at least 2.

    Parameters: K D. Cost: K D multiply-adds a token. State: (K - 1) D numbers a row.

    Raises:
        ValueError: fewer than 2 taps.
    """

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        at_least_one("; leave the convolution out for 1", least=2, taps=taps)
        self.taps = taps
        self.weight_KD = nn.Parameter(torch.empty(taps, width))  # current token first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(K), like a depthwise `nn.Conv1d`."""
        nn.init.uniform_(self.weight_KD, -(self.taps**-0.5), self.taps**-0.5)

    def init_state(self, batch_size: int, like: Tensor) -> Tensor:
        """(B, T, D) zeros."""
        return like.new_zeros(batch_size, self.taps - 1, self.weight_KD.shape[1])

    def forward(
        self,
        x_BND: Tensor,
        recent_BTD: Tensor,
        *,
        padding_BN: Tensor | None = None,
        segment: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolved tokens, and the last T inputs for the next segment.

        Args:
            x_BND: tokens. recent_BTD: last inputs of the previous segment.
            padding_BN: bool, True = padding at any position, which is skipped.
            segment: (start, length) of the tokens to convolve; tokens around them stay unchanged.
        """
        if segment is not None:
            start, length = segment
            front, inside, back = x_BND.split([start, length, x_BND.shape[1] - start - length], 1)
            within = None if padding_BN is None else padding_BN[:, start : start + length]
            y_BND, recent_BTD = self(inside, recent_BTD, padding_BN=within)
            return torch.cat([front, y_BND, back], 1), recent_BTD
        if padding_BN is not None:
            return self._beside_padding(x_BND, recent_BTD, padding_BN)
        y_BND, all_BLD = self._run(x_BND, recent_BTD)
        return y_BND, all_BLD[:, x_BND.shape[1] :].to(recent_BTD.dtype)

    def _run(self, x_BND: Tensor, recent_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Convolved tokens, and the inputs (B, T + N, D)."""
        n, t = x_BND.shape[1], self.taps - 1
        all_BLD = torch.cat([recent_BTD.to(x_BND.dtype), x_BND], 1)
        weight_KD = self.weight_KD.to(x_BND.dtype)
        y_BND = x_BND * (1 + weight_KD[0])
        for back in range(1, self.taps):
            y_BND = torch.addcmul(y_BND, all_BLD[:, t - back : t - back + n], weight_KD[back])
        return y_BND, all_BLD

    def _beside_padding(self, x_BND: Tensor, recent_BTD: Tensor, padding_BN: Tensor) -> tuple[Tensor, Tensor]:
        order_BN = padding_BN.long().argsort(dim=1, stable=True)  # real tokens first
        at_BND = order_BN[..., None].expand_as(x_BND)
        y_BND, all_BLD = self._run(x_BND.gather(1, at_BND), recent_BTD)
        last_BT = (~padding_BN).sum(1)[:, None] + torch.arange(self.taps - 1, device=x_BND.device)
        recent = all_BLD.gather(1, last_BT[..., None].expand(-1, -1, x_BND.shape[2]))
        return torch.zeros_like(y_BND).scatter(1, at_BND, y_BND), recent.to(recent_BTD.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight_KD.shape[1]}, taps={self.taps}"
