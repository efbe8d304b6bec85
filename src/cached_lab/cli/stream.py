"""`cached stream`: read a text of any length with a trained language model, in constant memory.

It prints perplexity (bits per byte for bytes) while it reads, and keeps the state in a file: the same command continues
after a stop, with the numbers of an uninterrupted reading.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

from .arguments import refuse_below_one, require_file, run_arguments

ARGUMENTS = (
    *run_arguments(" of a language model", device="cpu"),
    ("file FILE", Path, "a text, plain or .xz, .gz, .bz2"),
    ("--state FILE", Path, "file of the state (default: RUN/stream_FILE.safetensors)"),
    ("--segment-length N", int, "tokens in a segment (default: the run's)"),
    ("--schedule", ("segments", "diagonal"), "segment after segment, or layers on different segments at once"),
    ("--every N", 50_000, "tokens between lines and saves"),
    ("--tokens N", int, "stop after about this many tokens; the state is kept"),
)


def run(arguments: argparse.Namespace) -> int:
    """Read, print, and save, with a lock on the state's file."""
    from cached_lab.training.run_lock import file_lock

    refuse_below_one(arguments, "segment_length", "every", "tokens")
    require_file(arguments.file, "the text to read")
    path = arguments.state or arguments.folder / f"stream_{arguments.file.name}.safetensors"
    with file_lock(path.with_name(f".{path.name}.lock"), path, "another --state"):
        return _read(arguments, path)


def _read(arguments: argparse.Namespace, path: Path) -> int:
    from cached_lab.experiments.load import load_run
    from cached_lab.tasks.language.text_reader import TextReader, fingerprint, read_tokenizer
    from cached_lab.training.checkpoint import Checkpoints
    from cached_lab.training.distributed import pick_device
    from cached_lab.training.run_files import TOKENIZER

    folder, file, checkpoint = arguments.folder, arguments.file, arguments.checkpoint
    config, model, _ = load_run(folder, checkpoint)
    tokenizer = read_tokenizer(folder / TOKENIZER, model)
    length = arguments.segment_length or config.evaluation.segment_length or config.training.segment_length
    named = checkpoint in ("best", "last")
    weights = Checkpoints(folder / "checkpoints").named(checkpoint) if named else Path(checkpoint)
    model.to(pick_device(arguments.device))
    reader = TextReader(model, tokenizer, file, length, path, fingerprint(weights, file, length), arguments.schedule)
    if reader.now is not None:
        print(f"continuing after token {reader.first:,} ({path})")
    bytewise = tokenizer.vocabulary == 256 and tokenizer.lossless
    kind, mib = "bits per byte" if bytewise else "perplexity", 2**20 if sys.platform == "darwin" else 2**10
    for lap in reader.laps(arguments.every, arguments.tokens):
        parts = (lap.now, lap.now._replace(tokens=lap.tokens, nats=lap.nats))
        whole, last = (part.bits_per_byte(part.tokens) if bytewise else part.perplexity for part in parts)
        numbers = f"{kind} {whole:.4f}, of the last {lap.tokens:,} {last:.4f}  {lap.rate:,.0f} tokens/s"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / mib
        print(f"{lap.now.tokens:>12,} tokens  {numbers}  {resident:,.0f} MiB", flush=True)
    now = reader.now
    if now is None or now.tokens == reader.first:
        print(f"nothing new to read in {file}")
        return 0
    size = f", {now.bits_per_byte(reader.size):.4f} bits per byte" if arguments.tokens is None else ""
    print(f"{now.tokens:,} tokens: loss {now.nats / now.tokens:.4f} nats, perplexity {now.perplexity:.3f}{size}")
    print(f"state: {path}")
    return 0
