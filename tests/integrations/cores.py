"""Attention cores for the tests of hosts: a window, one with a parameter, and two that cannot do much."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cached_transformers.attentions import Attention, AttentionOutput, Call, PatternAttention
from cached_transformers.attentions.parts.building_blocks import attend


class Window(PatternAttention):
    """Tokens see those at most `radius` away, by a dense mask."""

    can = PatternAttention.can | {"causal"}

    def __init__(self, radius: int = 1, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.radius = radius

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        mask = near(q_BHNE.shape[2], self.radius, call.causal)[None, None]
        if call.key_padding_mask is not None:
            mask = mask & ~call.key_padding_mask[:, None, None]
        return AttentionOutput(*attend(q_BHNE, k_BHNE, v_BHNV, mask, dropout=self.drop, want_lse=call.want_lse))


class BiasedWindow(Window):
    """The same, and what is added to the logits is heard."""

    can = Window.can | {"bias"}

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        mask = near(q_BHNE.shape[2], self.radius, call.causal)
        logits = q_BHNE @ k_BHNE.mT * q_BHNE.shape[-1] ** -0.5
        if call.bias_BHNM is not None:
            logits = logits + call.bias_BHNM
        return AttentionOutput(logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v_BHNV)


class Tempered(Attention):
    """Exact attention whose heads scale their logits by a learned factor. Knows no dropout."""

    can = frozenset({"bidirectional", "cross", "bias"})

    def __init__(self, heads: int, start: float = 2.0) -> None:
        super().__init__()
        self.factor_H11 = nn.Parameter(torch.full((heads, 1, 1), start))

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        logits = q_BHNE * self.factor_H11 @ k_BHNE.mT * q_BHNE.shape[-1] ** -0.5
        logits = logits if call.bias_BHNM is None else logits + call.bias_BHNM
        return AttentionOutput(logits.softmax(-1) @ v_BHNV)


class Told(Attention):
    """Notes what it is told."""

    can = frozenset({"causal", "bidirectional"})

    def __init__(
        self,
        width: int,
        heads: int,
        index: int,
        depth: int,
        prefix: int,
        causal: bool,
        length: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.facts = {"width": width, "heads": heads, "index": index, "depth": depth, "prefix": prefix}
        self.facts |= {"length": length, "size": size, "causal": causal}  # type: ignore[dict-item]
        self.x_BND: Tensor | None = None

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        self.x_BND = call.x_BND
        return AttentionOutput(v_BHNV)


class Selfish(Attention):
    """Is trained with a loss of its own."""

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        return AttentionOutput(v_BHNV, None, v_BHNV.square().mean())


CORES = {
    "test_window": Window,
    "test_biased_window": BiasedWindow,
    "test_tempered": Tempered,
    "test_told": Told,
    "test_selfish": Selfish,
}


def near(tokens: int, radius: int = 1, causal: bool = False) -> Tensor:
    """(N, N) bool: who sees whom in a window."""
    away = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (away.abs() <= radius) & ((away >= 0) if causal else torch.ones_like(away, dtype=torch.bool))
