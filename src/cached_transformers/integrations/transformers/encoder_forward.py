"""The forward of an encoder with a memory: a text is read in segments, an image is one, and the state is carried.

Heads that answer for a whole text look at the output of the row's first token. That token is therefore prepended to
every segment, and its output is that of the row's last segment, which has read everything:

    a b c d e f    segments of 3:  a b c | a d e | a f      outputs:  a of the last, b c of the first, d e, f

Rows are read from their first token on, wherever their padding is. Tokens of a model-level memory join the segment
after the host's embedding modules, without positions and types: the segment keeps its positions.

Legend: B rows, M columns of a call, N tokens of a segment, D width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.hosts import Stream
from cached_transformers.integrations.loop_wrappers import FramesModel
from cached_transformers.integrations.memory_hooks import MemoryHook, refuse_forgetting, run_host
from cached_transformers.integrations.memory_lookup import like_weights
from cached_transformers.integrations.segment_context import SegmentContext, running
from cached_transformers.integrations.tracked_modules import TrackedModule
from cached_transformers.models.segments import cut
from cached_transformers.state import State

from .host_forward import HostForward, returned
from .packed_rows import refuse_told
from .row_segments import Segment, finite_padding, in_order, mapped, refuse_masks

TEXT = ("input_ids", "inputs_embeds", "token_type_ids", "task_type_ids")
"""Inputs that have columns."""


class Entrance(TrackedModule):
    """An embedding module, whose output the current context may replace."""

    def __init__(self, root: nn.Module, path: str) -> None:
        super().__init__(root, path, forward=self.embed)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, or the tokens that are embedded already."""
        context = running().segment
        if context is None or context.embedded is None:
            return self.original(*args, **kwargs)
        return context.embedded


class EncoderForward(HostForward):
    """The forward of an encoder.

    Args:
        body, hooks, spans, segment_length: as for `HostForward`.
        stream: the adapter's description of the layers.
    """

    def __init__(
        self, body: nn.Module, hooks: list[MemoryHook], spans: bool, segment_length: int | None, stream: Stream
    ) -> None:
        super().__init__(body, hooks, spans, segment_length)
        memories: list[Any] = [*([self.memory] if spans else []), *(hook.memory for hook in hooks)]
        self.cuts, self.remembers = stream.cuts, any("state" in memory.needs for memory in memories)
        self.loop_wrapper = None if self.cuts else FramesModel
        paths = {module: path for path, module in body.named_modules()}
        self.entrance = [Entrance(body, paths[module]) for module in stream.entrance] if spans else []
        self.embeds = list(inspect.signature(type(self.body.embeddings).forward).parameters)[1:]

    def uninstall(self) -> None:
        for entrance in self.entrance:
            entrance.uninstall()

    def forward(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The encoder's forward over all segments; its output holds `memory_state`.

        Raises:
            ValueError: arguments that a memory cannot follow, a state of another model or number of rows, or none where
                images train a memory.
        """
        call, given = self.call_of(memory_state, kwargs.get("inputs_embeds")), self.named(args, kwargs)
        self._refuse(given)
        for entrance in self.entrance:
            entrance.follow()
        as_tuple = given.pop("return_dict", None) is False
        out, after = (self._read_text if self.cuts else self._read_image)(given, call.state)
        if out.get("pooler_output") is not None and (self.cuts or self.entrance):
            out["pooler_output"] = _pooled(self.body, out.last_hidden_state)
        return returned(out, after, call, as_tuple)

    def _refuse(self, given: dict[str, Any]) -> None:
        self.refuse_weights(given)
        refuse_told(given, "an encoder with a memory reads one text a row;")
        given.pop("use_cache", None)  # an encoder has no KV cache
        for name in ("past_key_values", "encoder_hidden_states"):
            if name in given:
                raise ValueError(f"{name}: an encoder with a memory reads only whole segments; leave it out")

    def _read_image(self, given: dict[str, Any], state: State | None) -> tuple[Any, State]:
        """One image of each row."""
        images = given.get("pixel_values")
        if not isinstance(images, Tensor) or images.dim() != 4:
            found = f"of shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"={images!r}"
            raise ValueError(
                f"pixel_values {found}: give one frame a call, (rows, channels, height, width), and carry memory_state "
                "to the next; SegmentLoop does so with videos"
            )
        if "attention_mask" in given:
            raise ValueError("attention_mask: beside a memory an image is seen whole; leave it out")
        if state is None and self.remembers:
            refuse_forgetting(self.body)
        given["pixel_values"] = images.to(like_weights(self.body).dtype)
        inputs = {name: value for name, value in given.items() if name in self.embeds}
        return self.read_segment(Segment(inputs), self.checked_state(state, len(images)), given)

    def _read_text(self, given: dict[str, Any], state: State | None) -> tuple[Any, State]:
        """All segments of a text."""
        if "position_ids" in given:
            raise ValueError("position_ids: positions begin again with each segment of a row; leave them out")
        new = {name: given.pop(name) for name in TEXT if name in given}
        self.refuse_inputs(new, given)
        rows, total = new.get("input_ids", new.get("inputs_embeds")).shape[:2]  # type: ignore[union-attr]
        inputs: dict[str, Tensor] = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}
        mask, padding_BM, order_BM = given.pop("attention_mask", None), None, None
        if mask is not None:
            refuse_masks(mask, rows, total)
            padding_BM = mask == 0
            order_BM = padding_BM.long().argsort(dim=1, stable=True)  # each row's tokens first
            inputs = {name: in_order(t, order_BM) for name, t in inputs.items()}
            padding_BM = in_order(padding_BM, order_BM)
            inputs = finite_padding(inputs, padding_BM)
        segments = [_segment(inputs, padding_BM, part) for part in self._parts(total)]
        self.note_step(state, total, len(segments))
        answers = self.read(segments, self.checked_state(state, rows), given)
        return _joined([out for out, _ in answers], segments, order_BM, mask), answers[-1][1]

    def _parts(self, total: int) -> list[slice]:
        """The columns of each segment, but for the first token of the later ones."""
        length = self.segment_length
        if length is None or total <= length:
            return [slice(0, total)]
        later = cut(total - length, length - 1)
        return [slice(0, length), *(slice(length + part.start, length + part.stop) for part in later)]

    def positions(self, segment: Segment, clock_B: Tensor) -> tuple[Tensor | None, Tensor]:
        return super().positions(segment, clock_B) if self.cuts else (None, -clock_B[:, None])

    def count(self, segment: Segment) -> Tensor | int:
        return super().count(segment) if self.cuts else 1

    def embed(self, segment: Segment) -> Tensor:
        embeddings, *others = (entrance.module for entrance in self.entrance)
        names = [name for name in self.embeds if name in segment.inputs or name == "input_ids"]
        given: dict[str, Any] = {name: segment.inputs.get(name) for name in names}
        if "mask" in self.embeds and segment.padding_BN is not None:
            given["mask"] = ~segment.padding_BN
        x_BND: Tensor = embeddings(**given)
        for module in others:
            x_BND = module(x_BND)
        return x_BND

    def run(
        self, inputs: dict[str, Tensor], mask: Tensor | None, context: SegmentContext, options: dict[str, Any]
    ) -> Any:
        call = {**options, **inputs}
        if self.memory is not None:
            call, context.embedded = dict(options), inputs["inputs_embeds"]
            if self.cuts:
                call["inputs_embeds"] = context.embedded  # from which the host learns the number of tokens
        if context.padding_BN is not None:
            call["attention_mask"] = mask
        return run_host(context, self.hooks, self.body, **call, return_dict=True)


def _segment(inputs: dict[str, Tensor], padding_BM: Tensor | None, part: slice) -> Segment:
    """A segment of these columns, after the row's first token. A row that has no more tokens waits as padding."""
    taken = {name: t[:, part] for name, t in inputs.items()}
    padding_BN = None if padding_BM is None else padding_BM[:, part]
    if part.start:
        taken = {name: torch.cat([inputs[name][:, :1], t], 1) for name, t in taken.items()}
        if padding_BN is not None:
            padding_BN = torch.cat([padding_BN[:, :1], padding_BN], 1)  # its tokens come first
    return Segment(taken, padding_BN)


def _joined(outs: list[Any], segments: list[Segment], order_BM: Tensor | None, mask: Tensor | None) -> Any:
    """One output for all columns. The first token's is that of the row's last segment; where a row begins with padding,
    it is in the first column as well, at which heads look."""

    def whole(parts: list[Tensor]) -> Tensor:
        first_B1D = parts[0][:, :1]
        for part, segment in zip(parts[1:], segments[1:], strict=True):
            last_B1D, padding_BN = part[:, :1], segment.padding_BN
            first_B1D = last_B1D if padding_BN is None else torch.where(padding_BN[:, :1, None], first_B1D, last_B1D)
        t_BMD = torch.cat([first_B1D, *(part[:, 1:] for part in parts)], 1)
        if order_BM is None or mask is None:
            return t_BMD
        t_BMD = in_order(t_BMD, order_BM.argsort(dim=1))
        return torch.cat([torch.where(mask[:, :1, None] == 0, first_B1D, t_BMD[:, :1]), t_BMD[:, 1:]], 1)

    return mapped(outs, whole)


def _pooled(encoder: Any, x_BMD: Tensor) -> Tensor:
    """The pooler's output for the segments' tokens, without those of a memory."""
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        return x_BMD[:, 0]
    if hasattr(encoder, "pooler_activation"):  # ALBERT's takes only the first token
        return encoder.pooler_activation(pooler(x_BMD[:, 0]))  # type: ignore[no-any-return]
    return pooler(x_BMD)  # type: ignore[no-any-return]
