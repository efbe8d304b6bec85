"""Save models of transformers with their memory: `save_pretrained` and `push_to_hub`. Imports nothing of transformers.

The arguments of `add_memory` are noted in the model's config. `load_pretrained` loads the saved folder and, after
`import cached_transformers`, transformers' Auto classes and pipelines do.
"""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from cached_transformers.annotations import shown
from cached_transformers.files import write_whole
from cached_transformers.state import named_tensors

MODEL_TYPE = "cached_transformers"


def note_memory(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Note the arguments of `add_memory` in the config of a model of transformers, and let the model save them so that
    it is not loaded without its memory by mistake; None undoes both."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    saves: dict[str, Callable[..., Any]] = {"save_pretrained": save_pretrained, "push_to_hub": push_to_hub}
    if record is not None:
        config.cached_transformers = record
        vars(model).update({k: functools.partial(f, model) for k, f in saves.items() if hasattr(type(model), k)})
    elif "cached_transformers" in vars(config):
        del config.cached_transformers
        for name in saves:
            vars(model).pop(name, None)


def save_pretrained(
    model: Any, save_directory: str | Path, *args: Any, results: Mapping[str, float] | None = None, **options: Any
) -> Any:
    """Drop-in replacement for `PreTrainedModel.save_pretrained`.

    Args:
        results: scores of the model for the card: {"perplexity on ...": 21.3}.
    """
    call = inspect.signature(type(model).save_pretrained).bind(model, save_directory, *args, **options)
    push = call.arguments.pop("push_to_hub", False)
    found = type(model).save_pretrained(*call.args, **call.kwargs)
    if call.arguments.get("is_main_process", True):
        folder = Path(save_directory)
        _wrap_config(folder / "config.json")
        if not (folder / "README.md").exists():
            write_whole(folder / "README.md", card(model, folder.name, results).encode())
        if push:
            _upload(folder, options.get("repo_id", folder.name), **_only(options, "token", "revision", "private"))
    return found


def push_to_hub(
    model: Any, repo_id: str, *, results: Mapping[str, float] | None = None, max_shard_size: Any = None, **options: Any
) -> Any:
    """Drop-in replacement for `PreTrainedModel.push_to_hub`, with a card that describes the memory.

    Args:
        results: see `save_pretrained`. options: of the upload (private, token, revision, ...).
    """
    sizes = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repo_id.rpartition("/")[2]
        save_pretrained(model, folder, results=results, **sizes)
        return _upload(folder, repo_id, **options)


def card(model: Any, name: str, results: Mapping[str, float] | None) -> str:
    """The page of the model: its memory, the size of its state, how to load it, and its scores."""
    record = model.config.cached_transformers
    memory = record["memory"]
    options = {key: value for key, value in memory.items() if key != "name"}
    lines = [
        *("---", "library_name: transformers", f"tags: [cached-transformers, {memory['name']}]", "---", ""),
        f"# {name}",
        "",
        f"A `{type(model).__name__}` with the memory `{memory['name']}` of cached-transformers"
        + (f" ({', '.join(f'{key}={shown(value)}' for key, value in options.items())})." if options else "."),
        "",
    ]
    if segment := record.get("segment_length"):
        lines += [f"It reads segments of {segment} tokens.", ""]
    lines += [_weight(model), "", "```python", "import cached_transformers", ""]
    lines += [f'model = cached_transformers.load_pretrained("{name}")  # or any Auto class of transformers', "```"]
    if results:
        lines += [
            "",
            "| Measured | Result |",
            "|---|---|",
            *(f"| {key} | {value:g} |" for key, value in results.items()),
        ]
    return "\n".join([*lines, ""])


def _weight(model: Any) -> str:
    if hasattr(model, "init_memory_state"):
        size = sum(tensor.nbytes for _, tensor in named_tensors(model.init_memory_state(1)))
        return f"The state of a row that has read nothing takes {size:,} bytes."
    held = [b for module in model.modules() if "uninstall_memory" in vars(module) for b in module.memory.buffers()]
    return f"Its caches take {sum(buffer.nbytes for buffer in held):,} bytes, for all rows together."


def _wrap_config(path: Path) -> None:
    """Put the host's config into one of type "cached_transformers". The host's type is moved out of its config, where
    transformers would find it and load the host without its memory."""
    host = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: host[key] for key in ("architectures", "dtype", "transformers_version") if key in host}
    ours = {"model_type": MODEL_TYPE, **kept, "host_type": host.pop("model_type"), "host": host}
    write_whole(path, json.dumps(ours, indent=2).encode())


def _only(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _upload(folder: Path, repo_id: str, private: bool | None = None, token: Any = None, **options: Any) -> Any:
    """Upload a folder by the Hub's own library."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
