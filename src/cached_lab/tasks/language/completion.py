"""Continue a text with a trained language model, and decode the continuation while it is sampled."""

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
"""Tokens before a continuation that are decoded with it, since they decide on the blank between the two."""
INCOMPLETE = "\ufffd"
"""The replacement character, for an incomplete character at the end of some ids."""


class Words(NamedTuple):
    """The functions of a tokenizer for a text in several parts.

    Attributes:
        first: ids before every text.
        encode: ids of a text, without an end.
        decode: the text of some ids.
        end: id that ends a text; None without one.
    """

    first: tuple[int, ...]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None


def words_of(tokenizer: Tokenizer) -> Words:
    """`Words` of the tokenizer of a run."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).tolist()
        closed = ids[-1:] == [tokenizer.start] and (tokenizer.ends_document or not text.endswith("\n"))
        return ids[:-1] if closed else ids

    end = tokenizer.start if tokenizer.ends_document else None
    return Words((tokenizer.start,), encode, tokenizer.decode, end)


def words_of_transformers(tokenizer: Any) -> Words:
    """`Words` of a tokenizer of transformers."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Words(tuple(tokenizer("")["input_ids"]), encode, decode, tokenizer.eos_token_id)


class Writer:
    """A language model that continues a text.

    Args:
        model: a language model, or a model of transformers with a memory.
        words: of its tokenizer.
        length: tokens of a segment, as in training; None for the model's own.
        path: file written by `session.save`, whose text is continued; None for a new text.

    Attributes:
        session: the text so far.

    Raises:
        ValueError: the file is damaged, or belongs to other weights or another segment length.
    """

    def __init__(self, model: nn.Module, words: Words, length: int | None, path: Path | None = None) -> None:
        self.words = words
        self.session = Session(model, length) if path is None else Session.load(model, path, length)

    def write(self, prompt: str, say: Callable[[str], object], **options: Any) -> Generation:
        """Continue the text; `say` receives the continuation in pieces, or as a whole in beam search.

        Args:
            prompt: follows the text so far.
            options: of `generate`.

        Raises:
            ValueError: an empty text, or options that `generate` refuses.
        """
        ids = [*(self.words.first if self.session.tokens == 0 else ()), *self.words.encode(prompt)]
        if not ids and self.session.tokens == 0:
            if self.words.end is None:
                raise ValueError("the prompt is empty, and the tokenizer has no token between texts; give a prompt")
            ids = [self.words.end]
        before = [*self.session.partial_1N[0].tolist(), *ids]
        text = Spelling(self.words.decode, before[-CONTEXT:])
        each = None if options.get("beams", 1) > 1 else lambda token_B: say(text.more([int(token_B)]))
        self.session.read(torch.tensor([ids], dtype=torch.long))
        found = self.session.generate(eos=self.words.end, each=each, **options)
        if each is None:
            say(text.more(found.tokens[0].tolist()))
        say(text.rest())
        return found


class Spelling:
    """Incremental decoding: the text of ids that come one after the other; text once given never changes.

    Args:
        decode: the text of some ids. before: preceding ids, whose text is not given.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self.decode, self.ids = decode, list(before)
        self.shown = len(decode(self.ids))

    def more(self, ids: Sequence[int]) -> str:
        """The text that these ids add, without an incomplete character at its end."""
        self.ids += ids
        text = self.decode(self.ids)
        whole = text.rstrip(INCOMPLETE)
        new = whole[self.shown :]
        self.shown = max(self.shown, len(whole))
        if new.endswith("\n") and whole == text:  # no token crosses a line end: these ids need not be decoded again
            self.ids, self.shown = [], 0
        return new

    def rest(self) -> str:
        """The incomplete end."""
        return self.decode(self.ids)[self.shown :]
