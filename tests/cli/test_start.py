"""The command line imports what a command uses, and no more: help, lists and explanations do without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cached_transformers.cli.main import build_parser

PROGRAM = """
import sys
from cached_transformers.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = sorted({{"torch", "numpy", "timm", "transformers", "matplotlib", "scipy"}} & {{*sys.modules}})
assert not heavy, heavy
"""
COMMANDS = sorted(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["list"],
        ["list", "recipes", "--json"],
        ["explain", "grc"],
        ["explain", "no_such_name"],
    ]
    + [[command, "--help"] for command in COMMANDS],
    ids=" ".join,
)
def test_without_torch(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "unknown name" in done.stderr


def test_help_of_reproductions_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    from cached_transformers.experiments.reproductions import MEASURED, REPRODUCTIONS

    with pytest.raises(SystemExit):
        build_parser().parse_args(["reproduce", "--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, table in {**REPRODUCTIONS, **MEASURED}.items():
        assert [name, table.summary] in lines
