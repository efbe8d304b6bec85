"""The transformer block: attention with a memory, cross-attention over slots, feed-forward, each with a residual
connection; optionally a short convolution before them.

Legend: B rows, N tokens, M slots, D model width, P position channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Trace
from cached_transformers.state import State

from .attention import SelfAttention, TokenProjections
from .feed_forward import DropPath, run_feed_forward
from .reversible import Sublayer
from .short_convolution import ShiftedState, ShortConvolution


class MemoryWeights(nn.Module):
    """Separate weights of a block for the tokens of a model memory, initialised as a copy."""

    def __init__(self, attention: SelfAttention, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = TokenProjections(attention), copy.deepcopy(feed_forward)

    def copy_from(self, block: Block) -> None:
        """Copy the block's weights again, after the block was trained without a memory."""
        for mine, theirs in ((self.attention, block.attention), (self.feed_forward, block.feed_forward)):
            mine.load_state_dict({k: v for k, v in theirs.state_dict().items() if k in mine.state_dict()})


class Block(nn.Module):
    """Transformer block: attention with a memory, then feed-forward, each with a residual connection.

    Args:
        attention: the attention sublayer, with its norm in a pre-norm block. feed_forward: likewise; a module for
            `run_feed_forward`.
        slot_attention: cross-attention over the slots of a model memory.
        memory_weights: for the tokens of a model memory with its own weights.
        short_convolution: applied to the tokens before attention and memory.
        drop_path: rate of stochastic depth.
        norms: norms after the two residual sums, in that order (a post-norm block, arXiv:1706.03762).

    Raises:
        ValueError: `memory_weights` for an attention with a reduction.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: nn.Module,
        *,
        slot_attention: nn.Module | None = None,
        memory_weights: MemoryWeights | None = None,
        short_convolution: ShortConvolution | None = None,
        drop_path: float = 0.0,
        norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.slot_attention, self.memory_weights = slot_attention, memory_weights
        if memory_weights is not None and attention.reduction is not None:
            raise ValueError(
                "a layer with a reduction cannot have memory_weights: memory tokens are not part of its map"
            )
        self.short_convolution = short_convolution
        self.drop_path = DropPath(drop_path)
        self.attention_norm, self.feed_forward_norm = norms if norms is not None else (nn.Identity(), nn.Identity())

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """Initial state of `batch_size` rows."""
        state = self.attention.init_state(batch_size, like)
        if self.short_convolution is None:
            return state
        return ShiftedState(self.short_convolution.init_state(batch_size, like), state)

    def forward(
        self,
        x_BND: Tensor,
        positions_BNP: Tensor | None = None,
        *,
        state: State = (),
        slots: tuple[Any, ...] | None = None,
        segment: tuple[int, int] | None = None,
        **attention: Any,
    ) -> tuple[Tensor, State, Trace, Tensor | None]:
        """Output tokens, the layer memory's new state, the trace, and the sum of auxiliary losses or None.

        Args:
            state: see `init_state`.
            slots: further arguments of the slot attention; None for no slots.
            segment: (start, length) of the segment's tokens, the only ones that a memory may store; None for all.
            attention: further arguments of `SelfAttention.forward`.
        """
        if self.memory_weights is not None:
            attention["others"] = self.memory_weights.attention
        padding_BN = attention.get("padding_BN")
        recent_BTD: Tensor | None = None
        if self.short_convolution is not None:
            if not len(state):
                state = self.init_state(len(x_BND), x_BND)
            if not isinstance(state, ShiftedState):
                raise ValueError(
                    "a block with a short convolution got the state of its attention; a wrapper of a block must expose "
                    "its init_state"
                )
            recent_BTD, state = state
            x_BND, recent_BTD = self.short_convolution(x_BND, recent_BTD, padding_BN=padding_BN, segment=segment)
        if slots is not None and self._reads_in_front:
            assert self.slot_attention is not None
            x_BND, slots = _look(self.slot_attention, slots, x_BND), None
        attended = self.attention(x_BND, positions_BNP, state=state, segment=segment, **attention)
        y_BND, fed_losses = self._after_attention(x_BND, attended.y_BND, _look, slots, padding_BN, segment)
        trace = Trace(x_BND, y_BND, attended.query, attended.reading, attended.weights_BHWL)
        written = trace if segment is None else trace.narrow(*segment)
        state, loss = self.attention.write(state, written, attended.core_state)
        if recent_BTD is not None:
            state = ShiftedState(recent_BTD, state)
        losses = [part for part in (attended.auxiliary_loss, *fed_losses, loss) if part is not None]
        return y_BND, state, trace, sum(losses) if losses else None  # type: ignore[return-value]

    @property
    def _reads_in_front(self) -> bool:
        """Return whether the slots are read before the block, and the result replaces its tokens."""
        return getattr(self.slot_attention, "in_front", False)

    def step(
        self,
        x_BND: Tensor,
        positions_BNP: Tensor,
        opened: Any,
        *,
        slots: tuple[Any, ...] | None = None,
        segment: tuple[int, int] | None = None,
        **attention: Any,
    ) -> tuple[Tensor, Trace]:
        """Output and trace of the next tokens of a partial segment, without writing the memory.

        Args: see `forward`; `opened` is the `LayerDecoder` of the layer.
        """
        if self.memory_weights is not None:
            attention["others"] = self.memory_weights.attention
        if self.short_convolution is not None:
            x_BND = opened.shift(self.short_convolution, x_BND, segment)
        if slots is not None and self._reads_in_front:
            assert self.slot_attention is not None
            x_BND, slots = opened.look(self.slot_attention, slots, x_BND), None
        attended = opened(x_BND, positions_BNP, segment=segment, **attention)
        y_BND, _ = self._after_attention(x_BND, attended.y_BND, opened.look, slots, None, segment)
        return y_BND, Trace(x_BND, y_BND, attended.query, attended.reading)

    def _after_attention(
        self,
        x_BND: Tensor,
        attended_BND: Tensor,
        look: Callable[..., Tensor],
        slots: tuple[Any, ...] | None,
        padding_BN: Tensor | None,
        segment: tuple[int, int] | None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Output of the block and auxiliary losses, given the output of the attention."""
        y_BND = self.attention_norm(x_BND + self.drop_path(attended_BND))
        if slots is not None and self.slot_attention is not None:
            y_BND = y_BND + self.drop_path(look(self.slot_attention, slots, y_BND))
        fed_BND, losses = self._feed_forward(y_BND, padding_BN, segment)
        return self.feed_forward_norm(y_BND + self.drop_path(fed_BND)), losses

    def _feed_forward(
        self, x_BND: Tensor, padding_BN: Tensor | None, segment: tuple[int, int] | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Output of the feed-forward, and auxiliary losses of its parts."""
        if self.memory_weights is None or segment is None:
            y_BND, loss = run_feed_forward(self.feed_forward, x_BND, padding_BN)
            return y_BND, [loss]
        start, length = segment
        sizes = [start, length, x_BND.shape[1] - start - length]
        memory = self.memory_weights.feed_forward
        paddings = [None] * 3 if padding_BN is None else padding_BN.split(sizes, 1)
        parts = zip((memory, self.feed_forward, memory), x_BND.split(sizes, 1), paddings, strict=True)
        y, losses = zip(*(run_feed_forward(*part) for part in parts), strict=True)
        return torch.cat(y, 1), list(losses)

    def sublayers(self, positions_BNP: Tensor | None = None, **attention: Any) -> tuple[Sublayer, Sublayer]:
        """The two residual branches, for a reversible stack; the memory writes nothing."""

        def attend(x_BND: Tensor) -> tuple[Tensor, Tensor]:
            attended = self.attention(x_BND, positions_BNP, **attention)
            loss = attended.auxiliary_loss
            return self.drop_path(attended.y_BND), x_BND.new_zeros(()) if loss is None else loss

        def feed_forward(x_BND: Tensor) -> tuple[Tensor, Tensor]:
            y_BND, loss = run_feed_forward(self.feed_forward, x_BND, attention.get("padding_BN"))
            return self.drop_path(y_BND), x_BND.new_zeros(()) if loss is None else loss

        first, second = (list(module.parameters()) for module in (self.attention, self.feed_forward))
        return Sublayer(attend, first), Sublayer(feed_forward, second)

    def cannot_reverse(self) -> str | None:
        """Say why the block cannot be part of a reversible stack; None if it can."""
        memory = self.attention.memory
        if "state" in memory.needs:
            name = type(memory).__name__
            return f"memory {name} carries a state from segment to segment, which cannot be undone"
        if self.short_convolution is not None:
            return "short_convolution carries a state, which cannot be undone"
        if self.attention.core.carry:
            return f"{self.attention.core.title} carries a state, which cannot be undone"
        if not isinstance(self.attention_norm, nn.Identity):
            return "norm='post' normalises the residual sum; take norm='pre'"
        return None


def _look(slot_attention: nn.Module, slots: tuple[Any, ...], x_BND: Tensor) -> Tensor:
    y_BND: Tensor = slot_attention(x_BND, *slots)
    return y_BND
