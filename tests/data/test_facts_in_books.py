"""Texts with facts: every answer lies before the last segment, and tokenizers of pretrained models are read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import refuses
from real_weights import TEXT, glass_folder

from cached_lab.data.tokenizers import PretrainedTokenizer, load_tokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.language.facts_in_books import NOUNS

SEGMENT, SEGMENTS = 160, 3
STORY = "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
SENTENCE = r"The code of the \w+ (\w+) is (\d+)\."


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))


def made(folder: Path, split: str = "train", **options: Any) -> Any:
    (folder / "book.txt").write_text(TEXT * 80, encoding="utf-8")
    (folder / "babi" / "en").mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        (folder / "babi" / "en" / f"qa1_single_{part}.txt").write_text(STORY * 3, encoding="utf-8")
    given = {"path": str(folder / "book.txt"), "tokenizer": str(glass_folder()), "segment_length": SEGMENT}
    given |= {"segments": SEGMENTS, "facts": 1.0, "test_fraction": 0.3}
    return create_dataset("facts_in_books", split, **{**given, **options})


def texts_of(data: Any) -> list[str]:
    return [data.tokenizer.decode(part) for part in np.split(data.tokens, data.starts[1:])]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_fact_is_asked_in_the_last_segment_and_told_before(split: str, tmp_path: Path) -> None:
    data, nouns = made(tmp_path, split), set()
    assert {*np.diff([*data.starts, len(data)])} == {SEGMENT * SEGMENTS}
    for start in data.starts:
        body = data.tokenizer.decode(data.tokens[start : start + SEGMENT * (SEGMENTS - 1)])
        told = re.findall(SENTENCE, body)
        asked = re.findall(SENTENCE, data.tokenizer.decode(data.tokens[start : start + SEGMENT * SEGMENTS]))
        assert 2 <= len(told) <= 4 and sorted(asked) == sorted(told * 2)
        nouns |= {noun for noun, _ in told}
    assert all((NOUNS.index(noun) % 4 == 3) == (split == "test") for noun in nouns)


def test_pages_are_those_of_the_book_in_order(tmp_path: Path) -> None:
    plain, facts = made(tmp_path, facts=0.0), made(tmp_path)
    book = plain.tokenizer.encode(TEXT * 80)
    assert np.array_equal(plain.tokens, book[: len(plain)])
    left = re.sub(rf" {SENTENCE}", "", facts.tokenizer.decode(facts.tokens))
    assert (TEXT * 80).startswith(left)
    assert facts.counts["bytes"] == len(facts.tokenizer.decode(facts.tokens).encode())
    assert made(tmp_path, tokenizer="byte", segment_length=400).scores(1.0, 1)["bits_per_byte"] > 0
    assert np.array_equal(facts.tokens, made(tmp_path).tokens)
    assert not np.array_equal(facts.tokens[: len(facts) // 2], made(tmp_path, seed=1).tokens[: len(facts) // 2])


def test_stories_are_told_in_order_and_asked(tmp_path: Path) -> None:
    data = made(tmp_path, facts=0.0, stories=1.0, babi=str(tmp_path / "babi"))
    for text in texts_of(data):
        assert re.search(r"Mary moved to the bathroom\..*Question: Where is mary\? Answer: bathroom\.$", text, re.S)


def test_a_pretrained_tokenizer_is_read_back(tmp_path: Path) -> None:
    tokenizer = PretrainedTokenizer.of_model(glass_folder())
    again = load_tokenizer(tokenizer.dump())
    assert again.start == tokenizer.start and again.vocabulary == tokenizer.vocabulary == 1024
    assert again.decode(again.encode(TEXT)) == tokenizer.decode(tokenizer.encode(TEXT))
    data = create_dataset("text", "train", path=made(tmp_path).path, tokenizer=str(glass_folder()))
    assert np.array_equal(data.tokens, tokenizer.encode(TEXT * 80)[: len(data)])


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    refuses("stories", made, tmp_path, facts=0.0, stories=0.5)
    refuses("both", made, tmp_path, facts=0.8, stories=0.5, babi=str(tmp_path / "babi"))
    refuses("segments", made, tmp_path, segments=1)
    refuses("segment_length=8", made, tmp_path, segment_length=8)
    refuses("reset", made, tmp_path, reset="never")
    refuses("7680", made, tmp_path, segments=30, segment_length=256)
    refuses("smollm2", made, tmp_path, tokenizer="smollm2")
    refuses("vocabulary_size=5", made, tmp_path, vocabulary_size=5)
