"""A conversation with a pretrained decoder: turns of its chat template, streamed answers, commands and files.

The text grows by appending, and the ids of a turn depend on the last token only: a file of `Session.save` is the whole
conversation.
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
from cached_transformers.models.session import Mark, Session
from cached_transformers.registry import unknown_name
from cached_transformers.state import load, named_tensors, nbytes, save

from .pretrained import remember, resolve_model

MEMORY = "block_retrieval"
"""The memory of a model without one: the last, partial segment of a turn chooses the blocks that its answer reads."""
COMMANDS = {
    "/mark": "[NAME]: remember this position",
    "/rewind": "[NAME]: go back to a mark",
    "/fork": "NAME: begin a second conversation here, or go to that of this name; the first one is `main`",
    "/save": "FILE: write this conversation",
    "/load": "FILE: continue a saved conversation instead of this one",
    "/memory": ": name, options, size and largest tensor of the memory",
    "/help": ": this list",
    "/exit": ": leave",
}
HOLE = "\u241f"
"""The place of a message in a rendered template."""


class Chat:
    """Conversations with one model.

    Args:
        model: as in `resolve_model`. memory: name and options; None for the model's own, or `MEMORY`.
        length: tokens of a segment; None for the model's own, or 256.
        tokens: of an answer at most. options: of `Session.stream`.

    Attributes:
        end: token that ends a turn; None for a tokenizer without a chat template.
        laps: tokens and seconds of each answer.

    Raises:
        ValueError: see `resolve_model` and `remember`; a template that cannot render a conversation, or ends no turn.
    """

    def __init__(
        self,
        model: str,
        memory: Mapping[str, Any] | None,
        length: int | None,
        device: torch.device,
        tokens: int,
        **options: Any,
    ) -> None:
        self.model, self.length, self.options = model, length, {"tokens": tokens, **options}
        self.host, self.tokenizer = resolve_model(model)
        if memory is None and not records_memory(self.host.config):
            memory = {"name": MEMORY}
        remember(self.host, model, memory, length)
        self.words = words_of_transformers(self.tokenizer)
        self.talks, self.name = {"main": Session(self.host.to(device), length)}, "main"
        self.marks: dict[str, Mark] = {}
        self.laps: list[tuple[int, float]] = []
        told = self.host.generation_config.eos_token_id
        self.ends = {*(told if isinstance(told, list) else [told]), self.words.end} - {None}
        self.end = None if self.tokenizer.chat_template is None else self._after_answer("")[0]
        if self.end is None:  # an answer to a question of a plain text is one line
            self.ends |= {self.words.encode(text)[-1] for text in ("\n", "\n\n")}
        self.ends.add(self.end)

    @property
    def session(self) -> Session:
        """The current conversation."""
        return self.talks[self.name]

    def turn(self, message: str) -> list[int]:
        """Ids that the user's next message adds to the text, up to the beginning of its answer."""
        if self.session.tokens == 0:
            return self.words.encode(self._rendered(message))
        ids = self._after_answer(message)
        return ids[1:] if int(self.session.partial_1N[0, -1]) == self.end else ids

    def _after_answer(self, message: str) -> list[int]:
        """Ids from the token that ends an answer to the beginning of the next one."""
        ids = self.words.encode(self._rendered(".", HOLE, message).partition(HOLE)[2])
        closing = self.ends.union(self.tokenizer.get_added_vocab().values())
        begin = next((place for place, token in enumerate(ids) if token in closing), None)
        if begin is None:
            raise ValueError(f"model={self.model}: its chat template ends no answer; use `cached generate`")
        return ids[begin:]

    def _rendered(self, *messages: str) -> str:
        """The text of a conversation that begins with the user, and the beginning of the next answer."""
        talk = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
        try:
            return str(self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise ValueError(f"model={self.model}: its chat template fails ({error}); use `cached generate`") from error

    def answer(self, ids: list[int], say: Callable[[str], object], *, interruptible: bool = False) -> None:
        """Read ids and write an answer, which `say` receives in pieces; it is part of the text.

        A signal stops it between two tokens and raises `Stopped`. The next turn closes an answer without an end.

        Args:
            interruptible: SIGINT stops the answer only.
        """
        spelling = Spelling(self.words.decode, ids[-CONTEXT:])
        with stop_requests() as stopped:
            self.session.read(torch.tensor([ids]))
            clock, count = time.perf_counter(), 0
            for token in self.session.stream(**self.options):
                count += 1
                if token in self.ends:
                    break
                say(spelling.more([token]))
                if stopped:
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
        """Carry out one of `COMMANDS` except /exit, and return its report.

        Raises:
            ValueError: an unknown command or mark, or no name; see `Session.load`. OSError: the file.
        """
        name, _, given = line.partition(" ")
        given = given.strip()
        if name not in COMMANDS:
            raise ValueError(unknown_name("command", name, [*COMMANDS]))
        if not given and COMMANDS[name].startswith(("NAME", "FILE")):
            raise ValueError(f"{name}: its argument is missing; {name} {COMMANDS[name]}")
        if name == "/help":
            return "\n".join(f"{name} {about}" for name, about in COMMANDS.items())
        if name == "/memory":
            record = dict(getattr(self.host.config, MODEL_TYPE)["memory"])
            place, t = max(named_tensors(self.session.state), key=lambda item: item[1].nbytes)
            size = f"{nbytes(self.session.state):,} bytes, {place} {tuple(t.shape)}"
            return f"{record.pop('name')} {record}: {size}, segments of {self.session.segment_length} tokens"
        if name == "/mark":
            self.marks[given or "mark"] = self.session.mark()
        elif name == "/rewind":
            if (given or "mark") not in self.marks:
                raise ValueError(unknown_name("mark", given or "mark", [*self.marks]))
            self.session.rewind(self.marks[given or "mark"])
        elif name == "/fork":
            self.talks.setdefault(given, self.session.fork())
            self.name = given
        elif name == "/save":
            self.session.save(given)
        else:
            self.talks[self.name] = Session.load(self.host, given, self.length)
        return f"{name} {given}".strip() + f": {self.session.tokens:,} tokens"

    def read_context(self, text: str, path: Path | None) -> tuple[float, Callable[[str], list[int]]]:
        """Read a context once; return the seconds of reading, and the ids of a question about it.

        Args:
            path: file that keeps the state after the context, and is read instead if it exists.

        Raises:
            ValueError: the file belongs to another context, model or memory. NotWritten: e.g. the disk is full.
        """
        if self.end is None:
            text, before, after = f"{text}\n\n", "Question: ", "\nAnswer:"
        else:
            (text, _, after), before = self._rendered(f"{text}\n\n{HOLE}").rpartition(HOLE), ""
        ids = [*(self.words.first if self.end is None else ()), *self.words.encode(text)]
        digest_32 = torch.tensor([*hashlib.sha256(str(ids).encode()).digest()])
        session, seconds_1 = self.session, torch.zeros(1, dtype=torch.float64)
        if path is not None and path.exists():
            state, found_32, seconds_1 = load(path, (session.state, digest_32, seconds_1), model=self.host)
            if not torch.equal(found_32, digest_32):
                raise ValueError(f"state={path}: it is of another context; remove it, or name another file")
            partial = len(ids) if session.segment_length is None else (len(ids) - 1) % session.segment_length + 1
            partial_1N = torch.tensor([ids[-partial:]], device=self.host.device)
            session.rewind(Mark(state, partial_1N, len(ids)))
        else:
            clock = time.perf_counter()
            session.read(torch.tensor([ids]))
            seconds_1 += time.perf_counter() - clock
            if path is not None:
                save((session.state, digest_32, seconds_1), path, model=self.host)
        return float(seconds_1), lambda question: self.words.encode(f"{before}{question}{after}")
