"""Parallel text in every layout, and errors that name file and line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from translation.made import write_corpus

from cached_lab.data.subwords import BEGIN, END, PAD, PairTokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.translation.datasets import ParallelText
from cached_transformers.layers.token_loss import IGNORED

SIDES = {"source": "de", "target": "en"}
SMALL = {"vocabulary_size": 280, "max_length": 64}


def build(path: Any, split: str = "train", **options: Any) -> ParallelText:
    found = create_dataset("translation", split, path=path, **{**SIDES, **SMALL, **options})
    assert isinstance(found, ParallelText)
    return found


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_items_are_what_the_decoder_reads_and_says(corpus: Path) -> None:
    data = build(corpus)
    source, target = lines(corpus / "train.de"), lines(corpus / "train.en")
    assert len(data) == 300
    for index in (0, 7, -1):
        pair = data[index]
        assert data.tokenizer.decode(pair.source) == source[index]
        assert data.tokenizer.decode(pair.targets) == target[index]
        assert pair.source[-1] == pair.targets[-1] == END and pair.decoder_inputs[0] == BEGIN
        assert torch.equal(pair.decoder_inputs[1:], pair.targets[:-1])
    assert data.lengths.tolist() == [[len(data[i].source), len(data[i].targets)] for i in range(300)]
    batch = data.collate([data[0], data[1], data[2]])
    assert batch.padding.tolist() == (batch.inputs == PAD).tolist()
    assert ((batch.targets == IGNORED) == (batch.decoder_inputs == PAD)).all()
    facts = data.describe()
    assert (facts["size"], facts["vocabulary"], facts["max_length"]) == (300, data.tokenizer.vocabulary, 64)
    assert "target_vocabulary" not in facts and facts["source_tokens"] == int(data.lengths[:, 0].sum())
    with pytest.raises(IndexError):
        data[300]


PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("kind", [*PACK, ".tsv", "header.tsv", "tar", "inner tar", "moses names"])
def test_every_layout_gives_the_same_pairs(kind: str, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.mkdir()
    for name in ("train", "val", "test"):
        both = [corpus / f"{name}.{language}" for language in ("de", "en")]
        rows = list(zip(*map(lines, both), strict=True))
        if kind == ".tsv":
            write(path, f"{name}.tsv", "".join(f"{a}\t{b}\n" for a, b in rows))
        elif kind == "header.tsv":
            write(path, f"{name}.tsv", "id\ten\tde\n" + "".join(f"7\t{b}\t{a}\n" for a, b in rows))
        for file in both:
            if kind in PACK:
                (path / f"{file.name}{kind}").write_bytes(PACK[kind](file.read_bytes()))
            elif kind == "moses names":
                write(path, f"{name}.lc.de-en{file.suffix}", file.read_text(encoding="utf-8"))
    if "tar" in kind:
        packed = path / "all.tar.xz"
        with tarfile.open(packed, "w:xz") as archive:
            for file in sorted(corpus.iterdir()):
                archive.add(file, file.name)
        path = packed if kind == "tar" else path
    for split in ("train", "validation", "test"):
        found, expected = build(path, split)[3], build(corpus, split)[3]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_several_files_make_a_split_and_tokens_are_kept(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(corpus, train=["train", "val"])
    assert len(data) == 320
    assert data.tokenizer.decode(data[300].targets) == lines(corpus / "val.en")[0]
    first = build(corpus)
    monkeypatch.setattr(PairTokenizer, "train", None)
    monkeypatch.setattr(ParallelText, "parallel", None)
    second = build(corpus)
    assert np.array_equal(first.lengths, second.lengths) and torch.equal(first[5].source, second[5].source)


def test_the_vocabulary_is_of_the_training_side(corpus: Path, tmp_path: Path) -> None:
    first = build(corpus)
    same = write_corpus(tmp_path / "same")
    (same / "val.de").write_text("ganz anderer text\n" * 20, encoding="utf-8")
    assert build(same, "validation").tokenizer.dump() == first.tokenizer.dump()
    (same / "train.de").write_text("ganz anderer text\n" * 300, encoding="utf-8")
    assert build(same, "validation").tokenizer.dump() != first.tokenizer.dump()


def test_empty_lines_are_dropped_in_training_and_kept_in_evaluation(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write(tmp_path, f"{split}.de", "der hund\n\ndie katze\nein vogel\n")
        write(tmp_path, f"{split}.en", "the dog\nnothing\n  \na bird\n")
    with pytest.warns(UserWarning, match="train: 2 pairs are empty; they are left out"):
        train = build(tmp_path)
    assert len(train) == 2 and train.dropped == {"empty": 2}
    test = build(tmp_path, "test")
    assert len(test) == 4 and test[1].source.tolist() == [END] and test.texts.source[1] == ""


def test_long_pairs(tmp_path: Path) -> None:
    many = "x y z " * 30
    for split in ("train", "val", "test"):
        write(tmp_path, f"{split}.de", f"der hund\n{many}\n")
        write(tmp_path, f"{split}.en", f"the dog\n{many}\n")
    with pytest.warns(UserWarning, match="1 pairs are longer than data.max_length"):
        train = build(tmp_path, max_length=20)
    assert len(train) == 1 and train.dropped == {"longer than data.max_length": 1}
    with pytest.warns(UserWarning, match=r"1 sources have more than data.max_length=20 .*lines 2"):
        test = build(tmp_path, "test", max_length=20)
    assert len(test) == 2 and len(test[1].source) == len(test[1].targets) == 20 and test[1].source[-1] == END
    assert test.texts.target[1] == many  # scores use the whole reference
    refuses(r"none of 2 pairs is left .*data.max_length=2", build, tmp_path, max_length=2)


def test_files_of_different_length_and_short_tables_are_named(corpus: Path, tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "der hund\tthe dog\nkatze\n")
    refuses(r"train.tsv", build, tmp_path)
    folder = write_corpus(tmp_path / "short")
    write(folder, "train.en", "one line\n")
    refuses(r"train.de.*300.*train.en", build, folder)


def test_encodings_marks_and_line_ends_are_named_or_do_not_count(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "latin")
    content = lines(folder / "train.de")
    (folder / "train.de").write_bytes("\n".join([*content[:41], "groß", *content[42:]]).encode("latin1") + b"\n")
    first = next(number for number, line in enumerate(content, 1) if not line.isascii())
    refuses(rf"train.de, line {min(first, 42)} is not UTF-8 .*iconv", build, folder)
    folder = write_corpus(tmp_path / "windows")
    (folder / "test.de").write_bytes("\ufeffder hund\r\n\u2028katze\r\n".encode())
    (folder / "test.en").write_bytes(b"the dog\r\ncat")
    assert build(folder, "test").texts[:2] == (["der hund", "\u2028katze"], ["the dog", "cat"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "fr"}, r"de-fr for split 'train': expected train.de.*; it has test.de, test.en"),
        ({"target": "de"}, "must be two languages"),
        ({"target": None}, "target=None must be "),
        ({"test": "test2016"}, r"expected test2016.de; .*data.test=NAME"),
        ({"vocabulary_size": 100}, "vocabulary_size=100 must be at least 260"),
        ({"text_format": "mosess"}, "unknown data.text_format 'mosess'; did you mean 'moses'"),
        ({"path": "nowhere"}, "nowhere does not exist"),
        ({"length": 9}, "unknown option of dataset 'translation' 'length'; did you mean 'max_length'"),
    ],
)
def test_bad_options(corpus: Path, change: dict[str, Any], message: str) -> None:
    options = {"path": corpus, **SIDES, **SMALL, **change}
    refuses(message, create_dataset, "translation", "test", **options, raises=(ValueError, FileNotFoundError))


def test_multi30k_as_it_is_published(shared: Path) -> None:
    sizes = {"train": 29_000, "validation": 1014, "test": 1000}
    for split, size in sizes.items():
        data = create_dataset("multi30k", split, path=shared / "data" / "multi30k")
        assert isinstance(data, ParallelText) and len(data) == size
        assert data.languages == ("en", "de") and data.dropped == {}
    assert data.texts.source[0] == "A man in an orange hat starring at something."
    assert data.tokenizer.decode(data[0].targets) == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."
    tok = shared / "data" / "multi30k" / "tok"
    tokens = create_dataset("multi30k", "test", path=tok, text_format="moses", target="de")
    assert isinstance(tokens, ParallelText) and tokens.texts.source[0].endswith(" .")
    with pytest.raises(FileNotFoundError, match=r"test_2016.en.*test_2016_flickr"):
        create_dataset("multi30k", "test", path=shared / "data" / "multi30k", test="test_2016")


def test_iwslt14_as_it_is_prepared(shared: Path) -> None:
    options: Any = {"path": shared / "data" / "iwslt14-de-en", "train": ["train_sample", "valid"], "max_length": 512}
    data = create_dataset("iwslt14", "test", **options)
    assert isinstance(data, ParallelText) and len(data) == 6750 and data.text_format == "moses"
    assert data.texts.target[3] == "we &apos;re all born . we all bring our children into the world ."
    assert data.tokenizer.decode(data[3].targets) == data.texts.target[3]
    assert len(data.parallel("train").source) == 8627 + 7283
