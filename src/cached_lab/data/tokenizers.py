"""Tokenizers of a text: words, bytes, or byte pairs; every vocabulary is built on training text only.

Words follow Transformer-XL's reading of WikiText (arXiv:1901.02860): blank-separated, one `<eos>` per line, rare ones
`<unk>`. Byte pairs are those of GPT-2 (over bytes, so that no text is unknown), trained by the `tokenizers` library. A
pretrained model of transformers brings its own tokenizer. Any tokenizer may get special ids after its own. Pairs of
texts have their own tokenizers, in `subwords.py`.
"""

from __future__ import annotations

import glob
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cached_transformers.extras import require
from cached_transformers.registry import unknown_name

from .store import cache_folder
from .subwords import PairTokenizer, loading, train_byte_pairs, trained_model

UNKNOWN, END = "<unk>", "<eos>"
SPECIALS = ("pad", "begin", "end", "mask")
SENTENCE_MARKS = (".", "!", "?")
BPE_SIZE = 16_000
KINDS = ("word", "byte", "bpe")
_CHUNK = 1 << 16  # characters encoded at a time
_PIECES = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


class Tokenizer(Protocol):
    """A tokenizer of a text.

    Attributes:
        vocabulary: number of token ids.
        start: id before the first token of a stream or document.
        lossless: `decode` returns the exact text.
        sentence_ends: ids of the tokens that end a sentence.
        line_ends: ids of the tokens that end a line.
        ends_document: `encode` appends an id after the text.
        unknown: id of all words outside the vocabulary; None if it covers every text.
    """

    vocabulary: int
    start: int
    lossless: bool
    sentence_ends: tuple[int, ...]
    line_ends: tuple[int, ...]
    ends_document: bool

    @property
    def unknown(self) -> int | None: ...

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def dump(self) -> bytes:
        """Bytes for `load_tokenizer`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes, without training; a line feed precedes the first token."""

    vocabulary, start, lossless, ends_document = 256, ord("\n"), True, False
    sentence_ends: tuple[int, ...] = tuple(map(ord, SENTENCE_MARKS))
    line_ends: tuple[int, ...] = (ord("\n"),)
    unknown = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def dump(self) -> bytes:
        return b'{"kind": "byte"}'


class WordTokenizer:
    """Words, the commonest first, after `<unk>` and `<eos>`.

    Args:
        words: the vocabulary; starts with `<unk>` and `<eos>`.
        punctuation: separate punctuation from words, for text that was not tokenised before.
    """

    start, unknown, lossless, ends_document = 1, 0, False, False

    def __init__(self, words: list[str], punctuation: bool) -> None:
        self.words, self.punctuation, self.vocabulary = words, punctuation, len(words)
        self._ids = {word: index for index, word in enumerate(words)}
        self.sentence_ends = tuple(self._ids[mark] for mark in SENTENCE_MARKS if mark in self._ids)
        self.line_ends: tuple[int, ...] = (self.start,)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None, punctuation: bool) -> WordTokenizer:
        """Take the `size` commonest words (all when None); ties are broken alphabetically."""
        if size is not None and size < 3:
            raise ValueError(f"data.vocabulary_size={size} must be at least 3: {UNKNOWN}, {END} and one word")
        counts: Counter[str] = Counter()
        for text in texts:
            for line in lines_of(text):
                counts.update(split_words(line, punctuation))
        ranked = sorted(counts.keys() - {UNKNOWN, END}, key=lambda word: (-counts[word], word))
        return cls([UNKNOWN, END, *ranked][:size], punctuation)

    def encode(self, text: str) -> np.ndarray:
        ids, found = self._ids, array("i")
        for line in lines_of(text):
            found.extend(ids.get(word, self.unknown) for word in split_words(line, self.punctuation))
            found.append(self.start)
        return np.array(found, dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        lines = " ".join(self.words[token] for token in tokens).split(END)
        return "\n".join(line.strip() for line in lines)

    def dump(self) -> bytes:
        return json.dumps({"kind": "word", "words": self.words, "punctuation": self.punctuation}).encode()


class BytePairTokenizer:
    """Byte pairs; `<eos>` (id 0) ends a document and precedes the first token.

    Args:
        model: the trained tokenizer of the `tokenizers` library, as JSON.
    """

    start, unknown, lossless, ends_document = 0, None, True, True

    def __init__(self, model: str) -> None:
        self._json, self._model = model, trained_model(model)
        self.vocabulary = self._model.get_vocab_size()
        texts = [self._model.decode([index], skip_special_tokens=False) for index in range(self.vocabulary)]
        ends = tuple(f"{mark}{quote}" for mark in SENTENCE_MARKS for quote in ("", '"', "'", ")", "\u201d"))
        self.sentence_ends = tuple(i for i, text in enumerate(texts) if text.strip().endswith(ends))
        self.line_ends = (self.start, *(i for i, text in enumerate(texts) if "\n" in text))

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None) -> BytePairTokenizer:
        """Train `size` tokens (16,000 when None); fewer when the text has no more pairs."""
        size = BPE_SIZE if size is None else size
        if size < 257:
            raise ValueError(f"data.vocabulary_size={size} must be at least 257 byte pairs: {END} and the 256 bytes")
        return cls(train_byte_pairs((chunk for text in texts for chunk in _chunks(text)), size, [END]))

    def encode(self, text: str) -> np.ndarray:
        parts = [self._model.encode(chunk, add_special_tokens=False).ids for chunk in _chunks(text)]
        return np.array([*(token for part in parts for token in part), self.start], dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._model.decode([token for token in map(int, tokens) if token != self.start])

    def dump(self) -> bytes:
        return json.dumps({"kind": "bpe", "model": self._json}).encode()


class PretrainedTokenizer(BytePairTokenizer):
    """The tokenizer of a pretrained model of transformers.

    The id that begins or ends its texts precedes the first token, or a line feed for a model without one.

    Args:
        model: its tokenizer.json. start: id before the first token.
    """

    ends_document = False

    def __init__(self, model: str, start: int) -> None:
        super().__init__(model)
        self.start, self.lossless = start, (json.loads(model).get("decoder") or {}).get("type") == "ByteLevel"

    @classmethod
    def of_model(cls, folder: Path) -> PretrainedTokenizer:
        """Read the tokenizer of a folder of `save_pretrained` (ValueError: it has none that is fast)."""
        found = require("transformers", extra="language").AutoTokenizer.from_pretrained(str(folder))
        if not hasattr(found, "backend_tokenizer"):
            raise ValueError(f"{folder} has no tokenizer.json that can be read; take another model")
        marks = (found.bos_token_id, found.eos_token_id, *found.encode("\n", add_special_tokens=False))
        return cls(found.backend_tokenizer.to_str(), next(mark for mark in marks if mark is not None))

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text)[:-1]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._model.decode([*map(int, tokens)], skip_special_tokens=True))

    def dump(self) -> bytes:
        return json.dumps({"kind": "pretrained", "model": self._json, "start": self.start}).encode()


class SpecialTokens:
    """A tokenizer with special ids after those of its text: pad, begin, end, mask, and S sentinels.

    For a text with V ids, pad is V, and so on. Sentinels count down, as in T5 (arXiv:1910.10683): the first sentinel of
    a text is the last id of the vocabulary.

    Args:
        text: the tokenizer of the text. sentinels: S.

    Attributes:
        vocabulary: V + 4 + S. pad, begin, end, mask: ids. sentinels: ids, the highest first.
    """

    def __init__(self, text: Tokenizer, sentinels: int = 0) -> None:
        if sentinels < 0:
            raise ValueError(f"sentinels={sentinels} must not be negative; T5 has 100")
        self.text = text
        self.pad, self.begin, self.end, self.mask = range(text.vocabulary, text.vocabulary + len(SPECIALS))
        self.vocabulary = text.vocabulary + len(SPECIALS) + sentinels
        self.sentinels = tuple(self.vocabulary - 1 - index for index in range(sentinels))
        self.start, self.lossless, self.ends_document = text.start, text.lossless, text.ends_document
        self.sentence_ends, self.line_ends, self.unknown = text.sentence_ends, text.line_ends, text.unknown

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text; the name of a special token in it is text."""
        return self.text.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, without special ids."""
        return self.text.decode([token for token in map(int, tokens) if token < self.pad])

    def dump(self) -> bytes:
        stored = {"kind": "special", "text": self.text.dump().decode(), "sentinels": len(self.sentinels)}
        return json.dumps(stored).encode()

    def word_starts(self) -> np.ndarray:
        """(V,) bool: ids that begin a word: all ids of a word tokenizer, else those that start with a blank."""
        if isinstance(self.text, WordTokenizer):
            return np.ones(self.text.vocabulary, dtype=bool)
        texts = (self.text.decode([token]) for token in range(self.text.vocabulary))
        return np.array([text[:1].isspace() for text in texts])


def train_tokenizer(kind: str, texts: Iterable[str], size: int | None, punctuation: bool) -> Tokenizer:
    """Train a tokenizer on `texts`.

    Raises:
        ValueError: an unknown kind, or a size that does not suit it.
        ImportError: byte pairs need the `tokenizers` library.
    """
    check_kind(kind, size)
    if kind == "byte":
        return ByteTokenizer()
    return WordTokenizer.train(texts, size, punctuation) if kind == "word" else BytePairTokenizer.train(texts, size)


def load_tokenizer(content: bytes, called: object = "the tokenizer") -> Tokenizer:
    """Load the result of a `dump` (ValueError for other content, with `called` in the message)."""
    with loading(called):
        return _loaded(json.loads(content))


def _loaded(tree: dict[str, Any]) -> Tokenizer:
    if tree["kind"] == "byte":
        return ByteTokenizer()
    if tree["kind"] == "pretrained":
        return PretrainedTokenizer(tree["model"], tree["start"])
    if tree["kind"] == "pair":
        return PairTokenizer(tree["model"])
    if tree["kind"] == "special":
        return SpecialTokens(_loaded(json.loads(tree["text"])), tree["sentinels"])
    if tree["kind"] == "word":
        words, punctuation = tree["words"], tree["punctuation"]
        known = words[:2] == [UNKNOWN, END] and all(isinstance(word, str) for word in words)
        if not isinstance(punctuation, bool) or not known or len(set(words)) != len(words):
            raise ValueError(f"its words must be text, begin with {UNKNOWN} and {END}, and occur once each")
        return WordTokenizer(words, punctuation)
    if tree["kind"] != "bpe":
        raise ValueError(f"kind={tree['kind']!r} is unknown")
    return BytePairTokenizer(tree["model"])


def pretrained_folder(kind: str) -> Path | None:
    """Return the folder of a pretrained model by path or by the name of `cached fetch`; None for another kind."""
    if kind in KINDS:
        return None
    folder = Path(kind).expanduser()
    fetched = [] if folder.exists() else sorted((cache_folder() / "models").glob(f"{glob.escape(kind)}-*"))
    folder = fetched[-1] if fetched else folder
    return folder if (folder / "tokenizer.json").is_file() else None


def check_kind(kind: str, size: int | None) -> None:
    """Refuse an unknown tokenizer, and a vocabulary size for bytes or a pretrained model (ValueError)."""
    if pretrained_folder(kind) is not None:
        if size is not None:
            raise ValueError(f"data.vocabulary_size={size} does not apply to the tokenizer of {kind}; leave it out")
        return
    if kind not in KINDS:
        way = "; for the tokenizer of a pretrained model give its folder, or run `cached fetch` once for its name"
        raise ValueError(unknown_name("tokenizer", kind, list(KINDS)) + way)
    if kind == "byte" and size is not None:
        raise ValueError(f"data.vocabulary_size={size} does not apply to the 256 bytes; leave it out")


def lines_of(text: str) -> Iterator[str]:
    """Lines without their ends; unlike `str.splitlines` only a line feed ends a line."""
    return iter((text[:-1] if text.endswith("\n") else text).split("\n"))


def split_words(line: str, punctuation: bool) -> list[str]:
    """Blank-separated words, or words and punctuation marks."""
    return _PIECES.findall(line) if punctuation else line.split()


def _chunks(text: str) -> Iterator[str]:
    """Pieces of bounded length, split at single line feeds, which no token crosses in either case."""
    start, boundary = 0, re.compile(r"(?<=\S)\n(?=\S)")
    while start < len(text):
        found = boundary.search(text, start + _CHUNK)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end
