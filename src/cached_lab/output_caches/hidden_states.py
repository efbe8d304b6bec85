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


class HiddenStates(list[Tensor]):
    """Hidden states of the last call of a model, in pieces."""

    def take(self, tokens: int | None = None) -> Tensor:
        """Return the hidden states (B, N, D) of the last call and forget them.

        Raises:
            ValueError: no call since the last `take`, or not of `tokens` tokens.
        """
        if not self:
            raise ValueError("the model was not called since hidden states were taken; call it first")
        h_BND = torch.cat(self, 1).detach()
        self.clear()
        if tokens not in (None, h_BND.shape[1]):
            raise ValueError(f"{h_BND.shape[1]} hidden states of a segment of {tokens} tokens; take key='last_hidden'")
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
    seen, stack = HiddenStates(), getattr(model, "stack", None)
    if stack is not None:
        place: Any = stack if key == "last_hidden" else getattr(stack.blocks[-1].feed_forward, "norm", None)
        caller: Any = stack
    else:
        host: Any = model if hasattr(model, "get_output_embeddings") else getattr(model, "model", None)
        caller = place = host.get_output_embeddings() if host is not None and key == "last_hidden" else None
    if not isinstance(place, nn.Module):
        raise ValueError(f"key={key!r}: {type(model).__name__} has no such place; take key='last_hidden' of a decoder")

    def record(_: Any, arguments: Any, out: Any) -> None:
        seen.append(arguments[0] if stack is None else getattr(out, "outputs", out))

    handles = [caller.register_forward_pre_hook(lambda *_: seen.clear()), place.register_forward_hook(record)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
