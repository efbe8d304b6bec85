"""Raw text as pairs: blocks, special ids, objectives by name, noise by row and epoch, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.restored_spans import restore_spans

from cached_lab.data.tokenizers import BytePairTokenizer, ByteTokenizer, SpecialTokens, WordTokenizer, load_tokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.pretraining.datasets import Denoising, blocks
from cached_lab.tasks.pretraining.objectives import OBJECTIVES
from cached_lab.training.loader import SeededRows
from cached_transformers.layers.token_loss import IGNORED

TEXT = "".join(f"the {word} sat on mat number {n} . why ?\n" for n, word in enumerate(["cat", "dog", "owl"] * 200))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "input.txt"


def made(text: Path, split: str = "train", **options: Any) -> Denoising:
    data = create_dataset("denoising", split, path=text, **{"tokenizer": "byte", "max_length": 64, **options})
    assert isinstance(data, Denoising)
    return data


def original(data: Denoising, index: int) -> list[int]:
    return data.text.tokens[slice(*data._bounds[index])].tolist()


def test_special_ids_stand_behind_the_text_and_sentinels_count_down() -> None:
    special = SpecialTokens(ByteTokenizer(), sentinels=3)
    assert (special.pad, special.begin, special.end, special.mask) == (256, 257, 258, 259)
    assert special.sentinels == (262, 261, 260) and special.vocabulary == 263
    assert special.decode([104, 105, 259, 262, 33, 258]) == "hi!"
    assert special.encode("<mask>").tolist() == list(b"<mask>")
    for tokenizer in (special, SpecialTokens(WordTokenizer.train(["a b"], None, False))):
        again = load_tokenizer(tokenizer.dump())
        assert isinstance(again, SpecialTokens)
        assert (again.vocabulary, again.sentinels) == (tokenizer.vocabulary, tokenizer.sentinels)
        assert again.decode([1, again.mask]) == tokenizer.decode([1, tokenizer.mask])


def test_words_begin_with_blanks_and_blocks_with_documents() -> None:
    pytest.importorskip("tokenizers")
    special = SpecialTokens(BytePairTokenizer.train([TEXT], 300))
    ids = special.encode("the cat sat")
    pieces = [special.decode([token]) for token in ids[:-1]]
    assert [piece for piece, start in zip(pieces, special.word_starts()[ids[:-1]], strict=True) if start] == [
        piece for piece in pieces if piece.startswith(" ")
    ]
    assert SpecialTokens(WordTokenizer.train(["a b"], None, False)).word_starts().all()
    assert blocks(np.array([0]), 11, 5).tolist() == [[0, 5], [5, 10]]  # a rest of one token is left out
    assert blocks(np.array([0, 7]), 12, 5).tolist() == [[0, 5], [5, 7], [7, 12]]
    assert blocks(np.array([0]), 1, 5).shape == (0, 2)


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_every_objective_gives_pairs_that_fit(text: Path, name: str) -> None:
    """Sources and targets within max_length, decoder inputs shifted by one, and the text recoverable from them."""
    data = made(text, objective=name)
    special = data.tokenizer
    assert data.describe()["vocabulary"] == special.vocabulary and data.task == "translation"
    longest = 0
    for index in range(len(data)):
        source, decoder_inputs, targets = data.pair(index, np.random.default_rng(index))
        longest = max(longest, len(source), len(targets))
        assert decoder_inputs[0] == special.begin and torch.equal(decoder_inputs[1:], targets[:-1])
        assert targets[-1] == special.end == source[-1]
        assert int(max(source.max(), targets.max())) < special.vocabulary
        if name == "span_corruption":
            restored = restore_spans(source, targets, special.sentinels, special.end).tolist()
        elif name == "prefix_lm":
            restored = [*source[:-1].tolist(), *targets[:-1].tolist()]
        else:
            restored = targets[:-1].tolist()
            assert source[0] == special.begin
        assert restored == original(data, index)
    assert longest <= 64 and (longest >= 62 or name == "prefix_lm")


@pytest.mark.parametrize(
    ("noise", "changes"),
    [
        ({"masking": 0.15}, lambda source, text, special: (source == special.mask).sum() == -(-len(text) * 15 // 100)),
        ({"deletion": 0.15}, lambda source, text, special: len(source) - 2 == len(text) - -(-len(text) * 15 // 100)),
        ({"permutation": 1.0}, lambda source, text, special: sorted(source[1:-1].tolist()) == sorted(text)),
        ({"rotation": 1.0}, lambda source, text, special: sorted(source[1:-1].tolist()) == sorted(text)),
        ({"infilling": 0.3}, lambda source, text, special: sum(source < 256) == len(text) - -(-len(text) * 3 // 10)),
    ],
)
def test_each_kind_of_bart_by_itself(text: Path, noise: dict[str, float], changes: Any) -> None:
    data = made(text, objective={"name": "bart", "infilling": 0.0, "permutation": 0.0, **noise})
    for index in range(len(data)):
        source = data.pair(index, np.random.default_rng(index)).source
        assert changes(source, original(data, index), data.tokenizer)


def test_whole_words_are_covered_and_spans_are_of_words(text: Path) -> None:
    noise = {"name": "bart", "infilling": 0.5, "permutation": 0.0, "whole_words": True}
    data = made(text, objective=noise, max_length=128)
    for index in range(20):
        start, end = data._bounds[index]
        source = data.pair(index, np.random.default_rng(index)).source[1:-1]
        parts = torch.tensor_split(source, (source == data.tokenizer.mask).nonzero()[:, 0])
        words = TEXT.encode()[start:end].decode()
        # A run begins with the text or with a blank, as words do, and is found in the text.
        runs = [run for part in parts if (run := data.tokenizer.decode(part))]
        assert all(run in words for run in runs)
        assert all(run[0].isspace() or words.startswith(run) for run in runs)


def test_noise_is_new_in_each_epoch_and_fixed_in_evaluation(text: Path) -> None:
    train, validation = made(text), made(text, "validation")
    assert train.augment and not validation.augment
    rows = SeededRows(train, seed=3)
    first, again, later = rows[0, 5], rows[0, 5], rows[1, 5]
    assert torch.equal(first.source, again.source) and not torch.equal(first.source, later.source)
    assert torch.equal(first.targets, later.targets)
    assert not torch.equal(rows[0, 5].source, SeededRows(train, seed=4)[0, 5].source)
    assert all(torch.equal(a, b) for a, b in zip(validation[1], validation[1], strict=True))
    sources = {tuple(validation[index].source.tolist()) for index in range(len(validation))}
    assert len(sources) == len(validation)


def test_a_batch_is_padded_behind_its_ends(text: Path) -> None:
    data = made(text, objective="prefix_lm")
    items = [data[index] for index in range(5)]
    batch = data.collate(items)
    assert batch.inputs.shape[1] % 8 == 0 and batch.targets.shape[1] % 8 == 0
    for row, item in enumerate(items):
        n, t = len(item.source), len(item.targets)
        assert torch.equal(batch.inputs[row, :n], item.source) and (batch.inputs[row, n:] == data.tokenizer.pad).all()
        assert torch.equal(batch.padding[row], torch.arange(batch.inputs.shape[1]) >= n)
        assert torch.equal(batch.targets[row, :t], item.targets) and (batch.targets[row, t:] == IGNORED).all()


def test_any_text_data_set_can_be_the_corpus(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(f" \n = One = \n \n{TEXT} \n = Two = \n \n a b . \n")
    data = made(tmp_path, corpus="wikitext2", tokenizer="word", reset="document")
    assert data.describe()["corpus"] == "wikitext2" and data.describe()["tokenizer"] == "word"
    starts = data.text.starts.tolist()
    assert len(starts) == 2 and set(starts) <= {start for start, _ in data._bounds.tolist()}
    assert set(data.describe()["sentence_ends"]) == {data.tokenizer.encode(mark)[0] for mark in ".?"}  # type: ignore[call-overload]


def test_objectives_share_a_vocabulary_where_they_have_as_many_sentinels(text: Path) -> None:
    first, second = (made(text, objective=name, sentinels=10) for name in ("span_corruption", "prefix_lm"))
    assert first.describe()["vocabulary"] == second.describe()["vocabulary"] == 256 + 4 + 10
    assert made(text, objective="span_corruption").describe()["vocabulary"] == 256 + 4 + 100
    assert made(text).describe()["vocabulary"] == 256 + 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "barth"}, "unknown objective 'barth'; did you mean 'bart'"),
        ({"objective": {"name": "bart", "permutations": 1}}, "did you mean 'permutation'"),
        ({"objective": {"rate": 0.1}}, "must have a name"),
        ({"objective": {"name": "bart", "infilling": 2.0}}, r"infilling=2.0 must lie in \[0, 1\]"),
        ({"objective": {"name": "bart", "mean": 1e300}}, r"mean=1e\+300 "),
        ({"objective": {"name": "span_corruption", "mean": 0.5}}, "mean=0.5 must be at least 1"),
        ({"objective": "span_corruption", "sentinels": 2}, "set data.sentinels=3"),
        ({"sentinels": -1}, "sentinels=-1 must not be negative|sentinels=-1 do not suffice"),
        ({"objective": {"name": "span_corruption", "rate": 1.0}}, "rate=1.0 must lie between 0 and 1"),
        ({"max_length": 3}, "max_length=3 must be at least 4"),
        ({"corpus": ""}, "unknown data.corpus ''"),
        ({"corpus": "digits"}, "unknown option of dataset 'digits'"),
        ({"corpus": "huggingface_stream"}, "unknown option of dataset 'huggingface_stream' 'path'"),
        ({"tokenizer": "bytes"}, "did you mean 'byte'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(text, **options)
