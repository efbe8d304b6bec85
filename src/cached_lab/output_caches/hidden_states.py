"""Record hidden states of a language model during its forward.

"last_hidden" is the input of the head, after the last norm; every language model has it. "feed_forward" is the normed
input of the last feed-forward, in blocks of this package.

Legend: B rows, N tokens of a segment, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEYS = ("last_hidden", "feed_forward")
WAY_OUT = {"feed_forward": "take key='last_hidden'", "last_hidden": "give a decoder with its head"}


class HiddenStates:
    """Hidden states (B, N, D) of the last call of a model."""

    def __init__(self) -> None:
        self._h_BND: Tensor | None = None

    def put(self, h_BND: Tensor) -> None:
        """Keep the hidden states of a call."""
        self._h_BND = h_BND.detach()

    def take(self) -> Tensor:
        """Return the hidden states of the last call and forget them (ValueError: no call since the last `take`)."""
        if self._h_BND is None:
            raise ValueError("the model was not called since hidden states were taken; call it first")
        h_BND, self._h_BND = self._h_BND, None
        return h_BND


@contextmanager
def hidden_states(model: nn.Module, key: str = "last_hidden") -> Iterator[HiddenStates]:
    """Record hidden states inside a `with` block; call `take()` after each forward.

    Args:
        model: of this package, or a decoder of transformers, possibly wrapped.
        key: "last_hidden" or "feed_forward".

    Raises:
        ValueError: an unknown key, or a model without this place.
    """
    if key not in KEYS:
        raise ValueError(f"key={key!r} must be one of {', '.join(KEYS)}")
    seen = HiddenStates()
    with ExitStack() as hooks:
        for handle in _hook_stack(model, key, seen) if hasattr(model, "stack") else _hook_head(model, key, seen):
            hooks.callback(handle.remove)
        yield seen


def _hook_head(model: nn.Module, key: str, seen: HiddenStates) -> list[Any]:
    host: Any = model if hasattr(model, "get_output_embeddings") else getattr(model, "model", None)
    head = host.get_output_embeddings() if hasattr(host, "get_output_embeddings") else None
    if key != "last_hidden" or head is None:
        lacks = "no head that reads hidden states" if head is None else "no block of this package"
        raise ValueError(f"key={key!r}: {type(model).__name__} has {lacks}; {WAY_OUT[key]}")
    return [head.register_forward_pre_hook(lambda _, arguments: seen.put(arguments[0]))]


def _hook_stack(model: Any, key: str, seen: HiddenStates) -> list[Any]:
    stack = model.stack
    if key == "last_hidden":
        return [stack.register_forward_hook(lambda _, arguments, out: seen.put(out.outputs))]
    block = stack.blocks[-1]
    norm = getattr(block.feed_forward, "norm", None)
    if not isinstance(norm, nn.Module):
        name = type(block.feed_forward).__name__
        raise ValueError(f"key={key!r}: the last feed-forward, {name}, has no norm of its own; {WAY_OUT[key]}")
    pieces: list[Tensor] = []
    segment: list[tuple[int, int]] = []  # (start, length) of the segment among tokens that a memory adds

    def enter(_: Any, arguments: Any, options: dict[str, Any]) -> None:
        given = options.get("segment")
        segment[:] = [] if given is None else [given]

    def read(_: Any, arguments: Any, out: Tensor) -> None:
        pieces.append(out.narrow(1, *segment[0]) if segment and out.shape[1] > segment[0][1] else out)

    def finish(_: Any, arguments: Any, out: Any) -> None:
        count, tokens = sum(piece.shape[1] for piece in pieces), out.outputs.shape[1]
        if count != tokens:
            read_again = f"the last block read {count} tokens for a segment of {tokens}"
            raise ValueError(f"key={key!r}: {read_again}, more than once; {WAY_OUT[key]}")
        seen.put(torch.cat(pieces, 1))
        pieces.clear()

    return [
        stack.register_forward_pre_hook(lambda _, arguments: pieces.clear()),
        block.register_forward_pre_hook(enter, with_kwargs=True),
        norm.register_forward_hook(read),
        stack.register_forward_hook(finish),
    ]
