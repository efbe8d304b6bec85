"""Models of transformers by name: a folder, a model of the Hugging Face hub, a GGUF file, or a fetched model.

A name of `cached fetch` means its folder in the cache; a folder of that name in the working directory comes first.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from cached_lab.data.archives import naming, refuse_special
from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.integrations.hub import MODEL_TYPE, records_memory
from cached_transformers.integrations.transformers.load import load_pretrained
from cached_transformers.registry import MEMORIES

from .packages import PACKAGES, model_folder

GGUF, SEGMENT = ".gguf", 256
"""Ending of files; tokens of a segment, for a memory that a model gets by name."""


def resolve_model(name: str | Path) -> tuple[Any, Any]:
    """Load a causal language model, in evaluation mode, and its tokenizer.

    Args:
        name: a folder of `save_pretrained`, with the memory that it was saved with, if any; a model of the Hugging Face
            hub; the path of a GGUF file, which is read into float32; or a name of `PACKAGES`.

    Raises:
        ValueError: it is none of them, or not fetched yet; a damaged file, or an architecture that transformers cannot
            read; weights or tokenizer are missing; the weights do not fit into the free memory.
        ImportError: a GGUF file, and gguf or accelerate is not installed.
    """
    place, options = located(str(name))
    auto = require("transformers", extra="language")
    with explained(name):
        config = auto.AutoConfig.from_pretrained(place, **_safe(options))
        size = 0 if options else _bytes_of(config)  # a GGUF file was checked before
    refuse_too_large(name, size)
    with explained(name):
        if records_memory(config):
            return load_pretrained(place), _tokenizer(place, name, {})
        options |= _safe(options)
        model, found = auto.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"model={name}: it has no weights for {missing[0]} ({len(missing)} are missing) of "
            f"{type(model).__name__}; give a model that was trained to predict the next token"
        )
    return model, _tokenizer(place, name, options)


def without_positions(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return name and options with `relative` off, where there is such an option: positions stay the model's."""
    places = {"relative": False} if "relative" in MEMORIES.entry(memory["name"]).options else {}
    return {**places, **memory}


def remember(model: Any, name: str | Path, memory: Mapping[str, Any] | None, length: int | None) -> None:
    """Give a memory without weights to a model without one.

    Args:
        name: of the model, for messages. memory: name and options; None for the model's own.
        length: tokens of a segment; `SEGMENT` when None.

    Raises:
        ValueError: the model has no memory and gets none, or has one and gets another; a memory with weights, or one
            that does not fit the model.
    """
    own = records_memory(model.config)
    if own == (memory is not None):
        way = "a memory; leave the option out" if own else "no memory; give one (--with-memory NAME)"
        raise ValueError(f"model={name}, memory={memory and memory['name']}: the model has {way}")
    if memory is not None:
        plain = {*model.state_dict()}
        add_memory(model, dict(memory), segment_length=length or SEGMENT)
        refuse_untrained(memory, model.state_dict().keys() - plain)


def refuse_untrained(memory: Mapping[str, Any], added: Set[str]) -> None:
    """Refuse (ValueError) a memory that added weights to a trained model."""
    if added:
        raise ValueError(
            f"memory {memory['name']!r} has weights that this model has not trained, such as {min(added)!r}; take a "
            "memory without weights (streaming_llm, tova, h2o), or train a model with it: cached train ... "
            f"model.memory={memory['name']}"
        )


def located(name: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or hub name of a model, and what `from_pretrained` needs beside it for a GGUF file.

    Raises:
        ValueError: a model that is not fetched yet; a damaged GGUF file, or one too large for the free memory.
        ImportError: a GGUF file, and gguf or accelerate is not installed.
        FileNotFoundError: no such file; or no such folder inside a folder.
    """
    path = Path(name).expanduser()
    if name in PACKAGES and not path.exists():
        path = model_folder(name)
        if not path.is_dir():
            raise ValueError(f"model={name}: it is not fetched yet; run `cached fetch {name}` once")
    if path.suffix.lower() != GGUF or path.is_dir():
        if not path.exists() and path.parent != Path() and path.parent.is_dir():
            raise FileNotFoundError(f"model={name}: no such folder; give one of save_pretrained, or a run")
        return str(path) if path.exists() else name, {}
    if not path.is_file():
        raise FileNotFoundError(f"model={name}: no such file; give the path of a GGUF file on this machine")
    refuse_special(path)
    require_gguf(name)
    with naming(f"model={name}", "file"):
        weights = sum(int(tensor.n_elements) for tensor in importlib.import_module("gguf").GGUFReader(path).tensors)
    refuse_too_large(name, 4 * weights)
    options: dict[str, Any] = {"gguf_file": str(path.resolve())}  # a name without folder is sought elsewhere first
    if kind := getattr(require("transformers", extra="language"), "GgufConfig", None):
        options["quantization_config"] = kind(dequantize=True)
    return str(path.parent), options


def require_gguf(name: str) -> None:
    """Require the packages for a GGUF file (ImportError with the pip command)."""
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"model={name}: {needed} is not installed; GGUF files need: pip install gguf accelerate")


def refuse_too_large(name: str | Path, size: int) -> None:
    """Refuse (ValueError) a model whose weights exceed the free memory."""
    if size > (room := available_memory()):
        raise ValueError(
            f"model={name}: its weights take {size / 2**30:,.1f} GiB, and {room / 2**30:,.1f} GiB of memory are free; "
            "end other programs, or take a smaller model"
        )


def _bytes_of(config: Any) -> int:
    """Return the bytes of the weights of a config's model, from its sizes."""
    config = copy.deepcopy(config)
    vars(config).pop(MODEL_TYPE, None)
    with torch.device("meta"):
        model = require("transformers", extra="language").AutoModelForCausalLM.from_config(config)
    return sum(weight.nbytes for weight in model.parameters())


def available_memory() -> int:
    """Return the bytes of memory that are free, or can be freed at once; where the system hides them, all bytes."""
    try:
        told = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:  # no Linux
        told = None
    return int(told[1]) << 10 if told else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _tokenizer(place: str, name: str | Path, options: dict[str, Any]) -> Any:
    with explained(name, "its tokenizer"):
        found = require("transformers", extra="language").AutoTokenizer.from_pretrained(place, **_safe(options))
        if len(found) <= len(found.all_special_tokens):  # without files, some classes are made without words
            raise ValueError("it has special tokens only; save it by tokenizer.save_pretrained")
    return found


@contextlib.contextmanager
def explained(name: str | Path, part: str = "it") -> Iterator[None]:
    """Turn errors of transformers and safetensors into a ValueError with the way out."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model={name}: transformers cannot load {part} ({reason}); give a folder of save_pretrained, a model of "
            f"the hub, a GGUF file, or a name of `cached fetch` ({', '.join(PACKAGES)})"
        ) from error


def _safe(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of every `from_pretrained`; transformers would ask a terminal about code in a model."""
    return {"trust_remote_code": False, **{key: value for key, value in options.items() if key == "gguf_file"}}
