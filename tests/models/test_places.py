"""Positions of tokens with a carried state: the rule of `models/stack_model.py`, in every model.

Legend: B rows, N tokens of a segment, K tokens of a stream.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.positions import Positions, RelativePositions, SinusoidalPositions

V, ROWS, N = 11, 3, 4
SIZES: dict[str, Any] = {"width": 8, "depth": 2, "heads": 2, "feed_forward": 12}
NEEDED: dict[str, dict[str, Any]] = {
    "language_model": {"vocabulary": V},
    "sequence_classifier": {"vocabulary": V, "classes": 3, "max_length": 6},
    "vision_transformer": {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3},
    "encoder_decoder": {"vocabulary": V, "max_length": 6, "dropout": 0.0},
}
XL = {"name": "transformer_xl", "length": 16}


def build(kind: str, memory: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_model(kind, memory=memory, **{**SIZES, **NEEDED[kind], **options}).eval()


def segments(kind: str, count: int) -> list[Tensor]:
    if kind == "vision_transformer":
        return list(torch.randn(count, ROWS, 1, 8, 8))
    return list(torch.randint(0, V, (count, ROWS, N)))


def stream(model: nn.Module, kind: str, inputs: list[Tensor], state: Any = None, **options: Any) -> list[Any]:
    outs = []
    for segment in inputs:
        given = (segment, segment) if kind == "encoder_decoder" else (segment,)
        outs.append(model(*given, state=state, **options))
        state = outs[-1].state
    return outs


@pytest.mark.parametrize("memory", [XL, {"name": "ernie_doc", "length": 16}, {**XL, "relative": False}])
@pytest.mark.parametrize("kind", NEEDED)
def test_slots_of_a_memory_stand_where_their_tokens_stood_in_the_stream(kind: str, memory: dict[str, Any]) -> None:
    """One after the other: distances are right, and what claims to be consecutive is."""
    model = build(kind, memory)
    tokens = N + (kind in ("sequence_classifier", "vision_transformer"))  # the class token has a place of its own
    state = stream(model, kind, segments(kind, 3))[-1].state
    for rows in state.layers:
        assert rows.positions_BMP[:, -3 * tokens :, 0].tolist() == [list(range(3 * tokens))] * ROWS
    assert state.clock_B.tolist() == [3 * tokens] * ROWS


@pytest.mark.parametrize("fresh", [False, True])
def test_padding_takes_no_place_in_the_stream_of_a_classifier(fresh: bool) -> None:
    model, kind = build("sequence_classifier", XL), "sequence_classifier"
    padding = torch.tensor([[False] * 4, [False, True, True, True], [True, True, False, False]])
    first = model.init_state(ROWS) if fresh else None
    state = stream(model, kind, segments(kind, 3), first, padding=padding)[-1].state
    for row, n in enumerate((15, 6, 9)):
        assert state.layers[0].positions_BMP[row, -n:, 0].tolist() == list(range(n))


def attended(model: nn.Module) -> list[Tensor]:
    """Positions that the first layer is given, one entry a segment."""
    layer = next(m for m in model.modules() if isinstance(m, SelfAttention))
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    return seen


@pytest.mark.parametrize("kind", ["sequence_classifier", "encoder_decoder"])
def test_without_a_state_every_segment_begins_at_0(kind: str) -> None:
    model = build(kind, None)
    seen = attended(model)
    stream(model, kind, segments(kind, 1))
    stream(model, kind, segments(kind, 1), padding=torch.tensor([[True, False, False, True]] * ROWS))
    assert all(positions[0, :, 0].tolist() == list(range(positions.shape[1])) for positions in seen)


@pytest.mark.parametrize("kind", NEEDED)
def test_a_fresh_state_is_no_state(kind: str) -> None:
    model = build(kind, XL)
    inputs = segments(kind, 1)
    none, fresh = (stream(model, kind, inputs, state)[0].outputs for state in (None, model.init_state(ROWS)))
    torch.testing.assert_close(none, fresh, rtol=0, atol=0)


def test_a_second_segment_reads_the_memory_by_distance() -> None:
    """All positions of a relative scheme may be moved by as much: only distances count, across segments too."""
    model, kind = build("sequence_classifier", XL), "sequence_classifier"
    inputs = segments(kind, 2)
    state = stream(model, kind, inputs[:1])[0].state
    rows = tuple(r._replace(positions_BMP=r.positions_BMP + 5) for r in state.layers)
    moved = state._replace(clock_B=state.clock_B + 5, layers=rows)
    near = state._replace(clock_B=torch.zeros_like(state.clock_B))  # as if the segment began at 0 again
    out, same, other = (stream(model, kind, inputs[1:], s)[0].outputs for s in (state, moved, near))
    torch.testing.assert_close(out, same, rtol=0, atol=1e-5)
    assert (out - other).abs().max() > 1e-4


def test_read_twice_tells_the_segments_of_a_classifier_apart() -> None:
    model, kind = build("sequence_classifier", {"name": "read_twice", "slots": 8}), "sequence_classifier"
    inputs = segments(kind, 4)
    state = stream(model, kind, inputs)[-1].state
    assert state.model.blocks_B.tolist() == [4] * ROWS
    begins_BM = state.model.table.positions_BMP[:, -4:, 0]
    assert begins_BM.tolist() == [[0, 5, 10, 15]] * ROWS
    again = model.init_state(ROWS)._replace(model=state.model)  # the second read: no block is new
    assert stream(model, kind, inputs, again)[-1].state.model.blocks_B.tolist() == [4] * ROWS


def test_a_classifier_counts_sentences_and_the_order_of_tokens() -> None:
    model = build("sequence_classifier", {"name": "segatron", "length": 12, "sentence_ends": (0, 3)})
    tokens = torch.tensor([[3, 1, 3, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    state = stream(model, "sequence_classifier", [tokens, tokens])[-1].state
    assert state.model.sentence_B.tolist() == [4, 0, 8]
    assert state.layers[0].positions_BMP[0, -10:, 1].tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    model, kind = build("sequence_classifier", XL), "sequence_classifier"
    tokens = torch.tensor([[1, 2, 3, 4]])
    one, other = (model(t).outputs for t in (tokens, tokens.flip(1)))
    assert (one - other).abs().max() > 1e-4
    assert stream(model, kind, [tokens])[0].outputs.equal(one)


@pytest.mark.parametrize("kind", ["sequence_classifier", "encoder_decoder"])
def test_a_memory_brings_its_scheme_unless_the_user_names_one(kind: str) -> None:
    def in_layers(model: Any) -> set[type]:
        return {type(block.attention.positions) for block in model.stack.blocks}

    model = build(kind, XL)
    assert in_layers(model) == {RelativePositions} and type(model.positions) is Positions
    for plain in (build(kind, None), build(kind, {**XL, "relative": False})):
        assert type(plain.positions) is SinusoidalPositions and not in_layers(plain) & {RelativePositions}
    asked = build(kind, XL, positions="sinusoidal")
    assert type(asked.positions) is SinusoidalPositions and RelativePositions not in in_layers(asked)
    if kind == "encoder_decoder":
        assert type(model.decoder.positions) is SinusoidalPositions


def test_embedded_places_of_a_classifier_go_on_and_those_of_sentences_and_images_do_not() -> None:
    for kind in ("sequence_classifier", "encoder_decoder"):
        model = build(kind, {**XL, "relative": False})
        seen: list[Tensor] = []
        embed = model.positions.embed
        model.positions.embed = lambda positions, embed=embed, seen=seen: (seen.append(positions), embed(positions))[1]
        stream(model, kind, segments(kind, 2))
        firsts = [positions[0, 0, 0].item() for positions in seen]
        assert firsts == ([0, 5] if kind == "sequence_classifier" else [0, 0])
    frozen = build("vision_transformer", None)
    image = segments("vision_transformer", 1) * 2
    one, other = stream(frozen, "vision_transformer", image)
    assert torch.equal(one.outputs, other.outputs)


def test_max_length_and_learned_positions_limit_a_segment() -> None:
    model, kind = build("sequence_classifier", XL), "sequence_classifier"
    assert stream(model, kind, segments(kind, 4))[-1].outputs.isfinite().all()
    refuses(r"7.*max_length=6", model, torch.zeros(1, 7, dtype=torch.long))
    model, kind = build("sequence_classifier", XL, positions="learned", max_length=11), "sequence_classifier"
    state = stream(model, kind, segments(kind, 2))[-1].state
    refuses(r"12.*positions='learned'", stream, model, kind, segments(kind, 1), state)
