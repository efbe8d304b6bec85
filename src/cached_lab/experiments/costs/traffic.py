"""Bytes that operators read and write: the memory traffic of eager mode without caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Count the bytes of tensors that operators inside the `with` read and write.

    A view moves nothing; an expanded tensor counts with its storage. Kernels outside torch are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and _is_view(schema):
            return out
        name = schema.name.rpartition("::")[2] if schema is not None else ""
        written = _bytes(tree_leaves(out))
        if schema is not None and not schema.returns:  # lists of tensors that are changed in place
            changed = [
                a for a, s in zip(args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
            ]
            written = _bytes(tree_leaves(changed))
        if "empty" not in name:
            self.total += _bytes(tree_leaves((args, kwargs))) + written
        return out


def _is_view(schema: Any) -> bool:
    aliases = [result.alias_info for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _bytes(leaves: Iterable[Any]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def bytes_of(call: Callable[[], object]) -> int:
    """Count the bytes that the operators of `call` read and write."""
    with Traffic() as traffic:
        call()
    return traffic.total
