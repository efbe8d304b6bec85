"""Peak rates of a device as measured: FLOPs a second of one large matrix product, bytes a second of one large copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cached_lab.experiments.costs.timing import seconds_of


@dataclass(frozen=True)
class Peaks:
    """FLOPs a second by dtype, and bytes a second (read and written together)."""

    flops: dict[str, float]
    bandwidth: float

    def __str__(self) -> str:
        speeds = [f"{name} {speed / 1e12:,.1f} TFLOP/s" for name, speed in self.flops.items()]
        return ", ".join([*speeds, f"{self.bandwidth / 1e9:,.0f} GB/s"])


def measure_peaks(device: str, dtypes: Sequence[torch.dtype], *, side: int = 8192, mebibytes: int = 2048) -> Peaks:
    """Take the best of ten square products of `side` and copies of `mebibytes`, larger than any cache of the device."""

    def best(call: Callable[[], object]) -> float:
        return max(min(seconds_of(call) for _ in range(10)), 1e-9)  # a coarse clock may report 0

    flops = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        flops[str(dtype).removeprefix("torch.")] = 2 * side**3 / best(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    source = torch.ones(mebibytes * 2**18, device=device)
    target = torch.empty_like(source)
    return Peaks(flops, 2 * source.nbytes / best(lambda: target.copy_(source)))
