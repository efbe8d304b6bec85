"""`cached ask`: read a text once, and answer questions about it, one a line of standard input.

At the end it compares the time with that of reading the text for each question.
"""

from __future__ import annotations

import argparse
import sys
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
    require_file(arguments.context or Path(), "--context FILE, the text that the questions are about")
    from cached_lab.data.archives import as_text

    text = as_text(arguments.context.read_bytes(), f"--context {arguments.context}", "give another file")
    chat = open_chat(arguments)
    reading, ids_of = chat.read_context(text, arguments.state)
    mark = chat.session.mark()
    for question in typed_lines(lambda: "> "):
        chat.answer(ids_of(question), show)
        chat.session.rewind(mark)
    asked, seconds = len(chat.laps), sum(seconds for _, seconds in chat.laps)
    read = (
        f"{mark.tokens:,} tokens read once in {reading:.2f} s; {asked} questions, {seconds / max(asked, 1):.2f} s each"
    )
    again = f"{asked} x {reading:.2f} = {asked * reading:.2f} s"
    print(f"{read}; reading them for each question would take {again}", file=sys.stderr)
    return 0
