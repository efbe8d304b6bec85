"""Subwords for pairs of texts: byte pairs (Sennrich et al., arXiv:1508.07909), by the `tokenizers` library.

They are trained over the 256 bytes, as in GPT-2, so that no text is unknown and `decode` returns the exact text.

The four special ids come first: `PAD`, `BEGIN`, `END`, `UNKNOWN`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from cached_transformers.extras import require

PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
SPECIALS = ("<pad >", "<s >", "</s >", "<unk >")
"""With a blank, which is no sign of the byte alphabet: no text is ever encoded as one of them."""
FORMATS = ("raw", "moses")
SMALLEST = len(SPECIALS) + 256


@contextlib.contextmanager
def loading(called: object) -> Iterator[None]:
    """Turn any error of loading a stored tokenizer into a ValueError that names it."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # foreign JSON gives errors of every kind, and so do the libraries
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{called} is no tokenizer of this library, or damaged: {reason}") from error


def trained_model(model: str) -> Any:
    """Load a tokenizer of the `tokenizers` library from its JSON (ValueError: its ids are not 0, 1, 2, ...)."""
    made = require("tokenizers", extra="language").Tokenizer.from_str(model)
    made.encode_special_tokens = True  # the name of a special token in a text means its characters
    size, highest = made.get_vocab_size(), max(made.get_vocab().values(), default=-1)
    if highest != size - 1:
        raise ValueError(f"its {size} ids reach up to {highest}; they must be 0, 1, 2, ...")
    return made


def train_byte_pairs(
    texts: Iterable[str], size: int, specials: Sequence[str], split: Any = None, min_frequency: int = 0
) -> str:
    """Train byte pairs of the `tokenizers` library; return the tokenizer as JSON.

    Args:
        split: pre-tokenizer of words; None for GPT-2's pattern.
    """
    library = require("tokenizers", extra="language")
    level = library.pre_tokenizers.ByteLevel
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = level(add_prefix_space=False)
    if split is not None:
        trained.pre_tokenizer = library.pre_tokenizers.Sequence([split, level(add_prefix_space=False, use_regex=False)])
    trained.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=list(specials),
        initial_alphabet=sorted(level.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return str(trained.to_str())


class PairTokenizer:
    """Byte pairs of source and target together.

    A blank is put before a text, and removed by `decode`, so that the first word gives the same token as elsewhere.

    Args:
        model: the trained tokenizer of the `tokenizers` library, as JSON.
    """

    pad, begin, end = PAD, BEGIN, END
    # Attributes of the protocol `Tokenizer`; the ends are those of sentences.
    start, ends_document, lossless, unknown = END, True, True, None
    sentence_ends: tuple[int, ...] = (END,)
    line_ends: tuple[int, ...] = (END,)

    def __init__(self, model: str) -> None:
        self._json, self._model = model, trained_model(model)
        self.vocabulary: int = self._model.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], size: int, text_format: str) -> PairTokenizer:
        """Train byte pairs on the lines of both sides.

        Args:
            size: number of ids, with special ids and the 256 bytes; fewer when no further pair occurs twice.
            text_format: words, which no token crosses, follow GPT-2's pattern in "raw" text, and blanks in "moses".

        Raises:
            ValueError: too few ids.
        """
        if size < SMALLEST:
            raise ValueError(f"data.vocabulary_size={size} must be at least {SMALLEST}: special ids and the 256 bytes")
        library = require("tokenizers", extra="language")
        blanks = library.pre_tokenizers.Split(" ", "merged_with_next") if text_format == "moses" else None
        return cls(train_byte_pairs((f" {text}" for text in texts), size, SPECIALS, blanks, min_frequency=2))

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, with the end."""
        return np.array(self.encode_batch([text])[0], dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, each with the end."""
        found = self._model.encode_batch([f" {text}" if text else "" for text in texts], add_special_tokens=False)
        return [[*encoding.ids, END] for encoding in found]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids, up to the first end."""
        kept = [token for token in takewhile(END.__ne__, map(int, tokens)) if token >= len(SPECIALS)]
        return str(self._model.decode(kept)).removeprefix(" ")

    def dump(self) -> bytes:
        """Bytes for `load_tokenizer`."""
        return json.dumps({"kind": "pair", "model": self._json}).encode()
