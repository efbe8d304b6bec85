"""The ListOps task itself: sampling, text form, baselines."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from functools import cache
from itertools import chain, islice
from statistics import mean

import pytest
from common import refuses
from data.listops_oracle import evaluate, to_tokens

from cached_lab.tasks.classification.listops.expressions import (
    VOCABULARY,
    Expression,
    generate_trees,
    root_operator_baselines,
    tokenize,
)

SMALL = {"max_depth": 4, "max_args": 4, "min_length": 10, "max_length": 64}


def sample(count: int, seed: int | str = 0, **shape: int) -> list[Expression]:
    return list(islice(generate_trees(seed, **shape), count))


@cache
def arena() -> list[Expression]:
    """Expressions of the arena's shape."""
    return sample(4000)


def children(tokens: list[str]) -> list[str]:
    """The nodes directly under the root: digits, and the operators of sub-expressions."""
    depth, found = 0, []
    for token in tokens:
        if depth == 1 and token != "]":
            found.append(token)
        depth += token.startswith("[") - (token == "]")
    return found


def depth_of(tokens: list[str]) -> int:
    """Depth of the deepest node; the root has depth 1."""
    depth = deepest = 0
    for token in tokens:
        depth -= token == "]"
        deepest = max(deepest, depth + (token != "]"))
        depth += token.startswith("[")
    return deepest


class TestGenerator:
    @pytest.mark.parametrize("shape", [{}, SMALL])
    def test_labels_are_the_values(self, shape):
        for expression in sample(300, **shape):
            assert evaluate(to_tokens(expression.tokens)) == expression.label

    def test_lengths_are_strictly_between_the_bounds_and_come_close_to_them(self):
        shape = {"max_depth": 6, "max_args": 4, "min_length": 10, "max_length": 40}
        lengths = [len(expression.tokens) for expression in sample(2000, **shape)]
        assert (min(lengths), max(lengths)) == (11, 39)
        lengths = [len(expression.tokens) for expression in sample(300)]
        assert min(lengths) > 500 and max(lengths) < 2000

    def test_depth_and_arguments_keep_to_their_limits(self):
        expressions = [to_tokens(expression.tokens) for expression in sample(2000, **SMALL)]
        assert max(map(depth_of, expressions)) == 4
        assert {len(children(tokens)) for tokens in expressions} == {2, 3, 4}
        assert len({tuple(tokens) for tokens in expressions}) == 2000
        assert {token for tokens in expressions for token in tokens} == {*VOCABULARY} - {"<pad>", "<unknown>"}

    def test_the_seed_decides(self):
        assert sample(50, 3, **SMALL) == sample(50, 3, **SMALL)
        assert not {e.tokens for e in sample(50, 3)} & {e.tokens for e in sample(50, 4)}
        assert sample(50, "3/test", **SMALL) != sample(50, "3/train", **SMALL)

    def test_the_stream_is_frozen(self):
        """Another stream would make cached and published data differ silently: raise GENERATOR_VERSION with it."""
        digest = hashlib.sha256(b"".join(e.tokens + bytes([e.label]) for e in sample(100, **SMALL))).hexdigest()
        assert digest == "cfe298cf2ea97f05328889cd2a1abe306a121d991874ea6e73b38d5cc3a8cd2d"

    def test_distribution_of_the_arena(self):
        """Facts of an independent implementation of the rule on 40,000 expressions."""
        expressions = arena()[:3000]
        tokens = [to_tokens(expression.tokens) for expression in expressions]
        assert mean(map(len, tokens)) == pytest.approx(1035, abs=35)
        deciles = sorted(map(len, tokens))[300::1200][:3]
        assert deciles == pytest.approx([581, 982, 1671], abs=60)
        assert {depth_of(one) for one in tokens[:300]} == {10}
        roots = [children(one) for one in tokens]
        assert mean(map(len, roots)) == pytest.approx(6.89, abs=0.15)
        assert mean(sum(child.startswith("[") for child in root) for root in roots) == pytest.approx(2.26, abs=0.1)
        labels = Counter(expression.label for expression in expressions)
        frequencies = [labels[digit] / 3000 for digit in range(10)]
        expected = [0.170, 0.092, 0.075, 0.082, 0.090, 0.085, 0.078, 0.072, 0.086, 0.171]
        assert frequencies == pytest.approx(expected, abs=0.025)

    def test_giving_up_early_does_not_bias(self):
        """Against a twin that draws whole trees by the rule as published and filters them afterwards."""
        generator = random.Random(1)

        def draw(depth: int) -> list[str]:
            if depth == 4 or generator.random() > 0.25:
                return [str(generator.choice(range(10)))]
            arguments = [draw(depth + 1) for _ in range(generator.randint(2, 4))]
            return [generator.choice(["[MIN", "[MAX", "[MED", "[SM"]), *chain(*arguments), "]"]

        naive: dict[str, int] = {}
        while len(naive) < 4000:
            tokens = draw(1)
            if 10 < len(tokens) < 40:
                naive[" ".join(tokens)] = evaluate(tokens)
        ours = sample(4000, max_depth=4, max_args=4, min_length=10, max_length=40)
        ours_tokens = [to_tokens(expression.tokens) for expression in ours]
        theirs_tokens = [text.split() for text in naive]
        assert mean(map(len, ours_tokens)) == pytest.approx(mean(map(len, theirs_tokens)), abs=0.5)
        for one, other in [
            ([tokens[0] for tokens in ours_tokens], [tokens[0] for tokens in theirs_tokens]),
            ([len(children(tokens)) for tokens in ours_tokens], [len(children(tokens)) for tokens in theirs_tokens]),
            ([expression.label for expression in ours], list(naive.values())),
            ([token for tokens in ours_tokens for token in tokens], [t for tokens in theirs_tokens for t in tokens]),
        ]:
            here, there = Counter(one), Counter(other)
            assert here.keys() == there.keys()
            for key in here:
                assert here[key] / len(one) == pytest.approx(there[key] / len(other), abs=0.04), key

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ({"max_depth": 0}, "max_depth=0"),
            ({"max_depth": 101}, "max_depth=101"),
            ({"max_args": 1}, "max_args=1"),
            ({"min_length": -1}, "min_length=-1"),
            ({"min_length": 10, "max_length": 11}, "max_length=11"),
        ],
    )
    def test_impossible_shapes_are_refused(self, shape, message):
        refuses(message, next, generate_trees(0, **shape))

    def test_a_space_that_is_exhausted_ends_with_an_error(self):
        """Depth 2 with two arguments has 4 operators x 100 pairs of digits, all of length 4."""
        stream = generate_trees(0, max_depth=2, max_args=2, min_length=3, max_length=5)
        assert len({expression.tokens for expression in islice(stream, 400)}) == 400
        refuses(r"only 400 different expressions with 3 < length < 5.*ask for fewer", next, stream)


@pytest.mark.parametrize(
    ("source", "value", "identifiers"),
    [
        ("[MED 4 3 9 1 ]", 3, [13, 5, 4, 10, 2, 15]),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9, [12, 3, 10, 15]),
        ("[SM [MIN 3 8 ] 9 ]", 2, [14, 11, 4, 9, 15, 10, 15]),
    ],
)
def test_the_form_of_the_arena(source, value, identifiers):
    assert list(tokenize(source)) == identifiers and evaluate(to_tokens(tokenize(source))) == value
    assert tokenize(" ".join(to_tokens(tokenize(source)))) == tokenize(source)


def test_malformed_text():
    refuses("token 'X' is not in the vocabulary", tokenize, "[MAX 1 X")
    refuses("empty", tokenize, "( )")


class TestBaselines:
    def expressions(self, *rows: str) -> list[Expression]:
        return [Expression(tokenize(row), evaluate(row.split())) for row in rows]

    def test_by_hand(self):
        train = self.expressions(
            "[MAX 9 1 ]", "[MAX 9 2 ]", "[MAX 9 [MIN 1 2 ] ]", "[MAX 5 [MIN 7 7 ] ]", "[MIN 0 1 ]", "[MIN 0 3 ]"
        )
        # Majority: 9 (3 of 6). By root: MAX 9, MIN 0. By digits: MAX of 5 with one sub-expression answers 7.
        test = self.expressions("[MAX 9 8 ]", "[MIN 0 5 ]", "[MAX 5 [MAX 7 1 ] ]", "[MED 1 2 3 ]")
        names = ("majority class", "root operator", "root operator and direct digits")
        assert root_operator_baselines(train, test) == dict(zip(names, (0.25, 0.5, 0.75), strict=True))

    def test_both_sides_are_needed(self):
        for sides in (([], self.expressions("7")), (self.expressions("7"), [])):
            refuses("at least one expression", root_operator_baselines, *sides)

    def test_arena_values(self):
        """On 40,000 expressions an independent program found 17.1, 36.4 and 50.0 %."""
        expressions = arena()
        found = root_operator_baselines(expressions[:3000], expressions[3000:])
        assert found["majority class"] == pytest.approx(0.171, abs=0.04)
        assert found["root operator"] == pytest.approx(0.364, abs=0.05)
        assert found["root operator and direct digits"] == pytest.approx(0.50, abs=0.05)
