"""Writing on with a trained language model: a text goes in, and what follows it comes out while it is chosen.

What has to be kept to go on later is the model's state and the last token, which the state has not read yet: a `Kept`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.data.tokenizers import Tokenizer
from cached_transformers.models.generation import Generation, generate
from cached_transformers.models.segments import as_language_model

CONTEXT = 16
"""Tokens before a continuation that its first word is written behind: a blank between the two may be a part of it."""
SAMPLE = 64
"""Values of each tensor that a fingerprint is of."""
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


class Kept(NamedTuple):
    """A text that may go on: what the model carries, its last token, and which model and segments it is of."""

    state: states.State
    last: Tensor
    what: Tensor


class Writer:
    """A language model that goes on with a text.

    Args:
        model: a language model, or a model of transformers with a memory.
        words: of its tokenizer.
        length: tokens of a segment, as in training; None reads a text as one segment.
    """

    def __init__(self, model: nn.Module, words: Words, length: int | None) -> None:
        self.model, self.words, self.length = as_language_model(model).eval(), words, length
        self.what = fingerprint(model, length)
        self.device = next(model.parameters()).device

    def write(
        self, prompt: str, say: Callable[[str], object], before: Kept | None = None, **options: Any
    ) -> tuple[Generation, Kept]:
        """Continue a text; the continuation is given to `say` piece by piece, and as a whole where beams find it.

        Args:
            prompt: the text, or what follows the one that was kept. Without both a text begins.
            before: what was kept of the text so far.
            options: of `generate`.

        Raises:
            ValueError: nothing to go on with, or what `generate` refuses.
        """
        first = self.words.first if before is None else (int(before.last),)
        ids = [*first, *self.words.encode(prompt)]
        if not ids:
            if self.words.end is None:
                raise ValueError("the prompt is empty, and the tokenizer has no token between texts; give a prompt")
            ids = [self.words.end]
        text = GrowingText(self.words.decode, ids[-CONTEXT:])
        each = None if options.get("beams", 1) > 1 else lambda token_B: say(text.more([int(token_B)]))
        found = generate(
            self.model,
            torch.tensor([ids], device=self.device),
            None if before is None else states.to(before.state, self.device),
            segment_length=self.length,
            eos=self.words.end,
            each=each,
            **options,
        )
        if each is None:
            say(text.more(found.tokens[0].tolist()))
        say(text.rest())
        return found, Kept(found.state, found.tokens[:, -1:].cpu(), self.what)

    def load(self, path: Path) -> Kept:
        """What `states.save` has kept.

        Raises:
            ValueError: the file is damaged, or of another model or length of segments.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file; give a state that --save-state has written")
        empty = Kept(self.model.init_state(1), torch.zeros(1, 1, dtype=torch.long), self.what)
        kept: Kept = states.load(path, empty)
        if not torch.equal(kept.what, self.what):
            raise ValueError(
                f"{path} was kept by other weights or another segment length; give that run, checkpoint and "
                "--segment-length, or begin without --state"
            )
        return kept


class GrowingText:
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


def fingerprint(model: nn.Module, length: int | None) -> Tensor:
    """32 bytes, (1, 32), that change with the weights (some values of each tensor) and the segments.

    Args:
        length: tokens of a segment.
    """
    digest = hashlib.sha256(f"{length}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].cpu()
        digest.update(sample.to(torch.float64).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)[None]
