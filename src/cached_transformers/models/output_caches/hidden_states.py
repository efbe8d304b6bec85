"""Hidden states of a language model, read off while it computes what it computes.

"last_hidden" is what the head reads, behind the last norm: every language model has it. "feed_forward" is the input of
the last feed-forward, behind its norm, which blocks of our own have.

Legend: B rows, N tokens of a segment, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEYS = ("last_hidden", "feed_forward")


class Seen:
    """What was read off the last call of a model."""

    def __init__(self) -> None:
        self._h_BND: Tensor | None = None

    def put(self, h_BND: Tensor) -> None:
        """Keep what a call has shown, and nothing of those before."""
        self._h_BND = h_BND.detach()

    def take(self) -> Tensor:
        """Hidden states (B, N, D) of the last call, which are then forgotten.

        Raises:
            ValueError: the model was not called since.
        """
        if self._h_BND is None:
            raise ValueError("the model was not called since hidden states were taken; call it first")
        h_BND, self._h_BND = self._h_BND, None
        return h_BND


@contextmanager
def hidden_states(model: nn.Module, key: str = "last_hidden") -> Iterator[Seen]:
    """Read them off a model inside a `with` block: `seen.take()` behind each call.

    Args:
        model: ours, or a decoder of transformers, with or without a wrapper of ours round it.
        key: "last_hidden" or "feed_forward".

    Raises:
        ValueError: an unknown key; a model that has no such place.
    """
    if key not in KEYS:
        raise ValueError(f"key={key!r} must be one of {', '.join(KEYS)}")
    seen = Seen()
    with ExitStack() as hooks:
        for handle in _of_ours(model, key, seen) if hasattr(model, "stack") else _of_others(model, key, seen):
            hooks.callback(handle.remove)
        yield seen


def _of_others(model: nn.Module, key: str, seen: Seen) -> list[Any]:
    host: Any = model if hasattr(model, "get_output_embeddings") else getattr(model, "model", None)
    head = host.get_output_embeddings() if hasattr(host, "get_output_embeddings") else None
    if key != "last_hidden" or head is None:
        lacks = "no head that reads hidden states" if head is None else "no block of ours, of which they are known"
        raise ValueError(f"key={key!r}: {type(model).__name__} has {lacks}; " + _way_out(key))
    return [head.register_forward_pre_hook(lambda _, arguments: seen.put(arguments[0]))]


def _of_ours(model: Any, key: str, seen: Seen) -> list[Any]:
    stack = model.stack
    if key == "last_hidden":
        return [stack.register_forward_hook(lambda _, arguments, out: seen.put(out.outputs))]
    block = stack.blocks[-1]
    norm = getattr(block.feed_forward, "norm", None)
    if not isinstance(norm, nn.Module):
        name = type(block.feed_forward).__name__
        raise ValueError(f"key={key!r}: the last feed-forward, {name}, has no norm of its own; {_way_out(key)}")
    pieces: list[Tensor] = []
    place: list[tuple[int, int]] = []  # of the segment's tokens among those that a memory puts round it

    def begin(_: Any, arguments: Any) -> None:
        pieces.clear()

    def enter(_: Any, arguments: Any, options: dict[str, Any]) -> None:
        segment = options.get("segment")
        place[:] = [] if segment is None else [segment]

    def read(_: Any, arguments: Any, out: Tensor) -> None:
        around = place and out.shape[1] > place[0][1]
        pieces.append(out.narrow(1, *place[0]) if around else out)

    def finish(_: Any, arguments: Any, out: Any) -> None:
        count, tokens = sum(piece.shape[1] for piece in pieces), out.outputs.shape[1]
        if count != tokens:
            raise ValueError(
                f"key={key!r}: the last block has read {count} tokens for a segment of {tokens}, as models do that "
                f"read twice; {_way_out(key)}"
            )
        seen.put(torch.cat(pieces, 1))
        pieces.clear()

    return [
        stack.register_forward_pre_hook(begin),
        block.register_forward_pre_hook(enter, with_kwargs=True),
        norm.register_forward_hook(read),
        stack.register_forward_hook(finish),
    ]


def _way_out(key: str) -> str:
    return "take key='last_hidden'" if key == "feed_forward" else "give a decoder with its head"
