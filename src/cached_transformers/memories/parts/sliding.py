"""The last M rows before each token of a segment, as views of one buffer that grows.

A store that is pushed at every token is copied at every token, and each copy is kept for its gradient. Here a row is
written once, after those that are there; a token sees a view, and the gradients of all views are added
up in one buffer of their own.

    window_i = rows i .. i + M of [the store, new rows],  gradient of a row = sum over the windows that show it

Legend: B rows, M slots, N new rows, L slots and all new rows of a segment, H heads, E head width, R = B H, G tensors of
a row (keys and values of each set).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cached_transformers.interfaces.memory import Attend


class Window:
    """The next token's window: the newest M rows of G tensors.

    Args:
        store: G times (B, H, M, E), the rows before the first token. room: how many rows will follow.
    """

    def __init__(self, store: Sequence[Tensor], room: int) -> None:
        rows, heads, self.slots, width = store[0].shape
        whole_GBHLE = store[0].new_empty(len(store), rows, heads, self.slots + room, width)
        self.first = 0
        # The buffer goes through the graph from one use to the next, so that its gradient goes the other way.
        self._whole_GBHLE, *seen = _Slide.apply(whole_GBHLE, 0, self.slots, *store)
        self.seen = tuple(seen)
        """G times (B, H, M, E)."""

    def slide(self, new: Sequence[Tensor]) -> None:
        """Let the next token see the rows `new`, G times (B, H, N, E), and as many old ones no more."""
        self.first += new[0].shape[2]
        self._whole_GBHLE, *seen = _Slide.apply(self._whole_GBHLE, self.first, self.slots, *new)
        self.seen = tuple(seen)

    def attends(self, valid_BM: Tensor) -> Sequence[Attend | None]:
        """Softmax attention of one token over keys and values of each set, whose gradients are added where they belong;
        None for each under autocast, where the backward would meet several dtypes."""
        if torch.is_autocast_enabled(valid_BM.device.type):
            return [None] * (len(self.seen) // 2)
        hidden_B11M = ~valid_BM[:, None, None]
        flat = [t.data.flatten(0, 1) for t in self.seen]
        return [partial(self._attend, pair, flat[pair : pair + 2], hidden_B11M) for pair in range(0, len(flat), 2)]

    def _attend(
        self, pair: int, seen: list[Tensor], hidden_B11M: Tensor, q_BHNE: Tensor, bias_BHNM: Tensor | None
    ) -> Tensor:
        place = pair, self.first, self.slots
        y_BHNE, self._whole_GBHLE = _Attend.apply(self._whole_GBHLE, q_BHNE, bias_BHNM, hidden_B11M, place, *seen)
        return y_BHNE  # type: ignore[no-any-return]


class _Slide(torch.autograd.Function):
    """Rows written so that they end the window that begins at `first`; the buffer, and views of the window."""

    @staticmethod
    def forward(ctx: Any, whole_GBHLE: Tensor, first: int, slots: int, *new: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.first, ctx.slots, ctx.rows, ctx.shape = first, slots, new[0].shape[2], whole_GBHLE.shape
        # Rows are written once, and earlier windows contain none of them: saved tensors are unchanged, which autograd
        # cannot know of views that share a count of writes.
        whole_GBHLE = whole_GBHLE.data
        windows = [t.narrow(2, first, slots) for t in whole_GBHLE.unbind(0)]
        for seen_BHME, new_BHNE in zip(windows, new, strict=True):
            seen_BHME[:, :, slots - ctx.rows :] = new_BHNE
        return whole_GBHLE, *(t.data for t in windows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GBHLE: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        if grad_GBHLE is None:
            like = next((t for t in grads if t is not None), None)
            if like is None:
                return None, None, None, *(None for _ in grads)
            grad_GBHLE = like.new_zeros(ctx.shape)
        for whole_BHLE, grad_BHME in zip(grad_GBHLE.unbind(0), grads, strict=True):
            if grad_BHME is not None:
                whole_BHLE.narrow(2, ctx.first, ctx.slots).add_(grad_BHME)
        place = ctx.first + ctx.slots - ctx.rows
        return grad_GBHLE, None, None, *(t.clone() for t in grad_GBHLE.narrow(3, place, ctx.rows).unbind(0))


class _Attend(torch.autograd.Function):
    """Softmax attention over a pair of windows; a query that sees no key gives 0."""

    @staticmethod
    def forward(
        ctx: Any,
        whole_GBHLE: Tensor,
        q_BHNE: Tensor,
        bias_BHNM: Tensor | None,
        hidden_B11M: Tensor,
        place: tuple[int, int, int],
        k_RME: Tensor,
        v_RME: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.place, ctx.shape, ctx.bias = place, whole_GBHLE.shape, bias_BHNM is not None and bias_BHNM.shape
        q_RNE = q_BHNE.flatten(0, 1) / math.sqrt(q_BHNE.shape[-1])
        logits_BHNM = torch.bmm(q_RNE, k_RME.mT).view(*q_BHNE.shape[:3], -1)
        if bias_BHNM is not None:
            logits_BHNM += bias_BHNM
        logits_BHNM.masked_fill_(hidden_B11M, torch.finfo(logits_BHNM.dtype).min)
        p_RNM = logits_BHNM.softmax(-1).masked_fill_(hidden_B11M, 0).flatten(0, 1)
        ctx.save_for_backward(q_RNE, p_RNM, k_RME, v_RME)
        return torch.bmm(p_RNM, v_RME).view_as(q_BHNE), whole_GBHLE.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHNE: Tensor | None, grad_GBHLE: Tensor | None) -> tuple[Any, ...]:
        if grad_BHNE is None:
            return grad_GBHLE, *[None] * 6
        q_RNE, p_RNM, k_RME, v_RME = ctx.saved_tensors
        if grad_GBHLE is None:
            grad_GBHLE = grad_BHNE.new_zeros(ctx.shape)
        grad_RNE = grad_BHNE.flatten(0, 1)
        ahead_RNM = p_RNM * torch.bmm(grad_RNE, v_RME.mT)
        logits_RNM = ahead_RNM.addcmul_(p_RNM, ahead_RNM.sum(-1, keepdim=True), value=-1)
        k_grad_RME, v_grad_RME = _pair(grad_GBHLE, ctx.place)
        k_grad_RME.addcmul_(logits_RNM.mT, q_RNE)  # of one query, products of batches are no faster
        v_grad_RME.addcmul_(p_RNM.mT, grad_RNE)
        q_RNE = torch.bmm(logits_RNM, k_RME).div_(math.sqrt(q_RNE.shape[-1]))
        logits_BHNM = logits_RNM.view(*grad_BHNE.shape[:3], -1)
        bias_BHNM = logits_BHNM.sum_to_size(ctx.bias) if ctx.bias and ctx.needs_input_grad[2] else None
        return grad_GBHLE, q_RNE.view_as(grad_BHNE), bias_BHNM, *[None] * 4


def _pair(whole_GBHLE: Tensor, place: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """(R, M, E): keys and values of one set that the window shows."""
    tensor, first, slots = place
    k_RME, v_RME = (t.flatten(0, 1).narrow(1, first, slots) for t in whole_GBHLE[tensor : tensor + 2].unbind(0))
    return k_RME, v_RME
