"""Peak memory of tensors on a CPU, counted by operator while code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count live storages made by operations inside the `with`.

    Args:
        slack: relative error allowed in the peak. Dead storages are searched only if a peak could be higher by more,
            which saves most searches in a long step.

    Attributes:
        peak: most bytes alive at once.
    """

    def __init__(self, slack: float = 0.0) -> None:
        super().__init__()
        self.peak, self.slack = 0, slack
        self._most = 0  # bytes alive if none died since the last count
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in given:
                    self._hold(storage)
        if self._most > self.peak * (1 + self.slack):
            self.peak = max(self.peak, self.now())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage; it replaces an earlier one at the same address."""
        before = self._storages.get(storage._cdata)
        self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._most += storage.nbytes() - (0 if before is None else before[1])

    def now(self) -> int:
        """Return the bytes alive."""
        expired = torch.UntypedStorage._expired  # `StorageWeakRef.expired` without its three calls in Python
        self._storages = {key: pair for key, pair in self._storages.items() if not expired(pair[0].cdata)}
        self._most = sum(size for _, size in self._storages.values())
        return self._most


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the peak of bytes during `call`, beyond those alive before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        call()
    return live.peak
