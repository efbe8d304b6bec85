"""An attention with a state: the layer carries it next to its memory's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.harness import run
from torch import Tensor, nn

from cached_transformers.layers.attention import LayerState
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models import LanguageModel
from cached_transformers.state import load, save

VOCABULARY, ROWS, SEGMENT = 11, 3, 5
CARRIED = ["delta_net", "linear", "gated_delta"]


def build(attention: str, memory: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    spec = {"name": attention, "carry": True}
    sizes = {"positions": "none", "attention": spec, "memory": memory, **options}
    return LanguageModel(VOCABULARY, 16, 2, 2, 32, **sizes).double()


def tokens(segments: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, segments * SEGMENT), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", CARRIED)
def test_a_text_in_segments_is_the_text_as_a_whole(attention: str) -> None:
    model, text = build(attention), tokens(3)
    outs = run(model, text.split(SEGMENT, 1))
    torch.testing.assert_close(torch.cat([out.outputs for out in outs], 1), model(text).outputs, rtol=0, atol=1e-10)
    assert isinstance(outs[-1].state.layers[0], LayerState)
    # Without what it carries a segment is another one.
    assert (model(text[:, SEGMENT : 2 * SEGMENT]).outputs - outs[1].outputs).abs().max() > 1e-3


@pytest.mark.parametrize("attention", CARRIED)
def test_the_gradient_crosses_segments_and_ends_where_the_loop_cuts(attention: str) -> None:
    model, text = build(attention), tokens(2)
    targets = torch.full_like(text, -100)
    targets[:, -1] = 1
    gradients = []
    for bptt in (2, 1):
        embedded: list[Tensor] = []
        hook = lambda _m, _i, y, got=embedded: (y.retain_grad(), got.append(y))[1]  # noqa: E731
        handle = model.embedding.register_forward_hook(hook)  # type: ignore[union-attr, operator]
        SegmentLoop(model, SEGMENT, bptt=bptt)(text, targets)[0].backward()
        handle.remove()
        gradients.append(embedded[0].grad)
    assert gradients[0] is not None and gradients[0].abs().max() > 0
    assert gradients[1] is None or gradients[1].abs().max() == 0


def test_a_row_that_is_reset_forgets_and_padding_leaves_the_state() -> None:
    model, text = build("delta_net"), tokens(2)
    first, second = text.split(SEGMENT, 1)
    state = model(first).state
    reset = torch.tensor([False, True, False])
    got, fresh, kept = model(second, state, reset).outputs, model(second).outputs, model(second, state).outputs
    torch.testing.assert_close(got[1], fresh[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[::2], kept[::2], rtol=0, atol=1e-12)
    padding = torch.zeros(ROWS, SEGMENT + 2, dtype=torch.bool)
    padding[:, -2:] = True
    padded = model(torch.cat([first, first[:, :2]], 1), padding=padding).state
    torch.testing.assert_close(model(second, padded).outputs, kept, rtol=0, atol=1e-10)


def test_a_memory_stands_beside_it_and_both_are_saved(tmp_path: Any) -> None:
    model, text = build("delta_net", {"name": "grc_stream", "length": 4}), tokens(3)
    first, second, third = text.split(SEGMENT, 1)
    state = model(second, model(first).state).state
    save(state, tmp_path / "state.safetensors")
    again = load(tmp_path / "state.safetensors", model.init_state(ROWS))  # type: ignore[operator]
    assert torch.equal(model(third, again).outputs, model(third, state).outputs)
    for part in ("memory", "core"):
        empty = model.init_state(ROWS)  # type: ignore[operator]
        layers = tuple(
            kept._replace(**{part: getattr(none, part)}) for kept, none in zip(state.layers, empty.layers, strict=True)
        )
        changed = model(third, state._replace(layers=layers)).outputs
        assert (changed - model(third, state).outputs).abs().max() > 1e-6, part


def test_a_reversible_stack_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"reversible=True.*DeltaNet"):
        build("delta_net", reversible=True)
