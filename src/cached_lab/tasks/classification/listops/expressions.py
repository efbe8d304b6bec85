"""Long ListOps: nested list operations whose value is a digit, as the Long Range Arena generates them.

Paper: Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", arXiv:2011.04006; the task is from
Nangia and Bowman, arXiv:1804.06028. Original implementation of the generator: google-research/long-range-arena,
lra_benchmarks/data/listops.py. The sampling rule is theirs; unlike there, the stream is a function of its seed.

An expression is kept as `bytes`, one token identifier each: digits, operators and the closing bracket, in reading
order. The arena's files write the same expression with parentheses round every application of an operator to its next
argument, `( ( ( [MAX 2 ) 9 ) ] )`; its input pipeline deletes them, and so does `tokenize`.

Length, everywhere: the number of tokens without parentheses, i.e. digits plus two per operator.
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

_ID = {token: identifier for identifier, token in enumerate(VOCABULARY)}
_OCCURRING = {token: _ID[token] for token in VOCABULARY[1:-1]}
_ZERO_ID, _FIRST_OPERATOR_ID, _CLOSE_ID = _ID["0"], _ID[OPERATORS[0]], _ID[CLOSE]
_DIGITS = {str(digit): digit for digit in range(10)}
_PARENTHESES = frozenset("()")
_DRAWS_WITHOUT_NEWS = 200_000


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
    `max_depth` it is a digit. Digits, operators and the number of arguments (2..`max_args`) are uniform. A drawn tree
    is kept when `min_length` < length < `max_length` and it did not occur before.

    Args:
        seed: the stream is a function of it and of the other arguments, in every process.
        max_depth: of nested operators. max_args: of one operator. min_length, max_length: of an expression in tokens,
            both exclusive.

    Raises:
        ValueError: no tree can have such a length, or no new one turns up any more.
    """
    _check_shape(max_depth, max_args, min_length, max_length)
    grower = _Grower(random.Random(seed), max_depth, max_args, max_length)
    seen: set[bytes] = set()
    draws_without_news = 0
    while draws_without_news < _DRAWS_WITHOUT_NEWS:
        draws_without_news += 1
        expression = grower.draw()
        if expression is None or len(expression.tokens) <= min_length or expression.tokens in seen:
            continue
        draws_without_news = 0
        seen.add(expression.tokens)
        yield expression
    raise ValueError(
        f"only {len(seen)} different expressions with {min_length} < length < {max_length}, max_depth={max_depth} and "
        f"max_args={max_args} turned up, and none in the last {_DRAWS_WITHOUT_NEWS} draws; widen the lengths, raise "
        "max_depth or max_args, or ask for fewer examples"
    )


def _check_shape(max_depth: int, max_args: int, min_length: int, max_length: int) -> None:
    if not 1 <= max_depth <= 100:
        raise ValueError(f"max_depth={max_depth} must lie in 1..100; the Long Range Arena uses 10")
    if max_args < 2:
        raise ValueError(f"max_args={max_args} must be at least 2: every operator has two arguments or more")
    if min_length < 0 or max_length < min_length + 2:
        message = f"min_length={min_length} and max_length={max_length} must leave a length between them, both excluded"
        raise ValueError(f"{message}: 0 <= min_length <= max_length - 2")
    longest = 1
    for _ in range(max_depth - 1):
        longest = min(2 + max_args * longest, max_length)
    if longest <= min_length:
        message = f"no expression with max_depth={max_depth} and max_args={max_args} is longer than {longest} tokens"
        raise ValueError(f"{message}, and min_length={min_length} asks for more; lower it or raise one of the two")


class _TooLong(Exception):
    """The tree in hand cannot end below the length limit any more."""


class _Grower:
    """Draws trees depth first, giving one up as soon as it is certain to be too long."""

    def __init__(self, generator: random.Random, max_depth: int, max_args: int, max_length: int) -> None:
        self._random = generator.random
        self._max_depth = max_depth
        self._max_args = max_args
        self._max_length = max_length

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
        # all 40 where only a digit may stand.
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


def evaluate(source: str | Iterable[str]) -> int:
    """Value of an expression, by a stack machine that reads it once from left to right.

    It shares nothing with the generator, so that each proves the other. Parentheses are skipped.

    Args:
        source: text with blanks between tokens, or the tokens.

    Raises:
        ValueError: not one complete expression; the message says what is wrong and at which token (from 1).
    """
    opened: list[tuple[str, list[int]]] = []
    values: list[int] = []
    operator = ""
    position = 0
    for position, token in enumerate(source.split() if isinstance(source, str) else source, 1):
        if token in _PARENTHESES:
            continue
        if token in _DIGITS:
            values.append(_DIGITS[token])
        elif token in OPERATORS:
            opened.append((operator, values))
            operator, values = token, []
        elif token != CLOSE:
            raise ValueError(f"token {position}, {token!r}, is not in the vocabulary ({' '.join(VOCABULARY[1:-1])})")
        elif not operator:
            raise ValueError(f"token {position}, ']', closes no operator")
        elif not values:
            raise ValueError(f"token {position}, ']', closes {operator} before its first argument")
        else:
            result = _reduce(operator, values)
            operator, values = opened.pop()
            values.append(result)
    if operator:
        raise ValueError(f"the expression ends after {position} tokens with {operator} still open")
    if len(values) != 1:
        raise ValueError(f"{len(values)} expressions stand side by side; exactly one is expected")
    return values[0]


def _reduce(operator: str, values: list[int]) -> int:
    if operator == "[SM":
        return sum(values) % 10
    ordered = sorted(values)
    if operator == "[MIN":
        return ordered[0]
    if operator == "[MAX":
        return ordered[-1]
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def tokenize(source: str) -> bytes:
    """Token identifiers of an expression in text form, parentheses dropped.

    Raises:
        ValueError: empty, or a token that is not in the vocabulary.
    """
    tokens = source.replace("(", " ").replace(")", " ").split()
    try:
        identifiers = bytes(map(_OCCURRING.__getitem__, tokens))
    except KeyError as error:
        known = " ".join(_OCCURRING)
        raise ValueError(f"token {error.args[0]!r} is not in the vocabulary ({known}, and parentheses)") from None
    if not identifiers:
        raise ValueError("the expression is empty")
    return identifiers


def to_tokens(identifiers: bytes) -> list[str]:
    """Tokens of an expression, the inverse of `tokenize` but for parentheses."""
    return [VOCABULARY[identifier] for identifier in identifiers]


def to_source(identifiers: bytes) -> str:
    """Text form of the arena's files: left-nested, with parentheses (ValueError: not one complete expression)."""
    evaluate(to_tokens(identifiers))
    opened: list[list[str]] = []
    pieces: list[str] = []
    for token in to_tokens(identifiers):
        if token in OPERATORS:
            opened.append(pieces)
            pieces = [token]
            continue
        pieces.append(token)
        if token == CLOSE:
            # One application per argument and one for the bracket.
            applied = "( " * (len(pieces) - 1) + pieces[0] + "".join(f" {piece} )" for piece in pieces[1:])
            pieces = opened.pop()
            pieces.append(applied)
    return pieces[0]


def root_operator_baselines(train: Iterable[Expression], test: Iterable[Expression]) -> dict[str, float]:
    """Accuracies on `test` of three guessers that never look below the root; print them beside any result.

    Each answers with the commonest label in `train` among expressions that look alike to it: all of them; those with
    the same root operator; those with the same root operator, result of that operator on the digits directly under
    the root, and number of sub-expressions there. A guesser that never saw the like falls back on the one before.

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
    """What the three guessers see of an expression, coarse to fine."""
    tokens = np.frombuffer(identifiers, dtype=np.uint8)
    opens = (tokens >= _FIRST_OPERATOR_ID) & (tokens < _CLOSE_ID)
    inside = np.cumsum(opens) - np.cumsum(tokens == _CLOSE_ID)  # operators open after each token
    digits = [int(token) - _ZERO_ID for token in tokens[(inside == 1) & (tokens < _FIRST_OPERATOR_ID)]]
    root = VOCABULARY[tokens[0]]
    summary = _APPLY[root](digits) if digits and root in _APPLY else None
    return (), (root,), (root, summary, int(np.sum(opens & (inside == 2))))
