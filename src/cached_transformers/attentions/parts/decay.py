"""Decays of a state per token: from the layer's input, or fixed, with their initial values.

    g = -exp(A) softplus(f + b)      "softplus": Mamba-2 (arXiv:2405.21060), Gated DeltaNet (2412.06464), KDA
    g = -5 sigmoid(exp(A) (f + b))   "safe": KDA (2510.26692) with a bound; no token forgets more than all but e^-5
    g = logsigmoid(f + b) / 16       "logsigmoid": Gated Linear Attention (2312.06635)
    g = log(1 - 2^(-5 - h))          fixed, of head h = 0 .. H-1: RetNet (2307.08621)

f = W x, or W_2 W_1 x through a narrow middle; A is a number a head, b one a head or a channel.

A decay has a half-life, ln 2 / -g tokens. As published it begins short: with exp(A) uniform in 0 .. 16 and softplus(b)
log-uniform in .001 .. .1, half of all heads forget half of what they hold within 11 tokens, and one in fifty keeps it
for 512, so that hardly a gradient crosses a segment. `half_life` draws half-lives instead, log-uniform between two
numbers of tokens, with A = 0 and W (or W_2) = 0: a decay then begins with that half-life, whatever is read.

Legend: B rows, H heads, N tokens, D model width, G decays a head, R width of the middle (D without one), O all decays
(H G).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .building_blocks import wide

DecayGate = Literal["softplus", "safe", "logsigmoid"]

BOUND = 5.0
"""Lower bound of "safe"."""
TEMPER = 16.0
"""Divisor of "logsigmoid"."""


def check_half_life(half_life: tuple[float, float] | None) -> None:
    """Raise a ValueError unless this is a range of tokens."""
    if half_life is None:
        return
    if len(half_life) != 2 or not 1 <= half_life[0] <= half_life[1] < math.inf:
        raise ValueError(
            f"half_life={half_life} must be two numbers of tokens, at least 1 and the smaller first, e.g. (32, 4096); "
            "None takes the published initialisation"
        )


def fixed_log_decay(heads: int, half_life: tuple[float, float] | None, like: Tensor) -> Tensor:
    """(H, 1, 1): RetNet's, or of half-lives in even ratios from the first to the second, and the first for one head."""
    h = torch.arange(heads, device=like.device, dtype=like.dtype)[:, None, None]
    if half_life is None:
        return torch.log1p(-torch.exp2(-5 - h))
    low, high = (math.log(tokens) for tokens in half_life)
    return -math.log(2) * torch.exp(-low - h * ((high - low) / max(heads - 1, 1)))


class InputDecay(nn.Module):
    """Decays from the layer's input.

    Args:
        width: D. heads: H. count: G, decays a head.
        gate: "softplus", "safe" or "logsigmoid".
        rank: R, width of the middle of the map; None for one full map.
        half_life: the least and the greatest at the start, in tokens; None for the published initialisation.
        least_rate: of the published "softplus": exp(A) is drawn from here to 16.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        count: int,
        *,
        gate: DecayGate,
        rank: int | None,
        half_life: tuple[float, float] | None,
        least_rate: float,
    ) -> None:
        super().__init__()
        if gate not in get_args(DecayGate):
            raise ValueError(f"decay_gate={gate!r} must be one of {', '.join(get_args(DecayGate))}")
        self.heads, self.gate, self.half_life, self.least_rate = heads, gate, half_life, least_rate
        outputs = heads * count
        # No nn.Linear: models give those weights of their own at the start, and half-lives would be others.
        self.middle_RD = None if rank is None else nn.Parameter(torch.empty(rank, width))
        self.weight_OR = nn.Parameter(torch.empty(outputs, width if rank is None else rank))
        self.bias_O = nn.Parameter(torch.empty(outputs))
        self.rate_H = None if gate == "logsigmoid" else nn.Parameter(torch.empty(heads))
        """A, the logarithm of the rate."""
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw half-lives, or the published weights: those of the maps as `nn.Linear` draws them."""
        for weight in (self.middle_RD, self.weight_OR):
            if weight is not None:
                nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        if self.rate_H is not None:
            self.rate_H.zero_()
        bias = self.bias_O
        if self.half_life is not None:
            self.weight_OR.zero_()
            low, high = (math.log(tokens) for tokens in self.half_life)
            g = math.log(2) / bias.uniform_(low, high).exp()  # of -g
            if self.gate == "safe":
                bias.copy_(torch.logit(g / BOUND))
            else:
                inverse = torch.log(torch.expm1(g if self.gate == "softplus" else g * TEMPER))
                bias.copy_(inverse if self.gate == "softplus" else -inverse)
        elif self.gate == "logsigmoid":
            nn.init.uniform_(bias, -(self.weight_OR.shape[1] ** -0.5), self.weight_OR.shape[1] ** -0.5)
        else:
            step = bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            bias.copy_(step + torch.log(-torch.expm1(-step)))
            if self.rate_H is not None and self.gate == "softplus":
                self.rate_H.uniform_(self.least_rate, 16).clamp_(min=1e-4).log_()

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """g, and softplus(f + b), Mamba-2's length of a step: (B, H, N, G) each, float32 or wider."""
        f_BNO = wide(x_BND)
        for weight in (self.middle_RD, self.weight_OR):
            f_BNO = f_BNO if weight is None else F.linear(f_BNO, wide(weight))
        # In one piece: of transposed numbers, a traced softplus_backward has another layout than one that runs.
        raw_BHNG = (f_BNO + wide(self.bias_O)).unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
        if self.rate_H is None:
            return F.logsigmoid(raw_BHNG) / TEMPER, F.softplus(raw_BHNG)
        rate_H11 = wide(self.rate_H).exp()[:, None, None]
        if self.gate == "safe":
            return -BOUND * torch.sigmoid(rate_H11 * raw_BHNG), F.softplus(raw_BHNG)
        step_BHNG = F.softplus(raw_BHNG)
        return -rate_H11 * step_BHNG, step_BHNG
