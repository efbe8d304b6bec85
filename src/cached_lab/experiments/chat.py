"""A conversation with a pretrained decoder: turns of its chat template, streamed answers, commands and files.

The text grows by appending, and a turn depends on the last token only: a file of `Session.save` is a conversation.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cached_lab.tasks.language.completion import CONTEXT, Spelling, words_of_transformers
from cached_lab.training.interruption import stop_requests
from cached_transformers.integrations.hub import MODEL_TYPE, records_memory
from cached_transformers.models.segments import cut
from cached_transformers.models.session import Mark, Session
from cached_transformers.registry import unknown_name
from cached_transformers.state import load, named_tensors, nbytes, save

from .pretrained import remember, resolve_model

MEMORY = "block_retrieval"
COMMANDS = {
    "/mark": ("mark", "NAME: remember this position"),
    "/rewind": ("mark", "NAME: go back to a mark"),
    "/fork": ("fork", "NAME: begin a second conversation here, or go to this one; the first one is main"),
    "/save": ("chat.safetensors", "FILE: write this conversation"),
    "/load": ("chat.safetensors", "FILE: continue a saved conversation instead"),
    "/memory": ("", "name, options, size and largest tensor"),
    "/help": ("", "this list"),
    "/exit": ("", "leave"),
}
HOLE = "\u241f"  # the place of a message in a rendered template


class Chat:
    """Conversations with one model.

    Args:
        model, memory, length: see `resolve_model` and `remember`; `MEMORY` by default. options: of `Session.stream`.

    Attributes:
        session: the current conversation. end: token that ends a turn; None without a chat template.
        laps: tokens and seconds of each answer.
    """

    def __init__(
        self, model: str, memory: Mapping[str, Any] | None, length: int | None, device: torch.device, **options: Any
    ) -> None:
        self.model, self.length, self.options = model, length, options
        self.host, self.tokenizer = resolve_model(model)
        if memory is None and not records_memory(self.host.config):
            memory = {"name": MEMORY}
        remember(self.host, model, memory, length)
        self.words = words_of_transformers(self.tokenizer)
        self.session, self.name = Session(self.host.to(device), length), "main"
        self.talks: dict[str, Session] = {}
        self.marks, self.laps = dict[str, Mark](), list[tuple[int, float]]()
        told = self.host.generation_config.eos_token_id
        self.ends = {*(told if isinstance(told, list) else [told]), self.words.end} - {None}
        self.end: int | None = None
        if self.tokenizer.chat_template is None:
            self.ends |= {self.words.encode(text)[-1] for text in ("\n", "\n\n")}  # an answer is one line
            return
        try:
            self.end = self._after_answer("")[0]
        except Exception as error:
            raise ValueError(f"model={model}: its chat template fails ({error!r}); use `cached generate`") from error
        self.ends.add(self.end)

    def turn(self, message: str) -> list[int]:
        """Ids that the user's next message adds, up to the beginning of its answer; they close an answer cut short."""
        if self.session.tokens == 0:
            return self.words.encode(self._rendered(message))
        ids = self._after_answer(message)
        return ids[1:] if int(self.session.partial_1N[0, -1]) == self.end else ids

    def _after_answer(self, message: str) -> list[int]:
        """Ids from the token that ends an answer to the beginning of the next one."""
        ids = self.words.encode(self._rendered(".", HOLE, message).partition(HOLE)[2])
        closing = self.ends.union(self.tokenizer.get_added_vocab().values())
        return ids[next(place for place, token in enumerate(ids) if token in closing) :]

    def _rendered(self, *messages: str) -> str:
        """The text of a conversation that begins with the user, and the beginning of the next answer."""
        talk = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
        return str(self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))

    def answer(self, ids: list[int], say: Callable[[str], object], *, interruptible: bool = False) -> None:
        """Read ids and write an answer, which `say` receives in pieces.

        SIGINT and SIGTERM stop it between two tokens and raise `Stopped`; an `interruptible` one ignores SIGINT then.
        """
        spelling = Spelling(self.words.decode, ids[-CONTEXT:])
        with stop_requests() as stopped:
            clock, count = time.perf_counter(), 0
            self.session.read(torch.tensor([ids]))
            for token in self.session.stream(**self.options):
                count += 1
                if token not in self.ends:
                    say(spelling.more([token]))
                if stopped or token in self.ends:
                    break
            say(spelling.rest() + "\n")
            self.laps.append((count, time.perf_counter() - clock))
            if interruptible and stopped == [signal.SIGINT]:
                stopped.clear()

    def prompt(self) -> str:
        """Tokens of the conversation, speed of the last answer, and size of the state."""
        rate = f"  {self.laps[-1][0] / self.laps[-1][1]:,.0f} tokens/s" if self.laps else ""
        return f"[{self.session.tokens:,} tokens{rate}  {nbytes(self.session.state) / 2**20:,.1f} MiB] > "

    def command(self, line: str) -> str:
        """Carry out one of `COMMANDS`, and return its report (ValueError, OSError: a mistake in it)."""
        name, _, given = line.partition(" ")
        if name not in COMMANDS:
            raise ValueError(unknown_name("command", name, [*COMMANDS]))
        given = given.strip() or COMMANDS[name][0]
        if name == "/help":
            return "\n".join(f"{name} {about}" for name, (_, about) in COMMANDS.items())
        if name == "/memory":
            state, memory = self.session.state, getattr(self.host.config, MODEL_TYPE)["memory"]
            place, t = max(named_tensors(state), key=lambda item: item[1].nbytes)
            return f"{memory}: {nbytes(state):,} bytes, the most in {place} {tuple(t.shape)}"
        if name == "/mark":
            self.marks[given] = self.session.mark()
        elif name == "/rewind":
            if given not in self.marks:
                raise ValueError(unknown_name("mark", given, [*self.marks]))
            self.session.rewind(self.marks[given])
        elif name == "/fork":
            self.talks[self.name] = self.session
            self.name, self.session = given, self.talks.get(given) or self.session.fork()
        elif name == "/save":
            self.session.save(given)
        else:
            self.session = Session.load(self.host, given, self.length)
        return f"{name} {given}: {self.session.tokens:,} tokens"

    def read_context(self, text: str, path: Path | None) -> tuple[float, Callable[[str], list[int]]]:
        """Read a context, or load its state if `path` exists; return seconds of reading, and the ids of a question.

        Raises:
            ValueError: the file belongs to another context, model or memory.
        """
        if self.end is None:
            before, after, ids = "Question: ", "\nAnswer:", [*self.words.first, *self.words.encode(f"{text}\n\n")]
        else:
            text, before, after = self._rendered(f"{text}\n\n{HOLE}").rpartition(HOLE)
            before, ids = "", self.words.encode(text)
        digest_32 = torch.tensor([*hashlib.sha256(str(ids).encode()).digest()])
        session, seconds_1 = self.session, torch.zeros(1, dtype=torch.float64)
        if path is not None and path.exists():
            state, found_32, seconds_1 = load(path, (session.state, digest_32, seconds_1), model=self.host)
            if not torch.equal(found_32, digest_32):
                raise ValueError(f"state={path}: it is of another context; remove it, or name another file")
            partial_1N = torch.tensor([ids], device=self.host.device)[:, [*cut(len(ids), session.segment_length)][-1]]
            session.rewind(Mark(state, partial_1N, len(ids)))
        else:
            clock = time.perf_counter()
            session.read(torch.tensor([ids]))
            seconds_1 += time.perf_counter() - clock
            if path is not None:
                save((session.state, digest_32, seconds_1), path, model=self.host)
        return float(seconds_1), lambda question: self.words.encode(f"{before}{question}{after}")
