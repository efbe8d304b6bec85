"""Small language models, batches and gradients, for the tests of segment loops.

Legend: B rows, N tokens of all segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers import state as states

SEGMENT, ROWS, VOCABULARY = 4, 2, 11


def build(memory: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": 16, "depth": 2, "heads": 2, "feed_forward": 32}
    return create_model("language_model", **{**sizes, **options}, memory=memory).double()


def batch(segments: int = 5) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, N); the last segment is short."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, segments * SEGMENT), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(loop: nn.Module, *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Loss, state and gradients of one call, with the same random state each time."""
    loop.zero_grad()
    torch.manual_seed(5)
    loss, state = loop(*arguments, **options)
    loss.backward()
    return {"loss": loss.detach(), **dict(states.named_tensors(state)), **gradients_of(loop)}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, by the names that the bare model has."""
    wrappers = ("module.", "model.", "_orig_mod.")
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for wrapper in wrappers:
        found = {name.removeprefix(wrapper): grad for name, grad in found.items()}
    return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
