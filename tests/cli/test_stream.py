"""`cached stream`: it reads the text's tokens, and a resumed reading has the numbers of an uninterrupted one."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.made import TEXT, train_on_bytes
from common import refuses
from safetensors.torch import load_file

from cached_lab.cli.main import main
from cached_lab.data.tokenizers import Tokenizer, train_tokenizer
from cached_lab.experiments.load import load_run
from cached_lab.tasks.language import text_reader
from cached_transformers.state import named_tensors


@pytest.fixture(params=["byte", "word", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    size = {"byte": None, "word": 20, "bpe": 300}[request.param]
    return train_tokenizer(request.param, [TEXT], size, False)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_pieces_are_tokens(tmp_path: Path, tokenizer: Tokenizer, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK", 97)
    raw = TEXT.encode()
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes({"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix](raw))
    pieces = list(text_reader.text_pieces(path, tokenizer))
    want = [tokenizer.start, *tokenizer.encode(TEXT).tolist()]
    assert [i for piece in pieces for i in piece.ids] == want
    assert sum(piece.size for piece in pieces) == len(raw) and len(pieces) > 5


def test_what_cannot_be_read_in_pieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "LONGEST", 1000)
    monkeypatch.setattr(text_reader, "BLOCK", 100)
    words = train_tokenizer("word", [TEXT], None, False)
    path = tmp_path / "one_line.txt"
    path.write_text("word " * 1000)
    refuses(r"1,000.*data\.tokenizer=byte", list, text_reader.text_pieces(path, words))
    broken = tmp_path / "broken.txt.xz"
    broken.write_bytes(lzma.compress(TEXT.encode())[:-20])
    refuses(r"broken\.txt\.xz", list, text_reader.text_pieces(broken, words))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of bytes, hardly trained."""
    return train_on_bytes(tmp_path_factory.mktemp("stream"))


def test_going_on_gives_the_same_numbers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, whole, parts = tmp_path / "book.txt", tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    book.write_text(TEXT[:3000])
    size = len(TEXT[:3000].encode())
    words = ["stream", str(run), str(book), "--every", "500"]
    assert main([*words, "--state", str(whole)]) == 0
    last = capsys.readouterr().out.splitlines()
    assert last[-2].startswith(f"{size:,} tokens: loss") and "bits per byte" in last[-2] and len(last) > 6
    for tokens in ("7", "900", "601"):
        assert main([*words, "--state", str(parts), "--tokens", tokens]) == 0
    assert main([*words, "--state", str(parts)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == last[-2], "the same loss to the last digit"
    a, b = load_file(whole), load_file(parts)
    # The sum of a double depends on nothing but its order, which is the same.
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert main([*words, "--state", str(parts)]) == 0
    assert "nothing new to read" in capsys.readouterr().out
    names = {f"state.{name}" for name, _ in named_tensors(load_run(run)[1].init_state(1))}  # type: ignore[operator]
    assert names <= set(a) and np.isfinite(a["numbers"]).all(), "the state of one row"


@pytest.mark.usefixtures("no_run_reports")
def test_unknown_words_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_on_bytes(tmp_path, "data.tokenizer=word", "data.vocabulary_size=8", "training.metric=perplexity")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    assert 0.1 < json.loads(capsys.readouterr().out)["unknown"] < 0.9
    assert main(["evaluate", str(run)]) == 0
    assert "unknown words (<unk>): " in capsys.readouterr().out


def test_along_diagonals_it_reads_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a state goes on in either order. Of one layer there is nothing to run at once."""
    book, deep = tmp_path / "book.txt", train_on_bytes(tmp_path, "model.depth=2")
    book.write_text(TEXT[:700])
    words = [str(book), "--every", "200"]
    diagonal = ["--schedule", "diagonal"]
    capsys.readouterr()
    assert main(["stream", str(deep), *words, "--state", str(tmp_path / "a.safetensors")]) == 0
    plain = capsys.readouterr().out.splitlines()
    parts = ["stream", str(deep), *words, "--state", str(tmp_path / "b.safetensors")]
    assert main([*parts, *diagonal, "--tokens", "300"]) == main(parts) == 0
    assert capsys.readouterr().out.splitlines()[-2] == plain[-2]
    assert main(["stream", str(run), *words, *diagonal, "--state", str(tmp_path / "c.safetensors")]) == 2
    assert "no two layers could run at once: there is one" in capsys.readouterr().err


def test_a_state_of_something_else_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers below 1 are refused too."""
    book, other, state = tmp_path / "book.txt", tmp_path / "other.txt", tmp_path / "state.safetensors"
    book.write_text(TEXT)
    other.write_text(TEXT[5:])
    assert main(["stream", str(run), str(book), "--state", str(state), "--tokens", "50"]) == 0
    for option in ("--every", "--tokens", "--segment-length"):
        assert main(["stream", str(run), str(book), option, "0"]) == 2
        assert f"{option} 0 must be at least 1" in capsys.readouterr().err
    assert main(["stream", str(run), str(other), "--state", str(state)]) == 2
    assert "belongs to another run, checkpoint, file or segment length" in capsys.readouterr().err
    assert main(["stream", str(run), str(book), "--state", str(state), "--segment-length", "5"]) == 2
    assert main(["stream", str(run), str(book), "--state", str(state)]) == 0
    book.write_text(TEXT[:4200])
    assert main(["stream", str(run), str(book), "--state", str(state)]) == 2
    assert "is shorter than what was read of it before" in capsys.readouterr().err
    state.write_bytes(state.read_bytes()[:100])
    assert main(["stream", str(run), str(book), "--state", str(state)]) == 2
    assert "is no whole state file" in capsys.readouterr().err
    assert main(["stream", str(run), str(tmp_path / "none.txt")]) == 2
    assert "is not a file; give the text" in capsys.readouterr().err
    (run / "tokenizer.json").rename(run / "hidden.json")
    try:
        assert main(["stream", str(run), str(book)]) == 2
        assert "it is not a run of a language model on text" in capsys.readouterr().err
    finally:
        (run / "hidden.json").rename(run / "tokenizer.json")
