"""Beam search of the encoder-decoder: equal with and without KV cache, exhaustive if possible, row by row."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models.test_encoder_decoder import KINDS, LENGTHS, PADDING, ROWS, W, build, sources
from torch import Tensor

from cached_lab.tasks.translation.translate import Translation, translate
from cached_transformers.layers import kv_cache
from cached_transformers.models.encoder_decoder import Encoded, EncoderDecoder

BEGIN, END = 0, 1


def written(found: Translation, row: int) -> list[int]:
    return found.tokens_BT[row, : int(found.length_B[row])].tolist()


@torch.no_grad()
def score(model: EncoderDecoder, source: Tensor, tokens: list[int]) -> float:
    """Log-probability of a target, from one pass over all of it."""
    target = torch.tensor([tokens])
    read = torch.cat([torch.tensor([[BEGIN]]), target[:, :-1]], 1)
    logp = model(source[None], read).outputs.log_softmax(-1)
    return float(logp.gather(2, target[..., None]).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 4])
def test_the_kv_cache_equals_reading_again(kind: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK", 3)  # so that room runs out on the way
    model = build(target_vocabulary=W, **KINDS[kind])
    options: dict[str, Any] = {"padding": PADDING, "begin": BEGIN, "end": END, "beams": beams}
    kept, again = (find(model, sources(), **options) for find in (translate, translate_rereading))
    assert kept.tokens_BT.tolist() == again.tokens_BT.tolist()
    assert kept.length_B.tolist() == again.length_B.tolist()
    torch.testing.assert_close(kept.score_B, again.score_B)
    for row, length in enumerate(LENGTHS.tolist()):
        assert 1 <= kept.length_B[row] <= 2 * length + 10
        want = score(model, sources()[row, :length], written(kept, row))
        assert float(kept.score_B[row]) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_one_beam_takes_the_likeliest_token_each_time(seed: int) -> None:
    model = build(seed, target_vocabulary=W)
    found = translate(model, sources(seed), padding=PADDING, begin=BEGIN, end=END, beams=1, tokens=7)
    for row, length in enumerate(LENGTHS.tolist()):
        text = [BEGIN]
        while len(text) <= 7 and END not in text[1:]:
            logits = model(sources(seed)[row : row + 1, :length], torch.tensor([text])).outputs
            text.append(int(logits[0, -1].argmax()))
        assert written(found, row) == text[1:]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_of_all_targets(penalty: float) -> None:
    """With 4 words and 3 tokens there are 4 + 12 + 36... targets; none is lost among as many beams."""
    words, most = 4, 3
    model = build(2, target_vocabulary=words)
    targets = [
        list(t)
        for length in range(1, most + 1)
        for t in itertools.product(range(words), repeat=length)
        if END not in t[:-1] and (t[-1] == END or length == most)
    ]
    found = translate(model, sources(), begin=BEGIN, end=END, beams=words, tokens=most, length_penalty=penalty)
    ranks = [[score(model, sources()[row], t) / len(t) ** penalty for t in targets] for row in range(ROWS)]
    for row in range(ROWS):
        tokens = written(found, row)
        assert tokens in targets
        rank = float(found.score_B[row]) / len(tokens) ** penalty
        assert rank == pytest.approx(max(ranks[row]), abs=1e-4)


def test_a_row_is_translated_alone_and_a_source_may_be_padding() -> None:
    model = build(target_vocabulary=W)
    options: dict[str, Any] = {"begin": BEGIN, "end": END, "beams": 3}
    together = translate(model, sources(), padding=PADDING, **options)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = translate(model, sources()[row : row + 1, :length], **options)
        assert written(alone, 0) == written(together, row)
        torch.testing.assert_close(alone.score_B[0], together.score_B[row])
    assert len(set(together.length_B.tolist())) > 1  # they were done at different steps
    assert (together.tokens_BT[torch.arange(together.tokens_BT.shape[1]) >= together.length_B[:, None]] == END).all()
    # An empty line, which has no token to attend.
    padding = PADDING.clone()
    padding[1] = True
    for kind in ("pre", "t5", "grc"):
        model = build(target_vocabulary=W, **KINDS[kind])
        found = translate(model, sources(), padding=padding, begin=BEGIN, end=END, beams=2)
        assert found.score_B.isfinite().all() and found.length_B[1] <= 10


def test_state_goes_in_and_out_and_the_mode_stays() -> None:
    model = build(memory={"name": "grc_stream", "length": 4}).train()
    options: dict[str, Any] = {"padding": PADDING, "begin": BEGIN, "end": END, "beams": 2, "tokens": 6}
    first = translate(model, sources(), **options)
    second = translate(model, sources(1), state=first.state, **options)
    assert model.training
    with torch.no_grad():
        state = model.eval().encode(sources(), PADDING).state
        fresh, on = (model(sources(1), sources()[:, :4], PADDING, s) for s in (None, state))
    torch.testing.assert_close(second.state, on.state)
    torch.testing.assert_close(first.state, state)
    assert not torch.allclose(fresh.outputs, on.outputs, atol=1e-5)
    again = translate_rereading(model, sources(1), state=first.state, **options)
    torch.testing.assert_close(second.score_B, again.score_B)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 0}, f"beams=0 must lie in 1..{W}"),
        ({"beams": W + 1}, f"beams={W + 1} must lie in 1..{W}"),
        ({"tokens": 0}, "tokens=0 must lie in 1..32"),
        ({"tokens": 33}, "tokens=33 must lie in 1..32"),
        ({"begin": -1}, "begin=-1 is not in the target vocabulary of 11 tokens, 0 to 10"),
        ({"end": W}, "end=11 is not in the target vocabulary"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must lie in -50..50"),
        ({"padding": PADDING[:2]}, "padding of shape .* must have the shape of the inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate(build(target_vocabulary=W), sources(), **{"begin": BEGIN, "end": END, "beams": 3, **options})


class WholeTarget:
    def __init__(self, model: EncoderDecoder, encoded: Encoded, first_B: Tensor) -> None:
        self.model, self.encoded, self.tokens_BT = model, encoded, first_B[:, None]

    def after(self) -> tuple[()]:
        return ()

    def read(self) -> Tensor:
        return self.model.decode(self.tokens_BT, self.encoded, last_only=True)[:, 0].log_softmax(-1)

    def append(self, token_B: Tensor) -> None:
        self.tokens_BT = torch.cat([self.tokens_BT, token_B[:, None]], 1)

    def multiply(self, times: int) -> None:
        self.choose(torch.arange(len(self.tokens_BT)).repeat_interleave(times))

    def choose(self, rows_B: Tensor) -> None:
        hidden_BND, padding_BN = self.encoded.hidden_BND[rows_B], self.encoded.padding_BN
        padding_BN = None if padding_BN is None else padding_BN[rows_B]
        self.encoded = self.encoded._replace(hidden_BND=hidden_BND, padding_BN=padding_BN)
        self.tokens_BT = self.tokens_BT[rows_B]


def translate_rereading(model: EncoderDecoder, inputs_BN: Tensor, **options: Any) -> Translation:
    with patch("cached_lab.tasks.translation.translate.CachedTarget", WholeTarget):
        return translate(model, inputs_BN, **options)
