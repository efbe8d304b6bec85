"""Solvers of the probe tasks: they read an episode token by token, by the rules of the docstrings, and forget nothing.

A solver returns the possible answers at one place: a single one if the episode is complete, and all answers that fit
the rest if the first segment is hidden (its tokens are None).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Tokens = Sequence[int | None]
Solver = Callable[[Any, Tokens, int, list[int]], set[int]]
"""Given the task, the tokens, the place, and the answers at earlier places: the possible answers."""


def latch(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    seen = {token for token in tokens[: task.segment] if token is not None and token < task.classes}
    return seen or set(range(task.classes))


def copy(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    symbol = tokens[len(told)]
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
    values = {tokens[at]: tokens[at + 1] for at in range(0, 2 * task.pairs, 2)}
    half = task.vocabulary // 2
    return {values[tokens[place]]} if tokens[place] in values else set(range(half, task.vocabulary))  # type: ignore[arg-type]


def needles(task: Any, tokens: Tokens, place: int, told: list[int]) -> set[int]:
    ask = max(at for at in range(place) if tokens[at] == task.ask)
    key, digit = tokens[ask + 1], place - ask - 1
    found: list[Any] = []
    for at in range(len(tokens) - task.segment):
        if tokens[at] == task.mark and tokens[at + 1] == key:
            found += tokens[at + 2 : at + 2 + task.digits]
    unknown = task.values * task.digits - len(found)  # those of the first segment come first
    return set(range(task.base)) if digit < unknown else {found[digit - unknown]}


SOLVERS: dict[str, Solver] = {
    "copy": copy,
    "latch": latch,
    "mqar": mqar,
    "niah": needles,
    "passkey": passkey,
    "recall": recall,
    "remember": strings,
    "rewrite": strings,
}
