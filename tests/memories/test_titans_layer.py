"""Titans in front of attention (MAL): its place, its neighbours, and cuts of the stream.

`test_titans_places.py` holds it to its twin, and its gate, causality and schedules to the rules of the other places.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.transformers_hosts import LLAMA
from memories.harness import HEADS, ROWS, SEGMENT, VOCABULARY, WIDTH, build, segments
from torch import Tensor, nn

from cached_transformers import add_memory, create_model
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Query, Reading
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.titans.titans import Titans
from cached_transformers.models.generation import ReadsAgain
from cached_transformers.registry import MEMORIES

MAL: dict[str, Any] = {"name": "titans", "place": "layer", "chunk": 2}
WINDOW: dict[str, Any] = {"name": "transformer_xl", "length": 4}


@pytest.mark.parametrize("mix", ["sum", "product", "alone"])
def test_queries_keys_and_values_are_made_of_what_it_gives(mix: Any) -> None:
    memory, norm = Titans(WIDTH, HEADS, place="layer", mix=mix, chunk=2, initial_share=0.75), nn.LayerNorm(WIDTH)
    layer = SelfAttention(WIDTH, HEADS, memory=memory, norm=norm, causal=True).double()
    plain = SelfAttention(WIDTH, HEADS, causal=True).double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k in plain.state_dict()})
    x_BND, state = torch.randn(ROWS, 7, WIDTH).double(), layer.init_state(ROWS, torch.zeros(()).double())
    read = read_segment(memory, state[0], Query(layer.norm(x_BND)), None).output_BHNE
    assert read is not None
    m_BND = (read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt()).transpose(1, 2).flatten(2)
    given_BND, y = layer.norm(x_BND), layer.norm(x_BND).unflatten(-1, (HEADS, -1))
    normed_BND = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2)
    mixed = {"sum": given_BND + 0.75 * m_BND, "alone": 0.25 * given_BND + 0.75 * m_BND}
    mixed["product"] = 0.25 * given_BND + 0.75 * normed_BND * m_BND.sigmoid()
    torch.testing.assert_close(layer(x_BND, state=state).y_BND, plain(mixed[mix]).y_BND, rtol=0, atol=1e-12)


def test_the_memory_alone_leaves_nothing_of_attention() -> None:
    """mix="alone" behind attention with a full share is the neural memory by itself (LMM)."""
    model = build({"name": "titans", "mix": "alone"}, scale=0)
    out = model(segments(1)[0]).outputs
    for block in model.stack.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.attention.qkv.weight)
    assert torch.equal(model(segments(1)[0]).outputs, out)
    for block in model.stack.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.attention.memory.key.weight)
    assert (model(segments(1)[0]).outputs - out).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_cuts_at_multiples_of_its_chunk_change_nothing(cut: int) -> None:
    """Of a stream whose attention goes on across them."""
    model = build(MAL, attention={"name": "delta_net", "carry": True}, positions="none")
    tokens_BN = torch.cat(segments(5), 1)[:, :24]
    whole, state, parts = model(tokens_BN).outputs, None, []
    for ids in tokens_BN.split(cut, 1):
        out = model(ids, state)
        state = out.state
        parts.append(out.outputs)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


def test_kept_keys_of_another_memory_would_differ_between_training_and_evaluation() -> None:
    for order in (1, -1):
        with pytest.raises(ValueError, match=r"TransformerXL.*'hidden'"):
            build([{**WINDOW, "keep": "kv"}, MAL][::order])


class Doubling(LayerMemory):
    """In front of attention: twice its input, and nothing remembered."""

    needs = frozenset({"in_front"})

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()

    def read(self, opened: Any, query: Query, project_kv: Any) -> Reading:
        return Reading(carry=query.x_BND)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert torch.equal(reading.carry, query.x_BND)
        return 2 * y_BHNE

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: Any) -> Any:
        return state


def test_a_memory_of_yours_stands_there_with_one_word_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that a token can be read alone, which the layer cannot: the open segment is read again, and said."""
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("doubling")(Doubling)
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "depth": 2, "heads": HEADS, "feed_forward": 16}
    model = create_model("language_model", memory="doubling", **sizes).eval()
    plain = create_model("language_model", **sizes).eval()
    plain.load_state_dict(model.state_dict())
    for block in plain.stack.blocks:  # type: ignore[union-attr]
        for parameter in block.attention.norm.parameters():
            parameter.data.mul_(2)
    prompt = segments(1)[0]
    with pytest.warns(ReadsAgain, match="memory Doubling"):
        found = model.generate(prompt, tokens=8, temperature=0, segment_length=SEGMENT)
    assert torch.equal(found.tokens, plain.generate(prompt, tokens=8, temperature=0, segment_length=SEGMENT).tokens)


def test_a_host_whose_projections_are_its_own_takes_it_behind_attention_alone() -> None:
    with pytest.raises(ValueError, match=r"'titans'.*in_front.*place='gate'"):
        add_memory(LLAMA.build(), {"name": "titans", "place": "layer"}, segment_length=8)
