"""`cached stream`: tokens of the text, and a resumed reading as an uninterrupted one; `cached evaluate`."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.made import TEXT, train_on_bytes
from common import refuses
from safetensors.torch import load_file

from cached_lab.cli.main import main
from cached_lab.data.tokenizers import Tokenizer, train_tokenizer
from cached_lab.experiments.evaluate import Evaluation
from cached_lab.experiments.load import load_run
from cached_lab.tasks.language import text_reader
from cached_lab.tasks.recipes import config_from_dict
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


pytestmark = pytest.mark.usefixtures("no_run_reports")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, no_run_reports: None) -> Path:
    """A run without a memory, which has hardly trained."""
    return train_on_bytes(tmp_path_factory.mktemp("trained"), "model.memory=null", "training.steps=20")


def evaluated(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", str(trained), *words, "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["evaluate", str(trained), *words, "--device", "cpu"]) != 0
    return capsys.readouterr().err


def test_windows_read_on_and_one_of_a_segment_is_that_of_transformer_xl(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"none": evaluated(trained, capsys)["scores"][0]["loss"]}
    for name in ("streaming_llm", "tova", "h2o", "transformer_xl"):
        result = evaluated(trained, capsys, "--with-memory", name, f"{name}.length=5")
        assert result["memory"] == {"name": name, "relative": False, "length": 5}
        losses[name] = result["scores"][0]["loss"]
        assert len(result["scores"][0]["carried"]) > 3  # the loss by segments read before
    assert len(set(losses.values())) == len(losses), losses
    # Without sinks, StreamingLLM is a window: with rotary or no positions, Transformer-XL's of the same length.
    sizes = {"streaming_llm": ["streaming_llm.length=6", "streaming_llm.sinks=0"], "transformer_xl": []}
    sizes["transformer_xl"].append("transformer_xl.length=6")
    found = [evaluated(trained, capsys, "--with-memory", name, *more)["scores"][0] for name, more in sizes.items()]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--with-memory", "rmt"], ["memory 'rmt' has weights", "streaming_llm, tova, h2o"]),
        (["--with-memory", "no_such"], ["no_such"]),
        (["tova.length=5"], ["--output-cache or --with-memory"]),
        (["--with-memory", "tova", "tova.size=5"], ["unknown option of memory 'tova' 'size'"]),
        (["--with-memory", "tova", "--output-cache", "neural"], ["--with-memory"]),
    ],
)
def test_unfit_memories_are_refused(trained: Path, capsys, words: list[str], messages: list[str]) -> None:
    said = refused(trained, capsys, *words)
    assert all(message in said for message in messages)


def test_a_model_that_has_a_memory_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "was trained with the memory" in refused(train_on_bytes(tmp_path), capsys, "--with-memory", "tova")


def test_a_split_that_is_absent_is_refused_with_the_one_that_is_there(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
    tree = {
        "name": "run",
        "data": {"name": "image_folder", "path": str(tmp_path / "images"), "image_size": 8},
        "model": {"name": "vision_transformer", "patch_size": 4, "width": 8, "depth": 1, "heads": 1},
        "training": {"steps": 1, "batch_size": 1, "test": "none"},
    }
    with pytest.raises(ValueError, match=r"training.test=none"):
        Evaluation(tmp_path, config_from_dict(tree), "best", "test", ["carry"]).score("cpu")
