"""Text data sets: finding files, tokenizers, documents, and refused options."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cached_lab.data.text_files import find_texts, split_of
from cached_lab.data.tokenizers import BytePairTokenizer, ByteTokenizer, WordTokenizer, load_tokenizer
from cached_lab.tasks import create_dataset

SPLITS = ("train", "validation", "test")
TRAIN = " \n = One = \n \n a b c . \n a <unk> d ? \n \n = Two = \n \n = = Part = = \n \n a b \n"
VALID = " \n = Three = \n \n a zebra . \n"
TEST = " \n = Four = \n \n b b b \n"


def write_splits(folder: Path, form: str = "wiki.{}.tokens"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in zip(("train", "valid", "test"), (TRAIN, VALID, TEST), strict=True):
        (folder / form.format(split)).write_text(text, encoding="utf-8")
    return folder


def text_of(dataset) -> str:
    return dataset.tokenizer.decode(dataset.tokens.tolist())


def test_words_are_ranked_and_rare_ones_unknown(tmp_path):
    data = create_dataset("wikitext2", "validation", path=write_splits(tmp_path), vocabulary_size=5)
    # = occurs 8 times, a 3 times, then b (2): with <unk> and <eos> that makes five.
    assert data.tokenizer.words == ["<unk>", "<eos>", "=", "a", "b"]
    assert data.tokens.tolist() == [1, 2, 0, 2, 1, 1, 3, 0, 0, 1]
    assert text_of(data) == "\n= <unk> =\n\na <unk> <unk>\n"


def test_tokenizers_keep_line_ends_punctuation_and_bytes():
    tokenizer = WordTokenizer.train(["a b\n\nc"], None, False)
    assert tokenizer.encode("a b\n\nc\n").tolist() == [*tokenizer.encode("a b\n\nc").tolist()] == [2, 3, 1, 1, 4, 1]
    assert tokenizer.encode("a\u2028b\x0cc").tolist() == [2, 3, 4, 1]  # only a line feed ends a line
    tokenizer = WordTokenizer.train(["It's so, isn't it?"], None, True)
    assert set(tokenizer.words[2:]) == {"It's", "so", ",", "isn't", "it", "?"}
    assert [tokenizer.words[i] for i in tokenizer.sentence_ends] == ["?"]
    text = bytes(range(256)).decode("utf-8", "surrogateescape")
    assert ByteTokenizer().encode(text).tolist() == list(range(256))
    assert ByteTokenizer().decode(ByteTokenizer().encode("naïve\n")) == "naïve\n"


@pytest.mark.parametrize("text", ["Hello  world!\n\n\n It's 5.\t\n", "a\nb\nc " * 9, "naïve — ﬁn 漢字 <eos> <unk>\n"])
def test_byte_pairs_come_back_too(text):
    tokenizer = BytePairTokenizer.train(["Hello world. It's me.\n" * 20], 300)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens[-1] == tokenizer.start and (tokens[:-1] != tokenizer.start).all()
    assert tokenizer.vocabulary <= 300
    assert load_tokenizer(tokenizer.dump()).encode(text).tolist() == tokens.tolist()


def test_long_text_is_encoded_in_chunks_as_if_it_were_one(monkeypatch):
    text = "Some words, \n\n  and more.\nA line\n\nlast one\n" * 30
    tokenizer = BytePairTokenizer.train([text], 320)
    whole = tokenizer.encode(text)
    monkeypatch.setattr("cached_lab.data.tokenizers._CHUNK", 20)
    assert tokenizer.encode(text).tolist() == whole.tolist()


@pytest.mark.parametrize("kind", ["word", "byte", "bpe"])
def test_ends_of_sentences_and_paragraphs_are_told(tmp_path, kind):
    folder = write_splits(tmp_path)
    data = create_dataset("wikitext2", "train", path=folder, tokenizer=kind, vocabulary_size={"bpe": 300}.get(kind))
    told = data.describe()
    sentence, paragraph = ({data.tokenizer.decode([i]) for i in told[f"{n}_ends"]} for n in ("sentence", "paragraph"))
    assert {s.strip() for s in sentence} >= {".", "?"}
    assert any("\n" in p for p in paragraph)
    assert told["vocabulary"] == data.tokenizer.vocabulary > int(data.tokens.max())
    assert json.loads(json.dumps(told, default=list))["documents"] == 2


def test_lines_of_the_penn_treebank_are_sentences(tmp_path):
    data = create_dataset("ptb", "train", path=write_splits(tmp_path, "ptb.{}.txt"))
    assert data.describe()["sentence_ends"] == (1,) and data.describe()["paragraph_ends"] == ()
    assert len(data.starts) == 1


def packed(folder: Path, form: str) -> Path:
    plain = write_splits(folder / "plain", "{}.txt")
    target = folder / "packed"
    target.mkdir()
    if form in ("xz", "gz", "bz2"):
        compress = {"xz": lzma.compress, "gz": gzip.compress, "bz2": bz2.compress}[form]
        for file in plain.iterdir():
            (target / f"{file.name}.{form}").write_bytes(compress(file.read_bytes()))
    elif form == "zip":
        with zipfile.ZipFile(target / "all.zip", "w") as archive:
            for file in plain.iterdir():
                archive.write(file, f"wikitext-2/{file.name}")
                archive.writestr(f"__MACOSX/._{file.name}", b"junk")
    else:
        with tarfile.open(target / f"all.{form}", f"w:{form.removeprefix('tar').removeprefix('.')}") as archive:
            for file in plain.iterdir():
                archive.add(file, f"./{file.name}")
    return target


@pytest.mark.parametrize("form", ["xz", "gz", "bz2", "zip", "tar", "tar.xz", "tar.gz"])
def test_every_packing_gives_the_same_text(tmp_path, form):
    folder = packed(tmp_path, form)
    for split, text in zip(SPLITS, (TRAIN, VALID, TEST), strict=True):
        for path in (folder, *(folder.iterdir() if "tar" in form or form == "zip" else ())):
            data = create_dataset("wikitext2", split, path=path, tokenizer="byte")
            assert data.tokens.tobytes() == text.encode()


@pytest.mark.parametrize("form", ["xz", "gz", "bz2", "zip", "tar.xz"])
def test_what_unpacks_to_more_than_the_bound_is_refused_with_the_way_to_raise_it(tmp_path, monkeypatch, form):
    folder = packed(tmp_path, form)
    for bound, said in (("0", f"{form} unpacks to more than 0 GiB.*UNPACKED_GIB"), ("x", "UNPACKED_GIB='x'")):
        monkeypatch.setenv("CACHED_TRANSFORMERS_UNPACKED_GIB", bound)
        with pytest.raises(ValueError, match=said.replace("zip ", "zip:.* ")):
            create_dataset("wikitext2", "train", path=folder, tokenizer="byte")


def test_splits_are_recognised_by_whole_words(tmp_path):
    names = {"training.txt": "train", "wiki.valid.raw": "validation", "test/1.txt": "test", "latest.txt": None}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert {text.name: split_of(text) for text in find_texts(tmp_path)} == names


def test_ids_are_kept_by_content_and_options(tmp_path, cache):
    folder = write_splits(tmp_path / "a")
    first = create_dataset("wikitext2", "train", path=folder)
    assert len(list(cache.iterdir())) == 2
    again = create_dataset("wikitext2", "train", path=write_splits(tmp_path / "b"))
    assert len(list(cache.iterdir())) == 2 and again.tokens.tolist() == first.tokens.tolist()
    create_dataset("wikitext2", "train", path=folder, vocabulary_size=4)
    assert len(list(cache.iterdir())) == 4
    (folder / "wiki.train.tokens").write_text("other text\n", encoding="utf-8")
    assert create_dataset("wikitext2", "train", path=folder).counts["tokens"] == 3


def test_articles_begin_at_titles_and_words_are_of_the_training_text(tmp_path):
    data = create_dataset("wikitext2", "train", path=write_splits(tmp_path), tokenizer="byte")
    whole = data.tokens.tobytes().decode()
    assert whole == TRAIN and data.starts.tolist() == [0, TRAIN.index(" = Two")]
    for split in SPLITS:
        data = create_dataset("wikitext2", split, path=write_splits(tmp_path))
        assert "zebra" not in data.tokenizer.words and data.tokenizer.vocabulary == 12


def test_a_byte_file_is_cut_ninety_five_five(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
    (tmp_path / "enwik8").write_bytes(content)
    parts = [create_dataset("enwik8", split, path=tmp_path / "enwik8").tokens.tobytes() for split in SPLITS]
    assert [len(part) for part in parts] == [9000, 500, 500] and b"".join(parts) == content
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", content)
    assert create_dataset("enwik8", "test", path=tmp_path / "enwik8.zip").tokens.tobytes() == content[-500:]


def test_the_ends_of_texts_are_held_out(tmp_path):
    texts = {name: f"{name} " * 100 for name in "abcd"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    tails = [create_dataset("text", s, path=tmp_path, tokenizer="byte") for s in SPLITS]
    assert [len(tail.starts) for tail in tails] == [4, 4, 4]
    for index, text in enumerate(texts.values()):
        pieces = (np.split(tail.tokens, tail.starts[1:])[index] for tail in tails)
        assert b"".join(piece.tobytes() for piece in pieces).decode() == text


def test_folders_of_the_splits_are_taken_as_such(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "1.txt").write_text(f"{split}\n", encoding="utf-8")
    assert text_of(create_dataset("text", "train", path=tmp_path)) == "train\n"


def test_counts_and_scores_do_not_depend_on_the_tokenizer(tmp_path):
    folder = write_splits(tmp_path)
    data = {
        k: create_dataset("wikitext2", "test", path=folder, tokenizer=k, vocabulary_size=260 if k == "bpe" else None)
        for k in ("word", "byte", "bpe")
    }
    assert {(d.counts["words"], d.counts["bytes"]) for d in data.values()} == {(10, len(TEST))}
    assert data["word"].counts["tokens"] == 10 and data["byte"].counts["tokens"] == len(TEST)
    scores = {k: d.scores(30.0, d.counts["tokens"]) for k, d in data.items()}
    assert scores["word"].keys() == {"loss", "perplexity"}
    assert scores["bpe"]["word_perplexity"] == pytest.approx(np.exp(3.0))
    assert scores["byte"]["bits_per_byte"] == pytest.approx(scores["bpe"]["bits_per_byte"])
    assert scores["byte"]["bits_per_byte"] == pytest.approx(30 / np.log(2) / len(TEST))


def test_the_unigram_baseline(tmp_path):
    folder = write_splits(tmp_path)
    train, test = (create_dataset("wikitext2", split, path=folder) for split in ("train", "test"))
    counts = np.bincount(train.tokens, minlength=12) + 1.0
    expected = -np.mean([np.log(counts[t] / counts.sum()) for t in test.tokens])
    assert test.baselines(train)["unigram"]["loss"] == pytest.approx(expected)


def test_wikitext_has_the_published_counts(shared):
    path = shared / "data" / "wikitext-2"
    sizes = {split: create_dataset("wikitext2", split, path=path) for split in ("validation", "test")}
    assert [len(d) for d in sizes.values()] == [217_646, 245_569]
    assert [len(d.starts) for d in sizes.values()] == [60, 60]
    assert sizes["test"].tokenizer.vocabulary == 33_278


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("wikitext2", {"path": "nowhere"}, FileNotFoundError, "nowhere does not exist; give data.path="),
        ("wikitext2", {"path": "empty"}, FileNotFoundError, "holds no text"),
        ("wikitext2", {"path": "half"}, FileNotFoundError, "no text for split 'train'"),
        ("wikitext2", {"path": "twice"}, ValueError, "several texts are named after split 'train'"),
        ("wikitext2", {"path": "blank"}, ValueError, "train.txt is empty; remove it"),
        ("wikitext2", {"path": "latin"}, ValueError, "is not UTF-8 (byte 1); convert it, or read it with"),
        ("wikitext2", {"path": "wide"}, ValueError, "train.txt is UTF-16, not UTF-8"),
        ("text", {"path": "wide", "tokenizer": "byte"}, ValueError, "train.txt is UTF-16, not UTF-8"),
        ("wikitext2", {"path": "damaged"}, ValueError, "cannot be read"),
        ("wikitext2", {"tokenizer": "words"}, ValueError, "unknown tokenizer 'words'; did you mean 'word'"),
        ("wikitext2", {"vocabulary_size": 2}, ValueError, "data.vocabulary_size=2 must be at least 3"),
        ("wikitext2", {"tokenizer": "byte", "vocabulary_size": 99}, ValueError, "data.vocabulary_size=99"),
        ("wikitext2", {"tokenizer": "bpe", "vocabulary_size": 99}, ValueError, "at least 257 byte pairs"),
        ("wikitext2", {"reset": "always"}, ValueError, "data.reset='always' must be one of 'never'"),
        ("text", {"path": "two", "test_fraction": 0.97}, ValueError, "must add up to less than 1"),
        ("enwik8", {"path": "two"}, ValueError, "holds 2 texts (a.txt, b.txt); give one file"),
    ],
)
def test_bad_input_is_named_with_the_way_out(tmp_path, monkeypatch, name, options, error, message):
    monkeypatch.chdir(tmp_path)
    write_splits(Path("good"))
    files = {"half/valid.txt": b"a", "wide/train.txt": "a b\n".encode("utf-16"),
             "twice/train.txt": b"a", "twice/b.train.txt": b"a", "blank/train.txt": b" \n",
             "latin/train.txt": b"a\xe9\xe9 b", "damaged/train.txt.xz": b"not xz", "two/a.txt": b"a",
             "two/b.txt": b"b", "empty/nothing": b""}  # fmt: skip
    for file, content in files.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(content)
    with pytest.raises(error) as caught:
        create_dataset(name, "train", **{"path": "good", **options})
    assert message in str(caught.value)
