"""`cached chat`: talk with a pretrained decoder, whose memory keeps a conversation of any length.

Lines are turns of the model's chat template; /help lists commands. Ctrl-C stops an answer, which stays in the text, and
leaves at the prompt. From a pipe each line gets an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .arguments import memory_option, refuse_below_one
from .generate import show

SHARED = (
    ("model MODEL", str, "folder of save_pretrained, hub name, GGUF file, or name of `cached fetch`"),
    ("overrides NAME.option=value*", str, "options of the memory, such as block_retrieval.topk=8"),
    ("--device NAME", "auto", "auto, cpu, cuda or cuda:N"),
    ("--with-memory MEMORY", str, "a memory without weights for a model without one (default: block_retrieval)"),
    ("--segment-length N", int, "tokens in a segment (default: the model's own, or 256)"),
    ("--tokens N", 200, "tokens of an answer at most"),
    ("--temperature T", 0.0, "0 is greedy"),
    ("--top-k K", int, "sample among the K likeliest tokens"),
    ("--top-p P", float, "sample among the fewest tokens of total probability P"),
    ("--seed N", 0, "of the sampling"),
)
ARGUMENTS = (*SHARED, ("--state FILE", Path, "continue this conversation if the file exists, and save it at the end"))


def run(arguments: argparse.Namespace) -> int:
    """Talk; save the conversation however it ends."""
    from cached_lab.training.interruption import Stopped, stop_requests
    from cached_lab.training.run_lock import file_lock

    chat, path = open_chat(arguments), arguments.state
    if chat.end is None:
        raise ValueError(f"model={chat.model}: its tokenizer has no chat template; use `cached generate`")
    with contextlib.ExitStack() as opened:
        if path is not None:
            opened.enter_context(file_lock(path.with_name(f".{path.name}.lock"), path, "another --state"))
            if path.exists():
                chat.command(f"/load {path}")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # no failure
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # a closed window
        try:
            _talk(chat)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped):
                raise
        finally:
            if path is not None and chat.session.tokens:
                with stop_requests():
                    chat.session.save(path)
    count, seconds = (sum(column) for column in zip((0, 1e-9), *chat.laps, strict=True))
    print(f"{'' if not sys.stdin.isatty() else chr(10)}{count:,} tokens, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def _talk(chat: Any) -> None:
    for line in typed_lines(chat.prompt):
        if line == "/exit":
            return
        if not line.startswith("/"):
            chat.answer(chat.turn(line), show, interruptible=sys.stdin.isatty())
            continue
        try:
            told = chat.command(line)
        except (ValueError, OSError) as error:
            told = str(error)
        print(told, file=sys.stderr, flush=True)


def open_chat(arguments: argparse.Namespace) -> Any:
    """Load the model of `SHARED` arguments with its memory (ValueError: see `Chat`)."""
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
    """Yield the lines of standard input that are not empty, after a prompt on a terminal; others than UTF-8 are refused."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines by it)
    with contextlib.suppress(EOFError):
        while True:
            line = input(prompt() if terminal else "").strip()
            try:
                line.encode()
            except UnicodeEncodeError:
                print("a line is not UTF-8, and was left out; send UTF-8 (iconv -t UTF-8)", file=sys.stderr)
                continue
            if line:
                yield line
