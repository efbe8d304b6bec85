"""Texts with labels from files: tables and folders, splits that are named or dealt, tokens, and messages."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from training.small_language import CPU

from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.tasks import create_dataset
from cached_lab.tasks.documents.labelled import LabelledDocuments
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data

pytestmark = pytest.mark.usefixtures("own_cache")
TEXTS = [(f"{'good fine' if i % 2 else 'bad poor'} " + "word " * (i % 5) + str(i), "ab"[i % 2]) for i in range(40)]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))


def table(path: Path, texts: Any = TEXTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def read(path: Path, split: str = "train", **options: Any) -> LabelledDocuments:
    made = create_dataset("labelled_documents", split, path=path, segment_length=4, **options)
    assert isinstance(made, LabelledDocuments)
    return made


def texts_of(data: LabelledDocuments) -> set[tuple[str, str]]:
    """Texts with labels, as they were written."""
    return {(data.tokenizer.decode(tokens.tolist()), data.names[label]) for tokens, label in data}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz"])
def test_every_text_is_in_one_split_with_its_label(name: str, tmp_path: Path) -> None:
    path = table(tmp_path / name)
    found = [texts_of(read(path, split, tokenizer="byte")) for split in ("train", "validation", "test")]
    assert [len(part) for part in found] == [32, 4, 4]
    assert set.union(*found) == {*TEXTS}
    for part in found:
        assert sorted(label for _, label in part) == ["a"] * (len(part) // 2) + ["b"] * (len(part) // 2)


@pytest.mark.parametrize("named", [("train", "test"), ("train", "valid", "test")])
def test_splits_that_are_named_are_kept_and_others_dealt_from_training(named: tuple[str, ...], tmp_path: Path) -> None:
    parts = {"train": TEXTS[:20], "test": TEXTS[20:30], "valid": TEXTS[30:]}
    for name in named:
        table(tmp_path / "d" / f"{name}.jsonl", parts[name])
    splits = ("train", "validation", "test")
    train, validation, test = (read(tmp_path / "d", split, tokenizer="byte") for split in splits)
    assert texts_of(test) == {*TEXTS[20:30]}
    if "valid" in named:
        assert texts_of(train) == {*TEXTS[:20]} and texts_of(validation) == {*TEXTS[30:]}
    else:
        assert len(train) == 18 and texts_of(train) | texts_of(validation) == {*TEXTS[:20]}


def test_documents_are_cut_at_whole_segments(tmp_path: Path) -> None:
    data = read(table(tmp_path / "a.jsonl"))
    lengths = [len(data[index][0]) for index in range(len(data))]
    assert data.segments == 2 and max(lengths) == 8 and data.describe()["max_length"] == 4
    longest = lengths.index(8)
    assert torch.equal(data.document(longest, 1)[0], data[longest][0][:4]) and len(data.document(longest, 9)[0]) == 8
    short = read(table(tmp_path / "a.jsonl"), segments=1)
    assert short.segments == 1 and max(len(tokens) for tokens, _ in short) == 4


def test_a_vocabulary_is_of_the_training_texts_and_absence_is_said(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    train, test = read(path), read(path, "test")
    assert train.tokenizer.dump() == test.tokenizer.dump() == read(path).tokenizer.dump()  # type: ignore[attr-defined]
    assert train.vocabulary == 2 + len({word for tokens in texts_of(train) for word in tokens[0].split()})
    refuses("nowhere", read, tmp_path / "nowhere", raises=FileNotFoundError)
    table(tmp_path / "d" / "train.jsonl")
    table(tmp_path / "d" / "test.jsonl", [("text", "c")])
    refuses(r"'test'.*'c'", read, tmp_path / "d", "test")


def test_a_model_is_made_for_them_and_its_tokenizer_is_kept(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    tree = {
        "data": {"name": "labelled_documents", "path": str(path), "segment_length": 4},
        "model": {"name": "sequence_classifier", "width": 8, "depth": 1, "heads": 2, "memory": "rmt"},
        "training": {"batch_size": 4, "curriculum": [1, 2], "solved": 0.9},
    }
    config = config_from_dict(tree)
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    config = fill_from_data(config, train.describe())
    assert config.model["max_length"] == 4 and config.model["classes"] == 2
    task = make_task(config, build_model(config), train, validation, CPU)
    assert task.files() == {"tokenizer.json": train.tokenizer.dump()}
    batch = next(task.batches(0))
    assert batch.inputs.shape[1] <= 8


_AB = '{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": \n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 has no 'text', only nothing"),
        ("a.jsonl", '{"body": "x", "label": 1}\n', "line 1 has no 'text', only body, label"),
        ("a.jsonl", '{"text": "x", "label": ""}\n', "line 1 has no 'label', only text, label"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: .* must have a text, and a word or number for a label"),
        ("a.jsonl", '{"text": "x", "label": 1}\n', "the training texts have only the label '1'"),
        ("a.txt", "text", r"a.txt, line 1 is not JSON"),
        ("a.jsonl", _AB, "leaves split 'validation' empty; raise validation_fraction"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    refuses(message, read, file, "validation" if "leaves" in message else "train")
