"""`past_key_values` of a decoder with a memory: the keys and values of the open segment, and the memory behind it.

Legend: B rows, N tokens, M slots, G heads of keys, E head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cached_transformers.state import State, map_state, named_tensors, signature

from .row_segments import places

try:
    from transformers.cache_utils import Cache, DynamicCache
except ImportError:  # this module is of use to those alone who hold a model of transformers, but imports without it
    Cache = DynamicCache = object


class Made:
    """Keys and values that a layer made of stored hidden states, (B, G, M, E) without positions, in the order in which
    they were asked for; and the slots' positions in the stream, (B, M). They are the same for all tokens of a segment.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.positions_BM: Tensor | None = None


class SegmentCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of an open segment, and those that its layers attend beside it.

    Args:
        layers: how many have a memory. config: the host's, where its layers' windows are to drop keys.

    Attributes:
        made: of each layer.
        again: a layer's slots are not the same for all tokens, so that a longer segment has to be read from its start.
    """

    def __init__(self, layers: int, config: Any = None) -> None:
        super().__init__(config=config)
        self.made = [Made() for _ in range(layers)]
        self.again = False

    def pick(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Choose rows of what is attended beside the segment."""
        for made in self.made:
            made.pairs = [(pick(k), pick(v)) for k, v in made.pairs]
            made.positions_BM = None if made.positions_BM is None else pick(made.positions_BM)


class MemoryCache(Cache):  # type: ignore[misc]
    """A text that is read piece by piece. Keys and values do not outlive their segment: what does is the memory.

    Args:
        given, state: the memory's state before the text, as the caller gave it (or not) and as it is.
        work_out: gives the state after all tokens.

    Attributes:
        given: the state before the text, as the first call had it. state: that before the open segment.
        after: the state after all tokens, None where nobody has needed it yet.
        tokens: columns read in all. length: those of the open segments, the last ones.
        host_cache: keys and values of the open segments; the host's own cache.
        open: what the open segments were called with, each (B, length, ...). Places in it count a row's tokens from the
            text's first one on.
        padding_BN: True = no token of the row's open segment; None where all are.
        before: tokens of each row that its full segments hold, (B, 1) where rows differ.
    """

    def __init__(self, given: State | None, state: State, work_out: Callable[[MemoryCache], State]) -> None:
        super().__init__(layers=[])
        self.given, self.state = given, state
        self.after: State | None = state
        self.work_out = work_out
        self.tokens = self.length = 0
        self.before: int | Tensor = 0
        self.host_cache: SegmentCache | None = None
        self.open: dict[str, Tensor] = {}
        self.padding_BN: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCache:
        memo[id(self.work_out)] = self.work_out  # of the model, which is not to be copied along
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__ = copy.deepcopy(dict(vars(self)), memo)
        return new

    @property
    def memory_state(self) -> State:
        """State after all tokens that were read. A segment that grew token by token is read once more for it."""
        if self.after is None:
            self.after = self.work_out(self)
        return self.after

    def began_with(self, state: State) -> bool:
        """Whether the text began with this state, or with a copy of it on another device."""
        if state is self.given or self.given is None or signature(state) != signature(self.given):
            return state is self.given
        pairs = zip(named_tensors(state), named_tensors(self.given), strict=True)
        return all(torch.equal(a.to(b.device), b) for (_, a), (_, b) in pairs)

    def with_new(self, new: dict[str, Tensor], padding_BM: Tensor | None) -> dict[str, Tensor]:
        """What the open segments and these new columns are called with; `padding_BM` is that of both."""
        new, before = dict(new), dict(self.open)
        if padding_BM is not None or "position_ids" in new or "position_ids" in before:
            if padding_BM is None:
                some = next(iter(new.values()))
                rows, total = some.shape[0], self.length + some.shape[1]
                padding_BM = torch.zeros(rows, total, dtype=torch.bool, device=some.device)
            counted_BM = places(padding_BM, self.before)
            new.setdefault("position_ids", counted_BM[:, self.length :])
            before.setdefault("position_ids", counted_BM[:, : self.length])
        return {name: torch.cat([before[name], t], 1) if self.length else t for name, t in new.items()}

    def take(self, columns: dict[str, Tensor], padding_BN: Tensor | None, before: int | Tensor) -> None:
        """The open segments are these columns, behind so many tokens of each row."""
        self.open, self.padding_BN, self.before = columns, padding_BN, before
        self.length = next(iter(columns.values())).shape[1]

    def call(self) -> dict[str, Tensor]:
        """What the host is called with for the open segments, in which places begin anew."""
        if "position_ids" not in self.open:
            return self.open
        return {**self.open, "position_ids": (self.open["position_ids"] - self.before).clamp(min=0)}

    def close(self, state: State, before: int | Tensor) -> None:
        """The open segments are full: the memory moves on, their keys and values are forgotten."""
        self.state = self.after = state
        self.before = before
        self.length, self.open, self.padding_BN, self.host_cache = 0, {}, None, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read in all."""
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """A memory that was written cannot be taken back."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: ValueError: always."""
        raise ValueError(
            "what a memory has read cannot be taken back, as assisted generation and prompt lookup do; generate "
            "greedily, by sampling or by beams"
        )

    def reset(self) -> None:
        """Raises: ValueError: always."""
        raise ValueError("a text that was read begins again with its memory_state and without past_key_values")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in this order, state and all, as beam search asks for."""
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)), lambda cache: cache.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times in a row."""
        self._rows(lambda t: t.repeat_interleave(repeats, 0), lambda cache: cache.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self._rows(lambda t: t[indices], lambda cache: cache.batch_select_indices(indices))

    def _rows(self, pick: Callable[[Tensor], Tensor], pick_in: Callable[[Any], None]) -> None:
        self.state = map_state(pick, self.state)
        self.after = None if self.after is None else map_state(pick, self.after)
        self.open = {name: pick(t) for name, t in self.open.items()}
        self.padding_BN = None if self.padding_BN is None else pick(self.padding_BN)
        self.before = pick(self.before) if isinstance(self.before, Tensor) else self.before
        if self.host_cache is not None:
            pick_in(self.host_cache)
            self.host_cache.pick(pick)
