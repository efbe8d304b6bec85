"""Tensors that processes have parts of, in a folder by `torch.distributed.checkpoint` (DCP), each part written once.

    FOLDER/__0_0.distcp, __1_0.distcp, ...   the parts, a file a process
           .metadata                         which part is where, pickled by DCP, for tools that read its format
           index.json                        the same, which is all that is read here: JSON runs no code

What is read need not be cut as what was written: a process reads the parts that overlap with its own, so that another
number of processes goes on with the same values, and one process alone reads all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cached_transformers.files import sync_folder, write_durably

from .distributed import World
from .sharding import is_cut

INDEX = "index.json"


def write_cut(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write tensors by name; of those that are not cut up, the ones of the first process. Every process must write.

    Raises:
        OSError: some process could not write; all raise it.
    """
    import torch.distributed.checkpoint as dcp

    mine = {name: t for name, t in tensors.items() if world.main or is_cut(t)}
    try:
        metadata = dcp.save(mine, storage_writer=dcp.FileSystemWriter(folder), process_group=world.group)
    except dcp.CheckpointException as error:
        reasons = [failure[0] for failure in error.failures.values()]
        raise next((e for e in reasons if isinstance(e, OSError)), OSError(str(reasons[0]))) from error
    if world.main:
        index: dict[str, dict[str, Any]] = {
            name: {
                "dtype": str(stored.properties.dtype).removeprefix("torch."),
                "size": list(stored.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in stored.chunks],
                "places": [],
            }
            for name, stored in metadata.state_dict_metadata.items()
        }
        for key, place in metadata.storage_data.items():
            offset = None if key.offset is None else list(key.offset)
            index[key.fqn]["places"].append([offset, key.index, place.relative_path, place.offset, place.length])
        write_durably(folder / INDEX, json.dumps(index).encode())
        sync_folder(folder)


def read_cut(folder: Path, like: Callable[[str], Tensor | None] = lambda name: None) -> dict[str, Tensor]:
    """All tensors of a folder by name, each cut up as `like(name)` is; whole, on the CPU, where that has another shape.

    No process waits for another.

    Raises:
        ValueError: the folder is damaged, or none of these.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    try:
        metadata = _metadata(json.loads((folder / INDEX).read_bytes()))
        found: dict[str, Tensor] = {}
        for name, stored in metadata.state_dict_metadata.items():
            own = like(name)
            size, dtype = stored.size, stored.properties.dtype
            same = own is not None and own.shape == size and own.dtype == dtype
            found[name] = torch.empty_like(own) if own is not None and same else torch.empty(size, dtype=dtype)
        alone = {"no_dist": True} if dist.is_initialized() else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            dcp.load(found, storage_reader=_reader(folder, metadata), **alone)  # type: ignore[arg-type]
    except Exception as error:  # torch raises a wide choice for what it did not write, wrapped in its own
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} is damaged, or not one of ours: {type(error).__name__}: {reason}") from None
    return found


def _reader(folder: Path, metadata: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        """Does not unpickle `.metadata`."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    return Reader(folder)


def _metadata(index: Mapping[str, Any]) -> Any:
    """What DCP calls by that name, from what `index.json` holds."""
    from torch.distributed.checkpoint import metadata as kinds
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['dtype']!r} is no type of tensors")
        chunks = [kinds.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in entry["chunks"]]
        properties = kinds.TensorProperties(dtype=dtype)
        tensors[name] = kinds.TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        for offset, number, file, begin, length in entry["places"]:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not in the folder")
            key = kinds.MetadataIndex(name, None if offset is None else torch.Size(offset), number)
            places[key] = _StorageInfo(relative_path=file, offset=begin, length=length)
    return kinds.Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=kinds.StorageMeta())
