"""Optional dependencies: imported where they are used, and refused with the command that installs them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from cached_transformers.torchvision_guard import ensure_torchvision

# Importing any of these imports torchvision, sooner or later.
_NEEDS_TORCHVISION = frozenset({"torchvision", "timm", "transformers", "peft"})


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency.

    Before a module that loads torchvision, `ensure_torchvision` is called, so callers need not think of it.

    Args:
        module: dotted name, e.g. "matplotlib.pyplot".
        extra: the extra of this distribution that installs it, e.g. "plot".

    Returns:
        The module itself (for a dotted name the innermost one).

    Raises:
        ImportError: the module is not installed; the message holds the pip command. A dependency that is installed
            but fails to import something of its own keeps its own error.
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
def refused_by(library: str, what: str) -> Iterator[None]:
    """Whatever a library raises for options that it was handed as they are, as a `ValueError` that says so.

    Args:
        what: that was asked of it, e.g. "timm.create_model('vit_tiny_patch16_224', depth=-1)".
    """
    try:
        yield
    except (ValueError, ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{library} refuses {what}: {type(error).__name__}: {reason[:500]}") from error
