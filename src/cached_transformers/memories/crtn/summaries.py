"""Summaries of a segment for CRTN: one vector from the hidden states of up to L tokens.

Legend: B rows, L places of a segment, D model width, K key width, F = L D.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


class Summary(nn.Module):
    """Base: number of channels of the vector, and the fill of places after a short segment's tokens.

    Args:
        segment: L. width: D. key_width: K.
        fill: "zeros", or "mean" for the mean of the tokens that are there.
    """

    def __init__(self, segment: int, width: int, key_width: int, fill: str = "zeros") -> None:
        super().__init__()
        self.segment, self.width, self.key_width, self.fill = segment, width, key_width, fill

    def forward(self, x_BLD: Tensor, size_B: Tensor) -> Tensor:
        """(B, K) from the first `size_B` places, whatever the others hold; without any, some finite vector."""
        valid_BL = torch.arange(x_BLD.shape[1], device=size_B.device) < size_B[:, None]
        x_BLD = torch.where(valid_BL[..., None], x_BLD, 0)
        if self.fill == "mean":
            x_BLD = torch.where(valid_BL[..., None], x_BLD, _mean(x_BLD, size_B)[:, None])
        return self.reduce(x_BLD, size_B, valid_BL)

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        """The summary of clean inputs."""
        raise NotImplementedError("abstract: a summary writes reduce()")


class Flat(Summary):
    """The places in one row, K = L D; with layers, each a linear map and, in the seed, a ReLU (4.1 and 4.2).

    Args:
        layers: number of linear maps. relu: whether a ReLU follows each.
    """

    def __init__(
        self, segment: int, width: int, key_width: int, fill: str = "zeros", *, layers: int = 1, relu: bool = True
    ) -> None:
        super().__init__(segment, width, key_width if layers else segment * width, fill)
        widths = [segment * width, *[key_width] * layers]
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.relu = relu

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        x_BF = x_BLD.flatten(1)
        for linear in self.maps:
            x_BF = linear(x_BF).relu() if self.relu else linear(x_BF)
        return x_BF


class BiLSTM(Summary):
    """Last state of a forward LSTM and first of a backward one, K / 2 channels each (4.3).

    Written with cells, since compiled code takes no nn.LSTM; and so that a row's states stop where its tokens stop.

    Args:
        layers: LSTMs upon each other, each over both directions of the one below.
    """

    def __init__(self, segment: int, width: int, key_width: int, fill: str = "zeros", *, layers: int = 1) -> None:
        super().__init__(segment, width, key_width, fill)
        half = key_width // 2
        self.ahead, self.back = (
            nn.ModuleList(nn.LSTMCell(key_width if i else width, half) for i in range(layers)) for _ in range(2)
        )

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        if self.fill == "mean":
            valid_BL = torch.ones_like(valid_BL)
        inputs = list(x_BLD.unbind(1))
        masks = [valid_B[:, None] for valid_B in valid_BL.unbind(1)]
        for ahead, back in zip(self.ahead, self.back, strict=True):
            forth = _run(ahead, inputs, masks)  # type: ignore[arg-type]
            reverse = _run(back, inputs[::-1], masks[::-1])[::-1]  # type: ignore[arg-type]
            inputs = [torch.cat(pair, -1) for pair in zip(forth, reverse, strict=True)]
        return torch.cat([forth[-1], reverse[0]], -1)


class Pooled(Summary):
    """The last token, or the mean of the tokens: no parameters, K = D."""

    def __init__(self, segment: int, width: int, *, mean: bool) -> None:
        super().__init__(segment, width, width)
        self.mean = mean

    def reduce(self, x_BLD: Tensor, size_B: Tensor, valid_BL: Tensor) -> Tensor:
        if self.mean:
            return _mean(x_BLD, size_B)
        last_B11 = (size_B - 1).clamp(min=0)[:, None, None]
        return x_BLD.gather(1, last_B11.expand(-1, 1, self.width))[:, 0]


def _mean(x_BLD: Tensor, size_B: Tensor) -> Tensor:
    return x_BLD.sum(1) / size_B.clamp(min=1)[:, None].to(x_BLD.dtype)


def _run(cell: nn.LSTMCell, inputs: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Hidden state after each place; masked places leave it as it is."""
    hidden = carry = inputs[0].new_zeros(inputs[0].shape[0], cell.hidden_size)
    states = []
    for x, mask in zip(inputs, masks, strict=True):
        new_hidden, new_carry = cell(x, (hidden, carry))
        hidden, carry = torch.where(mask, new_hidden, hidden), torch.where(mask, new_carry, carry)
        states.append(hidden)
    return states


SUMMARIES = ("linear", "mlp", "bilstm", "affine", "identity", "last", "mean")


def make_summary(
    name: str, segment: int, width: int, *, key_width: int | None = None, layers: int | None = None, fill: str = "zeros"
) -> Summary:
    """Summary by name; for what each does and for the defaults see `CRTN`.

    Raises:
        ValueError: unknown names, options that the summary has no use for, sizes below 1, an odd width of a BiLSTM key.
    """
    if name not in SUMMARIES:
        raise ValueError(f"unknown summary={name!r} (known: {', '.join(SUMMARIES)})")
    if fill not in ("zeros", "mean"):
        raise ValueError(f"fill={fill!r} must be 'zeros' or 'mean'")
    for option, value in {"key_width": key_width, "layers": layers}.items():
        if value is not None and value < 1:
            raise ValueError(f"{option}={value} must be at least 1; leave it out for the default")
    if layers is not None and name not in ("mlp", "bilstm"):
        raise ValueError(f"layers={layers} is an option of summary='mlp' and 'bilstm', not of {name!r}; leave it out")
    if key_width is not None and name in ("identity", "last", "mean"):
        raise ValueError(f"key_width={key_width} cannot be chosen for summary={name!r}; leave it out")
    if fill != "zeros" and name in ("last", "mean"):
        raise ValueError(f"fill={fill!r} has no effect on summary={name!r}, which looks at tokens alone; leave it out")
    key_width = key_width or width
    if name == "bilstm" and key_width % 2:
        raise ValueError(f"key_width={key_width} must be even for summary='bilstm', half for each direction")
    makers: dict[str, Callable[[], Summary]] = {
        "linear": lambda: Flat(segment, width, key_width, fill),
        "mlp": lambda: Flat(segment, width, key_width, fill, layers=layers or 2),
        "bilstm": lambda: BiLSTM(segment, width, key_width, fill, layers=layers or 1),
        "affine": lambda: Flat(segment, width, key_width, fill, relu=False),
        "identity": lambda: Flat(segment, width, key_width, fill, layers=0),
        "last": lambda: Pooled(segment, width, mean=False),
        "mean": lambda: Pooled(segment, width, mean=True),
    }
    return makers[name]()
