"""The forward of an encoder with a memory: a text is read in segments, an image is one, and the state is carried.

Whoever asks an encoder about a whole text looks at what it makes of the row's first token. So that token stands in
front of every segment, and its output is that of the row's last segment, which alone has read all:

    a b c d e f    segments of 3:  a b c | a d e | a f      outputs:  a of the last, b c of the first, d e, f

Rows are read from their first token on, wherever their padding stands. Tokens of a memory join the segment behind the
embeddings of the host, with no position and no type of their own: the segment keeps the places it has without them.

Legend: B rows, M columns of a call, N tokens of a segment, D width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.attention_hooks import refuse_forgetting
from cached_transformers.integrations.hosts import Stream
from cached_transformers.integrations.loop_wrappers import FramesModel, TokensModel
from cached_transformers.integrations.offload import like_weights
from cached_transformers.integrations.tracked_modules import StandIn
from cached_transformers.interfaces.memory import Tokens
from cached_transformers.models.segments import cut
from cached_transformers.state import State

from .forward_context import Handed
from .output_state import handed_back
from .packed_rows import refuse_told
from .row_segments import refuse_masks
from .segmented_forward import Call, SegmentReader, is_exporting
from .stream_tap import Passage, Running, StreamTap

TEXT = ("input_ids", "inputs_embeds", "token_type_ids", "task_type_ids")
"""What a text is given as, in columns."""


class Entrance(StandIn):
    """Embeds what the host is called with, or gives the tokens that are on their way in already."""

    def __init__(self, root: nn.Module, path: str) -> None:
        super().__init__(root, path, self.embed)
        self.handed: Tensor | None = None

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        return self.original(*args, **kwargs) if self.handed is None else self.handed


class EncoderReader(SegmentReader):
    """Reads for an encoder; `read` is what its forward becomes.

    Args:
        encoder: the module that embeds and has the layers.
        taps, spans, segment_length: as for `SegmentReader`.
        stream: what its adapter says of its layers.
        remembers: whether the memory carries a state.
    """

    takes = ()

    def __init__(
        self,
        encoder: nn.Module,
        taps: list[StreamTap],
        spans: bool,
        segment_length: int | None,
        stream: Stream,
        remembers: bool,
    ) -> None:
        super().__init__(encoder, taps, spans, segment_length)
        self.cuts, self.remembers = stream.cuts, remembers
        paths = {module: path for path, module in encoder.named_modules()}
        self.entrance = [Entrance(encoder, paths[module]) for module in stream.entrance] if spans else []
        self.embeds = list(inspect.signature(type(self.decoder.embeddings).forward).parameters)[1:]

    @property
    def in_loops(self) -> type[nn.Module]:
        return TokensModel if self.cuts else FramesModel

    def documents(self, given: dict[str, Any]) -> None:
        """None: rows are one text each."""

    def detach(self) -> None:
        for place in self.entrance:
            place.leave()

    def read(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The encoder's forward over all segments; its output holds `memory_state` as well.

        Raises:
            ValueError: arguments that a memory cannot follow, a state of another model or number of rows, or none where
                images train a memory.
        """
        given, carried = self._given(args, kwargs, memory_state)
        self._refuse(given)
        for place in self.entrance:
            place.follow()
        tuples = given.pop("return_dict", None) is False
        out, after = (self._text_read if self.cuts else self._image_read)(given, carried.state)
        if out.get("pooler_output") is not None and (self.cuts or self.entrance):
            out["pooler_output"] = _pooled(self.decoder, out.last_hidden_state)
        return handed_back(out, after, carried, tuples)

    def _refuse(self, given: dict[str, Any]) -> None:
        self._refuse_weights(given)
        refuse_told(given, "an encoder with a memory reads one text a row;")
        given.pop("use_cache", None)  # an encoder keeps nothing
        for name in ("past_key_values", "encoder_hidden_states"):
            if name in given:
                raise ValueError(
                    f"{name}: an encoder with a memory reads whole segments, beside nothing else; leave it out"
                )

    def _image_read(self, given: dict[str, Any], state: State | None) -> tuple[Any, State]:
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
            refuse_forgetting(self.decoder)
        given["pixel_values"] = images.to(like_weights(self.decoder).dtype)
        tokens = {name: value for name, value in given.items() if name in self.embeds}
        answer = self._segment(Call(tokens, None, options=given), self._begun(state, len(images)))
        return answer.out, answer.state

    def _text_read(self, given: dict[str, Any], state: State | None) -> tuple[Any, State]:
        """All segments of a text."""
        if "position_ids" in given:
            raise ValueError("position_ids: places begin anew with each segment of a row; leave them out")
        new = {name: given.pop(name) for name in TEXT if name in given}
        if ("input_ids" in new) == ("inputs_embeds" in new):
            raise ValueError("give either input_ids or inputs_embeds")
        rows, total = new.get("input_ids", new.get("inputs_embeds")).shape[:2]  # type: ignore[union-attr]
        columns: dict[str, Tensor] = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}
        mask, padding_BM, order_BM = given.pop("attention_mask", None), None, None
        if mask is not None:
            refuse_masks(mask, rows, total)
            padding_BM = mask == 0
            order_BM = padding_BM.long().argsort(dim=1, stable=True)  # each row's tokens first
            columns = {name: _in_order(t, order_BM) for name, t in columns.items()}
            padding_BM = _in_order(padding_BM, order_BM)
        parts = self._parts(total)
        calls = [self._call(columns, padding_BM, part, given) for part in parts]
        apart = len(calls) > 1 and torch.compiler.is_compiling() and not is_exporting()
        answers = (self._read_apart if apart else self._read)(calls, self._begun(state, rows))
        out = _put_together([answer.out for answer in answers], [call.padding_BN for call in calls], order_BM, mask)
        return out, answers[-1].state

    def _parts(self, total: int) -> list[slice]:
        """The columns of each segment, but for the first token in front of the later ones."""
        length = self.segment_length
        if length is None or total <= length:
            return [slice(0, total)]
        later = cut(total - length, length - 1)
        return [slice(0, length), *(slice(length + part.start, length + part.stop) for part in later)]

    def _call(
        self, columns: dict[str, Tensor], padding_BM: Tensor | None, part: slice, options: dict[str, Any]
    ) -> Call:
        """What the host is called with for a segment. A row that has no more tokens waits as padding."""
        tokens = {name: t[:, part] for name, t in columns.items()}
        padding_BN = None if padding_BM is None else padding_BM[:, part]
        if part.start:
            tokens = {name: torch.cat([columns[name][:, :1], t], 1) for name, t in tokens.items()}
            if padding_BN is not None:
                padding_BN = torch.cat([padding_BN[:, :1], padding_BN], 1)  # its tokens come first
        return Call(tokens, padding_BN, options=options)

    def _where(self, call: Call, clock_B: Tensor) -> tuple[Tensor | None, Tensor]:
        return super()._where(call, clock_B) if self.cuts else (None, -clock_B[:, None])

    def _counted(self, call: Call) -> Tensor | int:
        return super()._counted(call) if self.cuts else 1

    def _tokens(self, call: Call, positions_BNP: Tensor | None) -> Tokens:
        embeddings, *others = (place.module for place in self.entrance)
        tokens = call.tokens
        given: dict[str, Any] = {
            name: tokens.get(name) for name in self.embeds if name in tokens or name == "input_ids"
        }
        if "mask" in self.embeds and call.padding_BN is not None:
            given["mask"] = ~call.padding_BN
        x_BND = embeddings(**given)
        for module in others:
            x_BND = module(x_BND)
        if positions_BNP is None:
            positions_BNP = torch.arange(x_BND.shape[1], device=x_BND.device).expand(x_BND.shape[:2])[..., None]
        return Tokens(x_BND, positions_BNP, call.padding_BN)

    def host(
        self, new: dict[str, Tensor], mask: Tensor | None, host_cache: Any, layers: Passage, options: dict[str, Any]
    ) -> Any:
        """The encoder's own forward, of a segment or of what is embedded already."""
        call, inside = {**options, **new}, None
        if self.memory is not None:
            call, inside = dict(options), new["inputs_embeds"]
            if self.cuts:
                call["inputs_embeds"] = inside  # from which the host learns how many tokens there are
        if layers.padding_BN is not None:
            call["attention_mask"] = mask
        with Running(layers, self.taps, self.decoder), Handed(inside, self.entrance):
            return type(self.decoder).forward(self.decoder, **call, return_dict=True)


def _in_order(t: Tensor, order_BM: Tensor) -> Tensor:
    """Columns of (B, M, ...) in another order for each row."""
    return t.take_along_dim(order_BM.view(*order_BM.shape, *[1] * (t.dim() - 2)), 1)


def _put_together(outs: list[Any], paddings: list[Tensor | None], order_BM: Tensor | None, mask: Tensor | None) -> Any:
    """One output for all columns. The first token's is that of the row's last segment; where a row begins with padding,
    it stands in the first column as well, at which heads look."""

    def whole(parts: list[Tensor]) -> Tensor:
        first_B1D = parts[0][:, :1]
        for part, padding_BN in zip(parts[1:], paddings[1:], strict=True):
            last_B1D = part[:, :1]
            first_B1D = last_B1D if padding_BN is None else torch.where(padding_BN[:, :1, None], first_B1D, last_B1D)
        t_BMD = torch.cat([first_B1D, *(part[:, 1:] for part in parts)], 1)
        if order_BM is None or mask is None:
            return t_BMD
        t_BMD = _in_order(t_BMD, order_BM.argsort(dim=1))
        return torch.cat([torch.where(mask[:, :1, None] == 0, first_B1D, t_BMD[:, :1]), t_BMD[:, 1:]], 1)

    out = outs[-1]
    out["last_hidden_state"] = whole([part.last_hidden_state for part in outs])
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(whole(list(parts)) for parts in zip(*(o.hidden_states for o in outs), strict=True))
    return out


def _pooled(encoder: Any, x_BMD: Tensor) -> Tensor:
    """What the encoder's pooler makes of its output, in which no token of a memory stands."""
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        return x_BMD[:, 0]
    if hasattr(encoder, "pooler_activation"):  # ALBERT's is given the first token alone
        return encoder.pooler_activation(pooler(x_BMD[:, 0]))  # type: ignore[no-any-return]
    return pooler(x_BMD)  # type: ignore[no-any-return]
