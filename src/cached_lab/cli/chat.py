"""`cached chat`: talk with a pretrained decoder, in constant memory or with all blocks of the conversation.

/help lists commands. Ctrl-C stops an answer, and leaves at the prompt. From a pipe each line gets an answer.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from cached_transformers.files import NotWritten

from .arguments import memory_option, refuse_below_one
from .generate import WRITING, show

SHARED = (
    ("model MODEL", str, "folder of save_pretrained, hub name, GGUF file, or name of `cached fetch`"),
    *WRITING,
    ("--device NAME", "auto", "auto, cpu, cuda or cuda:N"),
    ("--temperature T", 0.0, "0 is greedy"),
)
ARGUMENTS = (*SHARED, ("--state FILE", Path, "continue this conversation if it exists, and save it at the end"))


def run(arguments: argparse.Namespace) -> int:
    """Talk; save the conversation however it ends."""
    from cached_lab.training.run_lock import file_lock

    chat, path = open_chat(arguments), arguments.state
    if chat.end is None:
        raise ValueError(f"model={chat.model}: its tokenizer has no chat template; use `cached generate`")
    lock = nullcontext() if path is None else file_lock(path.with_name(f".{path.name}.lock"), path, "another --state")
    with lock:
        return _talk(chat, path)


def _talk(chat: Any, path: Path | None) -> int:
    from cached_lab.training.interruption import stop_requests

    if path and path.exists():
        chat.command(f"/load {path}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # at the prompt it is the end of input
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # a closed window
    try:
        for line in takewhile("/exit".__ne__, typed_lines(chat.prompt)):
            try:
                if line.startswith("/"):
                    print(chat.command(line), file=sys.stderr)
                else:
                    chat.answer(chat.turn(line), show, interruptible=sys.stdin.isatty())
            except (ValueError, FileNotFoundError, NotWritten) as error:
                print(error, file=sys.stderr)
    finally:
        if path and chat.session.tokens:
            with stop_requests():
                chat.session.save(path)
    count, seconds = (sum(column) for column in zip((0, 1e-9), *chat.laps, strict=True))
    print("" if sys.stdin.isatty() else f"{count:,} tokens, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def open_chat(arguments: argparse.Namespace) -> Any:
    """Load the model of `SHARED` arguments with its memory."""
    refuse_below_one(arguments, "tokens", "top_k", "segment_length")
    import torch

    from cached_lab.experiments.chat import MEMORY, Chat
    from cached_lab.training.distributed import pick_device

    device = pick_device(arguments.device)
    memory = memory_option(arguments.with_memory or (MEMORY if arguments.overrides else None), arguments.overrides)
    options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "top_p")}
    options["generator"] = torch.Generator(device).manual_seed(arguments.seed)
    return Chat(arguments.model, memory, arguments.segment_length, device, **options)


def typed_lines(prompt: Callable[[], str]) -> Iterator[str]:
    """Yield lines of standard input, after a prompt on a terminal; skip empty ones, and report those not in UTF-8."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    with suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines by it)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(prompt() if sys.stdin.isatty() and sys.stdout.isatty() else "").strip()
            if any("\ud800" <= letter <= "\udfff" for letter in line):
                print("a line is not UTF-8, and was left out; send UTF-8 (iconv -t UTF-8)", file=sys.stderr)
            elif line:
                yield line
