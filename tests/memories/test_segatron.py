"""Segatron-XL: a twin in loops, its distances, and its relation to Transformer-XL.

Legend: B rows, N tokens, M slots, K = M + N.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from memories.harness import agree, sines
from memories.xl_family import HEADS, WIDTH, Place, copying, joined, language_model, run, text, twin
from torch import Tensor

from cached_transformers.layers.stack import Stack
from cached_transformers.memories.segatron import SegatronPositions, paper_widths

SENTENCE_ENDS, PARAGRAPH_ENDS = (2, 5, 7), (3, 11)
SPEC: dict[str, Any] = {"name": "segatron", "sentence_ends": SENTENCE_ENDS, "paragraph_ends": PARAGRAPH_ENDS}
WIDTHS = (4, 6, 2)


def numbered(tokens: list[int]) -> list[Place]:
    """Token, sentence and paragraph of each token of a text."""
    places, sentence, paragraph = [], 0, 0
    for i, token in enumerate(tokens):
        places.append((i, sentence, paragraph))
        sentence += token in SENTENCE_ENDS or token in PARAGRAPH_ENDS
        paragraph += token in PARAGRAPH_ENDS
    return places


def near(ours: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"clamp": 2}, {"same_length": True}])
def test_the_model_is_its_slow_twin(options: dict[str, Any]) -> None:
    length, segment, n = 5, 4, 12
    model, tokens = language_model({**SPEC, "length": length, "widths": WIDTHS, **options}), text(2, n)
    limit = options.get("clamp", n)

    def code(here: Place, there: Place) -> Tensor:
        return torch.cat([sines(min(i - j, limit), w) for i, j, w in zip(here, there, WIDTHS, strict=True)])

    rows = []
    for row in tokens:
        places = numbered(row.tolist())
        assert places[-1][1] > places[-1][2] > 0
        window = length if "same_length" in options else None
        rows.append(twin(model, row.tolist(), places, segment, length, code, window=window))
    agree([joined(run(model, tokens, segment))], [torch.stack(rows)], model, least=1e-6)


def test_without_channels_for_sentences_it_is_transformer_xl() -> None:
    options, tokens = {"length": 6, "clamp": 7}, text(2, 16)
    xl = language_model({"name": "transformer_xl", **options})
    model = language_model({**SPEC, **options, "widths": (WIDTH, 0, 0)})
    model.load_state_dict(xl.state_dict())
    near(joined(run(model, tokens, 4)), joined(run(xl, tokens, 4)))


SHIFTS: dict[str, dict[str, Any]] = {"exact": {"shift": "exact"}, "official": {"shift": "official", "allow_leak": True}}


@pytest.mark.parametrize("shift", SHIFTS)
def test_with_the_released_distances_tokens_know_where_later_sentences_end(shift: str) -> None:
    """Token 3 of a segment ends a sentence or not, after another segment."""
    model, tokens = language_model({**SPEC, "length": 6, **SHIFTS[shift]}), text(1, 12)
    told = []
    for token in (0, SENTENCE_ENDS[0]):
        changed = tokens.clone()
        changed[:, 9] = token
        told.append(joined(run(model, changed, 6))[0, 6:])
    difference_N = (told[0] - told[1]).abs().amax(1)
    assert difference_N[3 if shift == "exact" else 0 :].min() > 1e-3
    assert shift == "official" or difference_N[:3].max() == 0


def climbing(rows: int, count: int) -> Tensor:
    """(rows, count, 3): tokens one by one, sentences and paragraphs now and then."""
    steps = (torch.rand(rows, count, 3) < torch.tensor([2.0, 0.5, 0.25])).long()
    return steps.cumsum(1) + torch.tensor([30, 9, 4])


@pytest.mark.parametrize("clamp", [None, 2])
@pytest.mark.parametrize("shift", ["exact", "official", "signed"])
@pytest.mark.parametrize(("n", "m"), [(1, 4), (4, 0), (5, 3)])
def test_distances_are_their_formulas(n: int, m: int, shift: str, clamp: int | None) -> None:
    """One query, key, head and row at a time: D = X_i - X_j, or X_last - X_(j + n - 1 - i); below 0 to later keys."""
    e, signed = WIDTH // HEADS, shift == "signed"
    options = {"signed": True} if signed else {"shift": shift}
    scheme = SegatronPositions(HEADS, e, widths=WIDTHS, clamp=clamp, **options).double()
    places, q = climbing(2, m + n), torch.randn(2, HEADS, n, e, dtype=torch.double)
    got = scheme.bias(q, places[:, m:], places)
    for b, h, i in itertools.product(range(2), range(HEADS), range(n)):
        for j in range(m + n if signed else m + i + 1):
            first, last = (j + n - 1 - i, m + n - 1) if shift == "official" else (j, m + i)
            distance = (places[b, last] - places[b, first]).clamp(-(clamp or 99), clamp or 99)
            code = torch.cat([sines(d, w) for d, w in zip(distance.tolist(), WIDTHS, strict=True)])
            r = (scheme.project.weight @ code)[h * e : (h + 1) * e]
            near(got[b, h, i, j], (q[b, h, i] + scheme.position_bias[h]) @ r / math.sqrt(e))


def test_the_two_distances_agree_where_no_sentence_ends_and_only_there() -> None:
    tokens = text(2, 12)
    quiet = torch.where(torch.isin(tokens, torch.tensor([*SENTENCE_ENDS, *PARAGRAPH_ENDS])), 0, tokens)
    models = [language_model({**SPEC, "length": 6, **shift}) for shift in SHIFTS.values()]
    one, other = (joined(run(model, quiet, 4)) for model in models)
    near(one, other)
    one, other = (joined(run(model, tokens, 4)) for model in models)
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize(
    ("width", "widths"), [(410, (136, 136, 138)), (1024, (342, 342, 340)), (768, (256, 256, 256)), (16, (6, 6, 4))]
)
def test_the_widths_of_the_paper(width: int, widths: tuple[int, ...]) -> None:
    assert paper_widths(width) == widths


def test_without_token_ids_it_says_what_is_missing() -> None:
    stack: Stack = language_model({**SPEC, "length": 4}).stack
    with pytest.raises(ValueError, match="inputs=token_ids"):
        stack(torch.randn(1, 3, WIDTH, dtype=torch.double))


def test_it_learns_to_copy() -> None:
    """Without a memory nothing is copied: see the tests of Transformer-XL."""
    assert copying({"name": "segatron", "length": 4, "sentence_ends": (1, 3), "paragraph_ends": (5,)}, 150) > 0.95
