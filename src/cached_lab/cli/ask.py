"""`cached ask`: read a text once and answer many questions about it, each from the same state.

Each line of standard input is a question, and each line of standard output its answer. At the end standard error gets
the seconds, beside an estimate of reading the text again for each question.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .arguments import require_file
from .chat import MODEL_ARGUMENTS, open_conversation

ARGUMENTS = (
    *MODEL_ARGUMENTS,
    ("--context FILE", Path, "the text that the questions are about"),
    ("--temperature T", 0.0, "0 is greedy"),
)
QUESTION = "[[question]]"


def run(arguments: argparse.Namespace) -> int:
    """Read the text, and answer each line of standard input."""
    from cached_lab.data.archives import as_text

    if arguments.context is None:
        raise ValueError("--context is missing; give the file with the text that the questions are about")
    require_file(arguments.context, "the text that the questions are about")
    text = as_text(arguments.context.read_bytes(), arguments.context, "give another text")
    if not text.strip():
        raise ValueError(f"--context {arguments.context}: it is empty; give the text that the questions are about")
    conversation = open_conversation(arguments)
    session = conversation.session
    before, _, after = conversation.turns.first(f"{text}\n\n{QUESTION}").rpartition(QUESTION)
    ids = conversation.ids(before, first=True)
    clock = time.perf_counter()
    for first in range(0, len(ids), session.segment_length):
        conversation.read(ids[first : first + session.segment_length])
        if sys.stderr.isatty() or session.tokens == len(ids):
            end = "\n" if session.tokens == len(ids) else "\r"
            print(f"read {session.tokens:,} of {len(ids):,} tokens", end=end, file=sys.stderr, flush=True)
    mark, reading, questions = session.mark(), time.perf_counter() - clock, 0
    for line in sys.stdin:
        if line.strip():
            questions += 1
            session.rewind(mark)
            conversation.read(conversation.ids(f"{line.strip()}{after}"))
        print(" ".join("".join(conversation.answer() if line.strip() else ()).split()), flush=True)
    answering = time.perf_counter() - clock - reading
    once, again = reading + answering, reading * questions + answering
    parts = f"read once in {reading:.1f} s, answered {questions} questions in {answering:.1f} s"
    print(f"{parts}: {once:.1f} s; with a reading for each question {again:.1f} s (estimate)", file=sys.stderr)
    return 0
