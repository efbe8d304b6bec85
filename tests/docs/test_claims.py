"""Each number in the answer of a page of results, and in README's claims, is in the tables and text of the results,
rounded as the claim rounds."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from docs.pages import PROJECT

RESULTS = sorted((PROJECT / "docs/results").glob("[!i]*.md"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|```.*?```", re.S)


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in NUMBER.findall(NOT_PROSE.sub(" ", text))]


def unsupported(claim: str, evidence: str) -> list[str]:
    """Numbers of the claim that no number of the evidence gives: itself, as a percentage, or the sum of a column."""
    columns: dict[tuple[int, int], float] = {}
    for index, table in enumerate(re.findall(r"(?:^\|.*\n)+", evidence, re.M)):
        for row in table.splitlines()[2:]:
            for place, cell in enumerate(row.split("|")):
                if re.fullmatch(r"\s*\d+\s*", cell):
                    columns[index, place] = columns.get((index, place), 0) + float(cell)
    given = [*map(float, numbers(evidence)), *columns.values()]

    def holds(number: str, among: Iterable[float]) -> bool:
        digits = len(number.partition(".")[2]) or len(number.rstrip("0")) - len(number)
        return any(float(number) in (round(x, digits), round(100 * (x - 1), digits)) for x in among)

    return [number for number in numbers(claim) if not holds(number, given)]


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_the_answer_of_a_page_is_in_its_tables(page) -> None:  # type: ignore[no-untyped-def]
    _, answer, evidence = page.read_text(encoding="utf-8").split("\n\n", 2)
    assert numbers(answer), "no number is claimed"
    assert unsupported(answer, evidence) == []


def test_readme_claims_what_the_pages_show() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    claims = re.split(r"^## ", readme, flags=re.M)
    (proof,) = [part for part in claims if part.startswith("Does it work?")]
    pages = "\n".join(page.read_text(encoding="utf-8") for page in RESULTS)
    assert len(numbers(proof)) > 5 and unsupported(proof, pages) == []


def test_a_number_of_no_table_is_found() -> None:
    table = "| a | n |\n| --- | --- |\n| x | 12 |\n| y | 30 |\n\nA step takes 1.143x."
    assert unsupported("14 % more, 42 in all, 1.14 times, 30 in `y`", table) == []
    assert unsupported("15 % more, 43 in all, 1.15 times", table) == ["15", "43", "1.15"]
