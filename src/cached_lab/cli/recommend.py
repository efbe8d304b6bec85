"""`cached recommend`: the memory for a task, its bytes on a model, and the result that supports it.

The first row that the model takes, and whose state fits into --bytes, is the advice; its `length` is set to fit. The
other rows of the task follow, with the reason where one does not fit.
"""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
ARGUMENTS = (
    ("--task TASK", "text", "text, stream, recall, state, pairs, documents or images"),
    ("--host HOST", "llama", "a kind of model as in `cached list --host`, or a pretrained model"),
    ("--bytes N", str, "bytes of the state of a batch row, at most: 65536, 64k, 2M, 1G"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows of the task; the exit status is 1 if none fits."""
    from cached_lab.experiments.recommend import RESULTS, recommend
    from cached_transformers.registry import MEMORIES

    found = [*recommend(arguments.task, arguments.host, parse_bytes(arguments.bytes))]
    for row in sorted(found, key=lambda row: bool(row.reason)):
        carries = MEMORIES.entry(row.memory["name"]).info["carries"]
        name, options = row.memory["name"], {key: value for key, value in row.memory.items() if key != "name"}
        size = "" if row.state_bytes is None else f"{row.state_bytes:,} bytes: "
        print(f"{row.advice.need}: {name} {options or ''}".rstrip())
        print(f"  does not fit: {row.reason}" if row.reason else f"  state: {size}{carries}")
        print(f"  result: {row.advice.result} ({RESULTS}/{row.advice.proof})")
    return int(all(row.reason for row in found))


def parse_bytes(text: str | None) -> int | None:
    """Parse a number of bytes with a unit of 1,024, such as 64k (ValueError); None for None."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)([kmg]?)b?", text.lower())
    if found is None or not int(found[1]):
        raise ValueError(f"--bytes {text!r} must be a number from 1 on with k, M, G or nothing after it, e.g. 64k")
    return int(found[1]) * UNITS[found[2]]
