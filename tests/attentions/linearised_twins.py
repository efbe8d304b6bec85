"""Slow, obvious forms of linearised attention, and what compares a mechanism with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attentions.agreement import agree
from attentions.cases import B, E, H
from torch import Tensor

from cached_transformers.attentions import Attention
from cached_transformers.interfaces.memory import Context

V = 5
"""A value width that is not the key width."""

Twin = Callable[..., Tensor]
"""twin(q, k, v, x=, causal=, seen=, context=) -> (B, H, N, V)."""


def leaves(tokens: int, slots: int = 0, *, seed: int = 0, rows: int = B) -> dict[str, Tensor]:
    """Inputs with gradient, float64: queries, keys, values, the layer's input, keys and values of a context."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (tokens, E), "k": (tokens, E), "v": (tokens, V), "context_k": (slots, E), "context_v": (slots, V)}
    made = {
        name: torch.randn(rows, H, *shape, dtype=torch.double, generator=generator) for name, shape in shapes.items()
    }
    made["x"] = torch.randn(rows, tokens, H * E, dtype=torch.double, generator=generator)
    return {name: t.requires_grad_() for name, t in made.items()}


def keys_and_mask(
    k: Tensor, v: Tensor, causal: bool, seen: Tensor, context: Context | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All keys, all values, and which of them each query sees (B, 1, N, M + N)."""
    tokens = k.shape[2]
    mask = seen[:, None, None].expand(-1, 1, tokens, -1)
    if causal:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if context is None:
        return k, v, mask
    slots = context.valid_BM[:, None, None].expand(-1, 1, tokens, -1)
    return torch.cat([context.k_BHME, k], 2), torch.cat([context.v_BHME, v], 2), torch.cat([slots, mask], -1)


def average(weights: Tensor, v: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """sum w v / sum w over the keys that a query sees, and 0 where it sees none."""
    weights = weights * mask
    total = weights.sum(-1, keepdim=True) + epsilon
    return weights @ v / torch.where(total == 0, 1, total)


def compare(core: Attention, twin: Twin, *, forms: tuple[bool, ...] = (False, True), **tolerance: Any) -> None:
    """Values and gradients are those of the twin: at several lengths, causal and not, with padding and context."""
    for tokens in (1, 3, 8, 13):
        for causal in forms:
            for slots, padded in ((0, False), (0, True), (4, True)):
                seen = torch.ones(B, tokens, dtype=torch.bool)
                if padded:
                    seen[0, max(tokens - 3, 0) :] = False  # of one token: a row of padding alone
                    seen[1, :1] = tokens == 1
                given = leaves(tokens, slots, seed=tokens)
                context = None
                if slots:
                    valid = torch.tensor([[True, False, True, True], [False] * 4])
                    context = Context(given["context_k"], given["context_v"], torch.zeros(B, 4, 1), valid)
                shared: dict[str, Any] = {"causal": causal, "context": context}
                q, k, v, x = (given[name] for name in ("q", "k", "v", "x"))
                got = core(q, k, v, x_BND=x, key_padding_mask=~seen if padded else None, **shared).out_BHNV
                want = twin(q, k, v, x=x, seen=seen, **shared)
                where = f"{tokens} tokens, causal={causal}, slots={slots}, padded={padded}"
                agree(got, want, [*given.values(), *core.parameters()], where=where, **tolerance)
