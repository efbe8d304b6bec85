"""`cached read`: compare memories on a pretrained model and long texts, without training.

It measures perplexity by position (--tokens) and pass keys, which one sentence of a text gives and a question after the
text asks for (--keys), beside the same model with each segment separately (none) and over the whole text (whole). A
repeated command continues after the last measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import command_line, numbers_from_one, refuse_below_one, require_file

ARGUMENTS = (
    ("model MODEL", str, "folder of save_pretrained, hub name, GGUF file, or fetched name; without a memory"),
    ("texts FILE+", Path, "UTF-8, plain or .xz, .gz, .bz2"),
    (
        "--with ARM,...",
        "none,whole,streaming_llm,block_retrieval",
        "none, whole, or memories with options: NAME:key=value",
    ),
    ("--control NAME", (None, "window"), "window: for each memory a window of as many bytes"),
    ("--tokens N", int, "perplexity of the first N tokens of each text"),
    ("--keys N,...", str, "pass keys in texts of N tokens, and in repeated sentences"),
    ("--trials N", 20, "pass keys of each length"),
    ("--segment-length N", 256, "tokens in a segment"),
    ("--dtype TYPE", (None, "float32", "bfloat16"), "of the model; as it is loaded unless given"),
    ("--seed N", 0, "of the pass keys"),
    ("--out FOLDER", Path("runs/read"), "folder of read.json and report.html"),
)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, and write the report."""
    refuse_below_one(arguments, "tokens", "trials", "segment_length")
    lengths = numbers_from_one("--keys", arguments.keys)
    if not lengths and arguments.tokens is None:
        raise ValueError("nothing to measure: give --tokens N, --keys N,... or both")
    for path in arguments.texts:
        require_file(path, "a text")
    import torch

    from cached_lab.experiments.long_text import LongTexts, parse_arms, read_text
    from cached_lab.experiments.pretrained import resolve_model
    from cached_lab.experiments.reports.read_page import read_tables, write_read_report
    from cached_lab.experiments.reports.terminal import open_console, show
    from cached_lab.tasks.language.completion import words_of_transformers
    from cached_lab.training.run_lock import folder_lock

    arms, texts = parse_arms(vars(arguments)["with"]), {path.name: read_text(path) for path in arguments.texts}
    if len(texts) < len(arguments.texts):
        raise ValueError(f"{len(arguments.texts)} texts have {len(texts)} names; rename the files, which name the rows")
    model, words = resolve_model(arguments.model)
    if arguments.dtype is not None:
        model = model.to(getattr(torch, arguments.dtype))
    about = (words_of_transformers(words), arguments.model, arguments.segment_length, arguments.seed, arguments.out)
    with folder_lock(arguments.out):
        measured = LongTexts(model, *about, command_line())
        if arguments.control == "window":
            arms += measured.windows(arms)
        for line in measured.perplexities(arms, texts, arguments.tokens) if arguments.tokens else ():
            print(line, flush=True)
        for line in measured.pass_keys(arms, texts, lengths, arguments.trials) if lengths else ():
            print(line, flush=True)
    show(open_console(), *read_tables(measured.content))
    print(f"written: {write_read_report(measured.path)}")
    return 0
