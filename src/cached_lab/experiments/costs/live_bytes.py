"""Peak memory of tensors on a CPU, counted by operator while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count live storages made by operations inside the `with`.

    Attributes:
        now, peak: bytes alive, and most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {s._cdata: s for s in _storages(out) if s._cdata not in self._storages}
        for key in made and made.keys() - {s._cdata for s in _storages((args, kwargs))}:
            self._hold(key, made[key])
        return out

    def _hold(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        size = storage.nbytes()

        def free(_: object) -> None:
            self.now -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, free)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


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
