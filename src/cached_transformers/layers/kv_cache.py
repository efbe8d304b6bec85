"""Keys and values of a text that is written token by token, of one or of several continuations.

Slots never move: a continuation that is given up leaves its slots unseen, and one that is forked lets several see the
same. A layer then reads each key once for all K continuations, and nothing is copied when they change.

Legend: B rows, K continuations of each, N tokens, S slots, H heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder_block import KeysValues

BLOCK = 32
"""Steps for which memory is taken at once, where nobody says for how many."""


class KeptKeys:
    """Keys and values of one layer, for all continuations.

    Args:
        steps: tokens of each continuation for which there is to be room from the beginning; `BLOCK` when None.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.keys: KeysValues | None = None
        self.used, self.steps = 0, steps or BLOCK

    def extend(self, new: KeysValues, continuations: int | None = None) -> KeysValues:
        """All slots up to and with the new ones.

        Args:
            continuations: K, where the new ones are not one slot of each.
        """
        first, last = self.used, self.used + new.k_BHSE.shape[2]
        if self.keys is None or self.keys.k_BHSE.shape[2] < last:
            room = max(self.steps * (continuations or new.k_BHSE.shape[2]), self.used) + new.k_BHSE.shape[2]
            self.keys = KeysValues(*(self._widened(index, t, room) for index, t in enumerate(new)))
        for kept, t in zip(self.keys, new, strict=True):
            kept[:, :, first:last] = t
        self.used = last
        k, v = (t[:, :, :last] for t in self.keys)
        return KeysValues(k, v)

    def _widened(self, index: int, new: Tensor, slots: int) -> Tensor:
        """What is kept (keys 0, values 1), with room for so many slots more."""
        b, h, _, e = new.shape
        room = new.new_empty(b, h, slots, e)
        return room if self.keys is None else torch.cat([self.keys[index][:, :, : self.used], room], 2)

    def choose(self, rows_B: Tensor) -> None:
        """Rows in this order."""
        if self.keys is not None:
            self.keys = KeysValues(*(t.index_select(0, rows_B) for t in self.keys))


class Continuations:
    """Which slots of a text each of its continuations sees; all layers have the same.

    Attributes:
        count: K. step: of the next token.
    """

    def __init__(self, rows: int, device: torch.device, continuations: int = 1) -> None:
        self.rows, self.device, self.count, self.step = rows, device, continuations, 0
        # A single continuation sees all there is, in order, of which no account needs to be kept.
        self._visible_BKS = None if continuations == 1 else self._nothing(torch.bool, rows, continuations)
        self._step_S = None if continuations == 1 else self._nothing(torch.long)

    def _nothing(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, 0, dtype=dtype, device=self.device)

    @property
    def visible_BKS(self) -> Tensor:
        """bool, the slots that each continuation sees."""
        if self._visible_BKS is None:
            return torch.ones(self.rows, 1, self.step, dtype=torch.bool, device=self.device)
        return self._visible_BKS

    @property
    def step_S(self) -> Tensor:
        """The step that a slot belongs to."""
        return torch.arange(self.step, device=self.device) if self._step_S is None else self._step_S

    def multiply(self, times: int) -> None:
        """Each continuation `times` times, one behind the other."""
        self._visible_BKS, self._step_S = self.visible_BKS.repeat_interleave(times, 1), self.step_S
        self.count *= times

    def choose(self, rows_B: Tensor, parent_BK: Tensor) -> bool:
        """Rows in the order of `rows_B`, and of each the continuations `parent_BK`; whether rows have moved."""
        moved = len(rows_B) != self.rows or bool((rows_B != torch.arange(self.rows, device=self.device)).any())
        self.rows = len(rows_B)
        if self._visible_BKS is not None:
            visible = self._visible_BKS.index_select(0, rows_B) if moved else self._visible_BKS
            self._visible_BKS = visible.gather(1, parent_BK[..., None].expand(-1, -1, visible.shape[2]))
        return moved

    def grow(self, tokens: int = 1) -> None:
        """Slots for the next tokens of each continuation, which sees its own alone."""
        if self._visible_BKS is not None:
            own = own_slots(self.count, tokens, self.device)
            self._visible_BKS = torch.cat([self._visible_BKS, own.expand(self.rows, -1, -1)], 2)
            steps_N = torch.arange(self.step, self.step + tokens, device=self.device)
            self._step_S = torch.cat([self.step_S, steps_N.repeat(self.count)])
        self.step += tokens


def own_slots(continuations: int, slots: int, device: torch.device) -> Tensor:
    """(K, K slots) bool: where each of K continuations has its own slots, one behind the other."""
    return torch.eye(continuations, dtype=torch.bool, device=device).repeat_interleave(slots, 1)
