"""Record hidden states of a language model during its forward.

"last_hidden" is the input of the head, after the last norm; every language model has it. "feed_forward" is the normed
input of the last feed-forward, in blocks of this package.

Legend: B rows, N tokens of a segment, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEYS = ("last_hidden", "feed_forward")


class HiddenStates:
    """Hidden states (B, N, D) of the last call of a model."""

    def __init__(self) -> None:
        self.h_BND: Tensor | None = None

    def take(self) -> Tensor:
        """Return the hidden states of the last call and forget them (ValueError: no call since the last `take`)."""
        if self.h_BND is None:
            raise ValueError("the model was not called since hidden states were taken; call it first")
        h_BND, self.h_BND = self.h_BND.detach(), None
        return h_BND


@contextmanager
def hidden_states(model: nn.Module, key: str = "last_hidden") -> Iterator[HiddenStates]:
    """Record hidden states inside a `with` block; call `take()` after each forward.

    Args:
        model: of this package, or a decoder of transformers, possibly wrapped.
        key: "last_hidden" or "feed_forward".

    Raises:
        ValueError: an unknown key, a model without this place, or "feed_forward" with a memory that adds tokens.
    """
    if key not in KEYS:
        raise ValueError(f"key={key!r} must be one of {', '.join(KEYS)}")
    seen, own = HiddenStates(), hasattr(model, "stack")
    if own and key == "feed_forward":
        handles = _hook_feed_forward(model.stack, seen)
    elif own:
        handles = [model.stack.register_forward_hook(lambda _, arguments, out: setattr(seen, "h_BND", out.outputs))]
    else:
        host: Any = model if hasattr(model, "get_output_embeddings") else getattr(model, "model", None)
        head = host.get_output_embeddings() if hasattr(host, "get_output_embeddings") else None
        if key != "last_hidden" or head is None:
            raise ValueError(f"key={key!r}: give a model of this package, or a decoder's 'last_hidden' with its head")
        handles = [head.register_forward_pre_hook(lambda _, arguments: setattr(seen, "h_BND", arguments[0]))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _hook_feed_forward(stack: Any, seen: HiddenStates) -> list[Any]:
    block = stack.blocks[-1]
    norm = getattr(block.feed_forward, "norm", None)
    if not isinstance(norm, nn.Module):
        name = type(block.feed_forward).__name__
        raise ValueError(f"key='feed_forward': the last, {name}, has no norm of its own; take key='last_hidden'")
    read: list[Tensor] = []

    def finish(_: Any, arguments: Any, out: Any) -> None:
        count, tokens = sum(h_BND.shape[1] for h_BND in read), out.outputs.shape[1]
        if count != tokens:
            way = "take key='last_hidden'"
            raise ValueError(f"key='feed_forward': the last block read {count} tokens of a segment of {tokens}; {way}")
        seen.h_BND = torch.cat(read, 1)

    return [
        stack.register_forward_pre_hook(lambda _, arguments: read.clear()),
        norm.register_forward_hook(lambda _, arguments, out: read.append(out)),
        stack.register_forward_hook(finish),
    ]
