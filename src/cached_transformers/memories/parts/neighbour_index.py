"""Nearest keys of a store by faiss (Johnson et al. 2017, arXiv:1702.08734; github.com/facebookresearch/faiss).

Legend: B rows, H heads, N queries, M slots, K neighbours, E head width.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cached_transformers.extras import require


class NeighbourIndex:
    """Indices of faiss over stored keys, one a row and head.

    They are made from the keys and never stand for them: what an index holds is compared with the keys at every search.
    An index whose keys are the first of those that are there is extended, any other is built anew (as every search
    does once a full store overwrites its oldest slots). A copy, or what is unpickled, begins without indices.

    Args:
        kind: "Flat" (exact) or "HNSW<links>" (approximate: a graph of so many links a key, arXiv:1603.09320).

    Raises:
        ValueError: another kind. ImportError: faiss is not installed.
    """

    def __init__(self, kind: str = "Flat") -> None:
        if not re.fullmatch(r"Flat|HNSW[1-9]\d*", kind):
            raise ValueError(f"faiss_index={kind!r} must be 'Flat' (exact) or 'HNSW' with a number of links ('HNSW32')")
        self.kind = kind
        self._faiss = require("faiss", extra="memory")
        self._indices: dict[tuple[int, int], Any] = {}
        # Here and not as a decorator, which would load the compiler whenever the package is imported.
        self.search = torch.compiler.disable(self._search)

    def __getstate__(self) -> str:
        return self.kind

    def __setstate__(self, kind: str) -> None:
        self.__init__(kind)  # type: ignore[misc]

    @torch.no_grad()
    def _search(self, q_BHNE: Tensor, k_BHME: Tensor, filled_B: Tensor, neighbours: int) -> Tensor:
        """(B, H, N, K): slots of the keys with the largest products, the largest first; -1 where there is none."""
        queries, keys = (t.detach().float().cpu().contiguous().numpy() for t in (q_BHNE, k_BHME))
        found = np.full((*queries.shape[:3], neighbours), -1, dtype=np.int64)
        for row, filled in enumerate(filled_B.tolist()):
            for head in range(keys.shape[1] if filled else 0):
                index = self._index_of(row, head, keys[row, head, :filled], neighbours)
                found[row, head] = index.search(queries[row, head], neighbours)[1]
        return torch.from_numpy(found).to(q_BHNE.device)

    def _index_of(self, row: int, head: int, keys_ME: np.ndarray, neighbours: int) -> Any:
        index = self._indices.get((row, head))
        held = 0 if index is None else index.ntotal
        if index is None or held > len(keys_ME) or not np.array_equal(index.reconstruct_n(0, held), keys_ME[:held]):
            index, held = self._faiss.index_factory(keys_ME.shape[1], self.kind, self._faiss.METRIC_INNER_PRODUCT), 0
            self._indices[row, head] = index
        if held < len(keys_ME):
            index.add(keys_ME[held:])
        if self.kind != "Flat":
            index.hnsw.efSearch = max(64, 2 * neighbours)
        return index
