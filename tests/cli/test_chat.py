"""`cached chat` and `cached ask`: the answers are those of a model that reads the whole chat again."""

from __future__ import annotations

import io
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library
from integrations.transformers_hosts import byte_tokenizer
from launch import SOURCE

from cached_lab.cli.main import main
from cached_lab.experiments.chat import Conversation, PlainTurns, TemplateTurns, load_chat_model
from cached_transformers import Session, add_memory, generate

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEGMENT, TOKENS = 32, 12
PLACE = torch.device("cpu")
TURNS = ["My name is Anna.", "I live in Bremen, and I like bridges.", "Where do I live?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("chat") / "model")


def made(folder: Path, seed: int = 0, memory: dict[str, Any] | None = None, template: str | None = TEMPLATE) -> Path:
    """A random Llama that writes letters only, so that the text of an answer tells its tokens."""
    transformers = library("transformers")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": ["<|start|>"]})
    tokenizer.chat_template = template
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 4 * SEGMENT}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends, initializer_range=0.4)).eval()
    with torch.no_grad():
        model.lm_head.weight[sorted({*range(len(tokenizer))} - {*tokenizer(LETTERS)["input_ids"]})] = 0
    if memory is not None:
        add_memory(model, memory, segment_length=SEGMENT)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path, **options: Any) -> tuple[Conversation, Any]:
    model, tokenizer = load_chat_model(str(folder), None, PLACE)
    given = {"tokens": TOKENS, "temperature": 0.0, "seed": 0, **options}
    return Conversation(model, tokenizer, TemplateTurns(tokenizer, None), **given), tokenizer


@pytest.fixture(scope="module")
def twin(folder: Path) -> Callable[[list[str]], list[str]]:
    """Slow twin: for each answer the whole chat is rendered and read again."""
    conversation, tokenizer = loaded(folder)

    def answers(turns: list[str]) -> list[str]:
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            prompt = torch.tensor([ids])
            found = generate(conversation.model, prompt, tokens=TOKENS, temperature=0, segment_length=SEGMENT)
            messages.append({"role": "assistant", "content": tokenizer.decode(found.tokens[0])})
        return [message["content"] for message in messages[1::2]]

    return answers


Call = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process with lines of standard input: status, output, errors."""

    def run(command: str, *words: object, lines: list[str] = TURNS) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main([command, "--tokens", str(TOKENS), "--temperature", "0", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_a_pipe_gets_the_answers_only(folder: Path, call: Call, twin: Any) -> None:
    status, out, _ = call("chat", folder, lines=[*TURNS[:1], "", *TURNS[1:]])
    assert status == 0 and out.splitlines() == twin(TURNS) and len({*out.splitlines()}) == len(TURNS)


def test_the_chat_is_never_read_again(folder: Path) -> None:
    """Each token is read once, and once more with its segment; and the ids are those of the chat template."""
    conversation, tokenizer = loaded(folder)
    sizes: list[int] = []
    read: list[int] = []
    conversation.model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: sizes.append(out.shape[1]))
    hear, messages = conversation.read, []
    conversation.read = lambda ids: (read.extend(ids), hear(ids))[1]  # type: ignore[method-assign, func-returns-value]
    for number, turn in enumerate(TURNS * 4):
        conversation.hear(turn)
        messages.append({"role": "user", "content": turn})
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert read == expected, "an answer is closed once, whether it was cut or ended by itself"
        answer = "".join(conversation.answer())
        messages.append({"role": "assistant", "content": answer})
        read += tokenizer(answer)["input_ids"]
        if number % 2:
            conversation.read([tokenizer.eos_token_id])
    assert len(read) == conversation.session.tokens > 10 * SEGMENT
    assert sum(sizes) <= len(read) + SEGMENT * (len(read) // SEGMENT)


def test_a_position_and_a_seed_give_one_answer(folder: Path) -> None:
    texts = []
    for seed in (0, 0, 1):
        conversation, _ = loaded(folder, temperature=1e6, seed=seed)  # tells the random numbers
        for turn in TURNS[:2]:
            conversation.hear(turn)
            texts.append("".join(conversation.answer()))
    assert texts[:2] == texts[2:4] != texts[4:] and texts[0] != texts[1]


def test_plain_turns(tmp_path: Path, call: Call) -> None:
    folder = made(tmp_path / "base", template=None)
    status, out, error = call("chat", folder)
    assert status == 2 and out == "" and "--plain" in error.splitlines()[-1]
    status, out, _ = call("chat", folder, "--plain", "--system", "Be kind.")
    assert status == 0 and len(out.splitlines()) == len(TURNS)
    turns = PlainTurns("Be kind.")
    assert turns.first("a") == "Be kind.\n\nUser: a\nAssistant:" and turns.ended(" yes\n") and not turns.ended("\nyes")
    assert turns.following("b", "x") == "\n" + turns.following("b", "\n") == "\nUser: b\nAssistant:"


def test_a_state_is_kept_and_another_models_refused(folder: Path, tmp_path: Path, call: Call, twin: Any) -> None:
    state = tmp_path / "state"
    answers = [call("chat", folder, "--state", state, lines=[turn])[1].strip("\n") for turn in TURNS]
    assert answers == twin(TURNS)
    before = state.read_bytes()
    other = made(tmp_path / "other", seed=1)
    for words in ([other], [folder, "--memory", "streaming_llm,length=8,sinks=2"]):
        status, out, error = call("chat", *words, "--state", state)
        assert status == 2 and out == "" and error.splitlines()[-1].startswith(f"error: {state}")
        status, out, error = call("chat", *words, lines=["Hi.", f"/load {state}"])
        assert status == 2 and len(out) == TOKENS + 1 and error.splitlines()[-1].startswith(f"error: {state}")
        assert state.read_bytes() == before
    state.write_bytes(before[:99])
    assert call("chat", folder, "--state", state)[0] == 2 and state.read_bytes() == before[:99]


def test_a_models_own_memory_is_kept(tmp_path: Path, call: Call) -> None:
    own = made(tmp_path / "own", memory={"name": "streaming_llm", "length": 7, "sinks": 1})
    status, _, error = call("chat", own, lines=[*TURNS[:2], "/memory"])
    assert status == 0 and "length=7" in error and "16 of 16" in error
    assert re.search(r"own, memory=tova", call("chat", own, "--memory", "tova")[2])


@pytest.mark.parametrize(
    ("words", "lines", "says"),
    [
        (["--memory", "rmt"], TURNS, "'rmt'"),
        (["--memory", "streaming_llm,length"], TURNS, "'length'"),
        (["--memory", "streaming_llm,segment_length=x"], TURNS, "segment_length='x'"),
        (["--memory", "streaming_lm"], TURNS, "streaming_lm"),
        (["--temperature", "-1"], TURNS, "temperature=-1"),
        ([], ["/markk"], "/markk"),
        ([], ["/rewind"], "/rewind"),
        ([], ["/mark a", "/rewind b"], "/rewind b"),
        ([], ["/load"], "/load FILE"),
        ([], ["/load nowhere"], "nowhere"),
        ([], ["/save"], "--state"),
        ([], ["hi", "/save {model}/config.json"], "config.json"),
        ([], ["hi", "/fork {model}/config.json"], "config.json"),
    ],
)
def test_refusals_take_one_line(folder: Path, call: Call, words: list[str], lines: list[str], says: str) -> None:
    text = (folder / "config.json").read_text()
    status, _, error = call("chat", folder, *words, lines=[line.format(model=folder) for line in lines])
    assert status == 2 and says in error.splitlines()[-1] and "Traceback" not in error
    assert (folder / "config.json").read_text() == text


def test_no_model_is_one_line(tmp_path: Path, call: Call) -> None:
    status, _, error = call("chat", tmp_path / "none")
    assert status == 2 and str(tmp_path / "none") in error.splitlines()[-1]


def test_a_context_is_read_once_for_all_questions(
    folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, counts = tmp_path / "book", []
    context.write_text("A bridge in Bremen spans the Weser. " * 9)
    read = Session.read
    monkeypatch.setattr(Session, "read", lambda self, ids: (counts.append(ids.shape[1]), read(self, ids))[1])
    status, out, error = call("ask", folder, "--context", context, lines=["Where?", "", "And when was it?", "Where?"])
    first, blank, second, again = out.split("\n")[:-1]
    assert status == 0 and first == again != second and blank == ""
    assert re.search(r"once in [\d.]+ s.* 3 questions.*estimate", error)
    assert sum(counts) < 2 * len(context.read_text()), "once, and three questions"
    conversation, tokenizer = loaded(folder)
    messages = [{"role": "user", "content": f"{context.read_text()}\n\nAnd when was it?"}]
    conversation.read(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert "".join(conversation.answer()).split() == second.split()


def test_contexts_that_are_no_text(folder: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    status, out, error = call("ask", folder, "--context", tmp_path / "latin")
    assert status == 2 and out == "" and re.search(r"latin .*byte 2", error.splitlines()[-1])
    (tmp_path / "empty").write_text("\n")
    assert str(tmp_path / "empty") in call("ask", folder, "--context", tmp_path / "empty")[2]
    assert "--context" in call("ask", folder)[2]


class Terminal:
    """A chat in another process on a pseudo-terminal."""

    def __init__(self, *words: object) -> None:
        pty, termios, fcntl = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl"))
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))  # no line is wrapped
        path = os.pathsep.join([str(SOURCE), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "cached_lab.cli.main", "chat", *map(str, words), "--temperature", "0"]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.prompt = self.until(r"\[([\d,]+) tokens.*MiB.*\] > $")

    def until(self, pattern: str) -> str:
        """The output up to a pattern at its end."""
        text = ""
        while not re.search(pattern, text):
            text += os.read(self.master, 4096).decode(errors="replace").replace("\r", "")
        return text

    def send(self, line: str, until: str = r"tokens.*\] > $") -> str:
        """The output after a line, without its echo and the prompt."""
        os.write(self.master, f"{line}\n".encode())
        return self.until(until).partition("\n")[2].rpartition("\n")[0]

    def end(self) -> int:
        """Ctrl-D; returns the status."""
        os.write(self.master, b"\x04")
        try:
            while os.read(self.master, 4096):
                pass
        except OSError:  # the other end is closed
            pass
        return self.process.wait()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*words: object) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        os.close(one.master)


def test_a_terminal(folder: Path, tmp_path: Path, terminal: Callable[..., Terminal], twin: Any) -> None:
    """Marks, errors, files that another process continues, and Ctrl-C in the middle of an answer."""
    expected, kept, forked = twin(TURNS), tmp_path / "kept", tmp_path / "forked"
    one = terminal(folder, "--tokens", TOKENS)
    assert [one.send(turn) for turn in TURNS[:2]] == expected[:2]
    assert "mark here" in one.send("/mark here") and "error" in one.send("/nonsense")
    answers = [one.send(TURNS[2]), one.send("/rewind"), one.send(TURNS[2])]
    assert answers[::2] == expected[2:] * 2
    assert str(kept) in one.send(f"/save {kept}") and str(forked) in one.send(f"/fork {forked}")
    more = one.send("And then?")
    assert one.end() == 0 and len(more) == TOKENS

    two = terminal(folder, "--tokens", 100_000, "--state", tmp_path / "state")
    assert str(kept) in two.send(f"/load {kept}")
    counts = []
    for turn in ("And then?", "Go on."):
        os.write(two.master, f"{turn}\n".encode())
        shown = two.until(rf"\n[{LETTERS}]{{{TOKENS},}}$")
        two.process.send_signal(signal.SIGINT)
        shown += two.until(r"tokens.*\] > $")
        answer = shown.split("\n")[1]
        counts.append(len(answer.encode()))
        assert "(stopped)" in shown and (turn == "Go on." or answer.startswith(more))
    read = int(re.search(r"([\d,]+) tokens read", two.send("/memory"))[1].replace(",", ""))  # type: ignore[index]
    conversation, tokenizer = loaded(folder)
    sizes = {}
    for path in (kept, forked):
        conversation.load(path)
        sizes[path] = conversation.session.tokens
    turn = "<|end|>\n<|start|>user\n{}<|end|>\n<|start|>assistant\n"
    then, go = (len(tokenizer(turn.format(text))["input_ids"]) for text in ("And then?", "Go on."))
    assert read == sizes[kept] + then + go + sum(counts), "the shown tokens are read, and no more"
    assert sizes[forked] == sizes[kept] + then + TOKENS, "the end writes the fork"
    two.process.send_signal(signal.SIGINT)  # at the prompt
    assert two.end() == 128 + signal.SIGINT and not (tmp_path / "state").exists()
    conversation.load(kept)
    assert conversation.session.tokens == read, "the end writes the loaded file"
