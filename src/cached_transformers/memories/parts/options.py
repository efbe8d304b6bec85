"""Checks of memories' options, with one message each."""

from __future__ import annotations

from typing import Any

NO_MEMORY = "; a model without memory takes memory=None"
"""The way out for who asks for a memory of size 0."""


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """`value`, or a ValueError that names the option and its values."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
    return value


def check_choices(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse (ValueError) an option that is none of its choices: `option=(value, choices)`; None may be one of them."""
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
