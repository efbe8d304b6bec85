"""Ids that noise needs, behind those of a tokenizer: padding, begin, end, mask, and sentinels.

Sentinels count down, as T5's do (arXiv:1910.10683): the first one of a text is the last id of the vocabulary.

Legend: V ids of the text's own tokenizer, S sentinels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from .tokenizers import Tokenizer, WordTokenizer

NAMES = ("pad", "begin", "end", "mask")


class SpecialTokens:
    """A tokenizer with ids for noise: V pad, V + 1 begin, V + 2 end, V + 3 mask, then S sentinels.

    Args:
        text: the tokenizer of the text. sentinels: S.

    Attributes:
        vocabulary: V + 4 + S. pad, begin, end, mask: ids. sentinels: ids, of which the first is the highest.
    """

    def __init__(self, text: Tokenizer, sentinels: int = 0) -> None:
        if sentinels < 0:
            raise ValueError(f"sentinels={sentinels} must not be negative; T5 has 100")
        self.text = text
        self.pad, self.begin, self.end, self.mask = range(text.vocabulary, text.vocabulary + len(NAMES))
        self.vocabulary = text.vocabulary + len(NAMES) + sentinels
        self.sentinels = tuple(self.vocabulary - 1 - index for index in range(sentinels))
        self.start, self.lossless, self.ends_document = text.start, text.lossless, text.ends_document
        self.sentence_ends, self.line_ends = text.sentence_ends, text.line_ends
        self._names = {text.vocabulary + index: f"<{name}>" for index, name in enumerate(NAMES)}
        self._names |= {token: f"<extra_id_{index}>" for index, token in enumerate(self.sentinels)}

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text alone: what looks like a special token in it is text."""
        return self.text.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, with names such as <mask> and <extra_id_0> where special ids stand."""
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, tokens):
            if token in self._names:
                parts += [self.text.decode(run) if run else "", self._names[token]]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self.text.decode(run) if run else ""])

    def dump(self) -> bytes:
        """Everything that `load_tokenizer` needs to make it again."""
        stored = {"kind": "special", "text": self.text.dump().decode(), "sentinels": len(self.sentinels)}
        return json.dumps(stored).encode()

    def word_starts(self) -> np.ndarray:
        """(V,) bool: ids with which a word begins: all of a word tokenizer, else those that start with a blank."""
        if isinstance(self.text, WordTokenizer):
            return np.ones(self.text.vocabulary, dtype=bool)
        texts = (self.text.decode([token]) for token in range(self.text.vocabulary))
        return np.array([text[:1].isspace() for text in texts])
