"""Stories of bAbI (arXiv:1502.05698) from its archive, or the unpacked folder."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import NamedTuple

from .archives import as_text, naming

FOLDERS = ("en-10k", "en")
"""Folders of bAbI's archive: English stories, with ten thousand questions of each task and with a thousand."""
WORD = re.compile(r"[a-z]+|[?.]")


class Story(NamedTuple):
    """Sentences in order, the question, and the answer, as words."""

    sentences: list[list[str]]
    question: list[str]
    answer: str


def read_stories(babi: Path, question: str, split: str, facts: int) -> list[Story]:
    """Read a story for each question that at most `facts` sentences precede, without the questions between."""
    result: list[Story] = []
    sentences: list[list[str]] = []
    for line in _babi_text(babi, f"{question}_*_{split}.txt").splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            sentences = []
        if "\t" not in text:
            sentences.append(WORD.findall(text.lower()))
        elif len(sentences) <= facts:
            asked, answer, _ = text.split("\t", 2)
            result.append(Story(list(sentences), WORD.findall(asked.lower()), answer.strip().lower()))
    return result


def _babi_text(babi: Path, name: str) -> str:
    """Return the file with ten thousand questions, as in BABILong, or the file with a thousand if it is missing."""
    if babi.is_file():
        with naming(f"babi={babi}"), tarfile.open(babi) as archive:
            members = archive.getmembers()
            for folder in FOLDERS:
                for member in members:
                    if Path(member.name).match(f"{folder}/{name}") and (file := archive.extractfile(member)):
                        return as_text(file.read(), f"{babi}:{member.name}")
    elif paths := sorted(babi.rglob(name), key=lambda path: (path.parent.name != FOLDERS[0], path)):
        return as_text(paths[0].read_bytes(), paths[0])
    raise FileNotFoundError(f"{babi} holds no file en/{name}; give bAbI's archive or folder as --babi")
