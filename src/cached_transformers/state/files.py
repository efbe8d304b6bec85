"""State files: one safetensors file, which appears whole or not at all, in fewer bytes if asked, and told its weights.

Real numbers alone are packed; counters, positions and masks stay as they are. `int8` keeps, of each vector (the last
dimension), 8 bits an element and one scale, `max |x| / 127` in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from cached_transformers.files import write_whole

from .tree import State, from_tensors, named_tensors

FORMAT = 3
"""Format of a state file: 1 had neither format nor checksum, 2 neither fingerprint nor dtypes."""
KEY = "cached_transformers_state"
"""Key of the metadata, one for all: the library writes several in any order, and equal states must be equal files."""
_MARK = re.compile(rb'"cached_transformers_state":"(\d{1,6}) ([0-9a-f]{64})[ "]')


Packing: TypeAlias = Literal["float16", "bfloat16", "int8"]
SCALE = "#scale"
"""After the name of a tensor: the scales of its vectors."""
WHOLE = 2**24
"""Largest number of hashed elements; a larger tensor is sampled evenly."""
ROUND = ("_orig_mod.", "module.")
"""Prefixes of torch.compile and DDP before the names of wrapped modules."""


class Stored(NamedTuple):
    """Result of `save`: bytes of the file, and the largest relative error of a packed tensor."""

    nbytes: int
    error: float


def save(
    state: State, path: str | os.PathLike[str], *, model: nn.Module | None = None, dtype: Packing | None = None
) -> Stored:
    """Write the state as one safetensors file; the file appears whole or not at all.

    Its metadata hold the format and a SHA-256 of the whole file, which is taken with zeros instead of the digest.

    Args:
        model: that made the state; the file then tells its weights, and `load` refuses another one's.
        dtype: of the real numbers in the file, None as they are; "int8" has a scale for each vector. What that costs is
            in the result.

    Raises:
        ValueError: a dtype that there is not, or numbers that do not fit into it.
        NotWritten: e.g. the disk is full; a file that was there before is untouched.
    """
    named = dict(named_tensors(state))
    if absent := [name for name, t in named.items() if t.is_meta]:
        raise ValueError(f"state: {absent[0]} is on the meta device, without values; save a state that a model made")
    tensors = {name: t.detach().contiguous().cpu().clone() for name, t in named.items()}
    notes: dict[str, Any] = {}
    error = 0.0
    if dtype is not None:
        tensors, notes["dtypes"], error = pack(tensors, dtype)
    if model is not None:
        notes["fingerprint"] = fingerprint(model)
    blank = "0" * 64
    content = safetensors.torch.save(tensors, {KEY: f"{FORMAT} {blank} {json.dumps(notes, sort_keys=True)}"})
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(f"{FORMAT} {blank}".encode(), f"{FORMAT} {digest}".encode(), 1)
    write_whole(Path(path), content)
    return Stored(len(content), error)


def load(path: str | os.PathLike[str], like: State, *, model: nn.Module | None = None) -> State:
    """Read a state that `save` wrote, into the structure of `like` (for instance `model.init_state(rows)`).

    Args:
        model: with whose weights it must have been made, which the file has to tell.

    Raises:
        ValueError: the file is damaged, of a newer format, holds a state of another structure, or that of another
            model; the message names the file and the first difference.
    """
    content = Path(path).read_bytes()
    way = "begin the stream anew (remove the file, or name another), or take an older file"
    try:
        notes = _notes(content)
        stored = unpack(safetensors.torch.load(content), notes.get("dtypes", {}))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} is no whole state file: {error}; {way}") from error
    if model is not None:
        if "fingerprint" not in notes:
            raise ValueError(
                f"{path} does not tell the weights that made it: it was saved without model=...; load it without, if "
                "you know that it is this model's"
            )
        check_weights(notes["fingerprint"], model, str(path))
    return from_tensors(stored, like, str(path))


def _notes(content: bytes) -> dict[str, Any]:
    """Metadata except format and checksum, which format 1 lacks (ValueError: a changed bit, or a newer format)."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    tree = json.loads(header)
    if not isinstance(tree, dict) or "__metadata__" not in tree:
        return {}
    found = _MARK.search(header)
    if found is None:
        raise ValueError("it was written by something else, or is damaged")
    if int(found[1]) > FORMAT:
        raise ValueError(
            f"it has format {int(found[1])}, and this version reads up to {FORMAT}; use the matching version"
        )
    begin, end = (8 + place for place in found.span(2))
    digest = hashlib.sha256(content[:begin] + b"0" * (end - begin) + content[end:]).hexdigest()
    if digest != found[2].decode():
        raise ValueError("its content does not match its checksum, so it is damaged")
    parts = tree["__metadata__"][KEY].split(" ", 2)
    return json.loads(parts[2]) if len(parts) == 3 else {}  # type: ignore[no-any-return]


def pack(tensors: Mapping[str, Tensor], packing: Packing) -> tuple[dict[str, Tensor], dict[str, str], float]:
    """Tensors in fewer bytes, their dtypes, and the largest relative error of a tensor, || x - x' || / || x ||
    (ValueError: another way to pack; numbers that are not finite, or too large for it)."""
    if packing not in get_args(Packing):
        raise ValueError(f"dtype={packing!r} is no way to keep a state; take {', '.join(get_args(Packing))}, or None")
    packed, dtypes, error = dict(tensors), {}, 0.0
    for name, t in tensors.items():
        if not t.is_floating_point() or t.numel() == 0:
            continue
        if not bool(t.isfinite().all()):
            raise ValueError(
                f"{name} holds numbers that are not finite, which dtype={packing!r} cannot tell; take None"
            )
        parts = _as_int8(t) if packing == "int8" else {"": t.to(getattr(torch, packing))}
        again = _restored(parts[""], parts.get(SCALE), t.dtype)
        if not bool(again.isfinite().all()):
            raise ValueError(
                f"{name} holds {t.abs().max().item():.3g}, too large for dtype={packing!r}; take 'bfloat16', or None"
            )
        packed.update({name + ending: part for ending, part in parts.items()})
        dtypes[name] = str(t.dtype).removeprefix("torch.")
        size = t.double().norm().item()
        error = max(error, (t.double() - again.double()).norm().item() / size if size else 0.0)
    return packed, dtypes, error


def unpack(tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors again, each in the dtype that it had (ValueError: an unknown dtype, or a missing tensor)."""
    found = {name: t for name, t in tensors.items() if not name.endswith(SCALE)}
    for name, wanted in dtypes.items():
        dtype = getattr(torch, wanted, None)
        if name not in found or not isinstance(dtype, torch.dtype):
            raise ValueError(f"it says of {name!r} that it was {wanted!r}, which cannot be")
        found[name] = _restored(found[name], tensors.get(name + SCALE), dtype)
    return found


def _as_int8(t: Tensor) -> dict[str, Tensor]:
    t = t.float()[..., None] if t.dim() == 0 else t.float()
    scale = t.abs().amax(-1, keepdim=True) / 127
    return {"": (t / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), SCALE: scale}


def _restored(t: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if scale is None else (t.float() * scale).to(dtype)


def check_weights(made_by: str, model: nn.Module, source: str = "the state") -> None:
    """Refuse (ValueError) a state that was made with other weights, by the `fingerprint` of those that made it."""
    if made_by != fingerprint(model):
        raise ValueError(
            f"{source} was made with other weights than those of this {type(model).__name__}, to which it means "
            "nothing; load those, or read the text again"
        )


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) of the names, dtypes, shapes and values of a model's state dict, wherever they lie.

    A tensor with more than 16 million elements is sampled at about that many, evenly spread. An initial state that was
    tuned is a state, and not counted. ValueError: weights on "meta" (offloaded), or cut up among processes.
    """
    digest = hashlib.sha256()
    for name, t in sorted(model.state_dict().items()):
        if "initial_state." in name or not isinstance(t, Tensor):
            continue
        for prefix in ROUND:
            name = name.removeprefix(prefix)
        if t.is_meta or hasattr(t, "full_tensor"):
            where = "offloaded" if t.is_meta else "cut up among processes"
            raise ValueError(
                f"{name} is {where}, so that the weights cannot be told from others; save and load the state without "
                "model=..., or take the model as it was before"
            )
        digest.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        flat = t.detach().reshape(-1)
        if flat.numel() > WHOLE:
            flat = flat[:: -(-flat.numel() // WHOLE)]
        digest.update(flat.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
