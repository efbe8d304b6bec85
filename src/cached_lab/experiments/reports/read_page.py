"""The tables and the page of `cached read`: perplexity by position, pass keys, facts and stories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from cached_lab.experiments.efficiency import NONE, NOTE, WHOLE, WINDOW, efficiencies
from cached_lab.experiments.statistics import summarise_pairs

from .blocks import Block, FactList, Heading, ReportTable
from .formatting import MISSING, environment_text, share_text
from .page import write_page

TITLES = {"keys": "pass keys", "facts": "facts recalled", "stories": "answers about stories"}
KEYS_NOTE = "Right answers, and in brackets the efficiency."


def write_read_report(path: Path) -> Path:
    """Write `report.html` beside read.json."""
    return write_page(path.parent, "Long texts", read_blocks(path))


def read_blocks(path: Path) -> list[Block]:
    """The page of one read.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    facts = {**content["settings"], "command": content["command"]}
    facts["environment"] = environment_text(content["environment"])
    return [Heading(f"Long texts read by {content['settings']['model']}", 1), *read_tables(content), FactList(facts)]


def read_tables(content: Mapping[str, Any]) -> list[Block]:
    """A table of perplexities for each text, two tables of pass keys, and one of facts and of stories."""
    texts = {(row["text"], row["tokens"]): None for row in content["perplexity"]}
    found: list[Block] = [_perplexities(content, *text) for text in texts]
    found += _against_controls(content)
    for kind in TITLES:
        for text in dict.fromkeys(row["text"] for row in content.get(kind, ())):
            found += _recall(content, kind, text)
    return found


def _perplexities(content: Mapping[str, Any], text: str, tokens: int) -> ReportTable:
    rows = {r["arm"]: r for r in content["perplexity"] if (r["text"], r["tokens"]) == (text, tokens)}
    ends = [end for end, _ in next(iter(rows.values()))["bins"]]
    longest = content["longest"] or ends[-1]
    trained = max(sum(end <= longest for end in ends) - 1, 0)
    shares = efficiencies("perplexity", {arm: row["bins"][trained][1] for arm, row in rows.items()})
    columns = [f"{end:,}" for end in ends]
    lines = []
    for arm, row in rows.items():
        speed, size = tokens / row["seconds"], row["state_bytes"] / 2**20
        values = [f"{perplexity:.2f}" for _, perplexity in row["bins"]]
        lines.append([arm, *values, share_text(shares[arm]), f"{speed:,.0f}", f"{size:,.1f}"])
    notes = f"The model was trained with up to {longest:,} tokens. {NOTE} Here up to {columns[trained]}."
    heads = ("read by", *columns, "efficiency", "tok/s", "MiB")
    return ReportTable(heads, lines, notes, f"{text}: perplexity by position, in tokens up to; MiB of state")


def _against_controls(content: Mapping[str, Any]) -> list[Block]:
    """A table of what each memory saves against no memory, a window of as many bytes, and training without a memory.

    Runs of one folder, "NAME/seed_N", are one row: the mean over seeds, each against the control of its seed, or
    against the mean of the control's seeds where that seed is missing.
    """
    values: dict[str, list[float]] = {}
    rows = [row for row in content["perplexity"] if row.get("blocks")]
    for row in sorted(rows, key=lambda row: (row["text"], row["tokens"])):
        values.setdefault(row["arm"], []).extend(row["blocks"])
    most = max(map(len, values.values()), default=0)
    whole = {arm for arm, blocks in values.items() if len(blocks) == most > 1}  # arms that read every text
    groups: dict[str, dict[str, str]] = {}
    for arm in (row["arm"] for row in rows if row["arm"] in whole):
        name, _, seed = arm.partition("/seed_")
        groups.setdefault(name, {})[seed] = arm
    has_memory = {row["arm"].partition("/seed_")[0]: row["memory"] for row in rows}
    memories = [name for name in groups if has_memory[name] and not name.startswith(f"{WINDOW} of ")]
    trained = [name for name in groups if not has_memory[name] and name not in (NONE, WHOLE)]
    pairs = [(name, other) for name in memories for other in (NONE, f"{WINDOW} of {name}", *trained) if other in groups]
    sides, by_seed = dict[str, list[float]](), []
    for place, (name, other) in enumerate(pairs):
        runs, controls = groups[name], groups[other]
        left, middle = [values[arm] for arm in runs.values()], _means([values[arm] for arm in controls.values()])
        right = [values[controls[seed]] if seed in controls else middle for seed in runs]
        sides |= {f"{place} left": _means(left), f"{place} right": _means(right)}
        saved = [mean(second) - mean(first) for first, second in zip(left, right, strict=True)]
        by_seed.append(", ".join(f"{nats:+.3f}" for nats in saved) if len(runs) > 1 else "")
    if not pairs:
        return []
    lines = []
    tested = summarise_pairs(sides, [(f"{place} left", f"{place} right") for place in range(len(pairs))])
    for pair, row, seeds_text in zip(pairs, tested, by_seed, strict=True):
        saves, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
        p_value = MISSING if row["p_adjusted"] is None else f"{row['p_adjusted']:.2g}"
        lines.append([*pair, f"{-saves:+.3f} [{-high:+.3f}, {-low:+.3f}]", p_value, seeds_text])
    notes = f"Over {most} blocks of 1,024 tokens of all texts, paired, with 95 % t intervals; p by Holm over the rows."
    heads = ["read by", "against", "nats a token saved", "p", "by seed"]
    if not any(by_seed):
        heads, lines = heads[:-1], [line[:-1] for line in lines]
    return [ReportTable(heads, lines, notes, "Against the controls")]


def _means(blocks: Sequence[Sequence[float]]) -> list[float]:
    return [mean(places) for places in zip(*blocks, strict=True)]


def _recall(content: Mapping[str, Any], kind: str, text: str) -> list[Block]:
    """A table of right answers by length, and for pass keys one of speeds."""
    by_place: dict[int, dict[str, list[Any]]] = {}
    for row in content[kind]:
        if row["text"] == text:
            by_place.setdefault(row["length"], {}).setdefault(row["arm"], []).append(row)
    lengths, arms = sorted(by_place), dict.fromkeys(arm for found in by_place.values() for arm in found)
    cells: dict[str, list[list[str]]] = {arm: [[], []] for arm in arms}
    for length in lengths:
        found = by_place[length]
        answers = {arm: [right for row in rows for right in _answers(row)] for arm, rows in found.items()}
        shares = efficiencies("accuracy", {arm: mean(right) for arm, right in answers.items()})
        for arm, (right, speed) in cells.items():
            rows = found.get(arm, [])
            share = "" if shares.get(arm) is None else f" ({share_text(shares[arm])})"
            right.append(f"{sum(answers[arm])} of {len(answers[arm])}{share}" if rows else "")
            if kind == "keys":
                speed.append(f"{median(length / row['seconds'] for row in rows):,.0f}" if rows and arm != NONE else "")
    heads = ("read by", *(f"{length:,}" for length in lengths))
    about = KEYS_NOTE if content["perplexity"] else f"{KEYS_NOTE} {NOTE}"
    tables = [(f"{TITLES[kind]} by length in tokens", about)]
    if kind == "keys":
        tables.append(("tokens/s of reading, median", ""))
    return [
        ReportTable(heads, [[arm, *both[n]] for arm, both in cells.items()], notes, f"{text}: {title}")
        for n, (title, notes) in enumerate(tables)
    ]


def _answers(row: Mapping[str, Any]) -> list[bool]:
    """Right or wrong for each question of a text; one for a pass key."""
    right = row["right"]
    return right if isinstance(right, list) else [right]
