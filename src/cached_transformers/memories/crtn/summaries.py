"""Summaries of a segment for CRTN: one vector from the hidden states of up to L tokens.

Legend: B rows, L places of a segment, D model width, K key width, F = L D.
"""

from __future__ import annotations

import abc
from itertools import pairwise

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.memories.parts.fifo_store import taken
from cached_transformers.memories.parts.late_gradients import mapped
from cached_transformers.memories.parts.options import one_of


class Summary(nn.Module, abc.ABC):
    """A vector (B, K) from the first `size_B` places, whatever the others hold; without any, some finite vector."""

    def __init__(self, key_width: int) -> None:
        super().__init__()
        self.key_width = key_width

    def forward(self, x_BLD: Tensor, size_B: Tensor) -> Tensor:
        valid_BL = torch.arange(x_BLD.shape[1], device=size_B.device) < size_B[:, None]
        return self.reduce(torch.where(valid_BL[..., None], x_BLD, 0), size_B, valid_BL)

    @abc.abstractmethod
    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        """The summary of clean inputs."""


class Flat(Summary):
    """The places in one row, and `layers` linear maps, each with a ReLU (4.1 and 4.2)."""

    def __init__(self, segment: int, width: int, key_width: int, layers: int) -> None:
        super().__init__(key_width)
        widths = [segment * width, *[key_width] * layers]
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        x_BF = x_BLD.flatten(1)
        for linear in self.maps:
            x_BF = mapped(linear, x_BF, segments=True).relu()
        return x_BF


class BiLSTM(Summary):
    """Last state of a forward LSTM and first of a backward one, K / 2 channels each (4.3).

    Written with cells, since compiled code takes no nn.LSTM; and so that a row's states stop where its tokens stop.
    """

    def __init__(self, width: int, key_width: int) -> None:
        super().__init__(key_width)
        self.ahead, self.back = (nn.LSTMCell(width, key_width // 2) for _ in range(2))

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        inputs, masks = x_BLD.unbind(1), [valid_B[:, None] for valid_B in valid_BL.unbind(1)]
        return torch.cat([_last(self.ahead, inputs, masks), _last(self.back, inputs[::-1], masks[::-1])], -1)


class Pooled(Summary):
    """The last token, or the mean of the tokens: no parameters, K = D."""

    def __init__(self, width: int, *, mean: bool) -> None:
        super().__init__(width)
        self.mean = mean

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        if self.mean:
            return x_BLD.sum(1) / size_B.clamp(min=1)[:, None].to(x_BLD.dtype)
        return taken(x_BLD, (size_B - 1).clamp(min=0)[:, None])[:, 0]


def _last(cell: nn.LSTMCell, inputs: tuple[Tensor, ...], masks: list[Tensor]) -> Tensor:
    """Hidden state after all places; masked places leave it as it is."""
    hidden = carry = inputs[0].new_zeros(inputs[0].shape[0], cell.hidden_size)
    for x, mask in zip(inputs, masks, strict=True):
        new_hidden, new_carry = cell(x, (hidden, carry))
        hidden, carry = torch.where(mask, new_hidden, hidden), torch.where(mask, new_carry, carry)
    return hidden


SUMMARIES = ("linear", "mlp", "bilstm", "last", "mean")


def make_summary(name: str, segment: int, width: int, key_width: int | None = None) -> Summary:
    """Summary by name; see `CRTN`."""
    one_of("summary", name, SUMMARIES)
    at_least_one("; leave it out for the default", key_width=key_width)
    if name in ("last", "mean"):
        if key_width is not None:
            raise ValueError(f"key_width={key_width} cannot be chosen for summary={name!r}; leave it out")
        return Pooled(width, mean=name == "mean")
    key_width = key_width or width
    if name != "bilstm":
        return Flat(segment, width, key_width, layers=1 if name == "linear" else 2)
    if key_width % 2:
        raise ValueError(f"key_width={key_width} must be even for summary='bilstm', half for each direction")
    return BiLSTM(width, key_width)
