"""`cached generate`: continue a text with a trained language model, token by token on a terminal.

It samples, is greedy with --temperature 0, or searches with beams. The memory is written after every full segment, as
in training.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .arguments import memory_option, refuse_below_one, require_file, run_arguments

WRITING = (
    ("overrides NAME.option=value*", str, "options of --with-memory"),
    ("--tokens N", 200, "new tokens at most"),
    ("--top-k K", int, "sample among the K likeliest tokens"),
    ("--top-p P", float, "sample among the fewest tokens of total probability P"),
    ("--seed N", 0, "of the sampling"),
    ("--segment-length N", int, "tokens in a segment (default: as trained; 256 for --with-memory)"),
    ("--with-memory MEMORY", str, "a memory without weights (streaming_llm, tova, ...) for a model without one"),
)
ARGUMENTS = (
    *run_arguments(" of a language model; or a model: folder of save_pretrained, hub name, GGUF file, fetched name"),
    *WRITING,
    ("--prompt TEXT", str, "the text (default: standard input, if it is no terminal)"),
    ("--temperature T", 1.0, "0 is greedy"),
    ("--beams K", 1, "search with K beams, and print the best"),
    ("--length-penalty A", 1.0, "of beams"),
    ("--state FILE", Path, "continue the text of this state, before the prompt"),
    ("--save-state FILE", Path, "keep the state, for --state; may be the same"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation."""
    refuse_below_one(arguments, "tokens", "beams", "top_k", "segment_length")
    if arguments.state is not None:
        require_file(arguments.state, "a state that --save-state has written")
    prompt = arguments.prompt
    if prompt is None:  # without the line end that closes standard input
        prompt = "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    import torch

    from cached_lab.experiments.load import load_writer
    from cached_lab.training.distributed import pick_device

    device, memory = pick_device(arguments.device), memory_option(arguments.with_memory, arguments.overrides)
    about = (arguments.folder, arguments.checkpoint, arguments.segment_length, device)
    writer = load_writer(*about, state=arguments.state, memory=memory)
    names = ("tokens", "temperature", "top_k", "top_p", "beams", "length_penalty")
    options = {name: getattr(arguments, name) for name in names}
    generator = torch.Generator(device).manual_seed(arguments.seed)
    clock = time.perf_counter()
    pieces: list[str] = []
    found = writer.write(prompt, show if sys.stdout.isatty() else pieces.append, generator=generator, **options)
    seconds = time.perf_counter() - clock
    show("".join([*pieces, "\n"]))
    if arguments.save_state is not None:
        writer.session.save(arguments.save_state)
    count = int(found.lengths)
    print(f"{count:,} tokens, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def show(text: str) -> None:
    """Print at once, without a line end."""
    sys.stdout.write(text)
    sys.stdout.flush()
