"""Files of a trained memory alone: a few megabytes that belong to one host of transformers.

The file is safetensors; its metadata hold the arguments of `add_memory` and a digest of the host's weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cached_transformers.files import write_whole

from .adapters import add_memory, remove_memory
from .frozen_host import host_digest, is_of_memory
from .hub import MODEL_TYPE
from .peft_models import adapters_of, refuse_unsaved

KEY, FORMAT = "cached_transformers_memory", 1
"""Name of the metadata, and its version."""

Host = TypeVar("Host", bound=nn.Module)


def save_memory(model: nn.Module, path: str | Path) -> None:
    """Write the weights, caches and tuned initial state of a host's memory as one safetensors file.

    Args:
        model: a model of transformers with a memory, or `create_model("transformers", ...)` around it.

    Raises:
        ValueError: the model has no memory, or adapters whose part in the memory's work the file would lack, or
            quantised weights.
        NotWritten: the folder cannot be written; a file that was there before is untouched.
    """
    host = _host(model)
    record = getattr(host.config, MODEL_TYPE, None)
    if not record:
        raise ValueError(f"{type(host).__name__} has no memory to save; call add_memory first")
    state = host.state_dict()
    if adapters := adapters_of(host):
        raise ValueError(
            f"{type(host).__name__} has adapters beside its memory ({adapters[0]}), which this file would lack; merge "
            "them into the host first, or save the PeftModel with modules_to_save=['memory']"
        )
    refuse_unsaved(host, getattr(host, "_hf_peft_config_loaded", False))
    notes = {"format": FORMAT, "host": _about(host), "add_memory": record}  # refuses quantised weights
    tensors = {name: t.contiguous().clone() for name, t in state.items() if is_of_memory(name)}
    write_whole(Path(path), safetensors.torch.save(tensors, {KEY: json.dumps(notes, sort_keys=True)}))


def load_memory(model: Host, path: str | Path) -> Host:
    """Give a host the memory of a file of `save_memory`, in place, with the options that it was trained with.

    Args:
        model: the model of transformers that the memory was trained on, without a memory; in any floating dtype.

    Returns:
        The same model; after an error it has no memory.

    Raises:
        ValueError: no such file, or a damaged one; the weights of the host are others, or it has a memory already.
    """
    host = _host(model)
    try:
        with safe_open(str(path), framework="pt") as file:
            notes = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        format_, other, record = notes["format"], notes["host"], notes["add_memory"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"path={path}: it is no file of save_memory ({type(error).__name__}: {error})") from None
    if format_ != FORMAT:
        raise ValueError(f"path={path} has format {format_}, this version reads {FORMAT}; update cached-transformers")
    if (own := _about(host)) != other:
        differing = ", ".join(
            f"{key}={other.get(key)!r} instead of {value!r}" for key, value in own.items() if other.get(key) != value
        )
        raise ValueError(f"path={path}: its memory was trained on another host, of {differing}; load that host")
    add_memory(host, **record)
    names = {name for name in host.state_dict() if is_of_memory(name)}
    try:
        if names != tensors.keys():
            raise ValueError(f"its tensors differ from the memory's, as {min(names ^ tensors.keys())}")
        host.load_state_dict(tensors, strict=False)
    except (ValueError, RuntimeError) as error:
        remove_memory(host)
        raise ValueError(f"path={path} does not fit memory {record['memory']['name']!r}: {error}") from None
    return model


def _host(model: Any) -> Any:
    """The model of transformers that has, or gets, the memory (ValueError: another kind)."""
    host = model if hasattr(getattr(model, "config", None), "to_json_string") else getattr(model, "model", None)
    if not hasattr(getattr(host, "config", None), "to_json_string"):
        raise ValueError(f"{type(model).__name__} is no model of transformers; save its state_dict instead")
    return host


def _about(host: Any) -> dict[str, Any]:
    """Facts about a host and the digest of its weights."""
    digest = bytes(host_digest(host).tolist()).hex()
    weights = [t for name, t in host.state_dict().items() if not is_of_memory(name)]
    return {
        "class": type(host).__name__,
        "layers": getattr(host.config, "num_hidden_layers", None),
        "parameters": sum(t.numel() for t in weights),
        "digest": digest,
    }
