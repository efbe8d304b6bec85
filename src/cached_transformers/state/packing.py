"""The tensors of a state in fewer bytes, for files.

Real numbers alone are packed; counters, positions and masks stay as they are. `int8` keeps, of each vector (the last
dimension), 8 bits an element and one scale, `max |x| / 127` in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Packing: TypeAlias = Literal["float16", "bfloat16", "int8"]
SCALE = "#scale"
"""After the name of a tensor: the scales of its vectors."""


def pack(tensors: Mapping[str, Tensor], packing: Packing) -> tuple[dict[str, Tensor], dict[str, str], float]:
    """Tensors in fewer bytes, their original dtypes, and the largest relative error of a tensor, || x - x' || / || x ||.

    Raises:
        ValueError: another way to pack; numbers that are not finite, or too large for it.
    """
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
    """The tensors again, each in the dtype that it had.

    Raises:
        ValueError: a dtype that torch has not, or a tensor that is missing.
    """
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
