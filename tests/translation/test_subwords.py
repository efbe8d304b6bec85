"""Subwords: nothing is unknown, decoding inverts encoding, and a tokenizer comes back as it was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_lab.data.subwords import (
    END,
    SPECIALS,
    PairTokenizer,
    read_pair_tokenizer,
    train_subwords,
)
from cached_lab.data.tokenizers import load_tokenizer

TEXTS = ["ein mann sieht ein haus", "a man sees a house .", "don &apos;t go , man !", "über straße"] * 5
FORMATS = ("raw", "moses")
TRAINED = {form: train_subwords(TEXTS, 300, form) for form in FORMATS}


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(form: str, text: str) -> None:
    ids = TRAINED[form].encode([text])[0]
    assert all(token >= len(SPECIALS) for token in ids)
    assert TRAINED[form].decode(ids) == text


@pytest.mark.parametrize("text", ["<pad >", "</s >", "<unk >", "</s>", "", " ", "  a  b ", "\u2028x\x00", "\U0001f642"])
@pytest.mark.parametrize("form", FORMATS)
def test_awkward_texts_come_back(form: str, text: str) -> None:
    ids = TRAINED[form].encode([text])[0]
    assert TRAINED[form].decode(ids) == text and all(token >= len(SPECIALS) for token in ids)


def test_words_keep_their_tokens_wherever_they_stand() -> None:
    first, second = TRAINED["raw"].encode(["man", "a man"])
    assert second[-len(first) :] == first


def test_moses_tokens_are_kept_together() -> None:
    trained = train_subwords(["don &apos;t"] * 9, 300, "moses")
    assert len(trained.encode(["&apos;t"])[0]) == 1
    # GPT-2's words part at punctuation.
    assert len(train_subwords(["don &apos;t"] * 9, 300, "raw").encode(["&apos;t"])[0]) > 1


@pytest.mark.parametrize("joint", [True, False])
def test_a_saved_tokenizer_comes_back(joint: bool) -> None:
    sides = (TRAINED["raw"], None if joint else train_subwords(TEXTS, 280, "raw"))
    tokenizer = PairTokenizer(*sides)
    again = load_tokenizer(tokenizer.dump())
    assert isinstance(again, PairTokenizer) and again.dump() == tokenizer.dump()
    assert (again.joint, again.vocabulary, again.target_vocabulary) == (
        joint,
        sides[0].vocabulary,
        (sides[1] or sides[0]).vocabulary,
    )
    source, target = [again.encode_batch(["ein mann"], target=t)[0] for t in (False, True)]
    assert source[-1] == target[-1] == END and (source == target) is joint
    assert again.decode(target) == "ein mann" == again.decode(source, source=True)
    assert again.decode([*target, *target]) == "ein mann"  # tokens after the end are no text


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocabulary_size=259.*260"):
        train_subwords(TEXTS, 259, "raw")
    with pytest.raises(FileNotFoundError, match=r"data.tokenizer"):
        read_pair_tokenizer(str(tmp_path), "raw")
    (tmp_path / "tokenizer.json").write_text('{"kind": "byte"}')
    with pytest.raises(ValueError, match="not of a translation run"):
        read_pair_tokenizer(str(tmp_path), "raw")
    (tmp_path / "tokenizer.json").write_bytes(PairTokenizer(TRAINED["moses"], text_format="moses").dump())
    with pytest.raises(ValueError, match=r"data.text_format=moses"):
        read_pair_tokenizer(str(tmp_path), "raw")
