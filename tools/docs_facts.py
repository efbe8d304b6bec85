"""Fill the marked regions of the README and the documentation from the registrations.

    python tools/docs_facts.py            write them again; `make facts` does so
    python tools/docs_facts.py --check    say which files are not current, and fail if there are any

A region is between `<!-- facts: WHAT -->` and `<!-- /facts -->`; `WHAT` is a word of `TEXTS` and its subject.
Rows of a table keep their order in the file, and new ones follow. A part that the registry has
and a page does not yet gets a section of its own at the page's end; all else on a page is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cached_lab.experiments.facts import registry_facts
from cached_lab.experiments.recommend import ADVICE, RESULTS, TASKS, Advice
from cached_lab.experiments.recommend import in_words as in_cell
from cached_transformers.interfaces.capabilities import in_words
from cached_transformers.registry import MEMORIES

PROJECT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/which-memory.md",
    "docs/memories.md",
    "docs/attentions.md",
    "docs/probes.md",
)
REGION = re.compile(r"(<!-- facts: ([\w ]+?) -->)(.*?)(<!-- /facts -->)", re.DOTALL)
NUMBERS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
SAID = {
    "memories": ("equations", "reach", "state", "exact_when"),
    "attentions": ("equation", "order"),
}
"""Facts of a section, in this order; `cached explain NAME` adds cost, gradient and needs."""
PROBED = ("chance", "solved_by")
"""Facts of a probe task, in this order."""
CODE = {"equation", "equations"}
BAR = r"\|"
"""A bar within a cell of a table."""

FIRST = tuple(task for task in TASKS if task != "documents")
"""Tasks in the README."""

Part = dict[str, Any]
Facts = dict[str, list[Part]]


def paper_link(part: Part) -> str:
    """The paper's short name, as a link to it."""
    where = part["paper"].split()[0]
    url = f"https://arxiv.org/abs/{where.removeprefix('arXiv:')}" if where.startswith("arXiv:") else f"https://{where}"
    return f"[{part['info']['title']}]({url})"


def in_order(names: Sequence[str], text: str) -> list[str]:
    """Names in their order in the text, then the missing ones."""
    places = {name: re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names}
    return sorted(names, key=lambda name: place.start() if (place := places[name]) else len(text))


def block(lines: Sequence[str]) -> str:
    """Lines between two markers, with an empty line at either end."""
    return "\n\n" + "\n".join(lines) + "\n\n"


def table(facts: Facts, kind: str, old: str) -> str:
    """Table of name, paper and carried state."""
    parts = {part["name"]: part for part in facts[kind]}
    rows = [
        f"| `{name}` | {paper_link(parts[name])} | {parts[name]['info']['carries'].replace('|', BAR)} |"
        for name in in_order(list(parts), old)
    ]
    return block(["| memory | paper | carries |", "| --- | --- | --- |", *rows])


def probes(facts: Facts, old: str) -> str:
    """Name, paper, a guess, sizes, and who solves it."""
    parts = {f"`{part['name']}`": part for part in facts["probes"]}
    rows = [
        f"| {name} | {paper_link(parts[name])} | {parts[name]['summary']} | "
        + " | ".join(parts[name]["info"][key] for key in PROBED)
        + " |"
        for name in in_order(list(parts), old)  # quoted: "facts" and "copy" are words of sentences, too
    ]
    head = "| task | paper | question | chance | solved by |"
    return block([head, "| --- | --- | --- | --- | --- |", *rows])


def purposes(facts: Facts, kind: str, old: str) -> str:
    """Table of purposes and their sections."""
    found: dict[str, list[str]] = {}
    for part in facts[kind]:
        purpose = part["info"]["purpose"]
        for want in [purpose] if isinstance(purpose, str) else purpose:
            found.setdefault(want, []).append(part["name"])
    rows = []
    for want in sorted(found, key=lambda want: at if (at := old.find(f"| {want} |")) >= 0 else len(old)):
        row = next((line for line in old.splitlines() if line.startswith(f"| {want} |")), "")
        links = ", ".join(f"[{name}](#{name})" for name in in_order(found[want], row))
        rows.append(f"| {want} | {links} |")
    return block(["| what you want | look at |", "| --- | --- |", *rows])


def advice(rows: Sequence[Advice], results: str) -> str:
    """Table of recommendations, each with a link to its result."""
    lines = [f"| {row.task} | {row.need} | {in_cell(row)} | [{row.result}]({results}/{row.proof}) |" for row in rows]
    return block(["| task | need | memory | result |", "| --- | --- | --- | --- |", *lines])


def section(facts: Facts, kind: str, name: str) -> str:
    """Paper and facts of one part."""
    part = next((part for part in facts[kind] if part["name"] == name), None)
    if part is None:
        raise ValueError(f"a page has a region of facts about {name!r}, which is not among the {kind}; take it out")
    said = {key: part["info"][key] for key in SAID[kind] if key in part["info"]}
    said |= {key: value for key, value in part["stated"].items() if key != "needs"}
    lines = [f"{paper_link(part)}{protocol(kind, name)}. {part['summary']}", ""]
    for key, value in said.items():
        words = value if isinstance(value, str) else in_words(value) if key == "can" else ", ".join(value)
        word = key.replace("_", " ").removesuffix("s" if key == "equations" else "").capitalize()
        lines.append(f"- **{word}**: `{words}`" if key in CODE else f"- **{word}**: {words}")
    return block(lines)


def protocol(kind: str, name: str) -> str:
    """Kind of a memory: in one layer, or model-level."""
    if kind != "memories":
        return ""
    bases = {base.__name__ for base in getattr(MEMORIES.entry(name).factory, "__mro__", ())}
    words = {"LayerMemory": ", a layer memory", "ModelMemory": ", a model memory"}
    return next((word for base, word in words.items() if base in bases), "")


def papers(facts: Facts, kind: str, less: int = 0) -> str:
    """Number of papers and projects, minus some, as a word."""
    count = len({part["paper"].split()[0] for part in facts[kind]}) - less
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


TEXTS: dict[str, Callable[[Facts, str], str]] = {
    "table of memories": lambda facts, old: table(facts, "memories", old),
    "advice": lambda facts, old: advice(ADVICE, "results"),
    "first advice": lambda facts, old: advice(
        [next(row for row in ADVICE if row.task == task) for task in FIRST], RESULTS
    ),
    "purposes of attentions": lambda facts, old: purposes(facts, "attentions", old),
    "papers of memories": lambda facts, old: papers(facts, "memories"),
    "other papers of memories": lambda facts, old: papers(facts, "memories", 1),
    "table of probes": probes,
    "number of attentions": lambda facts, old: str(len(facts["attentions"])),
}
"""Regions, beside `memory NAME` and `attention NAME`."""
SECTIONS = {"memory": "memories", "attention": "attentions"}


def fill(text: str, facts: Facts) -> str:
    """A page with its regions filled.

    Raises:
        ValueError: a region of unknown content, without an end, or in a sentence and at the begin of a line.
    """
    begins, ends = text.count("<!-- facts: "), text.count("<!-- /facts -->")
    if not begins == ends == len(REGION.findall(text)):
        raise ValueError(f"regions of facts must not be nested or open: {begins} begin and {ends} end")

    def fresh(match: re.Match[str]) -> str:
        begin, what, old, end = match.groups()
        first, _, rest = what.partition(" ")
        if what in TEXTS:
            new = TEXTS[what](facts, old)
            if "\n" not in new and match.start() and text[match.start() - 1] == "\n":
                raise ValueError(f"{begin} begins a line, where Markdown would end the paragraph; put a word before it")
            return f"{begin}{new}{end}"
        if first in SECTIONS:
            return f"{begin}{section(facts, SECTIONS[first], rest)}{end}"
        raise ValueError(
            f"a region of facts is called {what!r}; take one of {', '.join(TEXTS)}, memory NAME, attention NAME"
        )

    return REGION.sub(fresh, text)


def with_all_sections(page: str, text: str, facts: Facts) -> str:
    """The page of memories or attentions with an empty section for each part that has none."""
    for word, kind in SECTIONS.items():
        if Path(page).stem != kind:
            continue
        for name in (part["name"] for part in facts[kind]):
            if f"\n## {name}\n" in text:
                continue
            text += f"\n## {name}\n\n<!-- facts: {word} {name} --><!-- /facts -->\n"
            if kind == "attentions":
                picture = f"images/attentions/{name}.png"
                text += (
                    f"\n![Pattern of {name}]({picture})\n\n```bash\ncached explain {name} --plot docs/{picture}\n```\n"
                )
    return text


def current(page: str, text: str, facts: Facts) -> str:
    """Text of a page with current regions."""
    return fill(with_all_sections(page, text, facts), facts)


def main(arguments: Sequence[str]) -> int:
    """Write the pages that are not current, or name them."""
    facts, check = registry_facts(), "--check" in arguments
    stale = []
    for page in PAGES:
        path = PROJECT / page
        old = path.read_text(encoding="utf-8")
        if (new := current(page, old, facts)) != old:
            stale.append(page)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: {'not current; run `make facts`' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
