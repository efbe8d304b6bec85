"""Help, lists and explanations work without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cached_lab.cli.main import build_parser

PROGRAM = """
import contextlib, io, sys
from cached_lab.cli.main import main
for words in {commands!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out, \\
            contextlib.redirect_stderr(io.StringIO()) as err:
        main(words)
    heavy = sorted({{"torch", "numpy", "timm", "transformers", "matplotlib", "scipy"}} & {{*sys.modules}})
    assert not heavy, (words, heavy)
    assert out.getvalue() or "unknown name" in err.getvalue(), words
from cached_lab.tasks.recipes import load_config
load_config("imagenet_pvt_tiny_grc")  # its model is registered by a module of the library that a recipe does not name
print("done")
"""
COMMANDS = sorted(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


def test_without_torch() -> None:
    """One process runs all commands, so that the last check covers every import."""
    commands = [
        ["--help"],
        ["--version"],
        ["list"],
        ["list", "recipes", "--json"],
        ["explain", "grc"],
        ["explain", "no_such_name"],
        ["completion", "bash", "--words", "explain", "tran"],
        *([command, "--help"] for command in COMMANDS),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_help_of_reproductions_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    from cached_lab.experiments.reproductions import MEASURED, REPRODUCTIONS

    with pytest.raises(SystemExit):
        build_parser().parse_args(["reproduce", "--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, summary in {**{name: table.summary for name, table in REPRODUCTIONS.items()}, **MEASURED}.items():
        assert [name, summary] in lines
