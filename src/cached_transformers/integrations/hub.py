"""Save models of transformers with their memory: `save_pretrained` and `push_to_hub`. Imports nothing of transformers.

The arguments of `add_memory` are noted in the model's config. `load_pretrained` loads the saved folder and, after
`import cached_transformers`, transformers' Auto classes and pipelines do.
"""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

from torch import nn

from cached_transformers.files import write_whole

from .peft_models import refuse_unsaved

MODEL_TYPE = "cached_transformers"


def note_memory(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Note the arguments of `add_memory` in the config of a model of transformers, and let the model save them so that
    it is not loaded without its memory by mistake; None undoes both."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    if record is not None:
        config.cached_transformers = record
        vars(model)["save_pretrained"] = functools.partial(save_pretrained, model)
    elif "cached_transformers" in vars(config):
        del config.cached_transformers
        vars(model).pop("save_pretrained", None)


def save_pretrained(model: Any, save_directory: str | Path, *args: Any, **options: Any) -> Any:
    """Drop-in replacement for `PreTrainedModel.save_pretrained`, which `push_to_hub` calls, too."""
    call = inspect.signature(type(model).save_pretrained).bind(model, save_directory, *args, **options)
    push = call.arguments.pop("push_to_hub", False)
    adapted = getattr(model, "_hf_peft_config_loaded", False)  # then transformers saves adapters, and no config
    refuse_unsaved(model, adapted)
    found = type(model).save_pretrained(*call.args, **call.kwargs)
    if call.arguments.get("is_main_process", True):
        if not adapted:
            _wrap_config(Path(save_directory) / "config.json")
        if push:
            upload = {name: options[name] for name in ("token", "revision", "private") if name in options}
            model.push_to_hub(options.get("repo_id", Path(save_directory).name), **upload)
    return found


def _wrap_config(path: Path) -> None:
    """Put the host's config into one of type "cached_transformers". The host's type is moved out of its config, where
    transformers would find it and load the host without its memory."""
    host = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: host[key] for key in ("architectures", "dtype", "transformers_version") if key in host}
    ours = {"model_type": MODEL_TYPE, **kept, "host_type": host.pop("model_type"), "host": host}
    write_whole(path, json.dumps(ours, indent=2).encode())
