"""Generation with every memory: it meets the segments of training, and leaves the state that they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import MAIN_STREAMS, SEGMENT, STREAMS, VOCABULARY, Case, cases, stream

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
