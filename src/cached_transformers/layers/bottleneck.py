"""A block whose segment tokens see each other only through the memory.

Memory Transformer, MemBottleneck (Burtsev, Kuratov, Peganov, Sapunov 2020, arXiv:2006.11527). The memory's tokens are
updated first, with their own weights; the segment's tokens then attend the updated memory tokens in the same layer:

    A^mem = X^mem + MHA^mem(X^mem; [X^mem, X^seq]),   H^mem = A^mem + FF^mem(A^mem)
    A^seq = X^seq + MHA^seq(X^seq; H^mem),            H^seq = A^seq + FF^seq(A^seq)

Legend: B rows, N tokens of a segment, M memory tokens, L = M + N, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.state import State

from .block import Block
from .context_attention import ContextAttention


class BottleneckBlock(Block):
    """Update the memory's tokens by their own block, then let the segment's tokens attend only them.

    Attention costs D (2 M L + 2 N M) multiply-adds, linear in N.

    Args:
        attention, feed_forward: of the segment's tokens. memory_block: of the memory's tokens.
        options: see `Block`, for the segment's tokens.
    """

    def __init__(
        self, attention: ContextAttention, feed_forward: nn.Module, *, memory_block: Block, **options: Any
    ) -> None:
        super().__init__(attention, feed_forward, **options)
        self.memory_block = memory_block

    def forward(
        self,
        x_BND: Tensor,
        positions_BNP: Tensor | None = None,
        *,
        state: State = (),
        slots: tuple[Any, ...] | None = None,
        segment: tuple[int, int] | None = None,
        padding_BN: Tensor | None = None,
        **attention: Any,
    ) -> tuple[Tensor, State, Trace, Tensor | None]:
        """See `Block.forward`; the memory's tokens come before the segment's (ValueError: none, or no positions)."""
        if segment is None or segment[0] < 1 or positions_BNP is None:
            raise ValueError(
                f"segment={segment}: a bottleneck block needs positions and memory tokens before the segment"
            )
        start, n = segment
        memory_BMD, x_BND = x_BND.split([start, n], 1)
        memory_places, places = positions_BNP.split([start, n], 1)
        if padding_BN is not None:
            padding_BN = padding_BN[:, start:]

        def tokens(project_kv: ProjectKV) -> Context:
            valid_BN = x_BND.new_ones(x_BND.shape[:2], dtype=torch.bool) if padding_BN is None else ~padding_BN
            return Context(*project_kv(x_BND), places, valid_BN)

        memory_BMD, _, _, lost = self.memory_block(memory_BMD, memory_places, context=tokens)

        def memory(project_kv: ProjectKV) -> Context:
            valid_BM = memory_BMD.new_ones(memory_BMD.shape[:2], dtype=torch.bool)
            return Context(*project_kv(memory_BMD), memory_places, valid_BM, clean=True)

        attention["context"] = memory
        y_BND, state, trace, loss = super().forward(x_BND, places, state=state, padding_BN=padding_BN, **attention)
        losses = [part for part in (lost, loss) if part is not None]
        return torch.cat([memory_BMD, y_BND], 1), state, trace, sum(losses) if losses else None  # type: ignore[return-value]
