"""KV cache of a text that is decoded token by token, for one or several continuations.

Slots never move: a continuation that is dropped leaves its slots unseen, and after a fork several continuations see the
same slots. A layer then reads each key once for all K continuations, and nothing is copied when they change.

Legend: B rows, K continuations of each, R = B K, N tokens, S slots, H heads, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decoder_block import KeysValues

BLOCK = 32
"""Default number of steps to reserve room for."""


class KVCache:
    """Keys and values of one layer, for all continuations.

    Args:
        steps: tokens of each continuation to reserve room for; `BLOCK` when None.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.keys: KeysValues | None = None
        self.used, self.steps = 0, steps or BLOCK

    def extend(self, new: KeysValues, continuations: int | None = None) -> KeysValues:
        """Append keys and values and return all slots.

        Args:
            continuations: K, unless there is one new slot for each continuation.
        """
        first, last = self.used, self.used + new.k_BHSE.shape[2]
        if self.keys is None or self.keys.k_BHSE.shape[2] < last:
            room = max(self.steps * (continuations or new.k_BHSE.shape[2]), self.used) + new.k_BHSE.shape[2]
            self.keys = KeysValues(*(self._reserve(index, t, room) for index, t in enumerate(new)))
        for cached, t in zip(self.keys, new, strict=True):
            cached[:, :, first:last] = t
        self.used = last
        k, v = (t[:, :, :last] for t in self.keys)
        return KeysValues(k, v)

    def _reserve(self, index: int, new: Tensor, slots: int) -> Tensor:
        """The cached keys (index 0) or values (1), with room for `slots` more."""
        b, h, _, e = new.shape
        room = new.new_empty(b, h, slots, e)
        return room if self.keys is None else torch.cat([self.keys[index][:, :, : self.used], room], 2)

    def choose(self, rows_B: Tensor) -> None:
        """Reorder rows."""
        if self.keys is not None:
            self.keys = KeysValues(*(t.index_select(0, rows_B) for t in self.keys))


class Continuations:
    """The slots of a text that each of its continuations sees, for all layers.

    Attributes:
        count: K. step: of the next token.
    """

    def __init__(self, rows: int, device: torch.device, continuations: int = 1) -> None:
        self.rows, self.device, self.count, self.step = rows, device, continuations, 0
        # A single continuation sees all slots in order.
        self._visible_BKS = None if continuations == 1 else self._empty(torch.bool, rows, continuations)
        self._step_S = None if continuations == 1 else self._empty(torch.long)

    def _empty(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, 0, dtype=dtype, device=self.device)

    @property
    def visible_BKS(self) -> Tensor:
        """bool, the slots that each continuation sees."""
        if self._visible_BKS is None:
            return torch.ones(self.rows, 1, self.step, dtype=torch.bool, device=self.device)
        return self._visible_BKS

    @property
    def step_S(self) -> Tensor:
        """The step of each slot."""
        return torch.arange(self.step, device=self.device) if self._step_S is None else self._step_S

    def multiply(self, times: int) -> None:
        """Repeat each continuation `times` times."""
        self._visible_BKS, self._step_S = self.visible_BKS.repeat_interleave(times, 1), self.step_S
        self.count *= times

    def choose(self, rows_B: Tensor, parent_BK: Tensor) -> bool:
        """Reorder texts by `rows_B` and the continuations of each by `parent_BK`; return whether texts have moved."""
        moved = len(rows_B) != self.rows or bool((rows_B != torch.arange(self.rows, device=self.device)).any())
        self.rows = len(rows_B)
        if self._visible_BKS is not None:
            visible = self._visible_BKS.index_select(0, rows_B) if moved else self._visible_BKS
            self._visible_BKS = visible.gather(1, parent_BK[..., None].expand(-1, -1, visible.shape[2]))
        return moved

    def grow(self, tokens: int = 1) -> None:
        """Add slots for the next tokens of each continuation, seen only by that continuation."""
        if self._visible_BKS is not None:
            own = own_slots(self.count, tokens, self.device)
            self._visible_BKS = torch.cat([self._visible_BKS, own.expand(self.rows, -1, -1)], 2)
            steps_N = torch.arange(self.step, self.step + tokens, device=self.device)
            self._step_S = torch.cat([self.step_S, steps_N.repeat(self.count)])
        self.step += tokens


def own_slots(continuations: int, slots: int, device: torch.device) -> Tensor:
    """(K, K slots) bool: each continuation's own slots, when continuations are laid out one after the other."""
    return torch.eye(continuations, dtype=torch.bool, device=device).repeat_interleave(slots, 1)


def as_rows(t_BHKE: Tensor) -> Tensor:
    """(B, H, K, E) to (B K, H, 1, E)."""
    return t_BHKE.transpose(1, 2).flatten(0, 1)[:, :, None]


def side_by_side(t_RHNE: Tensor, continuations: int) -> Tensor:
    """(B K, H, N, E) to (B, H, K N, E)."""
    if continuations == 1:
        return t_RHNE
    return t_RHNE.unflatten(0, (-1, continuations)).transpose(1, 2).flatten(2, 3)


def select_rows(opened: Any, index: Tensor, rows: int) -> Any:
    """Select rows of an opened memory: of its tensors whose first dimension is `rows`."""
    if isinstance(opened, Tensor):
        return opened.index_select(0, index.to(opened.device)) if opened.shape[:1] == (rows,) else opened
    if isinstance(opened, tuple):
        parts = [select_rows(part, index, rows) for part in opened]
        return type(opened)(*parts) if hasattr(opened, "_fields") else tuple(parts)
    return opened
