"""Load models of transformers with the memory they were saved with, by any class of transformers or `load_pretrained`.

`save_pretrained` stores the memory's weights and caches among the model's own, and the arguments of `add_memory` in the
config (`hub.py`). `from_pretrained` loads the host, adds the memory, and loads the memory's tensors.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.integrations.hub import MODEL_TYPE, OURS, Record, note_memory, records_memory
from cached_transformers.integrations.peft_models import load_with_memory, refuse_unsaved
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE
from cached_transformers.models.published import PublishedModel, is_ours
from cached_transformers.models.state_tuning import begin_with

HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "proxies")
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def patch_models() -> None:
    """Let all model classes of transformers load, and make from a config, models with their memory."""
    kind = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    initialise, save = kind.__init__, kind.save_pretrained
    load, make = kind.from_pretrained.__func__, kind._from_config.__func__

    @functools.wraps(initialise)
    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        record = getattr(config, MODEL_TYPE, None)
        if record and not isinstance(record, Record) and not _inside.get():
            raise ValueError(
                f"config.{MODEL_TYPE}={record}: {type(self).__name__}(config) builds the host without this memory; "
                f"call {type(self).__name__}._from_config(config), or delete config.{MODEL_TYPE}"
            )
        initialise(self, config, *args, **options)
        if record:  # transformers would report the memory's tensors as unexpected
            self._keys_to_ignore_on_load_unexpected = [*(self._keys_to_ignore_on_load_unexpected or ()), OURS]

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        has_memory = any("uninstall_memory" in vars(module) for module in self.modules())
        if has_memory:
            refuse_unsaved(self, getattr(self, "_hf_peft_config_loaded", False))
        record = None if has_memory else vars(self.config).pop(MODEL_TYPE, None)  # the config of another model, too
        try:
            return save(self, *args, **options)
        finally:
            if record:
                note_memory(self, record)

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        with _outermost() as outermost:
            model, found = load(cls, *args, output_loading_info=True, **options)
        if outermost:
            _load_memories(model, found, options)
        return (model, found) if output_loading_info else model

    @functools.wraps(make)
    def _from_config(cls: Any, config: Any, **options: Any) -> Any:
        with _outermost() as outermost:
            model = make(cls, config, **options)
        for part in _recorded(model) if outermost else ():
            add_memory(part, **part.config.cached_transformers)
        return model

    kind.__init__, kind.save_pretrained = __init__, save_pretrained
    kind.load_adapter = load_with_memory(kind.load_adapter)
    kind.from_pretrained, kind._from_config = classmethod(from_pretrained), classmethod(_from_config)


@contextmanager
def _outermost() -> Iterator[bool]:
    """Give True outside of another such block: a model that is made inside of another gets its memory with it."""
    outermost = not _inside.get()
    token = _inside.set(True)
    try:
        yield outermost
    finally:
        _inside.reset(token)


def _recorded(module: Any) -> list[Any]:
    """The model, or the models inside of it, whose config records a memory."""
    if getattr(getattr(module, "config", None), MODEL_TYPE, None):
        return [module]
    return [part for child in module.children() for part in _recorded(child)]


def load_pretrained(name: str, cls: Any = None, **options: Any) -> Any:
    """Load a model of transformers with its memory; or a model of this package from a folder of its own.

    Args:
        name: folder that `save_pretrained` wrote, or a repository of the Hugging Face hub (of a model of transformers;
            for this package's models, `LanguageModel.from_pretrained`).
        cls: class of the model; None for the one that was saved.
        options: passed on to `cls.from_pretrained` (dtype, device_map, revision, ...).

    Returns:
        The model, in evaluation mode as `from_pretrained` gives it.

    Raises:
        ValueError: no memory was saved with it, or the memory's weights are missing.
    """
    if is_ours(Path(name)):
        return PublishedModel.from_pretrained(name)
    if str(name).lower().endswith(".gguf"):
        raise ValueError(f"{name}: a GGUF file holds no memory; load the host by gguf_file=..., and call add_memory")
    transformers = require("transformers", extra="language")
    config = transformers.AutoConfig.from_pretrained(name, **{key: options[key] for key in HUB if key in options})
    if not records_memory(config):
        raise ValueError(
            f"{name} was saved without a memory; load it by transformers' from_pretrained, and add one by add_memory"
        )
    if cls is None:
        saved = (getattr(config, "architectures", None) or ["?"])[0]
        if (cls := getattr(transformers, saved, None)) is None:
            raise ValueError(f"{name} was saved by a class {saved}, which transformers does not have; give cls=...")
    return cls.from_pretrained(name, **options)


def _load_memories(model: Any, found: dict[str, Any], options: dict[str, Any]) -> None:
    """Add the memories that the config records to a loaded host, and load their tensors.

    Raises:
        ValueError: a tensor is missing; or an error of `add_memory`.
    """
    name, hub = str(model.config.name_or_path), {key: options[key] for key in HUB if key in options}
    given = options.get("config") or name
    unexpected: Any = found["unexpected_keys"] if found else ()  # Flax reports none
    other = str(getattr(given, "name_or_path", given)) != name or any(re.search(OURS, key) for key in unexpected)
    if other and options.get("state_dict") is None and not _recorded(model):  # the config is another, or a part
        with suppress(OSError):  # no config.json
            note_memory(model, type(model.config).get_config_dict(name, **hub)[0].get(MODEL_TYPE))
    if not (parts := _recorded(model)):
        return
    plain = set(model.state_dict())
    with ExitStack() as files:
        stored = _stored(name, hub, options, files)
        for part in parts:
            add_memory(part, **part.config.cached_transformers)
            if any(f"{INITIAL_STATE}." in key for key in stored):
                begin_with(part, part.init_memory_state(1))  # of the shapes of the state to be loaded
        names = {key: _spellings(model, key) for key in set(model.state_dict()) - plain}
        read = {key: stored[s]() for key, spellings in names.items() for s in spellings if s in stored}
    if missing := sorted(names.keys() - read.keys()):
        raise ValueError(
            f"{name} names the memory {parts[0].config.cached_transformers['memory']['name']!r} in its config, but "
            f"holds no {missing[0]} ({len(missing)} tensors are missing) for {type(model).__name__}; for a new memory "
            f"delete config.{MODEL_TYPE}, load the host with config=config, and call add_memory"
        )
    model.load_state_dict(read, strict=False)
    model.eval()
    found["unexpected_keys"] = type(unexpected)(key for key in unexpected if not re.search(OURS, key))


def _stored(name: str, hub: dict[str, Any], options: dict[str, Any], files: ExitStack) -> dict[str, Any]:
    """Return a function for each stored tensor that reads it from the files, or from the given `state_dict`."""
    if (given := options.get("state_dict")) is not None:
        return {key: functools.partial(given.__getitem__, key) for key in given}
    utils = importlib.import_module("transformers.utils")
    variant = f".{options['variant']}" if options.get("variant") else ""
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    names = [f"model{variant}.safetensors"]
    if utils.cached_file(name, names[0], **quiet) is None and (
        index := utils.cached_file(name, f"model.safetensors.index{variant}.json", **quiet)
    ):
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    stored: dict[str, Any] = {}
    for part in names:
        path = utils.cached_file(name, part, **quiet)
        if path is None:
            raise ValueError(f"{name} holds no {part}; memories are saved as safetensors, by save_pretrained(folder)")
        file = files.enter_context(safe_open(path, framework="pt"))
        stored |= {key: functools.partial(file.get_tensor, key) for key in file.keys()}  # noqa: SIM118
    return stored


def _spellings(model: Any, key: str) -> tuple[str, ...]:
    """Names under which a weight may be stored: with the prefix of the model around the body, or without; and by the
    names of published checkpoints, to which `save_pretrained` goes back (ViT)."""
    prefix, published = f"{model.base_model_prefix}.", key
    with suppress(ImportError):  # an older transformers saves by the names that its models have
        from transformers.core_model_loading import revert_weight_conversion

        published = next(iter(revert_weight_conversion(model, {key: torch.empty(0)})))
    return tuple(name for own in (key, published) for name in (own, prefix + own, own.removeprefix(prefix)))
