"""The short convolution against a loop over tokens, with segments, padding, and memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from models.test_incremental_decoding import compare
from torch import Tensor, nn

from cached_transformers.layers.short_convolution import ShiftedState, ShortConvolution
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models import LanguageModel
from cached_transformers.models.generation import generate

B, N, D, K = 3, 9, 4, 4


@pytest.fixture
def convolution() -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(D, K).double()


def tokens(n: int = N) -> Tensor:
    return torch.randn(B, n, D, dtype=torch.double, generator=torch.Generator().manual_seed(n))


def slow(convolution: ShortConvolution, x_BND: Tensor) -> Tensor:
    """Token by token, as the equation has it; nothing before the first."""
    rows = []
    for row in x_BND:
        out = []
        for t in range(len(row)):
            y = row[t].clone()
            for back in range(min(convolution.taps, t + 1)):
                y = y + convolution.weight_KD[back] * row[t - back]
            out.append(y)
        rows.append(torch.stack(out))
    return torch.stack(rows)


def test_it_is_the_loop_and_leaves_tokens_around_a_segment(convolution: ShortConvolution) -> None:
    x = tokens().requires_grad_()
    expected = slow(convolution, x)
    mine, recent = convolution(x, convolution.init_state(B, x))
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(recent, x[:, -(K - 1) :])
    wanted = [x, convolution.weight_KD]
    gradients = [torch.autograd.grad(y.square().sum(), wanted, retain_graph=True) for y in (mine, expected)]
    torch.testing.assert_close(*gradients)
    x, recent = tokens(), tokens(K - 1)
    y, after = convolution(x, recent, segment=(2, 5))
    inside, expected = convolution(x[:, 2:7], recent)
    torch.testing.assert_close(y, torch.cat([x[:, :2], inside, x[:, 7:]], 1))
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("sizes", [[N], [1] * N, [2, 1, 6], [5, 4], [1, 1, 7]])
def test_a_text_may_be_cut_anywhere(convolution: ShortConvolution, sizes: list[int]) -> None:
    """Also for pieces shorter than the carried tokens; the gradient crosses segments."""
    x = tokens().requires_grad_()
    recent, parts = convolution.init_state(B, x), []
    for piece in x.split(sizes, 1):
        y, recent = convolution(piece, recent)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), slow(convolution, x))
    gradient = torch.autograd.grad(parts[-1].sum(), x)[0]
    if sizes[-1] < N:
        assert bool((gradient[:, N - sizes[-1] - 1] != 0).all())


def build(memory: Any = None, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(11, 16, 2, 2, 16, memory=memory, short_convolution=3, **options).double()


MEMORIES = [
    None,
    {"name": "transformer_xl", "length": 7},
    {"name": "grc_stream", "length": 5},
    {"name": "memorizing", "length": 9, "k": 4},
    {"name": "rmt", "length": 3},
    {"name": "memformer", "length": 4},
    {"name": "feedback", "length": 7},
    {"name": "read_twice", "slots": 4},
    {"name": "segatron", "length": 7, "sentence_ends": [1]},
    [{"name": "rmt", "length": 2}, {"name": "grc_stream", "length": 5}],
]


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_generation_carries_it_token_by_token(memory: Any) -> None:
    """Beams too: each has its own last tokens."""
    compare(build(memory).eval(), segment=5, steps=9)


@pytest.mark.parametrize("memory", MEMORIES[1:5], ids=str)
def test_a_reset_row_has_no_token_before_it(memory: Any) -> None:
    model = build(memory).eval()
    text = torch.randint(0, 11, (2, 10), generator=torch.Generator().manual_seed(1))
    state = model(text[:, :5]).state
    out = model(text[:, 5:], state, torch.tensor([False, True]))
    torch.testing.assert_close(out.outputs[1:], model(text[1:, 5:]).outputs)
    assert not torch.allclose(out.outputs[:1], model(text[:1, 5:]).outputs)


def test_the_diagonal_schedule_is_the_plain_one() -> None:
    model = build({"name": "grc_stream", "length": 5})
    text = torch.randint(0, 11, (2, 21), generator=torch.Generator().manual_seed(1))
    results = []
    for schedule in ("segments", "diagonal"):
        model.zero_grad()
        loss = SegmentLoop(model, 4, 5, schedule=schedule)(text[:, :-1], text[:, 1:])[0]
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_it_is_one_graph_whose_state_is_carried_and_whose_taps_are_trained() -> None:
    model = build()
    out = model(torch.randint(0, 11, (2, 6)), model.init_state(2))
    assert all(isinstance(layer, ShiftedState) and layer.recent_BTD.shape == (2, 2, 16) for layer in out.state.layers)
    out.outputs.square().sum().backward()
    assert all(bool((block.short_convolution.weight_KD.grad != 0).all()) for block in model.stack.blocks)
    model = build({"name": "transformer_xl", "length": 4}).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    text = torch.randint(0, 11, (2, 5))
    state = model(text).state
    torch.testing.assert_close(compiled(text, state).outputs, model(text, state).outputs)


def test_states_are_converted_and_models_reloaded_with_it(tmp_path: Path) -> None:
    text = torch.randint(0, 11, (2, 10), generator=torch.Generator().manual_seed(1))
    kept = build({"name": "transformer_xl", "length": 7, "keep": "kv"})
    plain = build({"name": "transformer_xl", "length": 7}).eval()
    plain.load_state_dict(kept.state_dict())
    state = kept.train()(text[:, :5]).state
    expected = plain(text[:, 5:], plain.train()(text[:, :5]).state).outputs
    torch.testing.assert_close(kept.eval()(text[:, 5:], kept.as_kept(state)).outputs, expected)
    kept.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(text).outputs, kept(text).outputs)


def test_a_wrapper_that_hides_what_a_block_carries_is_named() -> None:
    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.attention = block, block.attention

        def forward(self, *inputs: Any, **options: Any) -> Any:
            return self.block(*inputs, **options)

    model = build({"name": "transformer_xl", "length": 4})
    model.stack.blocks[0] = Wrapped(model.stack.blocks[0])
    refuses("init_state", model, torch.zeros(1, 3, dtype=torch.long))


def test_what_is_read_in_front_of_a_layer_is_asked_by_joined_tokens() -> None:
    """A token can then query with the tokens before it, such as the key of a question."""
    model = build({"name": "armt", "length": 2, "key_width": 4}).eval()
    block, seen = model.stack.blocks[0], []
    block.slot_attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    block.short_convolution.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model(torch.randint(0, 11, (2, 5)))
    assert torch.equal(seen[-1], seen[-2]), "the convolution comes first"


def test_it_is_refused_and_an_empty_state_is_zeros() -> None:
    refuses("taps=1", ShortConvolution, 4, 1)
    refuses("short_convolution=0", LanguageModel, 11, 16, 2, 2, 16, short_convolution=0)
    with pytest.raises(ValueError, match=r"reversible=True.*short_convolution"):
        LanguageModel(11, 16, 2, 2, 16, short_convolution=2, reversible=True)
    assert generate(build(), torch.zeros(1, 2, dtype=torch.long), tokens=3, segment_length=4).tokens.shape == (1, 3)
    model, ids = build().eval(), torch.randint(0, 11, (B, 4))
    state = model.init_state(B)
    layers = tuple(part._replace(recent_BTD=torch.full_like(part.recent_BTD, torch.nan)) for part in state.layers)
    torch.testing.assert_close(model(ids, state._replace(layers=layers)).outputs, model(ids).outputs)
