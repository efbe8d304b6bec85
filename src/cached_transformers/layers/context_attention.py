"""Attention over the context of a memory without the segment's own keys (Feedback Transformer, arXiv:2002.09402).

Legend: B rows, N tokens, M slots, H heads, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.attention import AttentionOutput

from .attention import SelfAttention


class ContextAttention(SelfAttention):
    """Tokens attend only the context, with output 0 where it is empty; queries of the memory have no keys and values.

    The layer has projections of keys and values only if its memory needs them ("context"), or with `keys=True`.

    Args:
        width: D. heads: H.
        keys: make projections of keys and values even if the layer's memory does not need them ("context").
        options: see `SelfAttention`.

    Raises:
        ValueError: see `SelfAttention`; or the core cannot attend other keys, the memory needs the weights of the
            segment's keys, or shared_query_key without keys.
    """

    def __init__(self, width: int, heads: int, *, keys: bool = False, **options: Any) -> None:
        memory = options.get("memory")
        self.keys = keys or (memory is not None and "context" in memory.needs)
        if options.get("shared_query_key") and not self.keys:
            raise ValueError("shared_query_key=True needs keys, but this layer has none; leave it out")
        super().__init__(width, heads, **options)
        if "weights" in self.memory.needs:
            name = type(self.memory).__name__
            raise ValueError(
                f"memory {name} needs weights of the segment's keys, but this layer has none; take SelfAttention"
            )

    def _projected(self) -> list[int]:
        return super()._projected() if self.keys else [self.inner]

    def _needs(self) -> dict[str, str]:
        return super()._needs() | dict.fromkeys(("context", "cross", "bidirectional"), "a ContextAttention")

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """See `SelfAttention` (ValueError: the layer has no keys and values)."""
        if not self.keys:
            raise ValueError("keys=False: this layer has no keys and values; make it with keys=True")
        return super().project_kv(hidden_BMD, frozen=frozen, normed=normed)

    def _project(self, h_BND: Tensor, size: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self._heads(self._linear(h_BND, 0, self.inner))
        return q, q[:, :, :0], q[:, :, :0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], more: dict[str, Any]) -> AttentionOutput:
        context = mask["context"]
        if context is None:
            return AttentionOutput(torch.zeros_like(q))
        looked_up = more["distances_BHNK"] is not None  # the kernel adds positions, without a bias
        if context.attend is not None and type(self.core) is SoftmaxAttention and not self.core.drop and not looked_up:
            return AttentionOutput(context.attend(q, mask["bias_BHNM"]))
        return self.core(q, k, v, context=context, bias_BHNM=mask["bias_BHNM"], **more)
