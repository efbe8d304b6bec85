"""`cached generate`: the text equals that of a model that reads everything again at every token, and is streamed."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.made import TEXT, train_on_bytes
from common import stirred
from integrations.hosts import library
from integrations.transformers_hosts import byte_tokenizer
from safetensors.torch import load_file

from cached_lab.cli.main import main
from cached_lab.data.tokenizers import Tokenizer, train_tokenizer
from cached_lab.experiments.load import load_run
from cached_lab.tasks.language.completion import Spelling, Writer, words_of
from cached_transformers import add_memory, generate

SEGMENT = 8
PROMPT = "It was the naïve spring"
BYTES = words_of(train_tokenizer("byte", [], None, False))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of bytes, hardly trained, whose gates are open."""
    return train_on_bytes(tmp_path_factory.mktemp("generate"))


def call(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The output of a command."""
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert re.search(r"(?:^|\n)\d+ tokens, [\d,]+ tokens/s\n$", printed.err)
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 2
    return capsys.readouterr().err


def bytes_of(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


@torch.no_grad()
def likeliest(model: Any, ids: list[int], count: int) -> list[int]:
    """Slow twin: the whole text is read again for every token, in segments as in training."""
    model.eval()
    for _ in range(count):
        state = model.init_state(1)
        for segment in torch.tensor([ids]).split(SEGMENT, 1):
            out = model(segment, state)
            state = out.state
        ids = [*ids, int(out.outputs[0, -1].argmax())]
    return ids[-count:]


def test_the_likeliest_text_is_that_of_reading_it_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, model, _ = load_run(run)
    want = likeliest(model, [ord("\n"), *PROMPT.encode()], 30)
    printed = call(capsys, run, "--prompt", PROMPT, "--tokens", 30, "--temperature", 0)
    assert printed == bytes_of(want) + "\n"


@pytest.mark.parametrize("count", [3, 7, 8])  # within a segment, at its end, one token after it
def test_a_kept_text_goes_on(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    _, model, _ = load_run(run)
    writer = Writer(model, BYTES, SEGMENT)
    ids = [ord("\n"), *PROMPT.encode()]
    first = writer.write(PROMPT, str, tokens=count, temperature=0.0).tokens[0].tolist()
    writer.session.save(tmp_path / "state")
    told: list[str] = []
    again = Writer(model, BYTES, SEGMENT, tmp_path / "state")
    second = again.write("!", told.append, tokens=9, temperature=0.0).tokens[0].tolist()
    assert first == likeliest(model, ids, count) and second == likeliest(model, [*ids, *first, ord("!")], 9)
    words = [run, "--temperature", 0, "--save-state", tmp_path / "kept"]
    call(capsys, *words, "--prompt", PROMPT, "--tokens", count)
    kept, stored = load_file(tmp_path / "kept"), load_file(tmp_path / "state")
    assert kept.keys() == stored.keys() and all(torch.equal(kept[name], stored[name]) for name in kept)
    assert call(capsys, *words, "--state", tmp_path / "kept", "--prompt", "!", "--tokens", 9) == "".join(told) + "\n"
    longer = load_file(tmp_path / "kept")
    assert any(not torch.equal(longer[name], stored[name]) for name in stored), "and is kept in turn"


def test_samples_and_beams_are_those_of_generate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [run, "--prompt", PROMPT, "--tokens", 20, "--top-k", 50, "--top-p", 0.9, "--temperature", 1.5]
    texts = [call(capsys, *words, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    _, model, _ = load_run(run)
    ids = torch.tensor([[ord("\n"), *PROMPT.encode()]])
    options = {"top_k": 50, "top_p": 0.9, "temperature": 1.5, "generator": torch.Generator().manual_seed(2)}
    found = generate(model, ids, tokens=20, segment_length=SEGMENT, **options).tokens[0].tolist()
    assert texts[2] == bytes_of(found) + "\n"
    found = generate(model, ids, tokens=6, beams=3, segment_length=SEGMENT).tokens[0].tolist()
    assert call(capsys, run, "--prompt", PROMPT, "--tokens", 6, "--beams", 3) == bytes_of(found) + "\n"


def test_a_prompt_may_be_stdin(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [run, "--tokens", 12, "--temperature", 0]
    want = call(capsys, *words, "--prompt", PROMPT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n"))
    assert call(capsys, *words) == want
    assert call(capsys, *words, "--segment-length", 5, "--prompt", PROMPT) != want


def test_it_is_told_token_by_token(run: Path) -> None:
    """Before the last token is chosen the first ones are out."""
    _, model, _ = load_run(run)
    said: list[str] = []
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(len(said)))
    found = Writer(model, BYTES, SEGMENT).write("It", said.append, tokens=5, temperature=0.0)
    assert len(said) == 6 and calls[:5] == [0, 1, 2, 3, 4]
    assert "".join(said) == bytes_of(found.tokens[0].tolist())


@pytest.mark.parametrize(("words", "terminal", "pieces"), [([], True, 7), ([], False, 1), (["--beams", "2"], True, 3)])
def test_a_terminal_shows_it_while_it_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], terminal: bool, pieces: int
) -> None:
    """Each token, what waits, and the end of the line; a file gets all at once."""
    told: list[str] = []
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(out, "write", told.append)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(run), "--prompt", "It", "--tokens", "5", *words]) == 0
    assert len(told) == pieces and told[-1].endswith("\n")


@pytest.mark.parametrize("kind", ["byte", "word", "bpe"])
def test_pieces_are_the_text_and_a_prompt_is_not_closed(kind: str) -> None:
    """The ids of a prompt are a prefix of the ids of a longer text: no end of a line or a document follows."""
    size = {"byte": None, "word": 20, "bpe": 257}[kind]
    tokenizer: Tokenizer = train_tokenizer(kind, [TEXT], size, False)
    words, text = words_of(tokenizer), "winter, naïve — too.\n\nIt was spring. 春"
    ids = words.encode(text)
    for before in (0, 3):
        growing = Spelling(tokenizer.decode, ids[:before])
        pieces = [growing.more([token]) for token in ids[before:]]
        assert "".join([tokenizer.decode(ids[:before]), *pieces, growing.rest()]) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces), "half a character"
    broken = Spelling(bytes_of, [])
    assert [broken.more([token]) for token in (0xE2, 0x82)] == ["", ""] and broken.rest() == "\ufffd"
    for prompt in ("It was", "It was spring.\n", ""):
        ids = words.encode(prompt)
        assert words.encode(f"{prompt} the" if prompt else "the")[: len(ids)] == ids
        assert prompt or not ids


def test_a_state_of_something_else_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, run, "--prompt", "a", "--tokens", 2, "--save-state", tmp_path / "state")
    words = [run, "--prompt", "b", "--state", tmp_path / "state"]
    assert "the segment_length of the saved session, here 5" in refused(capsys, *words, "--segment-length", 5)
    other = train_on_bytes(tmp_path, "optimizer.learning_rate=0.1")
    assert "was made with other weights" in refused(capsys, other, *words[1:])
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:50])
    assert "is no whole state file" in refused(capsys, *words)
    assert "give a state that --save-state has written" in refused(capsys, run, "--state", tmp_path / "none")
    assert "--tokens 0 must be at least 1" in refused(capsys, *words, "--tokens", 0)
    (tmp_path / "elsewhere").mkdir()
    assert "is not a run folder" in refused(capsys, tmp_path / "elsewhere", "--prompt", "a")


def test_a_saved_model_writes_as_its_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, model, _ = load_run(run)
    model.save_pretrained(tmp_path / "ours")
    words = ["--prompt", PROMPT, "--tokens", 12, "--temperature", 0]
    assert "has no tokenizer.json" in refused(capsys, tmp_path / "ours", *words, "--segment-length", SEGMENT)
    shutil.copy(run / "tokenizer.json", tmp_path / "ours")
    assert "give segment_length" in refused(capsys, tmp_path / "ours", *words)
    assert call(capsys, tmp_path / "ours", *words, "--segment-length", SEGMENT) == call(capsys, run, *words)


def test_a_model_of_transformers_writes_as_its_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = library("transformers")
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    add_memory(model, "rmt", length=2, segment_length=SEGMENT).eval()
    stirred(model, 0.3)
    model.save_pretrained(tmp_path / "host")
    words = [tmp_path / "host", "--prompt", PROMPT, "--tokens", 20, "--temperature", 0]
    assert "tokenizer" in refused(capsys, *words)
    byte_tokenizer().save_pretrained(tmp_path / "host")
    prompt = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    want = byte_tokenizer().decode(found[0, prompt.shape[1] :], skip_special_tokens=True)
    assert call(capsys, *words) == want + "\n"
    assert call(capsys, tmp_path / "host", "--prompt", "", "--tokens", 3, "--temperature", 0) != "\n"
    assert "is no run folder, and has one set of weights" in refused(capsys, *words, "--checkpoint", "last")
