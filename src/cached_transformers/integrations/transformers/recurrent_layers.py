"""Carry the recurrent layers of a hybrid decoder (gated delta rules, Mamba 2, short convolutions) between segments.

Such a layer keeps its state in the host's cache: the last inputs of its convolution, and a recurrent state. Here both
are a part of the model's state, beside the memories. The layer gets a `LayerCache`, whose tensors it replaces: a state
remains as it was, and gradients flow from segment to segment.

Padding would make a state decay even where its inputs are masked. So rows are read without their padding, rows of equal
length together.

Legend: B rows, N tokens, D width.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cached_transformers.integrations.hosts import is_recurrent
from cached_transformers.integrations.memory_lookup import like_weights
from cached_transformers.integrations.segment_context import SegmentContext, running
from cached_transformers.integrations.tracked_modules import TrackedModule
from cached_transformers.state import State, map_state, named_tensors

KINDS = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Layer types of transformers' configs with a recurrent state."""
CACHES = ("cache", "cache_params", "past_key_values")
"""Names of the keyword by which a recurrent layer gets its cache."""
NOTHING: State = ((), ())
"""The state of a layer that has read nothing: no convolution inputs, no recurrent states."""


class LayerCache:
    """The cache of one layer, as transformers' layers call it; a write replaces a tensor and changes none.

    Args:
        state: inputs of the convolutions (B, channels, width of the kernel), and recurrent states (B, ...).
    """

    def __init__(self, state: State) -> None:
        self.convolved, self.recurrent = (dict(enumerate(part)) for part in state)

    @property
    def state(self) -> State:
        """The state after the layer's writes."""
        return tuple(tuple(part[place] for place in sorted(part)) for part in (self.convolved, self.recurrent))

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a layer that reads one token would otherwise write the inputs of its convolution in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of the convolution."""
        return self.convolved.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy of the recurrent state: a layer that reads one token (Mamba 2) writes it in place."""
        if state_idx in self.recurrent:
            self.recurrent[state_idx] = self.recurrent[state_idx].clone()
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """All inputs (B, channels, kernel + N); the last ones remain in the cache."""
        before = self.convolved.get(state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        inputs = torch.cat([before.to(conv_states.dtype), conv_states], -1)
        self.convolved[state_idx] = inputs[..., inputs.shape[-1] - before.shape[-1] :].to(before.dtype)
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the recurrent state."""
        before = self.recurrent.get(state_idx)
        self.recurrent[state_idx] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return recurrent_states


class KeepsGraph(TorchFunctionMode):
    """Let a write in place of a recurrent state replace it: the graph may need the state before it."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, t in self.cache.recurrent.items() if func is torch.Tensor.copy_ else ():
            if t is args[0]:
                return self.cache.update_recurrent_state(args[1], 0, place)
        return func(*args, **(kwargs or {}))


class RecurrentHook:
    """Gives one recurrent layer its state before a segment, and keeps the state after it.

    Args:
        body: the module that has the layers. name: of the layer in it. number: its place among the recurrent layers.

    Raises:
        ValueError: the layer does not continue from its state.
    """

    def __init__(self, body: Any, name: str, number: int) -> None:
        self.module: nn.Module = body.get_submodule(name)
        names = inspect.signature(type(self.module).forward).parameters
        self.cache = next((name for name in CACHES if name in names), CACHES[0])
        self.number, self.place = number, f"{name}, a {type(self.module).__name__}"
        self.like = self._state_after_one_row(like_weights(body, self.module), int(body.config.hidden_size))
        self.tracked = TrackedModule(body, name, forward=self.call)

    def init_state(self, rows: int, like: Tensor) -> State:
        """State of rows that have read nothing; recurrent states have at least 32 bits, as in the layer itself."""
        wide = torch.promote_types(like.dtype, torch.float32)
        dtypes = zip(self.like, (like.dtype, wide), strict=True)
        return tuple(tuple(like.new_zeros(rows, *t.shape[1:], dtype=kind) for t in part) for part, kind in dtypes)

    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's forward, from the state in the segment's context."""
        context: SegmentContext | None = kwargs.get("segment_context", running().segment)
        if context is None:
            raise ValueError(f"{self.place}, was called without its state; call the model that add_memory was given")
        given = args[0] if args else kwargs["hidden_states"], context.recurrent[self.number]
        if context.padding_BN is None:
            y_BND, after = self.read(self.tracked.original, *given)
        else:
            if context.lengths is None:  # once for all layers
                context.lengths = rows_by_length(context.padding_BN)
            y_BND, after = self.read_padded(*given, context.lengths)
        context.recurrent_after[self.number] = after
        return y_BND

    def check_read(self, context: SegmentContext) -> None:
        """Raise ValueError if the layer did not run in this pass."""
        if context.recurrent_after[self.number] is None:
            raise ValueError(
                f"{self.place}, had no part in this forward; undo what replaced it, or remove_memory(model)"
            )

    def read(self, forward: Any, x_BND: Tensor, state: State) -> tuple[Tensor, State]:
        """Run a forward of the layer on tokens without padding: its output, and the state after them."""
        cache = LayerCache(state)
        given: dict[str, Any] = {"hidden_states": x_BND, "attention_mask": None, self.cache: cache}
        if x_BND.shape[1] > 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(**given), cache.state
        with KeepsGraph(cache):
            return forward(**given), cache.state

    def read_padded(self, x_BND: Tensor, state: State, lengths: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, State]:
        """`read` of rows with padding, whose outputs are 0; `lengths` are `rows_by_length`."""
        y_BND = torch.zeros_like(x_BND)
        for rows_R, columns_RN in lengths:
            rows_R = rows_R.to(x_BND.device)
            places = rows_R[:, None], columns_RN.to(x_BND.device)
            before = map_state(partial(torch.index_select, dim=0, index=rows_R), state)
            part, after = self.read(self.tracked.original, x_BND[places], before)
            y_BND = y_BND.index_put(places, part.to(y_BND.dtype))
            state = map_state(partial(_with_rows, rows_R, iter(_tensors(after))), state)
        return y_BND, state

    @torch.no_grad()
    def _state_after_one_row(self, like: Tensor, width: int) -> State:
        """The layer's state after one row; only its shapes count.

        Raises:
            ValueError: parts of a row, of several tokens or one, differ from the whole.
        """
        # Packed or offloaded weights have no copy of 32 bits.
        exact = all(p.is_floating_point() and not p.is_meta for p in self.module.parameters())
        wide = like.dtype in (torch.float32, torch.float64) or not exact
        module = self.module if wide else copy.deepcopy(self.module).float()
        x_BND = torch.arange(6 * width, device=like.device).sin().view(1, 6, width)
        x_BND, why, pairs = x_BND.to(like.dtype if wide else torch.float32), "", []
        state = after = NOTHING
        try:
            with torch.autocast(like.device.type if exact else "cpu", enabled=False):
                whole, state = self.read(module, x_BND, NOTHING)
                parts: list[Tensor] = []
                for piece in x_BND.split([3, 2, 1], 1):
                    part, after = self.read(module, piece, after)
                    parts.append(part)
            pairs = [(whole, torch.cat(parts, 1)), *zip(_tensors(state), _tensors(after), strict=True)]
            why = "" if _tensors(state) else "keeps no state"
        except (AttributeError, TypeError, KeyError, NotImplementedError) as error:
            why = f"takes no cache as layers of transformers 5 do ({error})"
        if exact and not why and any((a - b).abs().max() > 5e-3 * a.abs().max() for a, b in pairs):
            why = "does not continue from its state when it reads several tokens at once"
        if why:
            raise ValueError(f"{self.place}, {why}: each segment would begin without a past; {WAY_OUT}")
        return state


WAY_OUT = "take another hybrid model (Qwen 3.5, LFM2, Bamba, Granite 4, ...) or a later transformers"


def rows_by_length(padding_BN: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(rows, their columns that hold tokens (R, N)) of the rows of each length, except those without a token."""
    order_BN, tokens_B = padding_BN.long().argsort(dim=1, stable=True), (~padding_BN).sum(1)
    rows = {tokens: (tokens_B == tokens).nonzero()[:, 0] for tokens in sorted(set(tokens_B.tolist()) - {0})}
    return [(rows_R, order_BN[rows_R, :tokens]) for tokens, rows_R in rows.items()]


def _with_rows(rows_R: Tensor, parts: Iterator[Tensor], t: Tensor) -> Tensor:
    """The tensor with its next part in some rows."""
    return t.index_copy(0, rows_R, next(parts))


def _tensors(state: State) -> list[Tensor]:
    return [t for _, t in named_tensors(state)]


def recurrent_hooks(body: Any) -> list[RecurrentHook]:
    """The hooks of the recurrent layers of a decoder, in order.

    Raises:
        ValueError: a layer that the config calls recurrent has no hook, or a layer does not continue from its state.
    """
    names = [name for name, module in body.named_modules() if is_recurrent(module)]
    found = {getattr(body.get_submodule(name), "layer_idx", None) for name in names}
    for index, kind in enumerate(getattr(body.config, "layer_types", None) or ()):
        if kind in KINDS and index not in found:
            raise ValueError(
                f"layer_types[{index}]={kind!r}: a layer of {type(body).__name__} keeps a state that would begin again "
                "with each segment; name its class to cached_transformers.integrations.hosts.register_recurrent"
            )
    return [RecurrentHook(body, name, number) for number, name in enumerate(names)]
