"""`cached completion SHELL`: a script that completes commands, options and names in bash, zsh or fish.

The script asks the command itself, so that names of memories, recipes and others stay current. shtab writes static
scripts and argcomplete would be a dependency of every user for the same forty lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cached_lab.resources import read_facts

from .arguments import add_command
from .benchmark import BENCHMARKS
from .evaluate import MEMORY_MODES
from .list import parts, recipe_rows

SCRIPTS = {
    "bash": """\
_cached() {
    local IFS=$'\\n'
    COMPREPLY=($(cached completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _cached cached
""",
    "zsh": """\
_cached() {
    local -a found
    found=("${(@f)$(cached completion zsh --words "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    if [[ -n $found[1] ]]; then compadd -Q -a found; else _files; fi
}
compdef _cached cached
""",
    "fish": """\
complete -c cached -a '(cached completion fish --words (commandline -opc)[2..] "$(commandline -ct)" 2> /dev/null)'
""",
}
USE = """\
eval "$(cached completion bash)"   # in ~/.bashrc
eval "$(cached completion zsh)"    # in ~/.zshrc, after compinit
cached completion fish | source    # in ~/.config/fish/config.fish"""


def _memories(*more: str) -> list[str]:
    return [*more, *parts()["memories"]]


NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "recipe": lambda: [row["name"] for row in recipe_rows()],
    "variants": lambda: _memories("plain"),
    "control": lambda: ["conv", "flops", "longer", "parameters"],
    "name": lambda: [name for group in parts().values() for name in group],
    "memories": lambda: _memories("all"),
    "tasks": lambda: ["all", *parts()["probes"]],
    "benchmark": lambda: list(BENCHMARKS),
    "reproduction": lambda: [table["name"] for table in read_facts()["reproductions"]],
    "memory": lambda: MEMORY_MODES,
}
"""Names for arguments without choices, by their destination in the parser."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "completion",
        run,
        "a script that makes bash, zsh or fish complete commands and names",
        description="Prints the script. Put one of these lines into the start file of your shell:",
        epilog=USE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the words after `cached` so far
    parser.set_defaults(commands=subparsers.choices)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; or the completions of the last word, one per line."""
    if arguments.words is None:
        print(SCRIPTS[arguments.shell], end="")
    elif found := candidates(arguments.commands, arguments.words or [""]):
        print("\n".join(found))
    return 0


def candidates(commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]) -> list[str]:
    """Completions of the last word; empty if any word or file may follow.

    Args:
        commands: parsers by name. words: the words after `cached`, the last one as far as it is typed.
    """
    command, *before = words
    if not before:
        return sorted(name for name in commands if name.startswith(command))
    if command not in commands:
        return []
    word, actions = before.pop(), commands[command]._actions
    options = {name: action for action in actions for name in action.option_strings}
    if word.startswith("-"):
        return sorted(name for name in options if name.startswith(word))
    valued = {name for name, action in options.items() if action.nargs != 0}
    if before and before[-1] in valued:
        action = options[before[-1]]
    else:
        values = {index + 1 for index, given in enumerate(before) if given in valued}
        given = sum(not text.startswith("-") and index not in values for index, text in enumerate(before))
        positional = [action for action in actions if not action.option_strings]
        if given >= len(positional):
            return []
        action = positional[given]
    head, comma, last = word.rpartition(",")  # complete the last of several names separated by commas
    known = action.choices or NAMES.get(action.dest, list)()
    return sorted(f"{head}{comma}{name}" for name in known if name.startswith(last))
