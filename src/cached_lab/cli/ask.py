"""`cached ask`: read a text once, and answer questions about it, one a line of standard input.

After each answer the model goes back to the end of the text. At the end it compares the time with that of reading the
text for each question.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .arguments import require_file
from .chat import SHARED, open_chat, typed_lines
from .generate import show

ARGUMENTS = (
    *SHARED,
    ("--context FILE", Path, "the text, in UTF-8"),
    ("--state FILE", Path, "keep the text that was read for the next call, or continue from it"),
)


def run(arguments: argparse.Namespace) -> int:
    """Read, answer, and compare the times."""
    if arguments.context is None:
        raise ValueError("--context FILE is missing: the text that the questions are about")
    require_file(arguments.context, "the text that the questions are about")
    try:
        text = arguments.context.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--context {arguments.context}: {error}; convert it (iconv -t UTF-8)") from None
    chat = open_chat(arguments)
    reading, ids_of = chat.read_context(text, arguments.state)
    mark, asked, clock = chat.session.mark(), 0, 0.0
    for question in typed_lines(lambda: "> "):
        begin = time.perf_counter()
        chat.answer(ids_of(question), show)
        chat.session.rewind(mark)
        asked, clock = asked + 1, clock + time.perf_counter() - begin
    print(
        f"read {mark.tokens:,} tokens once in {reading:.2f} s; {asked} questions, {clock / max(asked, 1):.2f} s each; "
        f"reading the text for each would take {asked} x {reading:.2f} = {asked * reading:.2f} s",
        file=sys.stderr,
    )
    return 0
