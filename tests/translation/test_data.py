"""Parallel text in every layout, and errors that name file and line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from translation.made import write_corpus

from cached_lab.data.subwords import BEGIN, END, PAD
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
        assert data.tokenizer.decode(pair.source, source=True) == source[index]
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


def test_lengths_can_be_rounded_up(corpus: Path) -> None:
    data = build(corpus, multiple=16)
    batch = data.collate([data[0], data[1]])
    assert {t.shape[1] % 16 for t in batch} == {0}
    with pytest.raises(ValueError, match=r"max_length=64.*data.multiple=24"):
        build(corpus, multiple=24)


PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("kind", [*PACK, ".tsv", "header.tsv", "mapping", "tables", "tar", "inner tar", "moses names"])
def test_every_layout_gives_the_same_pairs(kind: str, corpus: Path, tmp_path: Path) -> None:
    expected = [build(corpus, split)[3] for split in ("train", "validation", "test")]
    path: Any = tmp_path / "other"
    path.mkdir()
    for name in ("train", "val", "test"):
        both = [corpus / f"{name}.{language}" for language in ("de", "en")]
        if kind in PACK:
            for file in both:
                (path / f"{file.name}{kind}").write_bytes(PACK[kind](file.read_bytes()))
        elif "tsv" in kind or kind == "tables":
            rows = [f"{a}\t{b}" for a, b in zip(*map(lines, both), strict=True)]
            if kind.startswith("header"):
                rows = ["id\ten\tde", *(f"7\t{b}\t{a}" for a, b in (row.split("\t") for row in rows))]
            write(path, f"{name}.tsv", "\n".join(rows) + "\n")
        elif kind == "moses names":
            for file in both:
                write(path, f"{name}.lc.de-en{file.suffix}", file.read_text(encoding="utf-8"))
    if kind in ("mapping", "tables"):
        names = {"train": "train", "validation": "val", "test": "test"}
        pairs = {s: [str(corpus / f"{n}.de"), str(corpus / f"{n}.en")] for s, n in names.items()}
        path = pairs if kind == "mapping" else {s: str(path / f"{n}.tsv") for s, n in names.items()}
    elif "tar" in kind:
        packed = path / "all.tar.xz"
        with tarfile.open(packed, "w:xz") as archive:
            for file in sorted(corpus.iterdir()):
                archive.add(file, file.name)
        path = packed if kind == "tar" else path
    for split, pair in zip(("train", "validation", "test"), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(build(path, split)[3], pair, strict=True))


def test_several_files_make_a_split(corpus: Path) -> None:
    data = build(corpus, train=["train", "val"])
    assert len(data) == 320
    assert data.tokenizer.decode(data[300].targets) == lines(corpus / "val.en")[0]
    assert len(build(corpus, limit=7)) == 7
    assert len(build(corpus, "test", limit=7)) == 30


def test_vocabularies_are_of_the_training_side_and_joint_or_not(corpus: Path, tmp_path: Path) -> None:
    joint, apart = build(corpus), build(corpus, joint=False)
    assert joint.tokenizer.joint and not apart.tokenizer.joint
    assert apart.describe()["target_vocabulary"] == apart.tokenizer.target_vocabulary
    same = write_corpus(tmp_path / "same")
    (same / "val.de").write_text("ganz anderer text\n" * 20, encoding="utf-8")
    assert build(same, "validation").tokenizer.dump() == joint.tokenizer.dump()
    (same / "train.de").write_text("ganz anderer text\n" * 300, encoding="utf-8")
    assert build(same, "validation").tokenizer.dump() != joint.tokenizer.dump()


def test_the_tokens_are_kept_on_disk(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(corpus)
    monkeypatch.setattr("cached_lab.data.subwords.train_subwords", None)
    monkeypatch.setattr(ParallelText, "parallel", None)
    second = build(corpus)
    assert np.array_equal(first.lengths, second.lengths) and torch.equal(first[5].source, second[5].source)


def test_lower_case_holds_for_references_too(corpus: Path, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "upper")
    (folder / "test.en").write_text("THE Dog\n", encoding="utf-8")
    (folder / "test.de").write_text("DER Hund\n", encoding="utf-8")
    data = build(folder, "test", lowercase=True)
    assert data.texts.source == ["der hund"] and data.texts.target == ["the dog"]
    assert data.tokenizer.decode(data[0].targets) == "the dog"
    assert data.tokenizer.encode("DER Hund").tolist() == data[0].source.tolist()


def test_empty_lines_are_dropped_in_training_and_kept_in_evaluation(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write(tmp_path, f"{split}.de", "der hund\n\ndie katze\nein vogel\n")
        write(tmp_path, f"{split}.en", "the dog\nnothing\n  \na bird\n")
    with pytest.warns(UserWarning, match="train: 2 pairs are empty; they are left out"):
        train = build(tmp_path)
    assert len(train) == 2 and train.dropped == {"empty": 2}
    test = build(tmp_path, "test")
    assert len(test) == 4 and test[1].source.tolist() == [END] and test.texts.source[1] == ""


def test_long_and_unequal_pairs(tmp_path: Path) -> None:
    many = "x y z " * 30
    for split in ("train", "val", "test"):
        write(tmp_path, f"{split}.de", f"der hund\n{many}\nder hund der hund der hund\n")
        write(tmp_path, f"{split}.en", f"the dog\n{many}\nthe\n")
    with pytest.warns(UserWarning) as found:
        train = build(tmp_path, max_length=20, max_ratio=2.0)
    assert len(train) == 1 and train.dropped == {"longer than data.max_length": 1, "beyond data.max_ratio": 1}
    assert any("1 pairs are longer than data.max_length" in str(w.message) for w in found)
    with pytest.warns(
        UserWarning, match=r"1 sources have more than data.max_length=20 tokens and are truncated .lines 2"
    ):
        test = build(tmp_path, "test", max_length=20, max_ratio=2.0)
    assert len(test) == 3 and len(test[1].source) == len(test[1].targets) == 20 and test[1].source[-1] == END
    assert test.texts.target[1] == many  # scores use the whole reference
    with pytest.raises(ValueError, match=r"none of 3 pairs is left \(0 empty, 3 longer"):
        build(tmp_path, max_length=2)


def test_files_of_different_length_are_named_with_their_counts(corpus: Path, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "short")
    write(folder, "train.en", "one line\n")
    with pytest.raises(ValueError, match=r"train.de.*300.*train.en"):
        build(folder)


def test_wrong_encodings_are_named_by_file_and_line(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "latin")
    content = lines(folder / "train.de")
    (folder / "train.de").write_bytes("\n".join([*content[:41], "groß", *content[42:]]).encode("latin1") + b"\n")
    first = next(number for number, line in enumerate(content, 1) if not line.isascii())
    with pytest.raises(ValueError, match=rf"train.de, line {min(first, 42)} is not UTF-8 .*iconv"):
        build(folder)


def test_line_ends_and_marks_of_windows_do_not_count(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "windows")
    (folder / "test.de").write_bytes("\ufeffder hund\r\n\u2028katze\r\n".encode())
    (folder / "test.en").write_bytes(b"the dog\r\ncat")
    assert build(folder, "test").texts[:2] == (["der hund", "\u2028katze"], ["the dog", "cat"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "fr"}, r"holds no de-fr for 'train': unknown language 'fr' \(known: de, en\)"),
        ({"target": "de"}, "must be two languages"),
        ({"target": None}, "data.target=None must be two languages"),
        ({"test": "test2016"}, r"expected test2016.de; it has test, train, val; name one by data.test=NAME"),
        ({"tokenizer": "bpee"}, "unknown tokenizer 'bpee'; did you mean 'bpe'"),
        ({"vocabulary_size": 100}, "vocabulary_size=100 must be at least 260"),
        ({"text_format": "mosess"}, "unknown data.text_format 'mosess'; did you mean 'moses'"),
        ({"max_ratio": 0.5}, "max_ratio=0.5 must be at least 1"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"dataset": "some/name"}, "give one of them"),
        ({"path": None}, "give one of them"),
        ({"path": "nowhere"}, "nowhere does not exist"),
        ({"path": {"train": ["a.de", "a.en"]}}, "data.path.train: a.de is no file"),
        ({"joined": True}, "unknown option of dataset 'translation' 'joined'; did you mean 'joint'"),
    ],
)
def test_bad_options(corpus: Path, change: dict[str, Any], message: str) -> None:
    options = {"path": corpus, **SIDES, **SMALL, **change}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        create_dataset("translation", "test", **options)


def test_a_table_without_a_second_column_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "der hund\tthe dog\nkatze\n")
    with pytest.raises(ValueError, match=r"train.tsv"):
        build(tmp_path)


def test_a_tokenizer_of_another_run(corpus: Path, trained: Path, tmp_path: Path) -> None:
    data = build(corpus, tokenizer=str(trained))
    assert data.tokenizer.dump() == (trained / "tokenizer.json").read_bytes()
    strange = tmp_path / "strange"
    strange.mkdir()
    library = pytest.importorskip("sentencepiece")
    with (strange / "x.model").open("wb") as model:
        words = iter(["一 二 三 四 五"] * 20)
        library.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=model, vocab_size=10, hard_vocab_limit=False, minloglevel=2
        )
    for split in ("train", "val", "test"):
        write(strange, f"{split}.de", "qqq\nzzz\n")
        write(strange, f"{split}.en", "qqq\nzzz\n")
    with pytest.raises(ValueError, match=r"data.tokenizer"):
        build(strange, tokenizer=str(strange / "x.model"))


class Rows(list[dict[str, Any]]):
    """Rows of the `datasets` library, with column names and a fingerprint."""

    _fingerprint = "f"

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


@pytest.mark.parametrize("nested", [True, False])
def test_data_of_the_hub(nested: bool, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(name: str) -> Rows:
        pairs = zip(lines(corpus / f"{name}.de"), lines(corpus / f"{name}.en"), strict=True)
        found = [{"en": b, "de": a} for a, b in pairs]
        return Rows([{"id": 1, "translation": row} for row in found] if nested else found)

    asked: list[Any] = []

    def load_dataset(name: str, config: str | None) -> dict[str, Rows]:
        asked.append((name, config))
        if name == "no/such":
            raise FileNotFoundError("no such data set")
        return {"train": rows("train"), "validation": rows("val")}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    hub = {"dataset": "some/name", "config": "de-en"}
    data = create_dataset("translation", "validation", **hub, **SIDES, **SMALL)
    assert asked[0] == ("some/name", "de-en")
    assert isinstance(data, ParallelText) and data.texts.target == lines(corpus / "val.en")
    assert torch.equal(data[2].source, build(corpus, "validation")[2].source)
    with pytest.raises(ValueError, match=r"some/name.*'test'"):
        create_dataset("translation", "test", **hub, **SIDES, **SMALL)
    with pytest.raises(ValueError, match=r"data.target.*some/name.*'fr'"):
        create_dataset("translation", "train", **hub, source="de", target="fr", **SMALL)
    with pytest.raises(ValueError, match=r"data.dataset='no/such'"):
        create_dataset("translation", "train", dataset="no/such", **SIDES, **SMALL)


def test_multi30k_as_it_is_published(shared: Path) -> None:
    sizes = {"train": 29_000, "validation": 1014, "test": 1000}
    for split, size in sizes.items():
        data = create_dataset("multi30k", split, path=shared / "data" / "multi30k", limit=2000)
        assert isinstance(data, ParallelText) and len(data) == min(size, 2000)
        assert data.languages == ("en", "de") and data.dropped == {}
    assert data.texts.source[0] == "A man in an orange hat starring at something."
    assert data.tokenizer.decode(data[0].targets) == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."
    tokens = create_dataset(
        "multi30k", "test", path=shared / "data" / "multi30k" / "tok", limit=2000, text_format="moses", target="de"
    )
    assert isinstance(tokens, ParallelText) and tokens.texts.source[0].endswith(" .")
    with pytest.raises(FileNotFoundError, match=r"test_2016.en.*test_2016_flickr.*test_2017_flickr"):
        create_dataset("multi30k", "test", path=shared / "data" / "multi30k", test="test_2016", limit=2000)


def test_iwslt14_as_it_is_prepared(shared: Path) -> None:
    options = {"path": shared / "data" / "iwslt14-de-en", "train": ["train_sample", "valid"], "max_length": 512}
    data = create_dataset("iwslt14", "test", **options, limit=2000)
    assert isinstance(data, ParallelText) and len(data) == 6750 and data.text_format == "moses"
    assert data.texts.target[3] == "we &apos;re all born . we all bring our children into the world ."
    assert data.tokenizer.decode(data[3].targets) == data.texts.target[3]
    assert len(data.parallel("train").source) == 8627 + 7283
