"""Solvers of the probe tasks: they read an episode token by token, by the rules of the docstrings, and forget nothing.

A solver returns the possible answers at one place: a single one if the episode is complete, and all answers that fit
the rest if the first segment is hidden (its tokens are None).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cached_lab.experiments.probes.tasks import stories as worlds

Tokens = Sequence[int | None]
Solver = Callable[[Any, Tokens, int, list[int]], set[int]]
"""Given the task, the tokens, the place, and the answers at earlier places: the possible answers."""


def latch(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    seen = {token for token in tokens[: task.segment] if token is not None and token < task.classes}
    return seen or set(range(task.classes))


def copy(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    source = tokens[: task.length][:: -1 if task.reverse else 1]
    symbol = source[len(told)]
    return set(range(task.symbols)) if symbol is None else {symbol}


def passkey(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    mark = task.vocabulary - 2
    if mark not in tokens:
        return set(range(10))
    return {tokens[tokens.index(mark) + 1 + len(told)]}  # type: ignore[arg-type]


def recall(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    places = range(0, len(tokens) - task.segment, task.segment)
    if len(tokens) == task.segment:  # all pairs come first
        places = range(0, next(at for at in range(len(tokens)) if tokens[at] >= task.keys + task.values), 2)  # type: ignore[operator]
    pairs = {tokens[at]: tokens[at + 1] for at in places}
    asked = tokens[place]
    return {pairs[asked]} if asked in pairs else set(range(task.keys, task.keys + task.values))  # type: ignore[arg-type]


def strings(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    separator, question = task.symbols, task.symbols + 1
    found: dict[tuple[Any, ...], Any] = {}
    places = range(0, len(tokens) - task.segment, task.segment)
    if len(tokens) == task.segment:  # all pairs come first, each with its end
        size, end = task.key_size + task.value_size + 2, task.symbols + 2
        places = range(0, size * tokens.count(end), size)
    for at in places:
        if tokens[at] is not None:
            assert tokens[at + task.key_size] == separator
            value = at + task.key_size + 1
            found[tuple(tokens[at : value - 1])] = tokens[value : value + task.value_size]
    end = len(tokens) - task.value_size
    assert tokens[end] == question
    key = tuple(tokens[end - task.key_size : end])
    return {found[key][len(told)]} if key in found else set(range(task.symbols))


def mqar(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    count = 2 * (task.pairs + task.rewritten)
    values = {tokens[at]: tokens[at + 1] for at in range(0, count, 2)}
    half = task.vocabulary // 2
    return {values[tokens[place]]} if tokens[place] in values else set(range(half, task.vocabulary))  # type: ignore[arg-type]


def six_places(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    persons, places, went = range(4), range(8, 14), 14
    found = {}
    for who, verb, where in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if who in persons and verb == went:
            found[who] = where
    assert tokens[-2] == 15
    asked = tokens[-1]
    return {found[asked]} if asked in found else set(places) - set(found.values())  # type: ignore[arg-type]


def needles(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    ask = max(at for at in range(place) if tokens[at] == task.ask)
    key, digit = tokens[ask + 1], place - ask - 1
    found: list[Any] = []
    for at in range(len(tokens) - task.segment):
        if tokens[at] == task.mark and tokens[at + 1] == key:
            found += tokens[at + 2 : at + 2 + task.digits]
    unknown = task.values * task.digits - len(found)  # those of the first segment come first
    return set(range(task.base)) if digit < unknown else {found[digit - unknown]}


def variables(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    equals = task.names + task.numbers
    lines = [(tokens[at - 1], tokens[at + 1]) for at in range(len(tokens)) if tokens[at] == equals]
    ask = len(tokens) - task.lines
    number = tokens[ask]
    heads = [name for name, said in lines if said == number]
    chain: list[Any] = heads or [said for name, said in lines if said not in {name for name, _ in lines}][:1]
    while following := [name for name, said in lines if chain and said == chain[-1]]:
        chain += following
    unknown = task.lines - len(chain)
    if len(told) >= unknown:
        return {chain[len(told) - unknown]}
    return set(range(task.names)) - set(chain) - set(told)


def common(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    words = [token for token in tokens[: -task.segment] if token < task.words]  # type: ignore[operator]
    return {sorted(word for word, _ in Counter(words).most_common(task.answers))[len(told)]}  # type: ignore[type-var]


def frequent(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    counts = Counter(token for token in tokens[: -task.segment] if token < task.words)  # type: ignore[operator]
    ordered = counts.most_common()
    assert ordered[len(told)][1] > ordered[len(told) + 1][1], "a rank of its own"
    return {ordered[len(told)][0]}  # type: ignore[arg-type]


def sentences(task: Any, tokens: Tokens) -> Iterator[list[str]]:
    """The sentences of an episode without files, bystanders' left out."""
    for begin in range(0, len(tokens) - task.segment, task.segment):
        for at in range(begin, begin + task.segment - worlds.WIDTH + 1, worlds.WIDTH):
            said = [worlds.WORDS[token] for token in tokens[at : at + worlds.WIDTH] if token is not None]
            if said and said[0] in (*worlds.PERSONS, *worlds.PLACES):
                yield said


def babilong(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    question = [worlds.WORDS[token] for token in tokens[-4:] if token is not None]
    question = [word for word in question if word != worlds.END]
    facts = list(sentences(task, tokens))
    if "of" in question:
        return {worlds.WORDS.index(_direction(facts, question))}
    if "gave" in question:
        unknown = next(at for at, word in enumerate(question) if word in ("who", "what"))
        gifts = [[giver, "gave", thing, to] for giver, verb, thing, to in facts if verb == "gave"]
        fitting = [
            gift
            for gift in gifts
            if all(a == b or i == unknown for i, (a, b) in enumerate(zip(gift, question, strict=True)))
        ]
        return {worlds.WORDS.index(fitting[-1][unknown])}
    visits = _travels(facts)
    if question[1] not in visits:
        return {worlds.WORDS.index(word) for word in worlds.PLACES}
    seen = visits[question[1]]
    if "before" not in question:
        return {worlds.WORDS.index(seen[-1])}
    last = max(at for at, where in enumerate(seen) if where == question[3])
    return {worlds.WORDS.index(seen[last - 1])}


def _direction(facts: list[list[str]], question: list[str]) -> str:
    known = {}
    for a, way, _, b in facts:
        known[(way, b)] = a
        known[(worlds.OPPOSITE[way], a)] = b
    first, way, _, last = question
    return known[(way, last)] if first == "what" else known[(worlds.OPPOSITE[way], first)]


def _travels(facts: list[list[str]]) -> dict[str, list[str]]:
    """Everywhere that persons and things were, one after the other."""
    visits: dict[str, list[str]] = {}
    held: dict[str, set[str]] = {}
    for who, verb, what, _ in facts:
        if verb == "went":
            for moved in (who, *held.get(who, ())):
                visits.setdefault(moved, []).append(what)
        elif verb == "took":
            assert all(what not in things for things in held.values())
            held.setdefault(who, set()).add(what)
            assert visits.get(what, visits[who])[-1] == visits[who][-1], "it lies where it is taken"
            visits.setdefault(what, [visits[who][-1]])
        else:
            held[who].remove(what)
    return visits


SOLVERS: dict[str, Solver] = {
    "babilong": babilong,
    "common_words": common,
    "copy": copy,
    "detect": six_places,
    "frequent_words": frequent,
    "latch": latch,
    "memorise": six_places,
    "mqar": mqar,
    "niah_multikey": needles,
    "niah_multiquery": needles,
    "niah_multivalue": needles,
    "niah_single": needles,
    "passkey": passkey,
    "reason": six_places,
    "recall": recall,
    "remember": strings,
    "reverse": copy,
    "rewrite": strings,
    "variable_tracking": variables,
}
