"""A check that a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refuses(message: str, call: Callable[..., Any], /, *given: Any, error: Any = ValueError, **options: Any) -> None:
    """Call, and expect an error of which a part matches the pattern `message`."""
    with pytest.raises(error, match=message):
        call(*given, **options)
