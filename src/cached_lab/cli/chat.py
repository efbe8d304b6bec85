"""`cached chat`: talk with a pretrained model in bounded memory, with marks and saved states.

Each turn reads its new tokens only. /help lists the commands. Ctrl-C stops an answer, and keeps the part that is shown;
at the prompt it ends the chat, as Ctrl-D does. Without a terminal each line of standard input is a turn, and standard
output gets the answers only.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arguments import refuse_below_one, require_file

MODEL_ARGUMENTS = (
    ("model MODEL", str, "a folder of save_pretrained, or a model of the Hugging Face hub"),
    ("--memory NAME,option=value", str, "for a model without a memory, one without weights (default: streaming_llm)"),
    ("--system TEXT", str, "the system message"),
    ("--plain", bool, "turns of User and Assistant, for a tokenizer without a chat template; an answer is one line"),
    ("--tokens N", 256, "tokens of an answer at most"),
    ("--seed N", 0, "of the sampling"),
    ("--device NAME", "auto", "auto, cpu, cuda or cuda:N"),
)
ARGUMENTS = (
    *MODEL_ARGUMENTS,
    ("--temperature T", 0.7, "0 is greedy"),
    ("--state FILE", Path, "file of the chat: loaded if it exists, and written at the end"),
)
HELP = """/mark [NAME]    remember this position
/rewind [NAME]  return to a position (default: the last one)
/save [FILE]    write the chat to a file (default: that of --state)
/load FILE      continue the chat of a file; that of --state is saved first, and the end writes FILE instead
/fork FILE      continue in a new file, which the end writes; that of --state keeps the chat up to here
/memory         show the memory, its filled slots, the tokens read, and bytes of state
/help           show this list
/quit           end, as Ctrl-D
A turn that begins with a slash needs a blank before it."""


def run(arguments: argparse.Namespace) -> int:
    """Chat until the end of the input."""
    from cached_lab.training.run_lock import file_lock

    conversation, path = open_conversation(arguments), arguments.state
    with contextlib.ExitStack() as lock:
        if path is not None:
            lock.enter_context(file_lock(path.with_name(f".{path.name}.lock"), path, "another --state"))
        chat = _Chat(conversation, path)
        if path is not None and path.exists():
            conversation.load(path)
            print(f"continuing {path} after {conversation.session.tokens:,} tokens", file=sys.stderr)
        try:
            chat.talk()
        finally:
            chat.keep()
    return 0


def open_conversation(arguments: argparse.Namespace) -> Any:
    """Load the model, and begin a conversation with the options of `MODEL_ARGUMENTS`."""
    refuse_below_one(arguments, "tokens")
    from cached_lab.experiments.chat import Conversation, PlainTurns, TemplateTurns, load_chat_model
    from cached_lab.training.distributed import pick_device

    model, tokenizer = load_chat_model(arguments.model, arguments.memory, pick_device(arguments.device))
    turns = PlainTurns(arguments.system) if arguments.plain else TemplateTurns(tokenizer, arguments.system)
    options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "seed")}
    return Conversation(model, tokenizer, turns, **options)


class _Chat:
    """The dialogue of a conversation with a terminal or a pipe.

    Attributes:
        path: file that the chat is written to at the end.
        own: files that this chat loaded or wrote, which /save may replace.
    """

    def __init__(self, conversation: Any, path: Path | None) -> None:
        self.conversation, self.path = conversation, path
        self.own = set() if path is None else {path}
        self.marks: dict[str, Any] = {}
        self.terminal, self.rate = sys.stdin.isatty(), ""

    def talk(self) -> None:
        """Take turns and commands until the input ends."""
        from .main import BUG, verdict

        for line in self._lines():
            try:
                if line.startswith("/"):
                    if line.rstrip() == "/quit":
                        return
                    print(self.command(line), file=sys.stdout if self.terminal else sys.stderr)
                elif line.strip():
                    self.turn(line.strip())
            except Exception as error:
                status, message = verdict(error)
                if not self.terminal or status == BUG:
                    raise
                print(f"error: {message}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        if not self.terminal:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing in `input`)
        while True:
            try:
                yield self._asked()
            except EOFError:
                print(file=sys.stderr)
                return

    def _asked(self) -> str:
        from cached_transformers.state import nbytes

        session = self.conversation.session
        prompt = f"[{session.tokens:,} tokens, {nbytes(session.state) / 2**20:,.1f} MiB of state{self.rate}] > "
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def turn(self, text: str) -> None:
        """Read a turn and print the answer; Ctrl-C stops the answer."""
        from cached_lab.training.interruption import Stopped, stop_requests

        session = self.conversation.session
        try:
            with stop_requests() as asked:
                self.conversation.hear(text)
                before, clock = session.tokens, time.perf_counter()
                for piece in self.conversation.answer(asked):
                    print(piece, end="", flush=self.terminal)
                print(flush=True)
                self.rate = f", {(session.tokens - before) / (time.perf_counter() - clock):,.1f} tokens/s"
        except Stopped as stop:
            if not self.terminal or stop.signal_number != signal.SIGINT:
                raise
            print("(stopped)", file=sys.stderr)

    def command(self, line: str) -> str:
        """Run a command and return its message (ValueError: an unknown one, or a bad argument)."""
        from cached_transformers.registry import unknown_name

        usage = {row.split()[0]: row.split("  ")[0] for row in HELP.splitlines() if row.startswith("/")}
        name, given = (*line.split(maxsplit=1), "")[:2]
        if name not in usage:
            raise ValueError(unknown_name("command", name, [*usage]))
        takes, given = usage[name].partition(" ")[2], given.strip()
        if (given and not takes) or (takes == "FILE" and not given):
            raise ValueError(f"{line}: write {usage[name]}")
        found: str = getattr(self, name[1:])(given)
        return found

    def help(self, given: str) -> str:
        return HELP

    def memory(self, given: str) -> str:
        return str(self.conversation.summary())

    def mark(self, given: str) -> str:
        name = given or str(len(self.marks) + 1)
        self.marks.pop(name, None)  # the newest is the last one
        self.marks[name] = self.conversation.session.mark()
        return f"mark {name} at {self.conversation.session.tokens:,} tokens"

    def rewind(self, given: str) -> str:
        name = given or next(reversed(self.marks), "")
        if name not in self.marks:
            raise ValueError(f"/rewind {name}: there is no such mark; there are: {', '.join(self.marks) or 'none'}")
        self.conversation.session.rewind(self.marks[name])
        return f"back at mark {name}, {self.conversation.session.tokens:,} tokens"

    def save(self, given: str) -> str:
        path, session = Path(given) if given else self.path, self.conversation.session
        if path is None:
            raise ValueError("/save: there is no --state FILE; write /save FILE")
        if path not in self.own and path.exists():
            raise ValueError(f"{path} exists, and is not of this chat; name another file, or remove it")
        stored = session.save(path)
        self.own.add(path)
        return f"saved {session.tokens:,} tokens in {path}, {stored.nbytes:,} bytes"

    def load(self, given: str) -> str:
        path, session = Path(given), self.conversation.session
        require_file(path, "a chat that /save has written")
        self.conversation.load(path)  # first, since it may be refused
        if self.path is not None:
            if session.tokens:
                session.save(self.path)
            self.path = path
        self.own.add(path)
        self.marks.clear()
        return f"continuing {path} after {self.conversation.session.tokens:,} tokens"

    def fork(self, given: str) -> str:
        if Path(given).exists():
            raise ValueError(f"/fork {given}: the file exists; name a new one")
        told = self.save(given)
        self.keep()
        self.path = Path(given)
        return told

    def keep(self) -> None:
        """Write the chat to its file, if it has one."""
        if self.path is not None and self.conversation.session.tokens:
            print(self.save(""), file=sys.stderr)
