"""`cached chat` and `cached ask`: turns of the template, streams, commands, signals and files; blocks found again."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from real_weights import TEXT, glass, glass_folder

from cached_lab.cli.main import main
from cached_lab.experiments.chat import COMMANDS, Chat
from cached_transformers import Session, add_memory
from cached_transformers.state import named_tensors

TEMPLATE = (
    "{% if messages[0].role != 'system' %}system\nOnce upon a time.<eos>\n{% endif %}{% for m in messages %}"
    "{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
PROMPT = r"\[([\d,]+) tokens(?:  [\d,]+ tokens/s)?  [\d.]+ MiB\] > $"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Glass with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "glass"
    model, tokenizer = glass()
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(path), tokenizer.save_pretrained(path)
    return path


def opened(folder: Path) -> Chat:
    return Chat(str(folder), None, None, torch.device("cpu"), tokens=12, temperature=0.0)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command with lines of a pipe; return its output, or its errors for another status than 0."""

    def run(status: int, lines: bytes, *words: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
            assert main([*map(str, words)]) == status
        out, run.err = capsys.readouterr()  # type: ignore[attr-defined]
        return run.err if status else out  # type: ignore[attr-defined]

    return run


def test_the_text_is_that_of_the_template(folder: Path) -> None:
    """Also after answers at their limit of tokens, which the next turn closes, and after one that ends itself."""
    chat, talk = opened(folder), []
    for message in ("Alice was tired.", "Who was the Queen?", "And then?"):
        said: list[str] = []
        if message == "And then?":
            chat.session.read(torch.tensor([[chat.end]]))
        chat.answer(chat.turn(message), said.append)
        assert len(said) == 13
        talk += [{"role": "user", "content": message}, {"role": "assistant", "content": "".join(said)[:-1]}]
    whole = chat.tokenizer.apply_chat_template(talk, tokenize=False)
    ids = chat.session.partial_1N[0].tolist()
    assert chat.tokenizer.decode([*ids, chat.end]) + "\n" == whole
    assert chat.words.encode(whole)[: len(ids)] == ids
    chat.ends.add(ids[-3])
    chat.session.rewind(Session(chat.host).mark())
    chat.answer(ids[:-12], said.append)
    assert chat.session.partial_1N[0].tolist() == ids[:-2] and chat.laps[-1][0] == 10


def test_commands(folder: Path, tmp_path: Path) -> None:
    chat = opened(folder)
    chat.answer(chat.turn("Alice was tired."), str)
    begun, file = chat.session.tokens, tmp_path / "talk"
    assert f"{begun} tokens" in chat.command("/mark")
    assert [str(begun) in chat.command(line) for line in (f"/save {file}", "/fork two")] == [True, True]
    chat.answer(chat.turn("Who was she?"), str)
    longer = chat.session.partial_1N
    assert f": {begun} " in chat.command("/fork main") and f": {longer.shape[1]} " in chat.command("/fork two")
    for line in ("/rewind", f"/load {file}"):
        chat.command(line)
        assert chat.session.tokens == begun
        chat.answer(chat.turn("Who was she?"), str)
        assert torch.equal(chat.session.partial_1N, longer)
    assert "block_retrieval" in chat.command("/memory")
    assert all(name in chat.command("/help") for name in COMMANDS)
    refuses("'/rewnd'.*'/rewind'", chat.command, "/rewnd")
    refuses("'mork'.*'mark'", chat.command, "/rewind mork")
    refuses("none", chat.command, f"/load {tmp_path / 'none'}", raises=FileNotFoundError)


def test_a_pipe_gets_answers_only_and_a_file_continues(folder: Path, tmp_path: Path, call: Any) -> None:
    words = ["chat", folder, "--tokens", 9]
    words += ["--segment-length", 16, "block_retrieval.recent=8", "block_retrieval.block=4"]
    whole = call(0, b"Alice was tired.\n/mark\n/nosuch\nthe \xff queen\n\nWho was she?\n", *words)
    assert re.search(r"'/nosuch'.*\n.*UTF-8.*\n18 tokens, \d+ tokens/s\n$", call.err)
    words += ["--state", tmp_path / "talk"]
    parts = [call(0, line, *words) for line in (b"Alice was tired.\n/exit\nno", b"Who was she?")]
    assert "".join(parts) == whole
    assert "--temperature" in call(2, b"", *words, "--top-k", 3)
    other = call(2, b"", *words[:4], "--with-memory", "streaming_llm", *words[-2:])
    assert str(tmp_path / "talk") in other and other.count("error:") == 1
    assert "cached generate" in call(2, b"", "chat", glass_folder())


def test_an_error_loses_no_answer(folder: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "command", lambda chat, line: 1 / 0)
    call(70, b"Alice was tired.\n/mark\n", "chat", folder, "--tokens", 5, "--state", tmp_path / "talk")
    monkeypatch.undo()
    (chat := opened(folder)).command(f"/load {tmp_path / 'talk'}")
    assert chat.session.tokens == 33 and chat.turn("And?")[0] == chat.end


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *words: object) -> None:
        self.child, self.fd = pty.fork()
        if self.child == 0:
            paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
            program = [sys.executable, "-W", "ignore", "-m", "cached_lab.cli.main", "chat", *map(str, words)]
            os.execve(sys.executable, program, {**os.environ, **paths})

    def until(self, pattern: str) -> re.Match[str]:
        text, end = "", time.monotonic() + 120
        while not (found := re.search(pattern, text)):
            assert select.select([self.fd], [], [], max(0, end - time.monotonic()))[0], text
            text += os.read(self.fd, 4096).decode().replace("\r\n", "\n")
        return found

    def status(self, keys: str = "") -> int:
        """Type keys until the chat ends: Python loses a signal between readline's prompt and its select()."""
        for tick in range(240):
            os.write(self.fd, keys.encode() if tick % 20 == 0 else b"")
            time.sleep(0.5)
            if (ended := os.waitpid(self.child, os.WNOHANG))[0]:
                return os.waitstatus_to_exitcode(ended[1])
        raise AssertionError("the chat goes on")

    def type(self, text: str, pattern: str = PROMPT) -> re.Match[str]:
        os.write(self.fd, text.encode())
        return self.until(pattern)


def test_a_terminal_and_its_signals(folder: Path, tmp_path: Path) -> None:
    words = [folder, "--tokens", 3000, "--state", tmp_path / "talk"]
    terminal = Terminal(*words)
    assert terminal.until(PROMPT)[1] == "0"
    terminal.type("Alice was tired.\n", r"tired\.\n[^\[]{40}")  # streamed
    stopped = terminal.type("\x03")
    assert "tokens/s" in stopped[0] and 20 < int(stopped[1].replace(",", "")) < 3000
    terminal.type("/nosuch\n", "'/nosuch'[^[]*" + PROMPT)
    terminal.type("Who was she?\n", r"she\?\n[^\[]{20}")
    os.kill(terminal.child, signal.SIGTERM)
    assert terminal.status() == 128 + signal.SIGTERM
    terminal = Terminal(*words)
    assert int(terminal.until(PROMPT)[1].replace(",", "")) > int(stopped[1].replace(",", ""))
    assert terminal.status("\x03") == 0


def test_questions_about_a_text(folder: Path, tmp_path: Path, call: Any) -> None:
    context, state = tmp_path / "context", tmp_path / "state"
    context.write_text(TEXT * 3, encoding="utf-8")
    for model in (folder, glass_folder()):  # turns of the template, and plain text
        words = ["ask", model, "--context", context, "--tokens", 8, "--state", state]
        answers = [call(0, lines, *words) for lines in (b"Who?\nWhere was she?\n", b"Where was she?\nWho?\n")]
        assert re.search(r"\d+ tokens read once in ([\d.]+) s; 2 questions.* 2 x \1 =", call.err)
        one = call(0, b"Who?\n", *words[:-2])
        assert answers[0].startswith(one) and answers[1] == answers[0].removeprefix(one) + one
        assert str(state) in call(2, b"", *words, "--with-memory", "tova")
        context.write_text(TEXT * 3 + "!", encoding="utf-8")
        assert str(state) in call(2, b"", *words)
        state.unlink(), context.write_text(TEXT * 3, encoding="utf-8")
    context.write_bytes(b"\xff")
    assert "UTF-8" in call(2, b"", *words) and "--context" in call(2, b"", *words[:2])


def test_the_block_with_the_fact_is_found_again() -> None:
    """Many blocks later a repetition of the fact chooses its blocks; the last tokens do not tell the same."""
    _, tokenizer = glass()
    fact = tokenizer("The White Rabbit hid the golden watch under the old oak tree.\n")["input_ids"]
    talk = tokenizer(("The Queen said nothing, and the King looked at the cards. " * 3 + TEXT) * 3)["input_ids"]
    asked = tokenizer("\nThe White Rabbit hid the golden watch under the")["input_ids"]
    logits_1V = []
    block = {"name": "block_retrieval", "sinks": 2, "recent": 30, "block": 8, "topk": 2}
    for memory in ({"name": "streaming_llm", "sinks": 2, "length": 39}, block):
        session = Session(add_memory(glass()[0], memory, segment_length=32))
        session.read(torch.tensor([[*fact, *talk, *asked]]))
        next(session.stream(tokens=1, temperature=0.0))
        out = session.model(session.partial_1N[:, :-1], memory_state=session.state)
        logits_1V.append(out.logits[:, -1].detach())
    state = dict(named_tensors(session.state))
    chosen, written = state["model.chosen_BUK"][0, 0].tolist(), int(state["model.written_B"])
    assert {*chosen} & {*range(-(-(len(fact) - 2) // 8))} and written > 40
    assert (logits_1V[0] - logits_1V[1]).abs().max() > 0.1
