"""Continue contexts of any length until a string appears; rows of equal length in one batch, each as if by itself.

Legend: B rows, N tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cached_lab.tasks.language.completion import CONTEXT, Spelling, Words
from cached_transformers.models.generation import GeneratedText, evaluating
from cached_transformers.models.sampling import Choice
from cached_transformers.models.segments import as_language_model


class EndingText:
    """The growing text of one row, up to the first of some strings.

    Args:
        before: ids of the context. until: strings that end the text and do not belong to it.
    """

    def __init__(self, words: Words, before: Sequence[int], until: Sequence[str]) -> None:
        self.end, self.until, self.text, self.done = words.end, until, "", False
        self.spelling = Spelling(words.decode, before[-CONTEXT:])

    def add(self, token: int) -> None:
        """Append a token, unless the text has ended."""
        if not self.done:
            self.done = token == self.end
            self._grow("" if self.done else self.spelling.more([token]))

    def whole(self) -> str:
        """Return the text with the incomplete character of the last tokens."""
        if not self.done:
            self._grow(self.spelling.rest())
        return self.text

    def _grow(self, new: str) -> None:
        longest = max(map(len, self.until), default=0)
        begin = max(0, len(self.text) - longest + 1)  # a string may begin in the old part
        self.text += new
        found = [place for string in self.until if (place := self.text.find(string, begin)) >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True


@torch.no_grad()
def generate_until(
    model: nn.Module,
    contexts: Sequence[Sequence[int]],
    words: Words,
    segment_length: int | None,
    choice: Choice,
    until: Sequence[str],
) -> list[str]:
    """Continue contexts with equal numbers of tokens, each up to a string, the tokenizer's end, or the last token.

    Args:
        model, segment_length: as for `generate`. choice: sampling options, with one beam.
    """
    reader = as_language_model(model)
    rows = [EndingText(words, context, until) for context in contexts]
    with evaluating(reader):
        prompt_BN = torch.tensor([list(context) for context in contexts], device=next(reader.parameters()).device)
        text = GeneratedText(reader, prompt_BN, reader.init_state(len(rows)), segment_length)
        for index in range(choice.tokens):
            token_B = choice.token(text.read())
            for row, token in zip(rows, token_B.tolist(), strict=True):
                row.add(token)
            if index + 1 == choice.tokens or all(row.done for row in rows):
                break
            text.append(token_B)
    return [row.whole() for row in rows]
