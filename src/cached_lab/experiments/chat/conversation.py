"""A chat of any length with a model that has a memory: only new tokens are read, and the memory holds the rest.

Legend: B rows, M slots, N tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cached_lab.tasks.language.completion import CONTEXT, Spelling, words_of_transformers
from cached_transformers import Session
from cached_transformers.models.sampling import Choice
from cached_transformers.state import State, nbytes

from .turns import Turns


class Conversation:
    """Turns of a user and answers of a model.

    Args:
        model: a decoder of transformers with a memory that has a state. tokenizer: of transformers.
        turns: texts around the turns.
        tokens: most of an answer. temperature: of the sampling.
        seed: with the position in the text, of the sampling: the same position gives the same answer.

    Attributes:
        session: the text so far.

    Raises:
        ValueError: an option out of its range, or a memory without a state.
    """

    def __init__(self, model: Any, tokenizer: Any, turns: Turns, *, tokens: int, temperature: float, seed: int) -> None:
        Choice(tokens, temperature=temperature)
        self.model, self.turns, self.seed = model, turns, seed
        self.options: dict[str, Any] = {"tokens": tokens, "temperature": temperature}
        self.words = words_of_transformers(tokenizer)
        ends = getattr(model.generation_config, "eos_token_id", None)
        closing = {*self.words.encode(turns.following("text", ""))[:1]} & {*tokenizer.all_special_ids}
        self.ends = {self.words.end, *(ends if isinstance(ends, list) else [ends]), *closing} - {None}
        self.session = Session(model)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue the chat of a file of `session.save` (ValueError: it is of another model or memory)."""
        self.session = Session.load(self.model, path)

    def hear(self, text: str) -> None:
        """Read a turn of the user."""
        if self.session.tokens == 0:
            return self.read(self.ids(self.turns.first(text), first=True))
        last = int(self.session.partial_1N[0, -1])
        ids = self.ids(self.turns.following(text, self.words.decode([last])))
        self.read(ids[1:] if last in self.ends and ids[0] in self.ends else ids)

    def ids(self, text: str, first: bool = False) -> list[int]:
        """Token ids of a text (ValueError: half of a character)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not UTF-8 at character {error.start}; set the terminal to UTF-8") from None
        return [*(self.words.first if first and self.turns.special else ()), *self.words.encode(text)]

    def read(self, ids: Sequence[int]) -> None:
        """Read tokens."""
        self.session.read(torch.tensor([ids], dtype=torch.long))

    def answer(self, stop: Sequence[Any] = ()) -> Iterator[str]:
        """Sample an answer and yield its text piece by piece; each token is part of the chat.

        Args:
            stop: the answer ends as soon as this list holds something.
        """
        session = self.session
        spelling, answer = Spelling(self.words.decode, session.partial_1N[0, -CONTEXT:].tolist()), ""
        seed = random.Random(f"{self.seed} {session.tokens}").getrandbits(63)
        generator = torch.Generator(self.model.device).manual_seed(seed)
        for token in session.stream(**self.options, generator=generator):
            piece = spelling.more([token])
            answer += piece
            yield piece
            if token in self.ends or self.turns.ended(answer) or stop:
                break
        yield spelling.rest()

    def summary(self) -> str:
        """The memory, its slots, the tokens read, and bytes of the state."""
        record = self.model.config.cached_transformers
        options = {**record["memory"], "segment_length": record.get("segment_length")}
        name, state, partial = options.pop("name"), self.session.state, self.session.partial_1N.shape[1]
        filled, slots = filled_slots(state)
        told = f", {filled:,} of {slots:,} slots of all layers filled" if slots else ""
        return (
            f"memory {name} ({', '.join(f'{key}={value}' for key, value in options.items())}){told}\n"
            f"{self.session.tokens:,} tokens read, the last {partial:,} in the partial segment, "
            f"{nbytes(state):,} bytes of state"
        )


def filled_slots(state: State) -> tuple[int, int]:
    """Number of filled slots, and of all slots, over the layers of a state; memories without slots count none."""
    valid_BM = getattr(state, "valid_BM", None)
    if valid_BM is not None:
        return int(valid_BM.sum()), valid_BM.numel()
    if isinstance(state, torch.Tensor):
        return 0, 0
    found = [filled_slots(part) for part in state]
    return sum(filled for filled, _ in found), sum(slots for _, slots in found)
