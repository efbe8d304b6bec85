"""`cached generate RUN --prompt TEXT`: continue a text; a terminal shows each token at once."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .arguments import add_command, add_run, add_weights, refuse_below_one, require_file


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "generate",
        run,
        "continue a text with a trained language model",
        description="Prints the continuation of the prompt, token by token on a terminal: sampled, or greedy with "
        "--temperature 0, or by beam search. The memory is written after every full segment, as in training.",
        epilog='example: cached generate runs/demo_text --prompt "It was" --tokens 200 --top-p 0.9',
    )
    add_run(parser, " of a language model, or a folder of save_pretrained with the tokenizer beside the model")
    parser.add_argument("--prompt", metavar="TEXT", help="the text (default: standard input, if it is no terminal)")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the text in a file, of any length")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="new tokens at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample among the fewest tokens of total probability P"
    )
    parser.add_argument("--beams", type=int, default=1, metavar="K", help="search with K beams, and print the best")
    parser.add_argument("--length-penalty", type=float, default=1.0, metavar="A", help="of beams (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--segment-length", type=int, metavar="N", help="tokens in a segment (default: as trained)")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print each token at once, or all at the end (default: at once on a terminal)",
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="continue the text of this state, before the prompt")
    parser.add_argument("--save-state", type=Path, metavar="FILE", help="keep the state, for --state; may be the same")
    add_weights(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation."""
    refuse_below_one(arguments, "tokens", "beams", "top_k", "segment_length")
    if arguments.prompt is not None and arguments.file is not None:
        raise ValueError("--prompt and --file both give the text; leave one of them out")
    if arguments.stream and arguments.beams > 1:
        raise ValueError(f"--stream has no tokens to show: --beams {arguments.beams} choose at the end; leave it out")
    prompt = _prompt(arguments)
    import torch

    from cached_lab.experiments.load import load_writer
    from cached_lab.training.distributed import pick_device

    if arguments.state is not None:
        require_file(arguments.state, "a state that --save-state has written")
    device = pick_device(arguments.device)
    about = (arguments.folder, arguments.checkpoint, arguments.segment_length, device)
    writer = load_writer(*about, state=arguments.state)
    names = ("tokens", "temperature", "top_k", "top_p", "beams", "length_penalty")
    options = {name: getattr(arguments, name) for name in names}
    generator = torch.Generator(device).manual_seed(arguments.seed)
    clock = time.perf_counter()
    pieces: list[str] = []
    at_once = sys.stdout.isatty() if arguments.stream is None else arguments.stream
    found = writer.write(prompt, _print if at_once else pieces.append, generator=generator, **options)
    seconds = time.perf_counter() - clock
    _print("".join([*pieces, "\n"]))
    if arguments.save_state is not None:
        writer.session.save(arguments.save_state)
    count = int(found.lengths)
    print(f"{count:,} tokens, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def _prompt(arguments: argparse.Namespace) -> str:
    """The text, without the line end that closes standard input."""
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.file is not None:
        require_file(arguments.file, "the text to continue")
        try:
            return str(arguments.file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.file} is not UTF-8 ({error}); convert it") from None
    return "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
