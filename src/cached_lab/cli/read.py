"""`cached read`: compare memories on a pretrained model and long texts.

It measures perplexity by position (--tokens); pass keys, which one sentence of a text gives and a question after the
text asks for (--keys); facts in the first tokens (--facts); and stories (--stories), beside the same model with each
segment separately (none) and over the whole text (whole). Memories that trained on the model are given by their run
folders. A repeated command continues after the last measurement.
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
        "none, whole, memories with options (NAME:key=value), or folders of runs that trained on the model",
    ),
    ("--control NAME", (None, "window"), "window: for each memory a window of as many bytes"),
    ("--tokens N", int, "perplexity of the first N tokens of each text"),
    ("--keys N,...", str, "pass keys in texts of N tokens, and in repeated sentences"),
    ("--facts N,...", str, "four facts in the first tokens of texts of N tokens, asked for at the end"),
    ("--stories N,...", str, "stories of bAbI (qa1) in texts of N tokens, which need --babi"),
    ("--babi PATH", Path, "bAbI's archive or folder"),
    ("--trials N", 20, "texts of each length with pass keys, facts or stories"),
    ("--segment-length N", 256, "tokens in a segment"),
    ("--dtype TYPE", (None, "float32", "bfloat16"), "of the model; as it is loaded unless given"),
    ("--seed N", 0, "of the pass keys"),
    ("--out FOLDER", Path("runs/read"), "folder of read.json and report.html"),
)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, and write the report."""
    refuse_below_one(arguments, "tokens", "trials", "segment_length")
    lengths = numbers_from_one("--keys", arguments.keys)
    recalled = {kind: numbers_from_one(f"--{kind}", getattr(arguments, kind)) for kind in ("facts", "stories")}
    if not lengths and arguments.tokens is None and not any(recalled.values()):
        raise ValueError("nothing to measure: give --tokens N, --keys N,..., --facts N,... or --stories N,...")
    if recalled["stories"] and arguments.babi is None:
        raise ValueError("--stories needs --babi PATH, bAbI's archive or folder")
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
        for kind, numbers in recalled.items():
            for line in measured.recalled(kind, arms, texts, numbers, arguments.trials, arguments.babi):
                print(line, flush=True)
    show(open_console(), *read_tables(measured.content))
    print(f"written: {write_read_report(measured.path)}")
    return 0
