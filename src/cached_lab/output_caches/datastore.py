"""Datastore of kNN-LM: the hidden states of all contexts of a text as keys, and the tokens that followed as values.

On disk it is a folder of three files, written completely or not at all: `keys.bin` (S, D) and `values.bin` (S,), raw
numbers, and `datastore.json` with sizes, origin and the SHA-256 of both. Keys are memory-mapped and read in chunks.

Legend: S entries, C entries of a chunk, D width of a key, Q queries, K neighbours.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.extras import require
from cached_transformers.files import NotWritten, json_text, sync_folder, write_durably
from cached_transformers.memories.parts.nearest import nearest
from cached_transformers.memories.parts.options import one_of

FORMAT = 1
KEYS, VALUES, ABOUT = "keys.bin", "values.bin", "datastore.json"
CHUNK = 2**27
"""Bytes of float32 keys that are compared at once."""
TRAINED_ON = 2**18
"""Keys, at most, to train an index on."""
_FAISS = re.compile(r"Flat|HNSW[1-9]\d*|IVF[1-9]\d*,(Flat|PQ[1-9]\d*)")
_TYPES = {"float16": torch.float16, "float32": torch.float32}


class Datastore:
    """Keys (S, D) and values (S,), and their search.

    Args:
        keys_SD: float16 or float32, in memory or memory-mapped.
        values_S: the tokens that followed.
        about: origin of the keys ("fingerprint" of the model, "key", ...).
        search: "exact", by torch; or an index of faiss, built at the first search: "Flat" (exact), "HNSW" with its
            number of links ("HNSW32"), "IVF" with its number of cells and their content ("IVF4096,PQ64").
        probes: cells that an IVF index searches.

    Raises:
        ValueError: no entry, mismatched sizes, or an unknown search. ImportError: faiss is not installed.
    """

    def __init__(
        self,
        keys_SD: Tensor,
        values_S: Tensor,
        about: Mapping[str, Any] | None = None,
        search: str = "exact",
        probes: int = 32,
    ) -> None:
        if keys_SD.dim() != 2 or values_S.shape != keys_SD.shape[:1] or not keys_SD.numel():
            shapes = f"keys of shape {tuple(keys_SD.shape)} and values of shape {tuple(values_S.shape)}"
            raise ValueError(f"{shapes} must be (entries, width) and (entries,), with one entry at least")
        if search != "exact" and not _FAISS.fullmatch(search):
            raise ValueError(f"search={search!r} must be 'exact', or an index of faiss: Flat, HNSW32, IVF4096,PQ64")
        at_least_one(probes=probes)
        self.keys_SD, self.values_S, self.about = keys_SD, values_S, dict(about or {})
        self.search, self.probes = search, probes
        self._faiss: Any = None if search == "exact" else require("faiss", extra="memory")
        self._index: Any = None

    def __len__(self) -> int:
        return len(self.values_S)

    @torch.no_grad()
    def nearest(self, q_QD: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Squared distances (Q, K) and indices of the nearest keys, nearest first; index -1 where there is none.

        Distances to the stored keys are computed in float32. K is `neighbours`, or S if that is smaller.

        Raises:
            ValueError: queries of another width.
        """
        if q_QD.shape[-1] != self.keys_SD.shape[1]:
            widths = f"hidden states of width {q_QD.shape[-1]} meet keys of width {self.keys_SD.shape[1]}"
            raise ValueError(f"{widths}; give {self.about.get('key', 'the hidden states of its model')}")
        neighbours = min(neighbours, len(self))
        with torch.autocast(q_QD.device.type, enabled=False):
            q_QD = q_QD.float()
            if self.search != "exact":
                index_QK = self._search_index(q_QD, neighbours)
                return _sorted(self._distances(q_QD, self.keys_SD, index_QK), index_QK, neighbours)
            best_QK = q_QD.new_empty(len(q_QD), 0)
            index_QK = torch.empty(len(q_QD), 0, dtype=torch.long, device=q_QD.device)
            for begin, k_CD in self._chunks():
                k_CD = k_CD.to(q_QD.device, torch.float32)
                # The nearest key has the largest q . k - |k|^2 / 2, a product with one more channel.
                keys = torch.cat([k_CD, -k_CD.square().sum(1, keepdim=True) / 2], 1)
                queries = torch.cat([q_QD, q_QD.new_ones(len(q_QD), 1)], 1)
                filled_B = torch.full((1,), len(k_CD), device=q_QD.device)
                found_QK = nearest(queries[None, None], keys[None, None], filled_B, min(neighbours, len(k_CD)))[0, 0]
                both = torch.cat([best_QK, self._distances(q_QD, k_CD, found_QK)], 1)
                best_QK, index_QK = _sorted(both, torch.cat([index_QK, found_QK + begin], 1), neighbours)
        return best_QK, index_QK

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Index of the first key of each chunk, and its keys."""
        size = max(CHUNK // (4 * self.keys_SD.shape[1]), 1)
        for begin in range(0, len(self), size):
            yield begin, self.keys_SD[begin : begin + size]

    def _distances(self, q_QD: Tensor, k_SD: Tensor, index_QK: Tensor) -> Tensor:
        """(Q, K) squared distances, from differences; infinite for index -1."""
        rows = max(CHUNK // max(4 * index_QK.shape[1] * q_QD.shape[1], 1), 1)
        parts = []
        for q_RD, index_RK in zip(q_QD.split(rows), index_QK.split(rows), strict=True):
            k_RKD = k_SD[index_RK.clamp(min=0).to(k_SD.device)].to(q_QD.device, torch.float32)
            distance_RK = (q_RD[:, None] - k_RKD).square().sum(-1)
            parts.append(distance_RK.masked_fill(index_RK < 0, torch.inf))
        return torch.cat(parts) if parts else q_QD.new_empty(index_QK.shape)

    def _search_index(self, q_QD: Tensor, neighbours: int) -> Tensor:
        if self._index is None:
            self._index = self._build_index()
        if self.search.startswith("HNSW"):
            self._index.hnsw.efSearch = max(64, 2 * neighbours)
        found = self._index.search(q_QD.cpu().contiguous().numpy(), neighbours)[1]
        return torch.from_numpy(found).to(q_QD.device)

    def _build_index(self) -> Any:
        try:
            index = self._faiss.index_factory(self.keys_SD.shape[1], self.search, self._faiss.METRIC_L2)
            if not index.is_trained:
                sample_SD = self.keys_SD[:: -(-len(self) // TRAINED_ON)]
                index.train(sample_SD.cpu().float().contiguous().numpy())
        except RuntimeError as error:
            why = f"cannot be built from {len(self)} keys of width {self.keys_SD.shape[1]}: {str(error)[-200:]}"
            raise ValueError(f"search={self.search!r} {why}; take fewer cells, or 'exact'") from None
        for _, k_CD in self._chunks():
            index.add(k_CD.cpu().float().contiguous().numpy())
        if self.search.startswith("IVF"):
            index.nprobe = self.probes
        return index


def _sorted(distance_QK: Tensor, index_QK: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    found = distance_QK.topk(min(neighbours, distance_QK.shape[1]), largest=False)
    return found.values, index_QK.gather(1, found.indices)


def build(folder: Path, pieces: Iterable[tuple[Tensor, Tensor]], about: Mapping[str, Any]) -> None:
    """Write a datastore into a new folder, completely or not at all.

    Args:
        pieces: keys (C, D) and values (C,), one pair in memory at a time.
        about: origin of the keys, as JSON; "dtype" of the stored keys is float16 (default) or float32.

    Raises:
        ValueError: the folder exists, there is no entry, or a key is out of the range of its dtype.
        NotWritten: e.g. the disk is full.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; name another folder, or remove it")
    dtype = one_of("dtype", about.get("dtype", "float16"), tuple(_TYPES))
    partial = folder.with_name(f".{folder.name}.partial")
    digest, values, width = hashlib.sha256(), list[np.ndarray](), list[int]()

    def keys() -> Iterator[bytes]:
        for k_CD, value_C in pieces:
            k_CD = k_CD.to(_TYPES[dtype])
            if not k_CD.isfinite().all():
                raise ValueError(f"a key is not finite in {dtype}; take dtype='float32', or check the model")
            values.append(value_C.cpu().numpy().astype("<i4"))
            width[:] = [k_CD.shape[1]]
            content = k_CD.cpu().contiguous().numpy().tobytes()
            digest.update(content)
            yield content

    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_durably(partial / KEYS, keys())
        if not values:
            raise ValueError("the text holds no token; give a longer one")
        content = np.concatenate(values).tobytes()
        sums = {KEYS: digest.hexdigest(), VALUES: hashlib.sha256(content).hexdigest()}
        head = {"format": FORMAT, "entries": len(content) // 4, "width": width[0], "sha256": sums}
        write_durably(partial / VALUES, content)
        write_durably(partial / ABOUT, json_text({**head, "about": {**about, "dtype": dtype}}))
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise NotWritten(str(folder), error, "nothing was written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(folder: Path, about: Mapping[str, Any], search: str = "exact", probes: int = 32) -> Datastore:
    """Load a datastore with memory-mapped keys, after a check of its sums.

    Args:
        about: required origin.

    Raises:
        ValueError: it is damaged, of a newer format, or of another origin; the message names the first difference.
    """
    way = "remove the folder to build it again, or name another"
    try:
        head = json.loads((folder / ABOUT).read_bytes())
        made, entries, width, sums = head["about"], int(head["entries"]), int(head["width"]), head["sha256"]
        if head["format"] != FORMAT:
            raise ValueError(f"it has format {head['format']}, and this version reads {FORMAT}")
        dtype = np.dtype(made["dtype"]).newbyteorder("<")
        for name, size in ((KEYS, entries * width * dtype.itemsize), (VALUES, entries * 4)):
            if (folder / name).stat().st_size != size or _sum(folder / name) != sums[name]:
                raise ValueError(f"{name} does not match its size or its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} is not a complete datastore: {error}; {way}") from error
    for name, value in about.items():
        if made.get(name) != value:
            raise ValueError(f"{folder} was built with {name}={made.get(name)!r}, not {value!r}; {way}")
    keys = np.memmap(folder / KEYS, dtype, mode="c", shape=(entries, width))
    values = np.fromfile(folder / VALUES, "<i4")
    return Datastore(torch.from_numpy(keys), torch.from_numpy(values), made, search, probes)


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()
