"""Sharded tensors on disk: one safetensors file per process, with its rows of each tensor.

    FOLDER/00000.safetensors, 00001.safetensors, ...   rows by tensor; metadata: first row of each tensor

`fully_shard` divides the first dimension. A process reads the rows of its own shard only, so that another number of
processes resumes with the same values, and one process can read everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cached_transformers.files import sync_folder, write_durably

from .distributed import World
from .sharding import first_row, is_sharded

_MARK = "sharded tensor"


@dataclass(frozen=True)
class StoredShards:
    """A sharded tensor on disk.

    Attributes:
        parts: file, first row and number of rows of each shard.
    """

    name: str
    shape: torch.Size
    parts: tuple[tuple[Path, int, int], ...]

    def rows(self, begin: int, end: int) -> Tensor:
        """Read the rows begin .. end - 1."""
        found: list[Tensor] = []
        for path, first, count in sorted(self.parts, key=lambda part: part[1]):
            low, high = max(begin - first, 0), min(end - first, count)
            if low < high or not count:  # an empty shard has the dtype of an empty tensor
                with safetensors.safe_open(path, "pt") as file:
                    found.append(file.get_slice(self.name)[low:high])
        whole = torch.cat(found)
        if whole.shape != (end - begin, *self.shape[1:]):
            raise ValueError(f"{self.name} has shape {tuple(whole.shape)}, {(end - begin, *self.shape[1:])} is needed")
        return whole


def split_shards(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return a tree with marks in place of sharded tensors, and these by the names in their marks."""
    if isinstance(tree, Tensor) and is_sharded(tree):
        return {_MARK: path, "shape": list(tree.shape)}, {path: tree}
    if not isinstance(tree, (dict, list)):
        return tree, {}
    found: dict[str, Tensor] = {}
    rest = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        rest[key], shards = split_shards(value, f"{path}/{key}")
        found |= shards
    return (rest if isinstance(tree, dict) else list(rest.values())), found


def join_shards(tree: Any, stored: Mapping[str, Sequence[tuple[Path, int, int]]], whole: bool) -> Any:
    """Return the tree of `split_shards` with whole tensors, or with `StoredShards`, in place of its marks."""
    if isinstance(tree, list):
        return [join_shards(value, stored, whole) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: join_shards(value, stored, whole) for key, value in tree.items()}
    shards = StoredShards(tree[_MARK], torch.Size(tree["shape"]), tuple(stored[tree[_MARK]]))
    return shards.rows(0, shards.shape[0]) if whole else shards


def write_shards(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write this process' rows of sharded tensors (OSError)."""
    folder.mkdir(exist_ok=True)
    mine = {name: t.to_local().detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}  # type: ignore[attr-defined]
    begins = json.dumps({name: first_row(t) for name, t in tensors.items()})
    write_durably(folder / f"{world.rank:05d}.safetensors", safetensors.torch.save(mine, {"begins": begins}))
    sync_folder(folder)


def stored_shards(files: Sequence[Path]) -> dict[str, list[tuple[Path, int, int]]]:
    """Return the parts of each tensor in files of `write_shards`."""
    found: dict[str, list[tuple[Path, int, int]]] = {}
    for path in files:
        with safetensors.safe_open(path, "pt") as file:
            for name, begin in json.loads(file.metadata()["begins"]).items():
                found.setdefault(name, []).append((path, begin, file.get_slice(name).get_shape()[0]))
    return found
