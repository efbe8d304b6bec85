"""Short convolution in front of attention: each token with a few of those before it, channel by channel.

Papers: "Zoology" (Arora et al. 2023, arXiv:2312.04927), which puts one before every mixer that it compares, attention
too, and H3 (Fu et al. 2022, arXiv:2212.14052), whose shift does the same for keys. As a residual branch of its own it
is what "Canon layers" (Allen-Zhu 2025, Physics of Language Models, part 4.1) have in front of attention. Code of the
first: HazyResearch/zoology, mixers/base_conv.py.

    y_t = x_t + sum_{w=0}^{K-1} c_w * x_{t-w}      c_w in R^D;  x before a row's first token is 0

A pair that stands side by side, key and value, is then one token for attention, which needs a layer of its own to bind
them otherwise. The last K - 1 tokens of a segment are carried into the next, so that a text may be cut anywhere.

Legend: B rows, N tokens, K taps, T = K - 1 tokens that are carried, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.state import State


class ShiftedState(NamedTuple):
    """State of a layer with a short convolution: the last tokens that went into it, and the layer's own."""

    recent_BTD: Tensor
    layer: State


class ShortConvolution(nn.Module):
    """Each token with those just before it, by a factor for each channel and distance.

    Args:
        width: D. taps: K, at least 2.

    Parameters: K D. Cost: K D multiply-adds a token. State: (K - 1) D numbers a row.

    Raises:
        ValueError: fewer than 2 taps.
    """

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        at_least_one(width=width)
        if taps < 2:
            raise ValueError(f"taps={taps} must be at least 2: a single one would scale a token")
        self.taps = taps
        self.weight_KD = nn.Parameter(torch.empty(taps, width))
        """Of the token itself first, and then of those before it."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(K), as `nn.Conv1d` of one channel a group."""
        nn.init.uniform_(self.weight_KD, -(self.taps**-0.5), self.taps**-0.5)

    def init_state(self, batch_size: int, like: Tensor) -> Tensor:
        """(B, T, D): nothing before the first token."""
        return like.new_zeros(batch_size, self.taps - 1, self.weight_KD.shape[1])

    def forward(
        self,
        x_BND: Tensor,
        recent_BTD: Tensor,
        *,
        padding_BN: Tensor | None = None,
        segment: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tokens with those before them, and the last T of them for the next segment.

        Args:
            x_BND: tokens. recent_BTD: of the segment before.
            padding_BN: bool, True = padding, wherever it stands: real tokens meet those before it.
            segment: (start, length) of the tokens that take part; those round them stay as they are.
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
        """The result, and the tokens that it was made of, (B, T + N, D)."""
        n, t = x_BND.shape[1], self.taps - 1
        all_BLD = torch.cat([recent_BTD.to(x_BND.dtype), x_BND], 1)
        weight_KD = self.weight_KD.to(x_BND.dtype)
        y_BND = x_BND * (1 + weight_KD[0])
        for back in range(1, self.taps):
            y_BND = torch.addcmul(y_BND, all_BLD[:, t - back : t - back + n], weight_KD[back])
        return y_BND, all_BLD

    def _beside_padding(self, x_BND: Tensor, recent_BTD: Tensor, padding_BN: Tensor) -> tuple[Tensor, Tensor]:
        order_BN = padding_BN.long().argsort(dim=1, stable=True)  # real tokens first, in their order
        at_BND = order_BN[..., None].expand_as(x_BND)
        y_BND, all_BLD = self._run(x_BND.gather(1, at_BND), recent_BTD)
        last_BT = (~padding_BN).sum(1)[:, None] + torch.arange(self.taps - 1, device=x_BND.device)
        recent = all_BLD.gather(1, last_BT[..., None].expand(-1, -1, x_BND.shape[2]))
        return torch.zeros_like(y_BND).scatter(1, at_BND, y_BND), recent.to(recent_BTD.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight_KD.shape[1]}, taps={self.taps}"
