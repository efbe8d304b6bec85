"""Generation with every memory, by the segments of training; and no output of a stream hears of a later token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import MAIN_STREAMS, SEGMENT, STREAMS, VOCABULARY, Case, cases, stream

from cached_transformers import create_model
from cached_transformers import state as states

PROMPT, TOKENS = SEGMENT + 3, 2 * SEGMENT


@cases(STREAMS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"beams": 3}], ids=str)
def test_scores_and_state_are_those_of_the_text_read_by_segments(case: Case, options: dict[str, Any]) -> None:
    model = case.build().eval()
    prompt = torch.cat(case.segments(2), 1)[:, :PROMPT]
    found = model.generate(prompt, tokens=TOKENS, segment_length=SEGMENT, **options)
    text = torch.cat([prompt, found.tokens], 1)
    with torch.no_grad():
        *_, last = outs = list(stream(model, list(text[:, :-1].split(SEGMENT, 1))))
    logp_BNV = torch.cat([out.outputs for out in outs], 1).log_softmax(-1)[:, PROMPT - 1 :]
    chosen = logp_BNV.gather(-1, found.tokens[..., None])[..., 0]
    torch.testing.assert_close(found.scores, chosen.sum(1), rtol=0, atol=1e-3)
    if "temperature" in options:
        torch.testing.assert_close(chosen, logp_BNV.amax(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.state, last.state, rtol=0, atol=1e-4)


def first_places(found_BN: torch.Tensor) -> torch.Tensor:
    """(B,): where each row is first True; N where it never is."""
    return torch.nn.functional.pad(found_BN.int(), (0, 1), value=1).argmax(1)


@cases(MAIN_STREAMS)
def test_rows_are_generated_as_if_alone(case: Case) -> None:
    model = case.build().eval()
    prompt = torch.cat(case.segments(2), 1)[:, :PROMPT]
    options: dict[str, Any] = {"tokens": TOKENS, "temperature": 0, "segment_length": SEGMENT}
    # The end that makes the rows differ most.
    endless = model.generate(prompt, **options).tokens
    eos = max(range(VOCABULARY), key=lambda eos: first_places(endless == eos).unique().numel())
    found = model.generate(prompt, eos=eos, **options)
    for row in range(len(prompt)):
        alone = model.generate(prompt[row : row + 1], eos=eos, **options)
        n = int(alone.lengths)
        assert torch.equal(alone.tokens[0], found.tokens[row, :n])
        mine = states.reorder(found.state, torch.tensor([row]))
        torch.testing.assert_close(mine, alone.state, rtol=0, atol=1e-4)


COUNT = 3
PLACES = (1, 5, 7, 11, 13, 17)


@cases(STREAMS)
@pytest.mark.parametrize("training", [False, True])
def test_changing_a_token_changes_nothing_before_it(case: Case, training: bool) -> None:
    model = case.build().double().train(training)
    tokens = torch.cat(case.segments(COUNT), 1)
    texts = [tokens]  # and with one token changed, all as rows of one batch
    for place in PLACES:
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCABULARY
        texts.append(changed)
    with torch.no_grad():
        outs = stream(model, list(torch.cat(texts).split(SEGMENT, 1)))
        before, *others = torch.cat([out.outputs for out in outs], 1).chunk(len(texts))
    for place, after in zip(PLACES, others, strict=True):
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-9)
        assert (after[:, place] - before[:, place]).abs().max() > 1e-3


@cases(STREAMS)
def test_no_gradient_flows_from_an_output_to_a_later_token(case: Case) -> None:
    model = case.build()
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, y: (y.retain_grad(), embedded.append(y))[1])  # type: ignore[union-attr, operator]
    *_, last = stream(model, case.segments(2))
    last.outputs[:, 2].square().sum().backward()
    assert embedded[1].grad is not None
    assert embedded[1].grad[:, 3:].abs().max() == 0
    assert embedded[1].grad[:, :3].abs().amax((0, 2)).min() > 0


@pytest.mark.parametrize("memory", ["grc", {"name": "grc", "variant": "released"}, "convolution"])
def test_a_memory_that_shows_the_future_is_refused(memory: object) -> None:
    with pytest.raises(ValueError, match="grc_stream"):
        create_model("language_model", vocabulary=5, width=16, depth=1, heads=2, feed_forward=8, memory=memory)
