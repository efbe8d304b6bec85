"""Segatron-XL with numbers of sentences and paragraphs that the caller gives.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.harness import same_states
from memories.xl_family import joined, language_model, run, text
from refusals import refuses
from torch import Tensor

from cached_transformers import generate
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.generation import GeneratedText

ROWS, SEGMENT, TOKENS = 2, 4, 16
ENDS: dict[str, Any] = {"sentence_ends": (2, 5, 7), "paragraph_ends": (3, 11)}
SPEC: dict[str, Any] = {"name": "segatron", "length": 6}


def counted(tokens_BN: Tensor, more: Tensor | None = None, padding: Tensor | None = None, ends: Any = ENDS) -> Tensor:
    """(B, N, 2): numbers of sentences and paragraphs, token by token; `more` is where a caller lets others begin."""
    rows = []
    for b, row in enumerate(tokens_BN.tolist()):
        following, numbers = [0, 0], []
        for i, token in enumerate(row):
            real = padding is None or not padding[b, i]
            own = [following[c] + int(more[b, i, c] if more is not None and real else 0) for c in (0, 1)]
            numbers.append(own)
            paragraph = token in ends.get("paragraph_ends", ())
            step = (paragraph or token in ends.get("sentence_ends", ()), paragraph)
            following = [n + (s and real) for n, s in zip(own, step, strict=True)]
        rows.append(numbers)
    return torch.tensor(rows)


def by_segments(model: Any, tokens_BN: Tensor, places: Tensor | None, **options: Any) -> list[Any]:
    state, outs = None, []
    for begin in range(0, tokens_BN.shape[1], SEGMENT):
        part = slice(begin, begin + SEGMENT)
        more = {name: t[:, part] for name, t in options.items()}
        outs.append(model(tokens_BN[:, part], state, places=None if places is None else places[:, part], **more))
        state = outs[-1].state
    return outs


@pytest.mark.parametrize("known", [1.0, 0.4], ids=["all", "some"])
def test_the_numbers_that_separators_have_are_what_separators_give(known: float) -> None:
    model, tokens = language_model({**SPEC, **ENDS}), text(ROWS, TOKENS)
    places = counted(tokens).masked_fill(torch.rand(ROWS, TOKENS, 1) >= known, -1)
    plain, told = run(model, tokens, SEGMENT), by_segments(model, tokens, places)
    same_states((joined(plain), plain[-1].state), (joined(told), told[-1].state))
    without = by_segments(language_model(SPEC), tokens, counted(tokens))  # no separators at all
    assert torch.equal(joined(plain), joined(without)) and counted(tokens).amax((0, 1)).min() > 1


@pytest.mark.parametrize("ends", [ENDS, {}], ids=["with separators", "without"])
def test_any_numbers_are_kept_and_counted_on_from(ends: Any) -> None:
    """Against a loop, with padding whose numbers are of no account, and rows that begin with the number 9."""
    model, tokens = language_model({**SPEC, "length": TOKENS, **ends}), text(ROWS, TOKENS)
    padding = torch.rand(ROWS, TOKENS) < 0.2
    padding[:, 4:8] = True  # one segment of padding alone
    more = (torch.rand(ROWS, TOKENS, 2) < 0.4).long()
    for row in range(ROWS):
        more[row, (~padding[row]).nonzero()[0]] = 9
    want = counted(tokens, more, padding, ends)
    given = want.masked_fill(more == 0, -1)
    outs = by_segments(model, tokens, given, padding=padding)
    for row in range(ROWS):
        real = ~padding[row]
        for layer in outs[-1].state.layers:
            assert layer.positions_BMP[row, -int(real.sum()) :, 1:].tolist() == want[row, real].tolist()
    other = given.masked_fill(padding[..., None], 77)
    same_states(outs[-1].state, by_segments(model, tokens, other, padding=padding)[-1].state)


def test_a_number_is_heard_of_from_its_token_on() -> None:
    model, tokens = language_model(SPEC), text(ROWS, TOKENS)
    places = counted(tokens)
    before = joined(by_segments(model, tokens, places))
    moved = places.clone()
    moved[:, 6:] += (places[:, 6:7] == places[:, 5:6]).long()
    assert (moved != places).any(2)[:, 6].all()
    change = (joined(by_segments(model, tokens, moved)) - before).abs().amax((0, 2))
    assert change[:6].max() == 0 and change[6:].min() > 1e-6


def test_a_loop_hands_each_segment_its_own() -> None:
    model, tokens = language_model(SPEC), text(ROWS, TOKENS + 1)
    counting = language_model({**SPEC, **ENDS})
    inputs, targets, found = tokens[:, :-1], tokens[:, 1:], []
    for kind, of, places in (
        (SegmentLoop, counting, None),
        (SegmentLoop, model, counted(inputs)),
        (ReplayLoop, model, counted(inputs)),
    ):
        of.zero_grad()
        loss, state = kind(of, SEGMENT)(inputs, targets, places=places)
        loss.backward()
        # What the next token's numbers will be, a model without separators does not know.
        found.append((loss.detach(), state.layers, tuple(p.grad.clone() for p in of.parameters())))
    same_states(found[0], found[1])
    same_states(found[0], found[2])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beams": 3}], ids=["greedy", "beams"])
def test_a_text_goes_on_from_the_numbers_of_its_prompt(options: dict[str, Any]) -> None:
    model, prompt = language_model({**SPEC, **ENDS}).eval(), text(ROWS, 10)
    places, how = counted(prompt), {"tokens": 7, "segment_length": SEGMENT, **options}
    plain, told = generate(model, prompt, **how), generate(model, prompt, places=places, **how)
    assert torch.equal(plain.tokens, told.tokens)
    same_states((plain.scores, plain.state), (told.scores, told.state))
    far = generate(model, prompt, places=places + 40, **how)  # only differences count
    torch.testing.assert_close(far.scores, plain.scores, rtol=0, atol=1e-10)
    assert torch.equal(far.state.model.sentence_B, plain.state.model.sentence_B + 40)
    places[:, 9] = places[:, 8] + 1  # in the open segment
    texts = [
        GeneratedText(model, prompt, model.init_state(ROWS), SEGMENT, again=again, places=places)
        for again in (False, True)
    ]
    with torch.no_grad():
        for token in text(6, ROWS, seed=3):
            first, second = (one.read() for one in texts)
            torch.testing.assert_close(first, second, rtol=0, atol=1e-10)
            for one in texts:
                one.append(token)
        same_states(*(one.after() for one in texts))


def test_what_are_no_places_is_refused() -> None:
    model, tokens = language_model(SPEC), text(ROWS, SEGMENT)
    for wrong in (torch.zeros(ROWS, SEGMENT).long(), torch.zeros(ROWS, SEGMENT, 2)):
        refuses("must be two numbers per token", model, tokens, places=wrong)
        refuses("must be two numbers per token", SegmentLoop(model, SEGMENT), tokens, tokens, places=wrong)
    places = torch.zeros(ROWS, SEGMENT, 2).long()
    state = model(tokens, places=places + 6).state
    for leap in (2, -2):
        wrong = places + 6
        wrong[1, 2:, 1] += leap
        refuses("a number in places leaps", model, tokens, places=wrong)
        refuses("reset a row that begins anew", model, tokens, state, places=places + 6 + leap)
    model(tokens, state, torch.ones(ROWS).bool(), places=places)
    with pytest.raises(ValueError, match="must be of the prompt"):
        generate(model, tokens, tokens=1, segment_length=SEGMENT, places=torch.zeros(ROWS, 2, 2).long())
    with pytest.raises(ValueError, match="need a memory that takes them"):
        language_model("transformer_xl")(tokens, places=torch.zeros(ROWS, SEGMENT, 2).long())
