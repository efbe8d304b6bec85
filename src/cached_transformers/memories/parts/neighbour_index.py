"""Nearest keys of a store by faiss (Johnson et al. 2017, arXiv:1702.08734; github.com/facebookresearch/faiss).

Token number t lies in slot t mod M of the store, and is in a graph of faiss in the order in which it came. Slots
that are overwritten leave old tokens in the graph, which a search passes over; when they are more than the store's own,
the graph is rebuilt.

Legend: B rows, H heads, N queries, M slots, K neighbours, E head width, L tokens in a graph.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cached_transformers.extras import require


class NeighbourIndex:
    """The search of faiss over stored keys: without an index ("Flat"), or by a graph for each row and head ("HNSW").

    A store that was written in place since the last search is known by the tensor and its version, and only new keys
    are added; any other is compared with the graph, which is extended or rebuilt. A copy begins without graphs.

    Args:
        kind: "Flat" (exact) or "HNSW<links>" (approximate: a graph with that many links per key, arXiv:1603.09320).
    """

    def __init__(self, kind: str = "Flat") -> None:
        if not re.fullmatch(r"Flat|HNSW[1-9]\d*", kind):
            raise ValueError(f"faiss_index={kind!r} must be 'Flat' (exact) or 'HNSW' with a number of links ('HNSW32')")
        self.kind = kind
        self._faiss = require("faiss", extra="memory")
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._seen: tuple[weakref.ref[Tensor], int] | None = None
        # Here and not as a decorator, which would load the compiler whenever the package is imported.
        self.search = torch.compiler.disable(self._search)

    def __getstate__(self) -> str:
        return self.kind

    def __setstate__(self, kind: str) -> None:
        self.__init__(kind)  # type: ignore[misc]

    def knows(self, k_BHME: Tensor) -> bool:
        """True if this tensor was searched last and has not been written since."""
        if self._seen is None or torch.compiler.is_compiling() or k_BHME.is_inference():
            return False
        return self._seen[0]() is k_BHME and self._seen[1] == k_BHME._version

    def follow(self, k_BHME: Tensor) -> None:
        """Treat the tensor as the one searched last, with only its oldest tokens overwritten."""
        self._seen = None if k_BHME.is_inference() else (weakref.ref(k_BHME), k_BHME._version)

    @torch.no_grad()
    def _search(self, q_BHNE: Tensor, k_BHME: Tensor, written_B: Tensor, neighbours: int) -> Tensor:
        """(B, H, N, K): slots of the keys with the largest products, the largest first; -1 where there is none."""
        queries, keys = (t.detach().float().cpu().contiguous().numpy() for t in (q_BHNE, k_BHME))
        found = np.full((*queries.shape[:3], neighbours), -1, dtype=np.int64)
        known = self.knows(k_BHME)
        for row, written in enumerate(written_B.tolist()):
            for head in range(keys.shape[1] if written else 0):
                queries_NE, keys_ME, graph = queries[row, head], keys[row, head], self._graphs.get((row, head))
                if self.kind == "Flat":
                    found[row, head] = self._flat(queries_NE, keys_ME[:written], neighbours)
                    continue
                if graph is None or not graph.serves(keys_ME, written, known):
                    first = max(written - len(keys_ME), 0)
                    graph = self._graphs[row, head] = Graph(self._faiss, self.kind, keys_ME.shape[1], first)
                graph.grow(keys_ME, written)
                found[row, head] = graph.search(queries_NE, len(keys_ME), written, neighbours)
        self.follow(k_BHME)
        return torch.from_numpy(found).to(q_BHNE.device)

    def _flat(self, queries_NE: np.ndarray, keys_ME: np.ndarray, neighbours: int) -> np.ndarray:
        some = min(neighbours, len(keys_ME))
        slots = self._faiss.knn(queries_NE, keys_ME, some, metric=self._faiss.METRIC_INNER_PRODUCT)[1]
        return np.pad(slots, ((0, 0), (0, neighbours - some)), constant_values=-1)


class Graph:
    """The keys of one row and head, oldest first, from token number `first` on."""

    def __init__(self, faiss: Any, kind: str, width: int, first: int) -> None:
        self._faiss, self.first = faiss, first
        self.index = faiss.index_factory(width, kind, faiss.METRIC_INNER_PRODUCT)

    def serves(self, keys_ME: np.ndarray, written: int, known: bool) -> bool:
        """True if it holds only tokens of this store, and at most as many old ones as the store has slots."""
        slots, end = len(keys_ME), self.first + self.index.ntotal
        oldest = max(written - slots, 0)
        if not self.first <= oldest <= end <= written or oldest - self.first > slots:
            return False
        if known:
            return True
        storage = self._faiss.downcast_index(self.index.storage)
        held_LE = self._faiss.rev_swig_ptr(storage.get_xb(), self.index.ntotal * keys_ME.shape[1])
        held_LE = held_LE.reshape(-1, keys_ME.shape[1])[oldest - self.first :]
        return all(
            np.array_equal(keys_ME[part], held_LE[begin:][: part.stop - part.start])
            for begin, part in _slots(oldest, end, slots)
        )

    def grow(self, keys_ME: np.ndarray, written: int) -> None:
        """Add the tokens that came since."""
        for _, part in _slots(self.first + self.index.ntotal, written, len(keys_ME)):
            self.index.add(keys_ME[part])

    def search(self, queries_NE: np.ndarray, slots: int, written: int, neighbours: int) -> np.ndarray:
        """(N, K) slots."""
        old = max(written - slots, 0) - self.first
        options: dict[str, Any] = {"efSearch": max(64, 2 * neighbours) * (2 if old else 1)}
        if old:
            options["sel"] = self._faiss.IDSelectorRange(old, self.index.ntotal)
        found = self.index.search(queries_NE, neighbours, params=self._faiss.SearchParametersHNSW(**options))[1]
        return np.where(found < 0, -1, (found + self.first) % slots)


def _slots(begin: int, end: int, slots: int) -> list[tuple[int, slice]]:
    """Places of tokens begin..end - 1, at most one per slot: the number before the wrap, and a slice."""
    parts, done = [], 0
    while begin < end:
        first = begin % slots
        count = min(end - begin, slots - first)
        parts.append((done, slice(first, first + count)))
        begin, done = begin + count, done + count
    return parts
