"""Sharded tensors on disk, by `torch.distributed.checkpoint` (DCP).

    FOLDER/__0_0.distcp, __1_0.distcp, ...   the shards, one file per process
           .metadata                         offsets of the shards, pickled by DCP, for tools that read its format
           index.json                        the same as JSON, the only index read here: unpickling could run code

A process reads the parts that overlap with its own shard, so that another number of processes resumes with the same
values, and one process can read everything.
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
from .sharding import is_sharded

INDEX = "index.json"


def flatten_state(
    weights: Mapping[str, Tensor], training: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a training state into tensors `weights/NAME`, `live/NAME` and `optimizer/NAME/FIELD`, and the rest."""
    optimizer, live = training["optimizer"], training.get("live_weights", {})
    names = optimizer["names"]
    tensors = {f"weights/{name}": t for name, t in weights.items()} | {f"live/{name}": t for name, t in live.items()}
    for index, fields in optimizer["state"].items():
        tensors |= {f"optimizer/{names[index]}/{field}": t for field, t in fields.items() if t is not None}
    rest = {key: value for key, value in training.items() if key != "live_weights"}
    rest["optimizer"] = {"param_groups": optimizer["param_groups"], "names": names}
    return tensors, rest


def unflatten_state(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and training state from the two parts that `flatten_state` made."""
    found: dict[str, dict[str, Tensor]] = {"weights": {}, "live": {}, "optimizer": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        found[kind][name] = tensor
    names, groups = (rest["optimizer"][key] for key in ("names", "param_groups"))
    numbers = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in found["optimizer"].items():
        name, _, field = key.rpartition("/")
        state.setdefault(numbers[name], {})[field] = tensor
    training = {**rest, "optimizer": {"state": state, "param_groups": groups}}
    return found["weights"], training | ({"live_weights": found["live"]} if found["live"] else {})


def write_shards(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write tensors by name; every process must call this. Whole tensors are written by the first process.

    Raises:
        OSError: a process could not write; all raise it.
    """
    import torch.distributed.checkpoint as dcp

    mine = {name: t for name, t in tensors.items() if world.main or is_sharded(t)}
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


def read_shards(folder: Path, like: Callable[[str], Tensor | None] = lambda name: None) -> dict[str, Tensor]:
    """Read all tensors of a folder, each sharded like `like(name)`; whole, on the CPU, if the shapes differ.

    Processes do not wait for each other.

    Raises:
        ValueError: the folder is damaged or of another program.
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
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(found, storage_reader=_reader(folder, metadata), **alone)  # type: ignore[arg-type]
    except Exception as error:  # torch raises many types of errors for foreign files
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder} is damaged, or not written by cached train: {type(error).__name__}: {reason}"
        ) from None
    return found


def _reader(folder: Path, metadata: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        """DCP reader that does not unpickle `.metadata`."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    return Reader(folder)


def _metadata(index: Mapping[str, Any]) -> Any:
    """Return the metadata object of DCP for the content of `index.json`."""
    from torch.distributed.checkpoint import metadata as kinds
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['dtype']!r} is no dtype")
        chunks = [kinds.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in entry["chunks"]]
        properties = kinds.TensorProperties(dtype=dtype)
        tensors[name] = kinds.TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        for offset, number, file, begin, length in entry["places"]:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not in the folder")
            key = kinds.MetadataIndex(name, None if offset is None else torch.Size(offset), number)
            places[key] = _StorageInfo(relative_path=file, offset=begin, length=length)
    return kinds.Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=kinds.StorageMeta())
