"""Helpers of all rooms: a check that a call is refused, and weights that hide nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def refuses(message: str, call: Callable[..., Any], /, *given: Any, raises: Any = ValueError, **options: Any) -> None:
    """Call, and expect an error of which a part matches the pattern `message`."""
    with pytest.raises(raises, match=message):
        call(*given, **options)


def stirred(module: Any, scale: float) -> Any:
    """Return the module, none of whose parameters keeps an initial value that would hide its effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return module
