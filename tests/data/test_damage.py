"""Damaged texts, labels and tokenizers end in messages that name the file."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import nn

from cached_lab.data.dataset import LabelledDataset
from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.tokenizers import ByteTokenizer, SpecialTokens, WordTokenizer, load_tokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.language.text_reader import read_tokenizer, text_pieces
from cached_lab.tasks.translation.lines import read_tokenizer as read_pair_file
from cached_lab.training.metrics import read_metrics

PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_packed_text_is_named(tmp_path, suffix, damage):
    path = tmp_path / f"a.txt{suffix}"
    content = bytearray(PACK[suffix](b"some words in a line\n" * 500))
    if damage == "flipped":
        content[len(content) // 2] ^= 0x10
    path.write_bytes({"cut": content[:-20], "flipped": content, "foreign": b"no such archive"}[damage])
    with pytest.raises(ValueError, match=rf"a.txt{suffix} cannot be read: .*; the file is damaged, fetch it again"):
        create_dataset("text", "train", path=path)
    with pytest.raises(ValueError, match=rf"a.txt{suffix} cannot be read: .*; the file is damaged, fetch it again"):
        list(text_pieces(path, ByteTokenizer()))


@pytest.mark.parametrize(
    ("label", "why"),
    [(b"9" * 20, "too large|out of bounds"), (b"1e999", "invalid literal"), (b"4" * 9, "must lie in 0..999999")],
)
def test_a_label_that_is_none_is_named(tmp_path, label, why):
    with tarfile.open(tmp_path / "train.tar", "w") as made:
        for name, content in (("0.png", b"x"), ("0.cls", label), ("1.png", b"x"), ("1.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    refuses(rf"train.tar:0\.(cls|png).*{why}", create_dataset, "image_shards", "train", path=tmp_path, image_size=8)


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(ValueError, match=r"labels reach from 0 to 3, and must lie in 0\.\.2"):
        LabelledDataset("made", "train", np.array([0, 3, 1]), 3)


FOREIGN = {
    "empty": b"",
    "no object": b"[1, 2]",
    "no kind": b"{}",
    "another kind": b'{"kind": "other"}',
    "words that are numbers": b'{"kind": "word", "words": ["<unk>", "<eos>", 3], "punctuation": true}',
    "a word twice": b'{"kind": "word", "words": ["<unk>", "<eos>", "a", "a"], "punctuation": true}',
    "no model": b'{"kind": "bpe", "model": "{}"}',
    "half a pair": b'{"kind": "pair", "model": 1}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"kind": "\xff"}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_tokenizer_is_named(tmp_path, content):
    refuses(r"tokenizer.json", load_tokenizer, content, "RUN/tokenizer.json")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    refuses(r"tokenizer.json", read_pair_file, path)


def test_a_stream_is_of_a_language_model_and_its_own_tokenizer(tmp_path):
    path, model = tmp_path / "tokenizer.json", nn.Linear(1, 1)
    path.write_bytes(PairTokenizer.train(["a b"], 261, "raw").dump())
    refuses(r"is a run on pairs of texts.*cached translate", read_tokenizer, path, model)
    path.write_bytes(SpecialTokens(ByteTokenizer()).dump())
    refuses("is a run on pairs of texts", read_tokenizer, path, model)
    model.init_state, model.vocabulary = lambda rows: torch.zeros(rows), 3
    path.write_bytes(WordTokenizer(["<unk>", "<eos>", "a", "b"], False).dump())
    refuses("has 4 ids, the model 3: it is of another run", read_tokenizer, path, model)
    path.unlink()
    refuses("is not a run of a language model on text", read_tokenizer, path, model)


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": "x", "split": "train"}', "\udcff", "[" * 9000])
def test_a_foreign_line_of_the_metrics_is_named(tmp_path: Path, line: str):
    path, good = tmp_path / "metrics.jsonl", json.dumps({"step": 1, "split": "train"})
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8", errors="surrogateescape")
    refuses(r"metrics.jsonl", read_metrics, path)
