"""The tables of a leaderboard, for the terminal and as Markdown with what every column means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cached_transformers.files import write_whole

from .far_page import trained_segments
from .formatting import MISSING, short_count
from .markdown import around, table, write_between

MARKS = ("<!-- leaderboard: made by `cached leaderboard` -->", "<!-- leaderboard end -->")
"""Between them stands what the command writes again."""
TITLE = "# Leaderboard"


class BoardTable(NamedTuple):
    """One table: a title, heads of the columns, and cells."""

    title: str
    header: list[str]
    rows: list[list[str]]


def board_tables(content: Mapping[str, Any]) -> list[BoardTable]:
    """The standings with costs, and right answers by task, near and far."""
    standings, tasks = content["standings"], content["tasks"]
    asks = {task: group for group, members in content["groups"].items() for task in members}
    overall = [
        [
            row["name"],
            _percent(row["near_mean"]),
            _percent(row["far_mean"]),
            f"{row['solved']} of {row['trainings']}",
            MISSING if row["state_bytes"] is None else _range(row["state_bytes"]),
            _range(row["parameters"]),
            *_costs(content["costs"][row["name"]]),
        ]
        for row in standings
    ]
    header = ["memory", "near, mean", "far, mean", "solved", "state, bytes", "parameters"]
    header += ["FLOPs a token", "reading, no memory = 1", "training, no memory = 1"]
    near = [[row["name"], *(_share(row["near"][task]) for task in tasks)] for row in standings]
    far = [[row["name"], *(_share(row["far"][task]) for task in tasks)] for row in standings if row["far"]]
    heads, far_heads = (
        [f"{asks[task]}: {task}, {standings[-1][where][task]['tokens']} tokens" for task in tasks]
        for where in ("near", "far")
    )
    return [
        BoardTable("Standings", header, overall),
        BoardTable("Near: right answers at the farthest trained distance, %", ["memory", *heads], near),
        BoardTable("Far: right answers in the longest texts, %", ["memory", *far_heads], far),
    ]


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"


def _share(share: Mapping[str, Any]) -> str:
    """A share with its interval, and a mark where one of its trainings counts as a guess."""
    interval = "" if share["low"] is None else f" [{_percent(share['low'])}, {_percent(share['high'])}]"
    return f"{_percent(share['mean'])}{interval}{' ~' if share['ended'] else ''}"


def _range(values: list[int]) -> str:
    low, high = values
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _costs(cost: Mapping[str, Any]) -> list[str]:
    ratios = [cost[kind] for kind in ("reading", "training")]
    return [short_count(cost["flops"]), *(f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in ratios)]


def refuse_page(path: Path) -> None:
    """Refuse (ValueError) a page that cannot be written, before anything is trained for it."""
    if path.is_dir():
        raise ValueError(f"--page {path} is a folder; give the name of a Markdown file")
    if path.is_file():
        around(path, MARKS)


def write_board_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page; of one that is there, what stands between the marks."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n\n".join([TITLE, *MARKS]).encode() + b"\n")
    write_between(path, MARKS, board_markdown(content))


def board_markdown(content: Mapping[str, Any]) -> str:
    """How the board was made, its tables, and what their columns mean."""
    tables = [f"**{title}**\n\n{table(header, rows)}" for title, header, rows in board_tables(content)]
    pieces = ["", f"```bash\n{content['command']}\n```", _made(content), tables[0], _columns(content), *tables[1:], ""]
    return "\n\n".join(pieces)[1:-1]


def _made(content: Mapping[str, Any]) -> str:
    facts, counts = content["environment"], _seeds(content["seeds"])
    trained = ", ".join(sorted({_commit(result.get("environment")) for result in content["results"]}))
    options = {r["task"]: r["settings"]["task"] for r in content["results"]}
    tasks = ", ".join(
        " ".join([f"`{task}`", *(f"`{task}.{key}={_value(value)}`" for key, value in options[task].items())])
        for task in content["tasks"]
    )
    sizes = content["results"][0]["settings"]["sizes"]
    return (
        f"{content['machine']}; torch {facts['torch']}, python {facts['python']}, {content['date']}, commit "
        f"{_commit(facts)}; trainings of commit {trained}.\n\n"
        f'The board "{content["board"]}": {content["why"]}. Tasks: {tasks}; {counts}, {sizes["steps"]} steps at most, '
        f"cue and question {trained_segments(content)} apart in training, by a curriculum; "
        f"then texts of up to {content['far']:,} tokens. A language model of {sizes['depth']} layers with "
        f"{sizes['heads']} heads, width {sizes['width']}, with a short convolution of {content['taps']} tokens, the "
        "same for all."
    )


def _commit(environment: Mapping[str, Any] | None) -> str:
    return ((environment or {}).get("commit") or "unknown")[:7]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seeds(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _columns(content: Mapping[str, Any]) -> str:
    rows, seeds, farthest = content["rows"], content["seeds"], content["course"]["farthest"]
    interval = (
        f"Wilson's over the {rows} texts of the one seed, which knows nothing of other seeds"
        if seeds == 1
        else f"the t interval over {seeds} seeds, cut to 0 and 100 (whole text, one seed: Wilson's over {rows} texts)"
    )
    lines = [
        "**no memory** begins every segment anew, **whole text** attends everything and shows that a task can be "
        "learned; both come first, and the latter is not asked about long texts.",
        f"**near**: share of right answers at the farthest trained distance, {farthest} segments, in {rows} new texts "
        f"a task; the mean is over tasks. Memories are sorted by it. In brackets behind each share: 95 %, {interval}.",
        "**far**: the same in the longest texts. Asking ends at a distance where a memory is near a guess, and a "
        "training of which it has ended counts as a guess: ~.",
        "**solved**: trainings that reached 99 % right answers at every distance of the curriculum, of all.",
        "**state, bytes**: what a row carries from segment to segment, in float32, the tail of the short convolution "
        "included.",
        "**parameters**: of the whole model; they differ with a task's vocabulary, too.",
        f"**FLOPs a token**: counted matrix products of reading a text of `{content['costs_of']}` at that distance, a "
        "multiply-add as two, over its tokens; all readings of a memory that reads twice.",
        "**reading**, **training**: processor time of reading these texts, and of a training step, over that of the "
        "model without a memory: median (quartiles) of rounds in which all models take turns, with one thread.",
    ]
    return "\n".join(f"- {line}" for line in lines)
