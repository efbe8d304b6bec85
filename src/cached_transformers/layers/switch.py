"""Switch feed-forward: a router sends each token through one of E feed-forward networks.

Fedus, Zoph and Shazeer 2022 (arXiv:2101.03961, section 2; code in google-research/t5x and tensorflow/mesh). With the
router's W and the experts F_1 .. F_E, for a token x:

    p = softmax(W x),   e = argmax p,   y = p_e F_e(x)

An expert takes at most ceil(T / E * capacity_factor) of T tokens, in order of rows and positions; dropped tokens get
y = 0. There are two losses, the second from ST-MoE (arXiv:2202.08906, equation 5):

    balance = E sum_e f_e P_e             f_e share of tokens routed to e (no gradient), P_e mean of p_e
    z       = mean (logsumexp W x)^2

`balance` is 1 for an even distribution and E if one expert gets all tokens with p = 1. Padding is excluded from
routing, capacity and losses. Unlike in the paper, capacity is rounded up, so it is never 0. In transformers'
SwitchTransformersSparseMLP capacity is per sequence, and padding is routed.

Legend: B rows, N tokens of a row, T = B N tokens, E experts, C places of an expert, D model width, F hidden width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.annotations import check_type, checked, hints_of
from cached_transformers.memories.grc.shared_cache import in_backward
from cached_transformers.registry import unknown_name

from .feed_forward import ACTIVATIONS, FeedForward

ExpertsSpec = int | Mapping[str, Any] | None
"""None for a dense feed-forward, number of experts, or {"experts": number, "every": layers, option: value}."""


@torch.library.custom_op("cached_transformers::count_dropped", mutates_args=("counts",))
def count_dropped(counts: Tensor, dropped: Tensor, tokens: Tensor) -> None:
    """Add to (dropped tokens, tokens), except during the recomputation of activation checkpointing.

    A custom operator, so the check runs with compiled code instead of at tracing.
    """
    if not in_backward():
        counts.add_(torch.stack([dropped, tokens]))


@checked
class SwitchFeedForward(nn.Module):
    """norm -> router -> one of E feed-forward networks per token, times the router's probability.

    Cost: 2 C E D F multiply-adds, capacity_factor times a `FeedForward`. The router computes in float32 or wider.

    Args:
        width: D. hidden: F, of each expert. experts: E.
        capacity_factor: capacity of an expert in training, in multiples of T / E; None for no limit.
        evaluation_capacity_factor: the same in evaluation mode. With a limit, results depend on other tokens of the
            batch, and incremental decoding differs from reading all tokens at once.
        balance_loss, z_loss: weights of the two losses.
        jitter: in training the router's input is multiplied by numbers from [1 - jitter, 1 + jitter] (usually 1e-2).
        expert_dropout: on the hidden layer of the experts, 0.4 in the paper's fine-tuning; None takes `dropout`.
        norm: applied to the input; identity when None.
        activation: of the experts. dropout: on the result. bias: of the experts.

    Raises:
        ValueError: an option out of its range.
    """

    gives_loss = True  # see `run_feed_forward`

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        capacity_factor: float | None = 1.25,
        evaluation_capacity_factor: float | None = 2.0,
        balance_loss: float = 1e-2,
        z_loss: float = 1e-3,
        jitter: float = 0.0,
        expert_dropout: float | None = None,
        norm: nn.Module | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", activation, list(ACTIVATIONS)))
        for name, weight in {"balance_loss": balance_loss, "z_loss": z_loss}.items():
            if weight < 0:
                raise ValueError(f"{name}={weight} must not be negative; 0 switches the loss off")
        for name, rate in {"jitter": jitter, "expert_dropout": expert_dropout or 0.0, "dropout": dropout}.items():
            if not 0 <= rate < 1:
                raise ValueError(f"{name}={rate} must lie in [0, 1)")
        self.width, self.hidden, self.experts = width, hidden, experts
        self._factors = {
            True: _fraction("capacity_factor", capacity_factor),
            False: _fraction("evaluation_capacity_factor", evaluation_capacity_factor),
        }
        self.balance_loss, self.z_loss, self.jitter = balance_loss, z_loss, jitter
        self.norm = norm if norm is not None else nn.Identity()
        self.activation = ACTIVATIONS[activation]()
        self.expert_dropout = nn.Dropout(dropout if expert_dropout is None else expert_dropout)
        self.dropout = nn.Dropout(dropout)
        self.router_ED = nn.Parameter(torch.empty(experts, width))
        self.enter_EDF = nn.Parameter(torch.empty(experts, width, hidden))
        self.leave_EFD = nn.Parameter(torch.empty(experts, hidden, width))
        self.enter_bias_EF = nn.Parameter(torch.zeros(experts, hidden)) if bias else None
        self.leave_bias_ED = nn.Parameter(torch.zeros(experts, width)) if bias else None
        self.reset_parameters()
        # No buffer: DistributedDataParallel broadcasts buffers from rank 0.
        self._counts = torch.zeros(2, dtype=torch.long)

    def reset_parameters(self, scale: float = 0.1) -> None:
        """Normal weights of deviation sqrt(scale / inputs), truncated at two deviations (section 2.4)."""
        for weight, inputs in (
            (self.router_ED, self.width),
            (self.enter_EDF, self.width),
            (self.leave_EFD, self.hidden),
        ):
            std = math.sqrt(scale / inputs)
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def route(self, h_TD: Tensor, valid_T: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Probability (T) of the selected expert, the expert (T), and the auxiliary loss."""
        kind = h_TD.device.type
        with contextlib.nullcontext() if h_TD.is_meta else torch.autocast(kind, enabled=False):  # meta has no autocast
            wide = torch.promote_types(h_TD.dtype, torch.float32)
            x_TD = h_TD.to(wide)
            if self.training and self.jitter:
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
            logits_TE = F.linear(x_TD, self.router_ED.to(wide))
            p_TE = logits_TE.softmax(-1)
            p_T, chosen_T = p_TE.max(-1)
            loss = self.balance_loss * balance_loss(p_TE, chosen_T, valid_T)
            return p_T, chosen_T, loss + self.z_loss * z_loss(logits_TE, valid_T)

    def forward(self, x_BND: Tensor, padding_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, N, D), 0 for dropped tokens and padding, and the auxiliary loss."""
        h_TD = self.norm(x_BND).flatten(0, -2)
        valid_T = None if padding_BN is None else ~padding_BN.flatten()
        p_T, chosen_T, loss = self.route(h_TD, valid_T)
        chose_TE = F.one_hot(chosen_T, self.experts)
        if valid_T is not None:
            chose_TE = chose_TE * valid_T[:, None]
        order_TE = chose_TE.cumsum(0)
        place_T = order_TE.gather(1, chosen_T[:, None])[:, 0] - 1
        tokens = order_TE.new_full((), len(h_TD)) if valid_T is None else valid_T.sum()
        kept_T = place_T < self._limit(tokens)
        kept_T = kept_T if valid_T is None else kept_T & valid_T
        if self.training:
            count_dropped(self._counts, tokens - kept_T.sum(), tokens)
        places = self._places(order_TE)
        last = self.experts * places
        # One more slot collects the tokens that are left out; no expert reads it.
        slot_T = torch.where(kept_T, chosen_T * places + place_T, last)
        buffer = h_TD.new_zeros(last + 1, self.width).index_copy(0, slot_T, h_TD)
        x_ECD = buffer[:last].unflatten(0, (self.experts, places))
        h_ECF = self.expert_dropout(self.activation(_batched(x_ECD, self.enter_EDF, self.enter_bias_EF)))
        out_ECD = _batched(h_ECF, self.leave_EFD, self.leave_bias_ED)
        y_TD = out_ECD.flatten(0, 1).index_select(0, slot_T.clamp(max=last - 1))
        y_TD = torch.where(kept_T[:, None], y_TD * p_T[:, None].to(y_TD.dtype), 0)
        return self.dropout(y_TD.view_as(x_BND)), loss

    def _limit(self, tokens: Any) -> Any:
        """ceil(tokens / E * factor) of a number or a tensor, in integer arithmetic."""
        factor = self._factors[self.training]
        if factor is None:
            return tokens
        return -(-tokens * factor.numerator // (self.experts * factor.denominator))

    def _places(self, order_TE: Tensor) -> int:
        """Slots of an expert in the buffer: the most that any expert can fill, at least 1."""
        tokens = order_TE.shape[0]
        if self._factors[self.training] is None and tokens and not (torch.compiler.is_compiling() or order_TE.is_meta):
            return max(int(order_TE[-1].max()), 1)  # without a limit, T slots per expert would waste memory
        return max(min(self._limit(tokens), tokens), 1)

    def tallies(self) -> dict[str, Tensor]:
        """Counts in training since the last call: {"dropped_tokens": (dropped tokens, tokens)}."""
        counts = self._counts.clone()
        self._counts.zero_()
        return {"dropped_tokens": counts}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SwitchFeedForward:
        super()._apply(fn, recurse)
        moved = fn(self._counts)
        self._counts = torch.zeros_like(moved) if self._counts.is_meta and not moved.is_meta else moved
        return self

    def extra_repr(self) -> str:
        return f"width={self.width}, hidden={self.hidden}, experts={self.experts}"


def balance_loss(p_TE: Tensor, chosen_T: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e over the valid tokens; 0 for none (equations 4 to 6)."""
    experts = p_TE.shape[-1]
    chose_TE = F.one_hot(chosen_T, experts).to(p_TE.dtype)
    return experts * (_mean(chose_TE, valid_T) * _mean(p_TE, valid_T)).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Mean of the squared log-sum-exp of the logits over the valid tokens; 0 for none."""
    return _mean(logits_TE.logsumexp(-1, keepdim=True).square(), valid_T)[0]


def make_feed_forward(
    experts: ExpertsSpec, width: int, hidden: int, *, index: int, depth: int, **common: Any
) -> FeedForward | SwitchFeedForward:
    """Build the feed-forward of layer `index` of `depth`: dense, or with experts.

    Args:
        experts: None, E, or {"experts": E, "every": layers, option of `SwitchFeedForward`: value}; every=1 gives all
            layers experts, every=2 (the default, as in the paper) the layers 1, 3, 5, ..., counted from 0. By default
            capacity has no limit in evaluation, so results do not depend on other rows.
        common: options of `FeedForward`, for both kinds; its `activation_dropout` is the default of the experts'
            dropout.

    Raises:
        ValueError: unknown options, or a stack without any layer with experts.
    """
    if experts is None:
        return FeedForward(width, hidden, **common)
    options = dict(experts) if isinstance(experts, Mapping) else {"experts": experts}
    every = options.pop("every", 2)
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(unknown_name("option of experts", name, [*_OPTIONS, "every"]))
        check_type(f"experts.{name}", options[name], hints_of(SwitchFeedForward)[name])
    check_type("experts.every", every, int)
    if "experts" not in options:
        raise ValueError(f"experts={experts} must give their number, e.g. {{experts: 8, every: 2}}")
    if not 1 <= every <= depth:
        raise ValueError(f"experts.every={every} must lie between 1 and the number of layers, depth={depth}")
    if (index + 1) % every:
        return FeedForward(width, hidden, **common)
    if "activation_dropout" in common:
        common["expert_dropout"] = common.pop("activation_dropout")
    return SwitchFeedForward(width, hidden, **{"evaluation_capacity_factor": None, **common, **options})


_OPTIONS = (
    "experts",
    "capacity_factor",
    "evaluation_capacity_factor",
    "balance_loss",
    "z_loss",
    "jitter",
    "expert_dropout",
    "bias",
)


def _batched(x_ECD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
    return torch.bmm(x_ECD, weight_EDF) if bias_EF is None else torch.baddbmm(bias_EF[:, None], x_ECD, weight_EDF)


def _mean(x_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Mean over the valid tokens; zeros for none."""
    if valid_T is None:
        return x_TE.sum(0) / max(len(x_TE), 1)
    return torch.where(valid_T[:, None], x_TE, 0).sum(0) / valid_T.sum().clamp(min=1)


def _fraction(name: str, factor: float | None) -> Fraction | None:
    """The factor as a ratio of small integers; None for None."""
    if factor is None:
        return None
    if not 0 <= factor <= 1e6:
        raise ValueError(f"{name}={factor} must not be negative, or above 1e6; null sets no limit")
    return Fraction(factor).limit_denominator(1000)
