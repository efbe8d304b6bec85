"""What a device can do at most, as measured: operations a second by one large product, bytes by one large copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .interleaved import seconds_of


@dataclass(frozen=True)
class Peaks:
    """Floating-point operations a second by dtype, and bytes a second (those read and those written together)."""

    flops: dict[str, float]
    bandwidth: float

    def __str__(self) -> str:
        speeds = [f"{name} {speed / 1e12:,.1f} TFLOP/s" for name, speed in self.flops.items()]
        return ", ".join([*speeds, f"{self.bandwidth / 1e9:,.0f} GB/s"])


def measure(device: str, dtypes: Sequence[torch.dtype], *, side: int = 8192, mebibytes: int = 2048) -> Peaks:
    """The best of ten: a product of two square matrices, as precise as torch is set to be, and a copy.

    Args:
        side: of the matrices. mebibytes: that are copied; more than any cache of the device holds.
    """
    flops = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        flops[str(dtype).removeprefix("torch.")] = 2 * side**3 / _best(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    source = torch.ones(mebibytes * 2**18, device=device)
    target = torch.empty_like(source)
    return Peaks(flops, 2 * source.nbytes / _best(lambda: target.copy_(source)))


def _best(call: Callable[[], object]) -> float:
    # A clock of limited resolution may say 0 of what is very short.
    return max(min(seconds_of(call) for _ in range(10)), 1e-9)
