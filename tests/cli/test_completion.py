"""`cached completion`: each shell offers the parser's options and the registered names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cached_lab.cli.completion import NAMES, SCRIPTS, candidates
from cached_lab.cli.main import build_parser, main
from cached_lab.resources import recipes_folder
from cached_transformers.registry import MEMORIES

COMMANDS = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
RECIPES = sorted(path.stem for path in recipes_folder().glob("demo_*.yaml"))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("exp", ["explain"]),
        ("", sorted(COMMANDS)),
        ("no_such_command ", []),
        ("train demo_", RECIPES),
        ("train --out folder demo_", RECIPES),
        ("train --dry-run demo_", RECIPES),
        ("train demo_text training.st", []),
        ("explain transformer_x", ["transformer_xl"]),
        ("explain big", ["bigbird"]),
        ("list me", ["memories"]),
        ("plan demo_text --par", ["--parallel"]),
        ("probe rmt,transformer_x", ["rmt,transformer_xl"]),
        ("probe rmt --tasks latch,mq", ["latch,mqar"]),
        ("leaderboard --memories rmt,transformer_x", ["rmt,transformer_xl"]),
        ("leaderboard --tasks latch,mq", ["latch,mqar"]),
        ("compare demo_text --with plain,rm", ["plain,rmt"]),
        ("evaluate run --memory carry,res", ["carry,reset"]),
        ("evaluate run --spl", ["--split"]),
        ("evaluate run --split ", ["test", "train", "validation"]),
        ("reproduce table1", ["table1", "table10"]),
        ("stream run ", []),
        ("completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_candidates(typed: str, offered: list[str]) -> None:
    assert candidates(COMMANDS, typed.split(" ")) == offered


def test_names_belong_to_existing_arguments() -> None:
    """A renamed argument would lose its completions."""
    found = {action.dest for parser in COMMANDS.values() for action in parser._actions}
    assert NAMES.keys() - found == set()
    assert {entry.name for entry in MEMORIES} <= {*candidates(COMMANDS, ["probe", ""])}
    assert all(names() for names in NAMES.values())


ASKED = {
    "bash": 'COMP_WORDS=(cached explain transformer_); COMP_CWORD=2; _cached; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "words=(cached explain transformer_); CURRENT=3; _cached",
    "fish": "complete -C 'cached explain transformer_'",
}
BEGIN = {
    "bash": 'eval "$(cached completion bash)"',
    # Stand-ins for two functions of the completion system.
    "zsh": 'compdef() { :; }; compadd() { print -l ${(P)3}; }; eval "$(cached completion zsh)"',
    "fish": "cached completion fish | source",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    cached = tmp_path / "cached"
    cached.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cached_lab.cli.main "$@"\n')
    cached.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    places = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [program, "-c", f"{BEGIN[shell]}\n{ASKED[shell]}"],
        env={**os.environ, "PATH": path, "PYTHONPATH": places, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["transformer_xl"], done.stderr


def test_the_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0 and capsys.readouterr().out == script
    assert main(["completion", "bash", "--words", "no_such_command", ""]) == 0 and capsys.readouterr().out == ""
