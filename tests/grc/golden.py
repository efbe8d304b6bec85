"""Reads the recorded values of GRC and moves them in and out of our modules.

A recorded parameter is a block of rows of one of ours, or of two of ours side by side (the gates, which we keep apart
for tokens and cache). One table says which; it loads the values and collects the gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cached_transformers.memories.grc.grc import GRC

Place = tuple[slice, tuple[str, ...]]
"""Rows, and the names of the parameters whose columns are concatenated."""

TOKENS, CACHE = "memory.cache.from_tokens.weight", "memory.cache.from_cache.weight"


class Golden:
    """One recorded file; `golden["x/1"]` is a float64 tensor."""

    def __init__(self, path: Path) -> None:
        self.arrays = np.load(path)
        self.meta: dict[str, Any] = json.loads(str(self.arrays["meta"]))

    def __getitem__(self, key: str) -> Tensor:
        return torch.tensor(self.arrays[key])

    def __contains__(self, key: str) -> bool:
        return key in self.arrays.files

    def names(self, prefix: str) -> list[str]:
        return [k.removeprefix(prefix) for k in self.arrays.files if k.startswith(prefix)]


class Attended:
    """Notes the tensor that keys and values are made of."""

    def __init__(self, memory: GRC) -> None:
        self.value: Tensor
        compute = memory.branch.keys_values

        def note(cache: Tensor, size: Any = None) -> tuple[Tensor, Tensor]:
            self.value = cache.detach()
            return compute(cache, size)

        memory.branch.keys_values = note  # type: ignore[method-assign]


def load(module: nn.Module, golden: Golden, places: dict[str, Place]) -> None:
    """Copy every recorded parameter to its place; nothing on either side may be left over."""
    parameters = dict(module.named_parameters())
    assert {n for _, names in places.values() for n in names} == set(parameters)
    assert set(places) == set(golden.names("param/"))
    with torch.no_grad():
        for name, (rows, names) in places.items():
            parts = golden[f"param/{name}"].chunk(len(names), -1) if len(names) > 1 else [golden[f"param/{name}"]]
            for part, target in zip(parts, names, strict=True):
                parameters[target][rows].copy_(part)


def check_gradients(module: nn.Module, golden: Golden, places: dict[str, Place], prefix: str) -> None:
    """Every recorded gradient equals ours; a parameter that took no part counts as zero."""
    parameters = dict(module.named_parameters())
    for name, (rows, names) in places.items():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in (parameters[n] for n in names)]
        ours = torch.cat([p[rows] for p in parts], -1) if len(parts) > 1 else parts[0][rows]
        close(ours, golden[prefix + name], prefix + name)
    module.zero_grad()


def close(ours: Tensor, recorded: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, recorded, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


def thirds(width: int) -> list[slice]:
    return [slice(i * width, (i + 1) * width) for i in range(3)]


def paper_places(d: int, c: int) -> dict[str, Place]:
    """Names of the paper family; gates read [tokens, cache]."""
    everything = slice(None)
    places: dict[str, Place] = {
        "Wo": (everything, ("output.weight",)),
        "bo": (everything, ("output.bias",)),
        "lam": (everything, ("memory.branch.gate_H",)),
        "Mq": (everything, ("memory.branch.query.weight",)),
        "mq": (everything, ("memory.branch.query.bias",)),
    }
    for letter, rows in zip("qkv", thirds(d), strict=True):
        places |= {f"W{letter}": (rows, ("qkv.weight",)), f"b{letter}": (rows, ("qkv.bias",))}
    for letter, rows in (("k", slice(0, c)), ("v", slice(c, None))):
        places[f"M{letter}"] = (rows, ("memory.branch.key_value.weight",))
        places[f"m{letter}"] = (rows, ("memory.branch.key_value.bias",))
    for letter, rows in zip("urc", thirds(c), strict=True):
        places |= {f"W{letter}": (rows, (TOKENS, CACHE)), f"b{letter}": (rows, ("memory.cache.from_tokens.bias",))}
    return places


def released_places(d: int, c: int, names: list[str], inside: str = "", ours: str = "") -> dict[str, Place]:
    """Names of the released family that occur in `names`; gates read [cache, tokens].

    `inside` is the module's path in the recording, `ours` its path in our model.
    """
    everything = slice(None)
    table: dict[str, Place] = {
        "lam": (everything, ("memory.branch.gate_H",)),
        "attn_self_func.relative_position_bias_table": (everything, ("positions.table",)),
        "attn_mem.relative_position_bias_table": (everything, ("memory.branch.relative_bias.table",)),
    }
    for gate, rows in zip(("update", "reset", "add"), thirds(c), strict=True):
        table[f"linear_{gate}.weight"] = (rows, (CACHE, TOKENS))
        table[f"linear_{gate}.bias"] = (rows, ("memory.cache.from_tokens.bias",))
    for kind in ("weight", "bias"):
        table |= {
            f"attn_self_func.q.{kind}": (slice(0, d), (f"qkv.{kind}",)),
            f"attn_self_func.kv.{kind}": (slice(d, None), (f"qkv.{kind}",)),
        }
        whole = {
            "attn_self_func.proj": "output",
            "attn_self_func.sr": "reduction.convolution",
            "attn_self_func.norm": "reduction.norm",
            "attn_mem.q": "memory.branch.query",
            "attn_mem.kv": "memory.branch.key_value",
            "attn_mem.proj": "memory.branch.projection",
            "attn_mem.sr": "memory.branch.reduction.convolution",
            "attn_mem.norm": "memory.branch.reduction.norm",
            "Norm1": "memory.cache.norm",
            "pos_emb": "memory.convolution.convolution",
        }
        table |= {f"{theirs}.{kind}": (everything, (f"{name}.{kind}",)) for theirs, name in whole.items()}
    found = {n: table[n.removeprefix(inside)] for n in names if n.startswith(inside)}
    return {n: (rows, tuple(ours + p for p in parts)) for n, (rows, parts) in found.items()}
