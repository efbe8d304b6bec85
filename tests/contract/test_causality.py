"""No output of a causal model depends on a later token, in training and in evaluation, within and across segments."""

from __future__ import annotations

import pytest
import torch
from contract.contract_cases import SEGMENT, STREAMS, VOCABULARY, Case, cases, stream

from cached_transformers import create_model

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
