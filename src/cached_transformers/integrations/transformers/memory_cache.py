"""`past_key_values` of a decoder with a memory: the KV cache of the partial segment, and the memory's state before it.

Legend: B rows, M slots, G heads of keys, E head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cached_transformers.interfaces.incremental import advance, open_segment
from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.layers.kv_cache import select_rows
from cached_transformers.state import State, map_state, named_tensors, repeat, signature

from .row_segments import finite_padding

try:
    from transformers.cache_utils import Cache, DynamicCache
except ImportError:  # of use only with models of transformers, but imported without it
    Cache = DynamicCache = object

EMBEDDED, PADDED = -1, -2
"""Values in `read_BT` of tokens that were given as embeddings, and of padding."""


def keeps_opened() -> bool:
    """Return True if an opened memory may serve later calls: no gradient would flow through it, or through it twice."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


class OpenedLayer:
    """A layer's memory, opened for all tokens of a segment, and the keys and values of its slots.

    Attributes:
        memory: as `open` or `advance` returned it; None where the next token opens the memory.
        pairs: of slots of a model-level memory, (B, G, M, E) each, without positions, in the order of the calls.
        slots: keys with positions, and values, of all slots that the layer attends; None where the next token makes
            them.
    """

    def __init__(self) -> None:
        self.memory: Any = None
        self.pairs: tuple[tuple[Tensor, Tensor], ...] = ()
        self.slots: tuple[Tensor, Tensor] | None = None

    def read(
        self, memory: LayerMemory, state: State, query: Query, project_kv: ProjectKV | None, positions_BLP: Tensor
    ) -> Reading:
        """Read the next tokens of a segment with this state before it, and with these positions up to here."""
        opened, keeps = self.memory, keeps_opened() and getattr(memory, "whole_segments", None) is None
        if opened is None or not keeps:
            opened = open_segment(memory, state, positions_BLP[:, :1].to(query.x_BND.device), project_kv)
        reading = memory.read(opened, query, project_kv)
        if keeps:
            opened = advance(memory, opened, query.x_BND, [Trace(query.x_BND, query.x_BND, query, reading)])
            self.memory = None if opened is state else opened  # a large state is kept once
        return reading

    def once(self, project_kv: ProjectKV, rows: int) -> ProjectKV:
        """`project_kv`, with the pairs of the segment's earlier tokens where there are some."""
        asked = 0

        def project(hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
            nonlocal asked
            if asked == len(self.pairs):
                k, v = (t.expand(rows, *t.shape[1:]) for t in project_kv(hidden_BMD, frozen=frozen, normed=normed))
                self.pairs += ((k, v),)
            asked += 1
            return self.pairs[asked - 1]

        return project

    def pick(self, index_R: Tensor, rows: int) -> None:
        """Choose among this number of rows."""
        self.memory, self.pairs, self.slots = select_rows((self.memory, self.pairs, self.slots), index_R, rows)


class MemoryCache(Cache):  # type: ignore[misc]
    """A text that is read piece by piece. Keys and values last as long as their segment; the memory lasts longer.

    Args:
        given: the memory's state before the text, as the caller gave it or not. state: the same, never None.
        compute_state: returns the state after all tokens.

    Attributes:
        given: the state before the text. state: the state before the partial segment.
        state_after: the state after all tokens; None until it is needed.
        tokens: columns read in all. length: columns of the partial segments, the last ones.
        read_BT: ids of all columns, or `EMBEDDED` or `PADDED`; None before the first.
        kv: the host's KV cache of the partial segments; None where they must be read from their first token.
        opened_layers: of the partial segments.
        advances: a layer's memory changes with each token.
        recurrent: the states of the host's recurrent layers after the tokens in `kv`.
        opened: the model-level memory, opened for the partial segments; None before their next tokens.
        inputs: the inputs of the partial segments, each (B, length, ...). Positions in them count from the first token
            of the row's text.
        padding_BN: True = no token of the row's partial segment; None where all are.
        before: tokens of each row that its full segments hold, (B, 1) where rows differ.
    """

    def __init__(self, given: State | None, state: State, compute_state: Callable[[MemoryCache], State]) -> None:
        super().__init__(layers=[])
        self.given, self.state = given, state
        self.state_after: State | None = state
        self.compute_state = compute_state
        self.tokens = self.length = self.first = 0
        self.read_BT: Tensor | None = None
        self.before: int | Tensor = 0
        self.kv: Any = None
        self.opened_layers: Sequence[OpenedLayer] | None = None
        self.advances = False
        self.opened: Any = None
        self.recurrent: State = ()
        self.inputs: dict[str, Tensor] = {}
        self.padding_BN: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCache:
        memo[id(self.compute_state)] = self.compute_state  # of the model, which is not copied
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__ = copy.deepcopy(dict(vars(self)), memo)
        return new

    @property
    def memory_state(self) -> State:
        """State after all tokens. A segment that grew token by token is read once more for it."""
        if self.state_after is None:
            self.state_after = self.compute_state(self)
        return self.state_after

    def began_with(self, state: State) -> bool:
        """Return True if the text began with this state, or with a copy of it on another device."""
        if state is self.given or self.given is None or signature(state) != signature(self.given):
            return state is self.given
        pairs = zip(named_tensors(state), named_tensors(self.given), strict=True)
        return all(torch.equal(a.to(b.device), b) for (_, a), (_, b) in pairs)

    def replace(self, cache: Any) -> Any:
        """Let an empty cache that the caller holds become this text, so that the caller can continue it."""
        cache.__class__ = type(self)
        vars(cache).update(vars(self))
        return cache

    def can_advance(self, padding_BN: Tensor | None, tokens: int = 1) -> bool:
        """Return True if the layers' memories can read these next tokens, after all tokens that they have read."""
        padded = padding_BN is not None and self.advances and bool(padding_BN.any())
        return not self.advances or (tokens == 1 and keeps_opened() and not padded)

    def reopen(self) -> None:
        """Let the next token open the layers' memories, perhaps with other weights."""
        self.kv = None if self.advances else self.kv
        for layer in self.opened_layers or ():
            layer.memory = layer.slots = None

    def note(self, new: dict[str, Tensor], padding_BN: Tensor | None) -> None:
        """Remember the ids of new columns."""
        ids_BN = new.get("input_ids")
        if ids_BN is None:
            ids_BN = new["inputs_embeds"].new_full(new["inputs_embeds"].shape[:2], EMBEDDED, dtype=torch.long)
        ids_BN = ids_BN if padding_BN is None else ids_BN.masked_fill(padding_BN, PADDED)
        self.read_BT = ids_BN if self.read_BT is None else torch.cat([self.read_BT, ids_BN], 1)
        self.tokens += ids_BN.shape[1]

    def refuse_other_text(self, text_BT: Tensor) -> None:
        """Raise ValueError unless a text, as ids or embeddings, continues the one that was read."""
        read_BT, follows = self.read_BT, text_BT.shape[1] > self.tokens
        if follows and read_BT is not None and text_BT.dim() == 2:
            follows = not bool(((text_BT[:, : self.tokens] != read_BT) & (read_BT >= 0)).any())
        if not follows:
            raise ValueError(
                f"past_key_values hold {self.tokens} tokens, which the prompt of {text_BT.shape[1]} does not continue; "
                "give the whole text and new tokens, only these with the attention_mask of all, or no past_key_values"
            )

    def with_new(
        self, new: dict[str, Tensor], padding_BM: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Inputs of the partial segments and these new columns; `padding_BM` is that of both."""
        new, before = dict(new), dict(self.inputs)
        if self.length and ("token_type_ids" in new) != ("token_type_ids" in before):
            raise ValueError("token_type_ids: give them in each call with past_key_values, or in none")
        if self.length and ("input_ids" in new) != ("input_ids" in before):
            for given in (new, before):
                if "input_ids" in given:
                    given["inputs_embeds"] = embed(given.pop("input_ids"))
        if padding_BM is not None or "position_ids" in new or "position_ids" in before:
            if padding_BM is None:
                some = next(iter(new.values()))
                rows, total = some.shape[0], self.length + some.shape[1]
                padding_BM = torch.zeros(rows, total, dtype=torch.bool, device=some.device)
            passed_BM = padding_BM.long().cumsum(1).masked_fill(padding_BM, 0).cummax(1).values
            # From 0 in each row; padding after a text is counted, as in the host itself.
            counted_BM = self.before + torch.arange(padding_BM.shape[1], device=padding_BM.device) - passed_BM
            new.setdefault("position_ids", counted_BM[:, self.length :])
            before.setdefault("position_ids", counted_BM[:, : self.length])
        inputs = {name: torch.cat([before[name], t], 1) if self.length else t for name, t in new.items()}
        return finite_padding(inputs, padding_BM)

    def take(self, inputs: dict[str, Tensor], padding_BN: Tensor | None, before: int | Tensor) -> None:
        """The partial segments have these inputs, after `before` tokens of each row."""
        self.inputs, self.padding_BN, self.before = inputs, padding_BN, before
        self.length = next(iter(inputs.values())).shape[1]

    def segment_inputs(self) -> dict[str, Tensor]:
        """Inputs of the partial segments, with positions that count from the segment's first token."""
        if "position_ids" not in self.inputs:
            return self.inputs
        return {**self.inputs, "position_ids": (self.inputs["position_ids"] - self.before).clamp(min=0)}

    def close(self, state: State, before: int | Tensor) -> None:
        """The partial segments are full: keep the memory's state, drop their keys and values."""
        self.state = self.state_after = state
        self.before = before
        self.length, self.inputs, self.padding_BN, self.kv, self.opened_layers = 0, {}, None, None, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read in all."""
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """[False]: generate cuts a prompt after the tokens that were read; transformers 5.24 asks it first."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """False: a memory that was written cannot be undone."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: ValueError: always."""
        raise ValueError("past_key_values: a memory cannot forget tokens; generate greedily, by sampling or by beams")

    def reset(self) -> None:
        """Raises: ValueError: always."""
        raise ValueError("past_key_values cannot be reset; begin the text again with its memory_state and without them")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put rows into this order, the state included, for beam search."""
        self._rows(beam_idx, lambda kv: kv.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        index_R = torch.arange(len(self.state.clock_B)).repeat_interleave(repeats)
        self._rows(index_R, lambda kv: kv.batch_repeat_interleave(repeats))
        self.given = None if self.given is None else repeat(self.given, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        index_R = torch.arange(len(self.state.clock_B), device=indices.device)[indices]
        self._rows(index_R, lambda kv: kv.batch_select_indices(indices))

    def _rows(self, index_R: Tensor, pick_kv: Callable[[Any], None]) -> None:
        rows = len(self.state.clock_B)

        def pick(t: Tensor) -> Tensor:
            return t.index_select(0, index_R.to(t.device))

        self.state, self.opened = map_state(pick, self.state), None
        self.recurrent = map_state(pick, self.recurrent)
        self.state_after = None if self.state_after is None else map_state(pick, self.state_after)
        self.inputs = {name: pick(t) for name, t in self.inputs.items()}
        self.padding_BN, self.read_BT = (None if t is None else pick(t) for t in (self.padding_BN, self.read_BT))
        self.before = pick(self.before) if isinstance(self.before, Tensor) else self.before
        if self.kv is not None:
            pick_kv(self.kv)
            for layer in self.opened_layers or ():
                layer.pick(index_R, rows)
