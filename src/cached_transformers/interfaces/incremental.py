"""Reading a segment token by token, an optional protocol of memories.

    opened = memory.open(state, ...)                       once per segment
    memory.read(opened, query, ...)  or  memory.enter(opened, tokens)      for the first tokens, then for each next one
    opened = memory.advance(opened, x_BND, traces)         after each of these; optional

Generation uses it. For a memory without `open`, `read` and `enter` get the state, and generation reads the whole
partial segment again for each token.

A model memory with `asks = True` also lets a prompt choose among its slots. Generation calls, before it reads a
prompt's last segment,

    state = memory.ask(state, tokens, through)             through: a `BlockRunner`, called with write=False

The choice depends on all tokens of the segment, which only a text without targets may know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from cached_transformers.state import State

from .memory import BlockRunner, Entry, LayerMemory, ModelMemory, Projections, ProjectKV, Query, Reading, Tokens, Trace


class IncrementalRead(Protocol):
    """A memory whose result for a token depends only on `opened` and on that token.

    A model memory's tokens before the segment may enter, too; they must be the same for all tokens. A memory whose
    current options break this sets `whole_segments` to the reason, for messages.
    """

    def open(self, state: State, *given: Any) -> Any:
        """Prepare the state for one segment.

        Args:
            state: before the segment.
            given: for a layer memory `first_B1P`, the position of the first token (None if the layer knows no
                positions), and `project_kv` (None if the memory does not need "context"); for a model memory `tokens`,
                the segment's first tokens, and `layers`, the projections of all layers.
        """
        ...

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        """`LayerMemory.read`, or `ModelMemory.enter`, with `opened` instead of the state."""
        ...

    def advance(self, opened: Any, x_BND: Tensor, traces: Sequence[Trace]) -> Any:
        """Return `opened` for the next tokens, given the last block's output, or a layer's input, and the traces."""
        ...


def open_segment(memory: LayerMemory | ModelMemory, state: State, *given: Any) -> Any:
    """Call `open`; return the state for a memory without it."""
    return memory.open(state, *given) if hasattr(memory, "open") else state  # type: ignore[operator]


def advance(memory: LayerMemory | ModelMemory, opened: Any, x_BND: Tensor, traces: Sequence[Trace]) -> Any:
    """Call `advance`; return `opened` for a memory without it."""
    return memory.advance(opened, x_BND, traces) if hasattr(memory, "advance") else opened  # type: ignore[operator]


def read_segment(memory: LayerMemory, state: State, query: Query, project_kv: ProjectKV | None) -> Reading:
    """Read for the tokens of a whole segment."""
    first_B1P = None if query.positions_BNP is None else query.positions_BNP[:, :1]
    return memory.read(open_segment(memory, state, first_B1P, project_kv), query, project_kv)


def enter_segment(memory: ModelMemory, state: State, tokens: Tokens, layers: Sequence[Projections]) -> Entry:
    """Enter the blocks with a whole segment."""
    return memory.enter(open_segment(memory, state, tokens, layers), tokens)


def asked(memory: ModelMemory, state: State, tokens: Tokens, through: BlockRunner) -> State:
    """Return the state with the choice of a prompt's last segment."""
    return memory.ask(state, tokens, through)  # type: ignore[operator]


def asks(memory: ModelMemory | None) -> bool:
    """Return True if prompts choose among the slots of the memory."""
    return bool(getattr(memory, "asks", False))


def needs_whole_segments(memory: LayerMemory | ModelMemory) -> str | None:
    """Return the reason why tokens cannot be read one at a time; None if they can.

    A class that overrides a reading method without `open` does not inherit the promise of its base.
    """
    name = f"memory {type(memory).__name__}"
    reason = getattr(memory, "whole_segments", None)
    if reason is not None:
        return f"{name}: {reason}"
    base, readers = (
        (ModelMemory, ("enter", "exit", "run")) if isinstance(memory, ModelMemory) else (LayerMemory, ("read",))
    )
    own = type(memory).__mro__[: type(memory).__mro__.index(base)]
    first = next((kind for kind in own if any(reader in vars(kind) for reader in readers)), None)
    if first is None or any("open" in vars(kind) for kind in own[: own.index(first) + 1]):
        return None
    return f"{name} has no open() for tokens that come one at a time"
