"""Optional dependencies: imported on use, refused with the command that installs them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from cached_transformers.torchvision_guard import ensure_torchvision

_NEEDS_TORCHVISION = frozenset({"torchvision", "timm", "transformers", "peft"})
"""Modules that import torchvision."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, after `ensure_torchvision` if it needs torchvision.

    Args:
        module: dotted name, e.g. "matplotlib.pyplot". extra: the extra of this distribution that installs it.

    Raises:
        ImportError: the module is not installed; the message has the pip command. Errors of an installed module's own
            imports are raised unchanged.
    """
    package = module.partition(".")[0]
    if package in _NEEDS_TORCHVISION:
        ensure_torchvision()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        message = f'{package} is not installed; it comes with: pip install "cached-transformers[{extra}]"'
        raise ImportError(message, name=package) from error


@contextlib.contextmanager
def refused_by(library: str, call: str) -> Iterator[None]:
    """Raise errors of a library about its arguments as `ValueError`, or as `OSError` if they are, with the call.

    Args:
        call: the call of the library, e.g. "timm.create_model('vit_tiny_patch16_224', depth=-1)".
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        reason, kind = " ".join(str(error).split()), OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{library} refuses {call}: {type(error).__name__}: {reason[:500]}") from error
