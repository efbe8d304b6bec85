"""A text that a model reads and continues step by step, with marks, rewinds, forks and files.

A session holds the memory's state after the last full segment and the tokens of the partial segment, for a text of any
length. Reading a text in pieces equals reading it at once. It reads new tokens only, each full segment once more, and
the partial segment again after `generate` or a mark, rewind, fork, save or load: a file and a mark hold no KV cache,
and a text continues from them in the same bits as from here.

Legend: N tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.annotations import checked
from cached_transformers.checks import at_least_one
from cached_transformers.state import Packing, State, Stored, check, check_weights, fingerprint, load, save, seal

from .generation import GeneratedText, Generation, continue_text, evaluating
from .sampling import Choice, ChoiceKeywords
from .segments import as_language_model, for_loops, host_reader, remembers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Mark(NamedTuple):
    """A position in a text to which a session can return.

    Attributes:
        state: after the last full segment. open_1N: tokens of the partial segment. tokens: number of tokens in all.
        made_by: fingerprint of the weights, if asked for.
    """

    state: State
    open_1N: Tensor
    tokens: int
    made_by: str | None = None


@checked
class Session:
    """One growing text.

    Args:
        model: a language model of this package, or a decoder of transformers with a memory that has a state. Its
            weights must not change while the text grows.
        segment_length: tokens in a segment, as in training; None for a host with a segment length, or for a model
            without memory, which reads one segment.

    Raises:
        ValueError: no `segment_length` for a model with a memory, or one below 1.

    Example:
        >>> session = Session(model, segment_length=256)
        >>> session.read(contract)            # (1, N) token ids: read once
        >>> mark = session.mark()
        >>> for question in questions:
        ...     session.read(question)
        ...     answers.append(session.generate(tokens=50, temperature=0).tokens)
        ...     session.rewind(mark)
    """

    def __init__(self, model: nn.Module, segment_length: int | None = None) -> None:
        self.model = model
        self._reader: Any = as_language_model(model)
        if segment_length is None:
            segment_length = getattr(host_reader(model), "segment_length", None)
        self.segment_length = segment_length
        at_least_one(" token", segment_length=self.segment_length)
        with evaluating(self._reader):
            state = self._reader.init_state(1)
        if self.segment_length is None and remembers(state):
            raise ValueError(
                "segment_length=None: a memory is written once per segment; give segment_length as in training"
            )
        self._now = Mark(state, torch.empty(1, 0, dtype=torch.long, device=self._device), 0)
        self._text: GeneratedText | None = None
        """The partial segment with its KV cache; None to read it again."""

    @property
    def _device(self) -> torch.device:
        return next(self._reader.parameters()).device

    @property
    def tokens(self) -> int:
        """Tokens read and written in all."""
        return self._now.tokens

    @property
    def partial_1N(self) -> Tensor:
        """Tokens of the partial segment, the last token of the text among them."""
        return self._now.open_1N

    @torch.no_grad()
    def read(self, text_1N: Tensor) -> None:
        """Read more of the text.

        Args:
            text_1N: token ids of one row, (1, N).

        Raises:
            ValueError: another shape.
        """
        if not isinstance(text_1N, Tensor) or text_1N.dim() != 2 or text_1N.shape[0] != 1:
            shape = tuple(text_1N.shape) if isinstance(text_1N, Tensor) else type(text_1N).__name__
            raise ValueError(f"a session reads one text, (1, tokens), not {shape}; take one session per text")
        if text_1N.shape[1] == 0:
            return
        text, self._text, text_1N = self._text, None, text_1N.to(self._device)
        grown_1N = torch.cat([self._now.open_1N, text_1N], 1)
        with evaluating(self._reader):
            if text is None or (self.segment_length is not None and grown_1N.shape[1] > self.segment_length):
                text = GeneratedText(self._reader, grown_1N, self._now.state, self.segment_length)
            else:
                text.extend(text_1N)
            self._continue(text, text_1N.shape[1])

    def _continue(self, text: GeneratedText, tokens: int) -> None:
        """Take a text that is longer by `tokens`."""
        self._now, self._text = Mark(text.state, text.open_BN, self._now.tokens + tokens), text

    def stream(self, *, tokens: int, **options: Unpack[ChoiceKeywords]) -> Iterator[int]:
        """Continue the text token by token: each is part of the text when it is yielded, so a caller may stop at any.

        As `generate`, each call lets the partial segment choose, in a memory that prompts ask.

        Args:
            tokens, options: see `Choice`; `beams` and `each` are refused.

        Raises:
            ValueError: nothing was read yet; or see `generate`.
        """
        choice = Choice(tokens, **options)
        if choice.beams > 1 or choice.each is not None:
            name = "each" if choice.each is not None else f"beams={choice.beams}"
            raise ValueError(f"{name}: a stream yields each token as it is sampled; leave it out, or call generate")
        self._require_text()
        return self._stream(choice)

    @torch.no_grad()
    def _stream(self, choice: Choice) -> Iterator[int]:
        for number in range(choice.tokens):
            text, self._text = self._text, None  # which an interrupt would leave half read
            with evaluating(self._reader):
                if text is None:
                    text = GeneratedText(self._reader, self._now.open_1N, self._now.state, self.segment_length)
                if number == 0:
                    text.ask()
                logp_1V = text.read()
                choice.check_vocabulary(logp_1V.shape[-1])
                token_1 = choice.token(logp_1V)
                text.append(token_1)
                self._continue(text, 1)
            yield int(token_1)
            if int(token_1) == choice.eos:
                return

    def _require_text(self) -> None:
        if self._now.open_1N.shape[1] == 0:
            raise ValueError("nothing was read yet; read a prompt of at least one token first")

    @torch.no_grad()
    def generate(self, *, tokens: int, **options: Unpack[ChoiceKeywords]) -> Generation:
        """Continue the text; the session reads the generated tokens.

        Args:
            tokens, options: see `Choice`.

        Raises:
            ValueError: nothing was read yet; or see `generate`.
        """
        choice, open_1N, state = Choice(tokens, **options), self._now.open_1N, self._now.state
        self._require_text()
        self._text = None
        with evaluating(self._reader):
            text = GeneratedText(self._reader, open_1N, state, self.segment_length)
            found = continue_text(text, choice)
            if choice.beams == 1:
                text.append(found.tokens[:, -1])
                self._now = Mark(text.state, text.open_BN, self._now.tokens + found.tokens.shape[1])
                return found
        self.read(found.tokens)
        return found

    def mark(self, *, weights: bool = False) -> Mark:
        """The current position, which copies nothing; with `weights`, `rewind` refuses it once the weights changed."""
        self._text = None
        return self._now._replace(made_by=fingerprint(self.model) if weights else None)

    def rewind(self, mark: Mark) -> None:
        """Return to a position of this text (ValueError: one of another memory, or of other weights)."""
        if not isinstance(mark, Mark):
            raise ValueError(f"mark={type(mark).__name__}: give a mark of this session")
        with evaluating(self._reader):
            check(mark.state, self._reader.init_state(1), 1)
        if mark.made_by is not None:
            check_weights(mark.made_by, self.model, "the mark")
        self._now, self._text = mark, None

    def compact(self, slots: int) -> None:
        """Merge the text before the partial segment into fewer slots (ValueError: see `compact`)."""
        self._now, self._text = self._now._replace(state=compact(self.model, self.state, slots)), None

    def fork(self) -> Session:
        """A second session that continues from here; nothing is copied."""
        self._text = None
        twin = Session.__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin

    @property
    def state(self) -> State:
        """The memory's state after the last full segment, without the partial segment."""
        return self._now.state

    def save(self, path: str | os.PathLike[str], *, dtype: Packing | None = None) -> Stored:
        """Write state and partial segment into one file, with the fingerprint of the weights.

        Args:
            dtype: of the state in the file, see `state.save`; the result reports the error.

        Raises:
            ValueError: an unknown dtype. NotWritten: e.g. the disk is full.
        """
        self._text = None
        return save(self._kept(), path, model=self.model, dtype=dtype)

    @classmethod
    def load(cls, model: nn.Module, path: str | os.PathLike[str], segment_length: int | None = None) -> Session:
        """Load a saved session.

        Raises:
            ValueError: no session file, or one made with other weights or another segment length.
        """
        session = cls(model, segment_length)
        try:
            state, open_1S, count_1, tokens_1 = load(path, session._kept(), model=model)
        except ValueError as error:
            raise ValueError(
                f"{error}; give the segment_length of the saved session, here {session.segment_length}"
            ) from error
        session._now = Mark(state, open_1S[:, : int(count_1)], int(tokens_1))
        return session

    def _kept(self) -> State:
        """Contents of the file: tensors whose shapes do not depend on the position."""
        state, open_1N, tokens = self._now[:3]
        if self.segment_length is None:
            raise ValueError("segment_length=None: a model without memory has no state to save; save the tokens")
        open_1S = torch.zeros(1, self.segment_length, dtype=torch.long, device=open_1N.device)
        open_1S[:, : open_1N.shape[1]] = open_1N
        return (state, open_1S, torch.tensor([open_1N.shape[1]]), torch.tensor([tokens]))


@torch.no_grad()
def compact(model: nn.Module, memory_state: State, slots: int) -> State:
    """Merge the slots of a state into fewer slots per layer, by Attention Matching (arXiv:2602.16284).

    Args:
        model: with attention_matching in each layer. memory_state: after a text, of any number of rows.
        slots: per layer, from sinks + newest tokens to `length`; a row with fewer keeps its slots.

    Returns:
        a state of the same shapes, from which the text continues.

    Raises:
        ValueError: another memory or state, or slots out of range.
    """
    forward, rows = host_reader(model), len(memory_state.clock_B)
    if forward is None:
        reader = for_loops(model)
        reader.check_state(memory_state, rows)
        layers = [(block.attention.memory, block.attention.positions.rotate) for block in reader.stack.blocks]
    else:
        forward.checked_state(memory_state, rows)
        like_11D = next(model.parameters()).new_zeros(1, 1, forward.body.config.hidden_size)
        zero_B1 = memory_state.clock_B.new_zeros(rows, 1)
        layers = [(hook.memory, partial(hook.placed, zero_B1, zero_B1, like_11D)) for hook in forward.hooks]
    merged = []
    for (memory, turn), part in zip(layers, memory_state.layers, strict=True):
        if not hasattr(memory, "compact"):
            raise ValueError(f"memory {type(memory).__name__}: its slots have no biases; take attention_matching")
        merged.append(memory.compact(part, slots, turn))
    return seal(memory_state._replace(layers=tuple(merged)))
