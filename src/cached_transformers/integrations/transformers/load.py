"""`load_pretrained`: a model of transformers with its memory, from what `save_pretrained` wrote.

`add_memory` notes its arguments in the config, and `save_pretrained` (`record.py`) stores the memory's weights and
caches among the model's own, and the config inside one of our type (`config.py`). Folders of earlier versions hold the
host's own config with the record in it, and load as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE
from cached_transformers.models.published import PublishedModel, is_ours
from cached_transformers.models.state_tuning import begin_with

from .config import CachedConfig


def load_pretrained(name: str, cls: Any = None, **options: Any) -> Any:
    """A model of transformers with the memory it was saved with; of a folder of ours, our model.

    Args:
        name: folder that `save_pretrained` wrote, or a repository of the Hugging Face hub (of a model of transformers;
            ours: `LanguageModel.from_pretrained`).
        cls: class of the model; None for the one that was saved.
        options: passed on to `cls.from_pretrained` (dtype, device_map, revision, ...).

    Returns:
        The model, in evaluation mode as `from_pretrained` gives it.

    Raises:
        ValueError: no memory was saved with it, or the memory's weights are missing; the folder holds an adapter.
    """
    if is_ours(Path(name)):
        return PublishedModel.from_pretrained(name)
    transformers = require("transformers", extra="language")
    hub: dict[str, Any] = {
        key: options[key]
        for key in ("revision", "token", "cache_dir", "local_files_only", "subfolder")
        if key in options
    }
    _refuse_adapter(transformers, name, hub)
    config = options.get("config") or transformers.AutoConfig.from_pretrained(name, **hub)
    if isinstance(config, CachedConfig):
        config = config.host_config()
    options["config"] = config
    record = getattr(config, "cached_transformers", None)
    if not record:
        raise ValueError(
            f"{name} was saved without a memory; load it by transformers' from_pretrained, and give the model one by "
            "add_memory"
        )
    if cls is None:
        saved = (getattr(config, "architectures", None) or ["?"])[0]
        cls = getattr(transformers, saved, None)
        if cls is None:
            raise ValueError(f"{name} was saved by a class {saved}, which transformers does not have; give cls=...")
    with _quiet(transformers):  # what it would report as unexpected is what we load
        model, found = cls.from_pretrained(name, output_loading_info=True, **options)
    plain = set(model.state_dict())
    add_memory(model, **{"segment_length": None, **record})  # which earlier versions did not note
    if any(f"{INITIAL_STATE}." in key for key in found["unexpected_keys"]):
        begin_with(model, model.init_memory_state(1))  # of the same shapes, for what is loaded
    wanted = set(model.state_dict()) - plain
    stored = _read(transformers, name, model, wanted, hub)
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ValueError(
            f"{name} names the memory {record['memory']['name']!r} in its config, but holds no {missing[0]} "
            f"({len(missing)} tensors are missing): it was saved by a model whose memory was not loaded; load it by "
            f"{cls.__name__}.from_pretrained and add a new one by add_memory"
        )
    model.load_state_dict(stored, strict=False)
    _report(name, model, found, wanted)
    return model.eval()


def _refuse_adapter(transformers: Any, name: str, hub: dict[str, Any]) -> None:
    """Raises: ValueError: there is an adapter in the place of a model, and it does not note what memory it had."""
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    there = [transformers.utils.cached_file(name, file, **quiet) for file in ("adapter_config.json", "config.json")]
    if there[0] is not None and there[1] is None:
        raise ValueError(
            f"{name} holds an adapter of PEFT, and no model: load the model that it was trained on, give it its memory "
            "by add_memory with the same options (or load both by load_pretrained), then call "
            f"peft.PeftModel.from_pretrained(base, {name!r})"
        )


def _report(name: str, model: Any, found: dict[str, Any], wanted: set[str]) -> None:
    """Say what transformers would have said of the host's own weights."""
    ours = {other for key in wanted for other in _spellings(model, key)}
    for what, keys in (
        ("not used by this model", set(found["unexpected_keys"]) - ours),
        ("not stored, and newly initialised", set(found["missing_keys"])),
    ):
        if keys:
            warnings.warn(f"{name}: {', '.join(sorted(keys))}: {what}", stacklevel=3)


def _spellings(model: Any, key: str) -> tuple[str, ...]:
    """Names under which a weight may be stored: with the prefix of a model round the decoder, or without; and by the
    names of layers that published checkpoints have, to which `save_pretrained` goes back (ViT)."""
    prefix = f"{model.base_model_prefix}."
    return tuple(
        name for own in (key, _published(model, key)) for name in (own, prefix + own, own.removeprefix(prefix))
    )


def _published(model: Any, key: str) -> str:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # of a transformers that saves by the names that its models have
        return key
    stored: dict[str, Tensor] = revert_weight_conversion(model, {key: torch.empty(0)})
    return next(iter(stored))


def _read(transformers: Any, name: str, model: nn.Module, wanted: set[str], hub: dict[str, Any]) -> dict[str, Tensor]:
    """The wanted tensors, by the names that the model has for them."""
    cached_file = transformers.utils.cached_file
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    index = cached_file(name, "model.safetensors.index.json", **quiet)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    stored: dict[str, Tensor] = {}
    for part in names:
        path = cached_file(name, part, **quiet)
        if path is None:
            raise ValueError(f"{name} holds no {part}; memories are saved as safetensors, by save_pretrained(folder)")
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            for key in wanted - stored.keys():
                spelling = next((s for s in _spellings(model, key) if s in there), None)
                if spelling is not None:
                    stored[key] = file.get_tensor(spelling)
    return stored


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
