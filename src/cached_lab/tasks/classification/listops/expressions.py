"""Long ListOps: nested list operations whose value is a digit, as the Long Range Arena generates them.

Paper: Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", arXiv:2011.04006; the task is from
Nangia and Bowman, arXiv:1804.06028. The sampling rule is that of the original generator
(google-research/long-range-arena, lra_benchmarks/data/listops.py); here the stream is a function of its seed.

An expression is `bytes`, one token identifier each: digits, operators and the closing bracket, in reading order. The
arena's files add parentheses around every application of an operator to its next argument, `( ( ( [MAX 2 ) 9 ) ] )`;
its input pipeline deletes them, and so does `tokenize`. Lengths count tokens without parentheses.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
VOCABULARY = ("<pad>", *"0123456789", *OPERATORS, CLOSE, "<unknown>")
"""Token of each identifier. 15 tokens occur; padding and unknown bring the size to the arena's 17."""

PADDING_ID = 0
GENERATOR_VERSION = 1
"""Rises whenever the same arguments of `generate_trees` give another stream."""

_OCCURRING = {token: identifier for identifier, token in enumerate(VOCABULARY) if identifier and token != "<unknown>"}
_ZERO_ID, _FIRST_OPERATOR_ID, _CLOSE_ID = _OCCURRING["0"], _OCCURRING[OPERATORS[0]], _OCCURRING[CLOSE]
_MOST_REPEATS = 200_000


class Expression(NamedTuple):
    """One example: token identifiers (see `VOCABULARY`) and the value, 0..9."""

    tokens: bytes
    label: int


_APPLY: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def generate_trees(
    seed: int | str, *, max_depth: int = 10, max_args: int = 10, min_length: int = 500, max_length: int = 2000
) -> Iterator[Expression]:
    """Endless stream of different expressions; the defaults are those of the Long Range Arena.

    A node above `max_depth` (the root has depth 1) is an operator with probability 1/4, otherwise a digit; at
    `max_depth` it is a digit. Digits, operators and the number of arguments (2..`max_args`) are uniform. A tree is kept
    when `min_length` < length < `max_length` and it did not occur before.

    Args:
        seed: the stream is a function of it and of the other arguments, in every process.
        max_depth: of nested operators. max_args: of one operator. min_length, max_length: of an expression in tokens,
            both exclusive.

    Raises:
        ValueError: no tree can have such a length, or no new tree occurs any more.
    """
    if not 1 <= max_depth <= 100 or max_args < 2 or not 0 <= min_length <= max_length - 2:
        raise ValueError(
            f"max_depth={max_depth} must lie in 1..100, max_args={max_args} be at least 2, and min_length={min_length} "
            f"and max_length={max_length} leave a length between them, both excluded"
        )
    grower = _Grower(random.Random(seed), max_depth, max_args, max_length)
    seen: set[bytes] = set()
    repeats = 0
    while repeats < _MOST_REPEATS:
        repeats += 1
        expression = grower.draw()
        if expression is None or len(expression.tokens) <= min_length or expression.tokens in seen:
            continue
        repeats = 0
        seen.add(expression.tokens)
        yield expression
    raise ValueError(
        f"only {len(seen)} different expressions with {min_length} < length < {max_length}, max_depth={max_depth} and "
        f"max_args={max_args} turned up, and none in the last {_MOST_REPEATS} draws; widen the lengths, raise "
        "max_depth or max_args, or ask for fewer examples"
    )


class _TooLong(Exception):
    """The current tree cannot stay below the length limit."""


class _Grower:
    """Samples trees depth first, and gives a tree up as soon as it is certain to be too long."""

    def __init__(self, generator: random.Random, max_depth: int, max_args: int, max_length: int) -> None:
        self._random = generator.random
        self._max_depth, self._max_args, self._max_length = max_depth, max_args, max_length

    def draw(self) -> Expression | None:
        self._tokens = bytearray()
        # Every argument still to come counts as one token: exact once the tree is complete.
        self._least_length = 1
        try:
            value = self._node(depth=1)
        except _TooLong:
            return None
        return Expression(bytes(self._tokens), value)

    def _node(self, depth: int) -> int:
        # One draw decides both: 10 of the 40 outcomes are an operator, and each digit has 3 of the other 30, or 4 of
        # all 40 at the largest depth.
        outcome = int(self._random() * 40)
        if outcome >= 10 or depth == self._max_depth:
            digit = outcome % 10
            self._tokens.append(_ZERO_ID + digit)
            return digit
        arguments = 2 + int(self._random() * (self._max_args - 1))
        self._least_length += arguments + 1
        if self._least_length >= self._max_length:
            raise _TooLong
        operator = int(self._random() * len(OPERATORS))
        self._tokens.append(_FIRST_OPERATOR_ID + operator)
        values = [self._node(depth + 1) for _ in range(arguments)]
        self._tokens.append(_CLOSE_ID)
        return _APPLY[OPERATORS[operator]](values)


def tokenize(source: str) -> bytes:
    """Token identifiers of an expression in text form, without parentheses (ValueError: empty, or an unknown token)."""
    tokens = source.replace("(", " ").replace(")", " ").split()
    try:
        identifiers = bytes(map(_OCCURRING.__getitem__, tokens))
    except KeyError as error:
        known = " ".join(_OCCURRING)
        raise ValueError(f"token {error.args[0]!r} is not in the vocabulary ({known}, and parentheses)") from None
    if not identifiers:
        raise ValueError("the expression is empty")
    return identifiers


def root_operator_baselines(train: Iterable[Expression], test: Iterable[Expression]) -> dict[str, float]:
    """Accuracies on `test` of three guessers that never look below the root; print them next to any result.

    Each answers with the commonest label in `train` among similar expressions: all of them; those with the same root
    operator; those with the same root operator, result of that operator on the digits directly under the root, and
    number of sub-expressions there. A guesser without a similar expression falls back on the previous one.

    Returns:
        "majority class", "root operator", "root operator and direct digits": accuracies in 0..1.

    Raises:
        ValueError: one side is empty.
    """
    names = ("majority class", "root operator", "root operator and direct digits")
    train, test = list(train), list(test)
    if not train or not test:
        raise ValueError("the baselines need at least one expression on each side")
    counts: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for expression in train:
        for view in _views(expression.tokens):
            counts[view][expression.label] += 1
    answers = {view: min(tally, key=lambda label: (-tally[label], label)) for view, tally in counts.items()}
    hits = [0, 0, 0]
    for expression in test:
        answer = -1
        for level, view in enumerate(_views(expression.tokens)):
            answer = answers.get(view, answer)
            hits[level] += answer == expression.label
    return {name: count / len(test) for name, count in zip(names, hits, strict=True)}


def _views(identifiers: bytes) -> tuple[Hashable, Hashable, Hashable]:
    """The features of an expression for the three guessers, coarse to fine."""
    tokens = np.frombuffer(identifiers, dtype=np.uint8)
    opens = (tokens >= _FIRST_OPERATOR_ID) & (tokens < _CLOSE_ID)
    inside = np.cumsum(opens) - np.cumsum(tokens == _CLOSE_ID)  # operators open after each token
    digits = [int(token) - _ZERO_ID for token in tokens[(inside == 1) & (tokens < _FIRST_OPERATOR_ID)]]
    root = VOCABULARY[tokens[0]]
    summary = _APPLY[root](digits) if digits and root in _APPLY else None
    return (), (root,), (root, summary, int(np.sum(opens & (inside == 2))))
