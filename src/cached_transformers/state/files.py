"""State files: one safetensors file, which appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import nn

from cached_transformers.files import write_whole

from .fingerprint import check_weights, fingerprint
from .packing import Packing, pack, unpack
from .tree import State, from_tensors, named_tensors

FORMAT = 3
"""Format of a state file: 1 had neither format nor checksum, 2 neither fingerprint nor dtypes."""
KEY = "cached_transformers_state"
"""Key of the metadata, one for all: the library writes several in any order, and equal states must be equal files."""
_MARK = re.compile(rb'"cached_transformers_state":"(\d{1,6}) ([0-9a-f]{64})[ "]')


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
    """Metadata except format and checksum, of a state file without a changed bit; format 1 has none, and no checksum.

    Raises:
        ValueError: a changed bit, or a newer format.
    """
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
