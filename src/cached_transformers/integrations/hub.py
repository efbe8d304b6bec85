"""Configs of transformers that record a memory, and their files. Importing this module imports nothing of transformers.

`add_memory` records its arguments in the model's config. `save_pretrained` writes such a config inside one of type
"cached_transformers", which transformers refuses without this package: Auto classes refuse the type, config classes the
`id2label`, whose key is a message instead of a number. With this package, every class reads the host's own config with
the record in it, also from files of the type without `id2label`, which earlier versions wrote.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from cached_transformers.files import write_whole
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE

MODEL_TYPE = "cached_transformers"
OURS = rf"(^|\.)(memory|{INITIAL_STATE})\."
"""Pattern of the names of a memory's tensors, or of a tuned initial state's, in a host's state dict."""
REFUSAL = {"this model has a memory: import cached_transformers, which loads it": 0}


class Record(dict[str, Any]):
    """The record of a model that has its memory; one that was read from a file is a plain dict."""


def note_memory(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Record the arguments of `add_memory` in the config of a model of transformers; None deletes all records."""
    if record is None:
        for module in model.modules():  # some have copies of the config
            vars(getattr(module, "config", nn.Identity())).pop(MODEL_TYPE, None)
    elif hasattr(config := getattr(model, "config", None), "to_json_string"):
        setattr(config, MODEL_TYPE, Record(record))


def records_memory(config: Any) -> bool:
    """Return True if a config, or one inside of it, records a memory."""
    return f'"{MODEL_TYPE}": ' in config.to_json_string()


def patch_configs() -> None:
    """Let the config classes of transformers write and read the files that this module's docstring describes."""
    kind = importlib.import_module("transformers.configuration_utils").PretrainedConfig
    write, read = kind.to_json_file, kind._dict_from_json_file.__func__

    @functools.wraps(write)
    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        if not records_memory(self):
            return write(self, json_file_path, use_diff)  # type: ignore[no-any-return]
        host = json.loads(self.to_json_string(use_diff))
        ours = {"model_type": MODEL_TYPE, "id2label": REFUSAL, "host_type": host.pop("model_type"), "host": host}
        ours |= {key: host[key] for key in ("architectures", "dtype", "transformers_version") if key in host}
        write_whole(Path(json_file_path), json.dumps(ours, indent=2).encode())

    @functools.wraps(read)
    def _dict_from_json_file(cls: Any, json_file: Any) -> dict[str, Any]:
        found: dict[str, Any] = read(cls, json_file)
        if found.get("model_type") != MODEL_TYPE or "host" not in found:
            return found
        return {"model_type": found["host_type"], **found["host"]}

    kind.to_json_file, kind._dict_from_json_file = to_json_file, classmethod(_dict_from_json_file)
