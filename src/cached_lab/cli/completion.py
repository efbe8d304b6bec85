"""`cached completion SHELL`: makes a shell complete commands, options, and the names of memories, recipes and others.

The shell's function asks the command itself, so that what it offers is what the parser takes and what is registered.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
WAYS = {
    "bash": 'eval "$(cached completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(cached completion zsh)"    # in ~/.zshrc, behind compinit',
    "fish": "cached completion fish | source    # in ~/.config/fish/config.fish",
}


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "completion",
        help="a script that makes bash, zsh or fish complete commands and names",
        description="Prints the script. Put one of these lines into the file that your shell reads when it starts:",
        epilog="\n".join(WAYS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # typed behind `cached` so far
    parser.set_defaults(run=run, commands=subparsers.choices)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; or what the last word may become, a line each."""
    if arguments.words is None:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    found = candidates(arguments.commands, arguments.words or [""])
    print("\n".join(found), end="\n" if found else "")
    return 0


def candidates(commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]) -> list[str]:
    """What the last word may become, in order; nothing where any word or a file may stand.

    Args:
        commands: parsers by name. words: behind the program's name, the last one as far as it is typed.
    """
    command, *before = words
    if not before:
        return sorted(name for name in commands if name.startswith(command))
    if command not in commands:
        return []
    parser, word = commands[command], before.pop()
    options = {name: action for action in parser._actions for name in action.option_strings}
    if word.startswith("-"):
        return sorted(name for name in options if name.startswith(word))
    if before and before[-1] in options and options[before[-1]].nargs != 0:
        action: argparse.Action | None = options[before[-1]]
    else:
        action = _next_positional(parser, options, before)
    if action is None:
        return []
    head, comma, last = word.rpartition(",")  # of names with commas between them the last one
    known = NAMES.get((command, action.dest), lambda: list(action.choices or ()))
    return sorted(f"{head}{comma}{name}" for name in known() if name.startswith(last))


def _next_positional(
    parser: argparse.ArgumentParser, options: dict[str, argparse.Action], before: list[str]
) -> argparse.Action | None:
    """The argument that the next word without a name is for."""
    values = {index + 1 for index, word in enumerate(before) if word in options and options[word].nargs != 0}
    given = sum(not word.startswith("-") and index not in values for index, word in enumerate(before))
    places = [action for action in parser._actions if not action.option_strings]
    return places[given] if given < len(places) else None


def _recipes() -> list[str]:
    return [row["name"] for row in recipe_rows()]


def _parts() -> list[str]:
    return [name for group in parts().values() for name in group]


def _memories() -> list[str]:
    return list(parts()["memories"])


def _probes() -> list[str]:
    return ["all", *parts()["probes"]]


def _tables() -> list[str]:
    from cached_lab.experiments.reproductions import MEASURED, REPRODUCTIONS

    return [*REPRODUCTIONS, *MEASURED]


def _cards() -> list[str]:
    from cached_lab.experiments.plan.plan import CARDS

    return list(CARDS)


def _modes() -> list[str]:
    from .evaluate import MEMORY_MODES

    return list(MEMORY_MODES)


def _benchmarks() -> list[str]:
    from .benchmark import BENCHMARKS

    return list(BENCHMARKS)


NAMES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("train", "recipe"): _recipes,
    ("plan", "recipe"): _recipes,
    ("plan", "card"): _cards,
    ("compare", "recipe"): _recipes,
    ("compare", "variants"): lambda: ["plain", *_memories()],
    ("compare", "control"): lambda: ["conv", "flops"],
    ("explain", "name"): _parts,
    ("probe", "memories"): lambda: ["all", *_memories()],
    ("probe", "tasks"): _probes,
    ("leaderboard", "memories"): lambda: ["all", *_memories()],
    ("leaderboard", "tasks"): _probes,
    ("reproduce", "reproduction"): _tables,
    ("evaluate", "memory"): _modes,
    ("benchmark", "name"): _benchmarks,
}
"""Names that an argument of a command may have and the parser does not know."""
