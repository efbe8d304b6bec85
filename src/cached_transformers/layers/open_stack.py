"""A stack within an open segment: tokens come one at a time, and the memories stay as they are until it is full.

Legend: B rows, K continuations, R = B K, N tokens, D model width, P position channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.incremental import advance, needs_whole_segments, open_segment
from cached_transformers.interfaces.memory import Query, Reading, Tokens, Trace
from cached_transformers.memories.parts.composite import members_of, stands_in_front
from cached_transformers.positions import Positions, alike

from .attention import SelfAttention
from .block import Block
from .kv_cache import Continuations
from .open_layer import OpenLayer, rows_of
from .stack import Stack, StackState


class OpenStack:
    """What a stack keeps while a segment grows.

    Args:
        stack: in evaluation mode; see `why_in_one_piece`.
        state: before the segment, of R rows.
        continuations: K, how many of the rows, one behind the other, are continuations of one text.
        steps: tokens of the segment for which there is to be room.
    """

    def __init__(self, stack: Stack, state: StackState, continuations: int = 1, steps: int = 32) -> None:
        self.stack, self.clock_R, self.read = stack, state.clock_B, 0
        self.text = Continuations(len(state.clock_B) // continuations, state.clock_B.device, continuations)
        self.model_state, self.opened = state.model, None
        self.schemes: list[tuple[Positions, Positions]] = []
        room = steps + stack.model_memory.extra_tokens
        self.layers = [
            OpenLayer(block.attention, layer_state, self.text, self._open, room)  # type: ignore[arg-type]
            for block, layer_state in zip(stack.blocks, state.layers, strict=True)
        ]

    def _open(self, scheme: Positions, run: bool) -> Positions:
        """The scheme opened; schemes of several layers that are alike and have nothing to learn are one."""
        shared = next(scheme.parameters(), None) is None
        for earlier, opened in self.schemes if shared else ():
            if alike(earlier, scheme):
                return opened
        self.schemes.append((scheme, scheme.open(run)))
        return self.schemes[-1][1]

    def positions(self, tokens: int) -> Tensor:
        """(R, N, 1): of the next tokens."""
        here_R1 = self.clock_R[:, None] + self.read
        return (here_R1 if tokens == 1 else here_R1 + torch.arange(tokens, device=here_R1.device))[..., None]

    def __call__(self, x_RND: Tensor, inputs_RN: Tensor | None = None, places_RN2: Tensor | None = None) -> Tensor:
        """Outputs for the next tokens, (R, N, D): any number of them first, and then one at a time.

        Args:
            x_RND: embedded tokens. inputs_RN: the model's raw inputs, for model memories that look at them.
            places_RN2: further channels of positions, for a model memory that takes them.
        """
        memory, n = self.stack.model_memory, x_RND.shape[1]
        if "context_alone" in memory.needs and n > 1:  # no token can be read beside another
            inputs = [None] * n if inputs_RN is None else inputs_RN.split(1, 1)
            return torch.cat([self(x, i) for x, i in zip(x_RND.split(1, 1), inputs, strict=True)], 1)
        positions_RNP = self.positions(n)
        if places_RN2 is not None:
            positions_RNP = torch.cat([positions_RNP, places_RN2], -1)
        tokens = Tokens(x_RND, positions_RNP, None, inputs_RN, consecutive=True)
        first = self.read == 0
        if first:
            self.opened = open_segment(
                memory, self.model_state, tokens, [block.attention for block in self.stack.blocks]
            )
        entry = memory.enter(self.opened, tokens)
        start, length = entry.segment or (0, n)
        x, positions = entry.tokens.x_BND, entry.tokens.positions_BNP
        options: dict[str, Any] = {}
        if first:
            # No token sees what stands behind the segment.
            x, positions = x[:, : start + length], positions[:, : start + length]
            self.text.grow(start + length)
            visible = entry.visible_NN
            options["visible_NN"] = None if visible is None else visible[: start + length, : start + length]
            options["segment"] = None if entry.segment is None else (start, length)
            options["consecutive"] = entry.tokens.consecutive
        else:
            if length != 1:
                raise ValueError(f"{length} tokens in the middle of a segment; they are read one at a time")
            x, positions = (t[:, start : start + 1] for t in (x, positions))
            self.text.grow()
            if self.text.count > 1 and "context_alone" not in memory.needs:
                x, positions = (t.view(-1, self.text.count, t.shape[-1]) for t in (x, positions))
        if entry.slots is not self.opened and entry.slots is not getattr(self.opened, "slots", None):
            self._look_anew()
        contexts = entry.contexts if entry.contexts is not None else [None] * len(self.layers)
        traces = []
        for block, layer, context in zip(self.stack.blocks, self.layers, contexts, strict=True):
            x, trace = block.step(x, positions, layer, slots=entry.slots, context=context, **options)  # type: ignore[operator]
            traces.append(trace)
        if first:
            x = x[:, start:]
            traces = [t if entry.segment is None else t.narrow(start, length) for t in traces]
        if len(x) != len(x_RND):
            x, traces = x.view_as(x_RND), [_by_row(trace) for trace in traces]
        opened = advance(memory, self.opened, x, traces)
        if opened is not self.opened:
            self._look_anew()
        self.opened = opened
        self.read += n
        return self.stack.norm(x).view(len(x_RND), n, -1)  # type: ignore[no-any-return]

    def _look_anew(self) -> None:
        for layer in self.layers:
            layer.opened_slots = None

    def multiply(self, times: int) -> None:
        """Each row `times` times, one behind the other."""
        index = torch.arange(len(self.clock_R), device=self.clock_R.device).repeat_interleave(times)
        self.clock_R, self.opened = self.clock_R[index], rows_of(self.opened, index, len(self.clock_R))
        self.text.multiply(times)
        for layer in self.layers:
            layer.multiply(times)

    def choose(self, rows_R: Tensor) -> None:
        """Rows in this order; they may repeat among the continuations of one row, and all of these together vanish."""
        k = self.text.count
        rows_BK = rows_R.view(-1, k)
        rows_B, parent_BK = rows_BK[:, 0] // k, rows_BK % k
        moved = self.text.choose(rows_B, parent_BK)
        self.clock_R, self.opened = self.clock_R[rows_R], rows_of(self.opened, rows_R, len(self.clock_R))
        for layer in self.layers:
            layer.choose(rows_R, rows_B, parent_BK, moved)


def _by_row(trace: Trace) -> Trace:
    """What tokens that stand side by side as (B, K) left, as that of R rows of one token."""
    x_RND, y_RND = (t.flatten(0, 1)[:, None] for t in trace[:2])
    assert trace.query.positions_BNP is not None
    return Trace(x_RND, y_RND, Query(x_RND, positions_BNP=trace.query.positions_BNP.flatten(0, 1)[:, None]), Reading())


def why_in_one_piece(stack: Stack) -> str | None:
    """Why the stack has to see a segment as a whole, so that no token can be read alone; None where it can."""
    if stack.reversible:
        return "a reversible stack reads whole segments"
    inside: list[Any] = [m for b in stack.blocks for m in (b, b.attention, b.attention.core)]  # type: ignore[union-attr]
    watched = next(filter(is_watched, (stack, *inside)), None)
    if watched is not None:
        return passed_by(watched)
    memory = stack.model_memory
    if (why := needs_whole_segments(memory)) is not None:
        return why
    for block in stack.blocks:
        if not isinstance(block, Block):
            return f"a {type(block).__name__} reads whole segments"
        reason = _layer_in_one_piece(block.attention)
        if reason is not None:
            return reason
    return None


def passed_by(module: nn.Module) -> str:
    """Why a module with hooks has to be called with whole segments."""
    return f"a {type(module).__name__} has hooks, or somebody else's forward, which a token read alone passes by"


def is_watched(module: nn.Module) -> bool:
    """Whether somebody counts on the calls of a module, as FSDP, accelerate and profilers do by hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _layer_in_one_piece(layer: SelfAttention) -> str | None:
    for member in members_of(layer.memory):
        if (why := needs_whole_segments(member)) is not None:
            return why
        if stands_in_front(member):
            return f"memory {type(member).__name__} stands in front of queries and keys, of a whole segment"
    if layer.core.steps_from is None:
        return f"{layer.core.title} has no form for tokens that come one at a time"
    if not layer.causal or layer.reduction is not None:
        return "a layer in which tokens see later ones reads whole segments"
    return None
