"""Writing on with a trained language model: a text goes in, and what follows it comes out while it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from cached_lab.data.tokenizers import Tokenizer
from cached_transformers.models.generation import Generation
from cached_transformers.models.session import Session

CONTEXT = 16
"""Tokens before a continuation that its first word is written behind: a blank between the two may be a part of it."""
INCOMPLETE = "\ufffd"
"""What stands for the bytes of a character of which some are still to come."""


class Words(NamedTuple):
    """What a tokenizer does for a text that goes on.

    Attributes:
        first: ids that stand before every text.
        encode: ids of a text, without what would end it.
        decode: the text of some ids.
        end: id behind which a text ends, and the next one begins; None where there is none.
    """

    first: tuple[int, ...]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None


def words_of(tokenizer: Tokenizer) -> Words:
    """Of a tokenizer of a run."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).tolist()
        closed = ids[-1:] == [tokenizer.start] and (tokenizer.ends_document or not text.endswith("\n"))
        return ids[:-1] if closed else ids

    end = tokenizer.start if tokenizer.ends_document else None
    return Words((tokenizer.start,), encode, tokenizer.decode, end)


def words_of_transformers(tokenizer: Any) -> Words:
    """Of a tokenizer of transformers."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Words(tuple(tokenizer("")["input_ids"]), encode, decode, tokenizer.eos_token_id)


class Writer:
    """A language model that goes on with a text.

    Args:
        model: a language model, or a model of transformers with a memory.
        words: of its tokenizer.
        length: tokens of a segment, as in training; None for what the model knows.
        path: file of a text that `session.save` has kept; None for a text that begins.

    Attributes:
        session: the text so far.

    Raises:
        ValueError: the file is damaged, or of other weights or another length of segments.
    """

    def __init__(self, model: nn.Module, words: Words, length: int | None, path: Path | None = None) -> None:
        self.words = words
        self.session = Session(model, length) if path is None else Session.load(model, path, length)

    def write(self, prompt: str, say: Callable[[str], object], **options: Any) -> Generation:
        """Continue the text; the continuation is given to `say` piece by piece, and as a whole where beams find it.

        Args:
            prompt: what follows the text so far.
            options: of `generate`.

        Raises:
            ValueError: nothing to go on with, or what `generate` refuses.
        """
        ids = [*(self.words.first if self.session.tokens == 0 else ()), *self.words.encode(prompt)]
        if not ids and self.session.tokens == 0:
            if self.words.end is None:
                raise ValueError("the prompt is empty, and the tokenizer has no token between texts; give a prompt")
            ids = [self.words.end]
        before = [*self.session.mark().open_1N[0].tolist(), *ids]
        text = Spelling(self.words.decode, before[-CONTEXT:])
        each = None if options.get("beams", 1) > 1 else lambda token_B: say(text.more([int(token_B)]))
        self.session.read(torch.tensor([ids], dtype=torch.long))
        found = self.session.generate(eos=self.words.end, each=each, **options)
        if each is None:
            say(text.more(found.tokens[0].tolist()))
        say(text.rest())
        return found


class Spelling:
    """The text of ids that come one after the other, of which what was given out never changes.

    Args:
        decode: the text of some ids. before: ids that stand before it and are not given out again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self.decode, self.ids = decode, list(before)
        self.shown = len(decode(self.ids))

    def more(self, ids: Sequence[int]) -> str:
        """What these ids add; a character whose bytes are not all there yet waits for them."""
        self.ids += ids
        text = self.decode(self.ids)
        whole = text.rstrip(INCOMPLETE)
        new = whole[self.shown :]
        self.shown = max(self.shown, len(whole))
        if new.endswith("\n") and whole == text:  # tokens do not reach over it: no need to decode these again and again
            self.ids, self.shown = [], 0
        return new

    def rest(self) -> str:
        """What waits."""
        return self.decode(self.ids)[self.shown :]
