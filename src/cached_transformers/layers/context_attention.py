"""Attention of the tokens over what a memory offers, and over nothing of their own segment.

The Feedback Transformer (arXiv:2002.09402) is made of such layers, of which only some need keys and values.

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
    """Tokens attend the context alone, and get 0 where it is empty. What is asked of the memory has no keys and values.

    There are projections of keys and values only where the layer's memory needs them ("context"), or others.

    Args:
        width: D. heads: H.
        keys: whether others than the layer's memory ask it for keys and values.
        options: as of `SelfAttention`.

    Raises:
        ValueError: as `SelfAttention`; or the core cannot attend other keys, the memory weighs those of the segment, or
            queries are to be keys where there are none.
    """

    def __init__(self, width: int, heads: int, *, keys: bool = False, **options: Any) -> None:
        memory = options.get("memory")
        self.keys = keys or (memory is not None and "context" in memory.needs)
        if options.get("shared_query_key") and not self.keys:
            raise ValueError("shared_query_key=True makes the queries keys, which this layer has none of; leave it out")
        super().__init__(width, heads, **options)
        if "weights" in self.memory.needs:
            name = type(self.memory).__name__
            raise ValueError(f"memory {name} weighs the keys of the segment, which a layer of context alone leaves out")

    def _projected(self) -> list[int]:
        return super()._projected() if self.keys else [self.inner]

    def _needs(self) -> dict[str, str]:
        return super()._needs() | dict.fromkeys(("context", "cross", "bidirectional"), "a layer of context alone")

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """As of `SelfAttention`.

        Raises:
            ValueError: the layer was made without such projections.
        """
        if not self.keys:
            raise ValueError("this layer has no keys and values, which its memory does not need; ask one that has")
        return super().project_kv(hidden_BMD, frozen=frozen, normed=normed)

    def _project(self, h_BND: Tensor, size: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self._heads(self._linear(h_BND, 0, self.inner))
        return q, q[:, :, :0], q[:, :, :0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], more: dict[str, Any]) -> AttentionOutput:
        context = mask["context"]
        if context is None:
            return AttentionOutput(torch.zeros_like(q))
        looked_up = more["distances_BHNK"] is not None  # by a kernel, which then has no bias
        if context.attend is not None and type(self.core) is SoftmaxAttention and not self.core.drop and not looked_up:
            return AttentionOutput(context.attend(q, mask["bias_BHNM"]))
        return self.core(q, k, v, context=context, bias_BHNM=mask["bias_BHNM"], **more)
