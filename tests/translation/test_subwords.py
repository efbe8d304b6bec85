"""Subwords: nothing is unknown, decoding inverts encoding, and a tokenizer comes back as it was saved."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cached_lab.data.subwords import END, SPECIALS, PairTokenizer
from cached_lab.data.tokenizers import load_tokenizer

TEXTS = ["ein mann sieht ein haus", "a man sees a house .", "don &apos;t go , man !", "über straße"] * 5
TRAINED = {form: PairTokenizer.train(TEXTS, 300, form) for form in ("raw", "moses")}


@pytest.mark.parametrize("form", TRAINED)
@settings(max_examples=25, deadline=None)
@given(text=st.text())
@example("<pad >")
@example("</s >")
@example("<unk >")
@example("  a  b ")
@example("\u2028x\x00")
@example("\U0001f642")
def test_any_text_comes_back(form: str, text: str) -> None:
    *ids, end = TRAINED[form].encode(text).tolist()
    assert end == END and all(token >= len(SPECIALS) for token in ids)
    assert TRAINED[form].decode([*ids, end, *ids]) == text  # tokens after the end are no text


def test_words_keep_their_tokens_anywhere() -> None:
    first, second = TRAINED["raw"].encode_batch(["man", "a man"])
    assert second[-len(first) :] == first


def test_moses_tokens_are_kept_together() -> None:
    raw, moses = (PairTokenizer.train(["don &apos;t"] * 9, 300, form) for form in ("raw", "moses"))
    assert len(moses.encode("&apos;t")) == 2 < len(raw.encode("&apos;t"))  # GPT-2's words part at punctuation


def test_a_saved_tokenizer_comes_back() -> None:
    tokenizer = TRAINED["raw"]
    again = load_tokenizer(tokenizer.dump())
    assert isinstance(again, PairTokenizer) and again.dump() == tokenizer.dump()
    assert again.vocabulary == tokenizer.vocabulary
    assert again.encode("ein mann").tolist() == tokenizer.encode("ein mann").tolist()
    with pytest.raises(ValueError, match=r"vocabulary_size=259.*260"):
        PairTokenizer.train(TEXTS, 259, "raw")
