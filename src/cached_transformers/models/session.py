"""A text that a model reads and continues step by step, with marks, rewinds, forks and files.

A session holds the memory's state after the last full segment and the tokens of the partial segment, for a text of any
length. Reading a text in pieces equals reading it at once.

Legend: N tokens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.state import State, Stored, load, save
from cached_transformers.state.packing import Packing

from .generation import GeneratedText, Generation, continue_text, evaluating
from .sampling import Choice, ChoiceKeywords
from .segments import as_language_model, remembers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Mark(NamedTuple):
    """A position in a text to which a session can return.

    Attributes:
        state: after the last full segment. open_1N: tokens of the partial segment. tokens: number of tokens in all.
    """

    state: State
    open_1N: Tensor
    tokens: int


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
        readers = (vars(module)["segment_reader"] for module in model.modules() if "segment_reader" in vars(module))
        of_host = next((reader.segment_length for reader in readers), None)
        self.segment_length = of_host if segment_length is None else segment_length
        at_least_one(" token", segment_length=self.segment_length)
        with evaluating(self._reader):
            state = self._reader.init_state(1)
        if self.segment_length is None and remembers(state):
            raise ValueError(
                "segment_length=None: a memory is written once per segment; give segment_length as in training"
            )
        self._now = Mark(state, torch.empty(1, 0, dtype=torch.long, device=self._device), 0)

    @property
    def _device(self) -> torch.device:
        return next(self._reader.parameters()).device

    @property
    def tokens(self) -> int:
        """Tokens read and written in all."""
        return self._now.tokens

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
        grown_1N = torch.cat([self._now.open_1N, text_1N.to(self._device)], 1)
        with evaluating(self._reader):
            text = GeneratedText(self._reader, grown_1N, self._now.state, self.segment_length)
            self._now = Mark(text.state, text.open_BN, self._now.tokens + text_1N.shape[1])

    @torch.no_grad()
    def generate(self, *, tokens: int, **options: Unpack[ChoiceKeywords]) -> Generation:
        """Continue the text; the session reads the generated tokens.

        Args:
            tokens, options: see `Choice`.

        Raises:
            ValueError: nothing was read yet; or see `generate`.
        """
        choice, open_1N, state = Choice(tokens, **options), self._now.open_1N, self._now.state
        if open_1N.shape[1] == 0:
            raise ValueError("nothing was read yet; read a prompt of at least one token first")
        with evaluating(self._reader):
            text = GeneratedText(self._reader, open_1N, state, self.segment_length)
            found = continue_text(text, choice)
            if choice.beams == 1:
                text.append(found.tokens[:, -1])
                self._now = Mark(text.state, text.open_BN, self._now.tokens + found.tokens.shape[1])
                return found
        self.read(found.tokens)
        return found

    def mark(self) -> Mark:
        """The current position. A mark copies nothing: states are never changed in place."""
        return self._now

    def rewind(self, mark: Mark) -> None:
        """Return to a position of this text."""
        self._now = mark

    def fork(self) -> Session:
        """A second session that continues from here; nothing is copied."""
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
        state, open_1N, tokens = self._now
        if self.segment_length is None:
            raise ValueError("segment_length=None: a model without memory has no state to save; save the tokens")
        open_1S = torch.zeros(1, self.segment_length, dtype=torch.long, device=open_1N.device)
        open_1S[:, : open_1N.shape[1]] = open_1N
        return (state, open_1S, torch.tensor([open_1N.shape[1]]), torch.tensor([tokens]))
