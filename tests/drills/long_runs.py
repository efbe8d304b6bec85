"""Long runs: an hour of training and twenty million streamed tokens, with resources measured at each tenth.

    make long-runs          writes the table of docs/results/reliability.md; Linux only (/proc)

Resident memory, open files and threads must not grow after the second tenth.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.markdown import write_between

MARKS = ("<!-- long runs: made by `make long-runs` -->", "<!-- long runs end -->")
SLACK_MIB = 16
SEGMENT = 512
CACHED = [sys.executable, "-m", "cached_lab.cli.main"]
RECIPE = """\
data: {{name: enwik8, path: {text}}}
model:
  {{name: language_model, width: 32, depth: 2, heads: 2, feed_forward: 64, memory: {{name: grc_stream, length: 8}}}}
training:
  {{steps: 100000000, batch_size: 4, segment_length: 64, segments: 2, bptt: 2, evaluate_every: 2000, log_every: 50,
  metric: bits_per_byte}}
optimizer: {{name: adamw, learning_rate: 1e-3}}
schedule: {{name: constant}}
"""


class Held(NamedTuple):
    """Resources of a process."""

    mib: float
    files: int
    threads: int


def held(process: int) -> Held:
    """Resident memory, open files and threads of a process (Linux)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    numbers = {key: int(value) for key, value in re.findall(r"(VmRSS|Threads):\s+(\d+)", status)}
    return Held(numbers["VmRSS"] / 1024, len(os.listdir(f"/proc/{process}/fd")), numbers["Threads"])


def write_text(path: Path, size: int) -> None:
    """Write a text of a number of bytes, with words of Zipf frequencies."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(5000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.write(" ".join(draw.choices(words, weights, k=2000)) + "\n")


def train(folder: Path, seconds: float) -> Iterator[Held]:
    """Train for a number of seconds; yield the resources at each tenth."""
    text, recipe = folder / "train.txt", folder / "long.yaml"
    write_text(text, 400_000)
    recipe.write_text(RECIPE.format(text=text), encoding="utf-8")
    with (folder / "train.log").open("wb") as log:
        process = subprocess.Popen(
            [*CACHED, "train", str(recipe), "--out", str(folder / "run")], stdout=log, stderr=log
        )
        begun = time.monotonic()
        for tenth in range(1, 11):
            while time.monotonic() < begun + seconds * tenth / 10:
                if process.poll() is not None:
                    raise SystemExit(f"training ended early:\n{(folder / 'train.log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield held(process.pid)
        process.send_signal(signal.SIGTERM)
        if (status := process.wait()) != 128 + signal.SIGTERM:
            raise SystemExit(f"training ended with status {status}:\n{(folder / 'train.log').read_text()[-2000:]}")


def stream(folder: Path, tokens: int) -> Iterator[Held]:
    """Stream a number of bytes through the trained model; yield the resources at each tenth."""
    text = folder / "stream.txt"
    write_text(text, tokens + 1000)
    tenth = tokens // 10 // SEGMENT * SEGMENT
    command = [*CACHED, "stream", str(folder / "run"), str(text), "--every", str(tenth), "--tokens", str(10 * tenth)]
    process = subprocess.Popen([*command, "--segment-length", str(SEGMENT)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "tokens/s" in line:
            yield held(process.pid)
    if status := process.wait():
        raise SystemExit(f"the stream ended with status {status}")


def main() -> int:
    """Exit status 0 when nothing grows."""
    parser = argparse.ArgumentParser(prog="python -m drills.long_runs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="of training")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of the stream")
    parser.add_argument("--table", type=Path, help="a Markdown file whose part between the marks is written again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long_runs_") as temporary:
        folder = Path(temporary)
        rows = {
            f"training, {arguments.seconds:.0f} s": list(train(folder, arguments.seconds)),
            f"stream, {arguments.tokens:,} tokens": list(stream(folder, arguments.tokens)),
        }
        steps = (folder / "run" / "metrics.jsonl").read_text().count('"split": "train"') * 50
    lines = ["| Run | Held | " + " | ".join(f"{tenth}/10" for tenth in range(1, 11)) + " |", "|---" * 12 + "|"]
    grown = []
    for name, found in rows.items():
        for label, values in zip(("MiB", "open files", "threads"), zip(*found, strict=True), strict=True):
            lines.append(f"| {name} | {label} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
            if max(values[2:]) > values[1] + (SLACK_MIB if label == "MiB" else 0):
                grown.append(f"{name}: {label} grew from {values[1]:.0f} to {max(values[2:]):.0f}")
    facts = environment("cpu")
    lines += [
        "",
        f"`make long-runs` ({steps:,} steps of training): {facts['device']}, python {facts['python']}, "
        f"torch {facts['torch']}, {facts['date']}, commit {facts['commit']}.",
    ]
    print("\n".join(lines))
    if arguments.table is not None:
        write_between(arguments.table, MARKS, "\n".join(lines))
    print("\n".join(grown) or "nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
