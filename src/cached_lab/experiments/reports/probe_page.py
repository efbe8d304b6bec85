"""The tables and the page of `cached probe`: at one distance (probe.json), or by distance (far.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cached_lab.experiments.efficiency import NONE, NOTE, WHOLE, WINDOW, probe_efficiencies, probe_rows, probe_scores

from .blocks import Block, FactList, Heading, Picture, ReportTable, Rows
from .figures.curves import answers_by_distance
from .formatting import environment_text, share_text
from .page import write_page

REACHES = ("within reach", "out of reach")
ENOUGH = 0.99
"""Share of right answers at which a distance counts as held."""
FAR_COLUMNS = ("right, %", "efficiency", "trained to, segments", "held, tokens", "state, bytes")
NO_WHOLE = f"No efficiency: no model read the {WHOLE}; "
PROBE_NOTE = (
    "Share of right answers in per cent on new episodes. Within reach: the options let the memory span the distance. "
    "Out of reach: they do not, by its theory; empty if it knows no bound. Without a memory the model can only guess."
)


def probe_tables(content: Mapping[str, Any]) -> list[Block]:
    """The shares of right answers in `probe.json` with their notes, or the distances held in `far.json`."""
    if "far" not in content:
        return [PROBE_NOTE, _table(content)]
    return [_far_table(content), *(f"{task}: {_sentence(content, task)}" for task in content["tasks"])]


def write_probe_report(path: Path) -> Path:
    """Write `report.html` beside probe.json or far.json."""
    return write_page(path.parent, "Probe of memories", probe_blocks(path))


def probe_blocks(path: Path) -> list[Block]:
    """The page of one probe.json or far.json: a picture of every task, the table, and the circumstances."""
    content = json.loads(path.read_text(encoding="utf-8"))
    is_far = "far" in content
    title = Heading("How far memories hold" if is_far else "What memories hold", 1)
    blocks: list[Block] = [title, *probe_tables(content)]
    for task in content["tasks"]:
        blocks += [Heading(task), (_far_picture if is_far else _picture)(content, task)]
    about = {key: content.get(key) for key in ("command", "date", "seeds", "rows")}
    return [*blocks, FactList(about | {"environment": environment_text(content["environment"])})]


def _picture(content: Mapping[str, Any], task: str) -> Picture:
    curves = {
        name: {int(d): [r["distances"][d] for r in found] for d in found[0]["distances"]}
        for name, found in probe_rows(content, task).items()
    }
    chance, trained = next(r["chance"] for r in content["results"] if r["task"] == task), content["distance"]
    figure = answers_by_distance(curves, chance, trained, "segments between cue and question")
    return Picture(figure, f"{task}: trained at a distance of {trained} segments, tested at others.")


def _table(content: Mapping[str, Any]) -> ReportTable:
    """A row per arm without a memory, memory and window, of "within reach"; three columns per task."""
    columns = [f"{task}, {head}" for task in content["tasks"] for head in (*REACHES, "efficiency")]
    found, shares = {task: probe_rows(content, task) for task in content["tasks"]}, probe_efficiencies(content)
    rows = []
    for name in dict.fromkeys(name for by_name in found.values() for name in by_name):
        cells = [name]
        for task in content["tasks"]:
            beyond = [r for r in content["results"] if (r["task"], r["memory"], r["arm"]) == (task, name, REACHES[1])]
            cells += [_cell(found[task].get(name, ())), _cell(beyond), share_text(shares[task].get(name))]
        rows.append(cells)
    bar = NOTE if any(WHOLE in by_name for by_name in found.values()) else f"{NO_WHOLE}--control whole trains one."
    notes = " ".join([bar, *(f"{name}: {note}." for name, note in content["notes"].items())]) + windows_note(content)
    title = f"right answers in per cent, {content['distance']} segments after the cue"
    return ReportTable(["memory", *columns], rows, notes, title)


def _cell(trainings: Rows) -> str:
    if not trainings:
        return ""
    accuracy, exact, steps = (mean(r[key] for r in trainings) for key in ("accuracy", "exact", "steps"))
    whole = f", whole episodes {100 * exact:.1f}" if exact != accuracy else ""
    return f"{100 * accuracy:.1f}{whole} ({steps:.0f} steps)"


def windows_note(content: Mapping[str, Any]) -> str:
    """The memories without a window in every task, if windows were asked for."""
    by_task = [probe_rows(content, task) for task in content["tasks"]]
    lacking = [m for m in content["memories"] if not all(f"{WINDOW} of {m}" in rows for rows in by_task)]
    if "window" not in content.get("controls", ()) or not lacking:
        return ""
    return f" No window of {', '.join(lacking)}: itself one, or of a state smaller than one slot."


def trained_segments(content: Mapping[str, Any]) -> str:
    """The distances of the training: "0 to 3", or "0 or 1 to 3" if the nearest one depends on the task."""
    nearest = sorted({result["settings"]["course"]["nearest"] for result in content["results"]})
    return f"{' or '.join(map(str, nearest))} to {content['course']['farthest']} segments"


def held_tokens(training: Mapping[str, Any], segment: int) -> int:
    """Tokens from cue to question up to which all tested distances are held."""
    far = 0
    for distance, (share, *_) in sorted((int(d), answer) for d, answer in training["far"].items()):
        if share < ENOUGH:
            break
        far = distance * segment
    return far


def _far_picture(content: Mapping[str, Any], task: str) -> Picture:
    rows, segment = probe_rows(content, task), content["segments"][task]
    lines = {}
    for name, trainings in rows.items():
        common = set.intersection(*(set(t["far"]) for t in trainings))
        lines[name] = {int(d) * segment: [t["far"][d][0] for t in trainings] for d in common}
    trained = content["course"]["farthest"] * segment
    figure = answers_by_distance(lines, rows["no memory"][0]["chance"], trained, "tokens since the cue", log=True)
    caption = f"{content['asked'][task]} Mean over seeds; the band runs from the worst to the best."
    return Picture(figure, caption)


def _far_table(content: Mapping[str, Any]) -> ReportTable:
    rows, shares = [], probe_efficiencies(content)
    for task in content["tasks"]:
        for name, trainings in probe_rows(content, task).items():
            cells = [f"{100 * mean(probe_scores(content, trainings)):.1f}", share_text(shares[task][name])]
            held = min(held_tokens(training, content["segments"][task]) for training in trainings)
            size = "" if name in (NONE, WHOLE) else f"{trainings[0]['state_bytes']:,}"
            rows.append([task, name, *cells, f"{min(t['solved'] for t in trainings)}", f"{held:,}", size])
    whole = any(result["arm"] == WHOLE for result in content["results"])
    title = f"trained with {trained_segments(content)} from cue to question, asked up to {content['far']:,} tokens"
    notes = (
        f"A distance is held if {100 * ENOUGH:.0f} % of the answers are right; numbers are the least over seeds. Tests "
        "end where a memory is near a guess. Whole text: attention over everything, without a memory, of one seed. "
        f"Right: at the farthest trained distance. {NOTE if whole else f'{NO_WHOLE}leave out --no-ceiling.'}"
    ) + windows_note(content)
    return ReportTable(["task", "memory", *FAR_COLUMNS], rows, notes, title)


def _sentence(content: Mapping[str, Any], task: str) -> str:
    """Answers of the memories, and of the model without a memory, at the longest tested distance."""
    rows = probe_rows(content, task)
    farthest = max(int(d) for memory in content["memories"] for t in rows[memory] for d in t["far"])
    shares = {name: found for name, trainings in rows.items() if (found := _shares(trainings, farthest))}
    best = sorted(set(shares) & set(content["memories"]), key=lambda name: -mean(shares[name]))
    right = ", ".join(f"{name} is right in {100 * mean(shares[name]):.1f} %" for name in best)
    none = f"{100 * mean(shares['no memory']):.1f} %" if "no memory" in shares else "no case (not asked there)"
    segment, chance = content["segments"][task], 100 * rows["no memory"][0]["chance"]
    farthest_trained = content["course"]["farthest"] * segment
    return (
        f"Asked {farthest * segment:,} tokens after the cue, {right}; the same model without a memory in {none}, "
        f"a guess in {chance:.1f} %. In training they were at most {farthest_trained:,} tokens apart."
    )


def _shares(trainings: Rows, distance: int) -> Sequence[float]:
    """Right answers at a distance, one per seed; a training that had ended counts as a guess. Empty if all had."""
    asked = [t["far"].get(str(distance)) for t in trainings]
    return [a[0] if a else trainings[0]["chance"] for a in asked] if any(asked) else []
