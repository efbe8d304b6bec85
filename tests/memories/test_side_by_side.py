"""Several memories in one model, `memory=[...]`: each does what it does alone, and all of them together.

Legend: B rows, N tokens, H heads, E head width, D model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from common import refuses
from memories import harness
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.tasks.recipes import config_from_dict
from cached_transformers import add_memory, create_memory
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.grc.shared_cache import commit_caches
from cached_transformers.memories.grc.stream import StreamGRC
from cached_transformers.memories.memorizing import Memorizing
from cached_transformers.memories.parts.composite import SideBySide
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.registry import MEMORIES, Registration

ROWS, SEGMENT, WIDTH, HEADS, DEPTH, VOCABULARY = 3, 6, 16, 2, 2, 11
GRC = {"name": "grc_stream", "length": 4}
XL = {"name": "transformer_xl", "length": 8, "relative": False}
RELATIVE_XL = {"name": "transformer_xl", "length": 8}


def build(memory: Any, model: str = "language_model", **options: Any) -> Any:
    """The same weights by the same names, whatever else the model has."""
    more = {"classes": 3, "max_length": 2 * SEGMENT} if model == "sequence_classifier" else {}
    made = harness.build(memory, model=model, scale=0, width=WIDTH, feed_forward=2 * WIDTH, **more, **options)
    for name, parameter in made.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        with torch.no_grad():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def segments(count: int = 4) -> tuple[Tensor, ...]:
    return harness.segments(count, length=SEGMENT)


def outputs(model: Any, inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([out.outputs for out in harness.run(model, inputs)])


def take_weights(both: nn.Module, alone: nn.Module, number: int) -> None:
    """Give the model with one memory the weights of the one with several, in which its memory has this number."""
    stored = {name.replace(f".memory.members.{number}.", ".memory."): t for name, t in both.state_dict().items()}
    alone.load_state_dict({name: stored[name] for name in alone.state_dict()})


def members(model: nn.Module) -> list[Any]:
    return [block.attention.memory for block in model.stack.blocks]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("order", [1, -1])
def test_with_the_gate_of_one_closed_the_other_is_as_alone(order: int) -> None:
    both, alone = build([GRC, RELATIVE_XL][::order]), build(RELATIVE_XL)
    number = (0, 1)[::order][1]
    take_weights(both, alone, number)
    for memory in members(both):
        memory.members[1 - number].close_gate()
    inputs = segments()
    assert torch.equal(outputs(both, inputs), outputs(alone, inputs))
    assert type(both.stack.blocks[0].attention.positions) is RelativePositions  # type: ignore[union-attr]


def heads(t_ND: Tensor) -> Tensor:
    return t_ND.unflatten(-1, (HEADS, -1)).transpose(0, 1)


def attend(q_HNE: Tensor, k_HME: Tensor, v_HME: Tensor, hidden_NM: Tensor) -> Tensor:
    logits = (q_HNE @ k_HME.mT / math.sqrt(q_HNE.shape[-1])).masked_fill(hidden_NM, -torch.inf)
    return logits.softmax(-1) @ v_HME


def twin(layer: SelfAttention, inputs: list[Tensor], slots: int) -> list[Tensor]:
    """Results for the segments (N, D) of one row: the last inputs are attended, and GRC's cache is mixed in."""
    (grc,) = (m for m in layer.memory.members if isinstance(m, StreamGRC))  # type: ignore[union-attr]
    past, found, gates = inputs[0].new_zeros(0, WIDTH), [], grc.gates
    cache, last = inputs[0].new_zeros(grc.length, gates.width), None
    for x in inputs:
        n = x.shape[0]
        q, k, v = (heads(t) for t in layer.qkv(torch.cat([past, x])).chunk(3, -1))
        hidden = F.pad(torch.ones(n, n, dtype=torch.bool).triu(1), (len(past), 0))
        y = attend(q[:, len(past) :], k, v, hidden)
        if last is not None:
            tokens, of_cache = gates.from_tokens(last).chunk(3, -1), gates.from_cache.weight.chunk(3)
            update, reset = (torch.sigmoid(tokens[i] + cache @ of_cache[i].T) for i in (0, 1))
            fresh = gates.norm(F.gelu(tokens[2] + (reset * cache) @ of_cache[2].T))  # type: ignore[misc]
            cache = (1 - update) * cache + update * fresh
            k, v = (heads(t) for t in grc.branch.key_value(cache).chunk(2, -1))
            o = attend(heads(grc.branch.query(x[:, : gates.width])), k, v, torch.zeros(n, 1, dtype=torch.bool))
            ratio = torch.sigmoid(grc.branch.gate_H)[:, None, None]
            y = ratio * F.pad(o, (0, y.shape[-1] - o.shape[-1])) + (1 - ratio) * y
        found.append(layer.output(y.transpose(0, 1).flatten(1)))
        last = x[torch.arange(grc.length) * n // grc.length, : gates.width]
        past = torch.cat([past, x])[-slots:].detach()
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_against_a_slow_twin(order: int) -> None:
    pair = [create_memory(GRC, WIDTH, HEADS), create_memory(XL, WIDTH, HEADS)][::order]
    layer = harness.wild(SelfAttention(WIDTH, HEADS, memory=SideBySide(pair), causal=True))  # type: ignore[arg-type]
    inputs = list(torch.randn(4, ROWS, SEGMENT, WIDTH, dtype=torch.float64))
    found, _, loss = harness.run_layer(layer, inputs, counted=True)
    assert loss == 0
    by_row = [twin(layer, list(row), 8) for row in zip(*inputs, strict=True)]
    expected = [torch.stack(rows) for rows in zip(*by_row, strict=True)]
    harness.agree(found, expected, layer, least=1e-6)


def test_each_gets_its_weights_and_its_part_of_the_softmax() -> None:
    """A memory that weighs its slots keeps the same ones beside another; the log-sum-exp is for who asked for it."""
    used = {"name": "compressive", "length": 4, "compressed": 3, "rate": 2, "function": "most_used", "relative": False}
    knn = {"name": "memorizing", "length": 8, "k": 4, "layer": 1}
    both, alone = build([{**knn, "joint": True}, knn, used]), build(used)
    first, second, _ = members(both)[0].members
    take_weights(both, alone, 2)
    for memory in (first, second):
        memory.close_gate()
    inputs = segments()
    torch.testing.assert_close(outputs(both, inputs), outputs(alone, inputs), rtol=0, atol=1e-12)
    both, alone = build([{**knn, "joint": True}, knn]), build(knn)
    take_weights(both, alone, 1)
    members(both)[0].members[0].close_gate()
    torch.testing.assert_close(outputs(both, inputs), outputs(alone, inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, -1])
def test_what_acts_behind_the_projection_does_so_beside_another(order: int) -> None:
    """GRC as released mixes behind the projection, the paper's before; both caches are written."""
    released = {"name": "grc", "length": 6, "variant": "released", "positional_convolution": False}
    paper = {"name": "grc", "length": 6}
    both = build([released, paper][::order], "sequence_classifier")
    inputs = segments(3)
    for closed, left in ((0, 1), (1, 0)):
        model = copy.deepcopy(both)
        alone = build([released, paper][::order][left], "sequence_classifier")
        take_weights(both, alone, left)
        for memory in members(model):
            memory.members[closed].close_gate()
        torch.testing.assert_close(outputs(model, inputs), outputs(alone, inputs), rtol=0, atol=1e-12)
    outputs(both, inputs)
    commit_caches(both)
    caches = [t for name, t in both.named_buffers() if name.endswith("cache_MC")]
    assert len(caches) == 2 * DEPTH and all(t.abs().max() > 1e-3 for t in caches)


def test_beside_a_memory_that_spans_the_layers() -> None:
    rmt = {"name": "rmt", "length": 3}
    both, alone = build([GRC, rmt]), build(rmt)
    take_weights(both, alone, 0)
    stored = both.state_dict()
    alone.load_state_dict({name: stored[name] for name in alone.state_dict()})
    inputs = segments()
    assert (outputs(both, inputs) - outputs(alone, inputs))[1:].abs().max() > 1e-3
    for memory in members(both):
        assert type(memory) is StreamGRC  # RMT has none in the layers, so that GRC is alone there
        memory.close_gate()
    assert torch.equal(outputs(both, inputs), outputs(alone, inputs))
    cached = build([{"name": "rmt", "length": 3, "cache": 4}, GRC])
    assert [type(m).__name__ for m in members(cached)[0].members] == ["CacheBeforeTokens", "StreamGRC"]
    outputs(cached, inputs)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([], r"memory=\[\] lists no memory"),
        ([GRC, {"length": 3}], "must be a name or have the key 'name'"),
        ([GRC, 3], "memory=3 must be a name"),
        ([GRC, {"name": "transformer_x"}], "did you mean 'transformer_xl'"),
        ([GRC, "grc"], "memory grc shows each token the rest of its segment"),
        (["rmt", GRC, "memformer"], "RMT and Memformer both span the layers"),
        (["feedback", XL], "Feedback lets tokens attend it alone, so that memory TransformerXL has no place"),
        (
            [RELATIVE_XL, {"name": "transformer_xl", "clamp": 3}],
            r"different position schemes to one layer \(RelativePositions, RelativePositions\); give relative=False",
        ),
        (["segatron", XL], "SegatronLayer and TransformerXL .*3 channels and 1"),
        (["segatron", RELATIVE_XL], "in one layer|different position schemes"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(memory: Any, message: str) -> None:
    refuses(message, build, memory)


def test_cores_and_places_that_cannot_take_several_say_so() -> None:
    with pytest.raises(ValueError, match="memory Memorizing needs lse"):
        build([GRC, {"name": "memorizing", "layer": 1, "joint": True}], attention="linear")
    refuses(r"memory=\[grc_stream, transformer_xl\]", add_memory, nn.TransformerEncoderLayer(WIDTH, HEADS), [GRC, XL])
    refuses("RMT spans the layers, and a list with it is for", create_memory, [GRC, "rmt"], WIDTH, HEADS)


def test_a_recipe_may_list_several() -> None:
    tree: dict[str, Any] = {"name": "both", "data": {"name": "text", "path": "x"}}
    tree["model"] = {"name": "language_model", "memory": ["grc_stream", XL]}
    assert config_from_dict(tree).model["memory"] == ["grc_stream", XL]
    tree["model"] = {"name": "language_model", "memory": ["grc_stream", {**XL, "lenght": 3}]}
    refuses("'length'", config_from_dict, tree)
    tree["model"] = {"name": "language_model", "memory": ["grc_stream", {**XL, "length": "long"}]}
    refuses(r"model.memory", config_from_dict, tree)


class Outer(LayerMemory):
    """Another memory, of which it counts the segments."""

    def __init__(self, width: int, heads: int, over: Any, *, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        made = create_memory(over, width, heads, **(facts or {}))
        assert isinstance(made, LayerMemory)
        self.inner, self.needs, self.shared = made, made.needs, made.shared

    def position_scheme(self) -> Positions | None:
        return self.inner.position_scheme()

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        return (self.inner.init_state(batch_size, like), torch.zeros(batch_size, dtype=torch.long))

    def read(self, state: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        return read_segment(self.inner, state[0], query, project_kv)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        return self.inner.combine(y_BHNE, query, reading)

    def write(self, state: Any, trace: Trace) -> tuple[Any, Tensor | None]:
        inner, loss = self.inner.write(state[0], trace)
        return (inner, state[1] + 1), loss


def test_a_memory_round_another_gives_it_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMORIES._entries, "test_outer", Registration("test_outer", Outer))
    knn = {"name": "memorizing", "length": 8, "k": 4}  # which needs to know its layer and their number
    model, plain = build({"name": "test_outer", "over": knn}), build(knn)
    stored = {name.replace(".memory.inner.", ".memory."): t for name, t in model.state_dict().items()}
    plain.load_state_dict(stored)
    assert [m.inner.here for m in members(model)] == [m.here for m in members(plain)] == [False, True]
    assert all(isinstance(m.inner, Memorizing) for m in members(model))
    inputs = segments()
    assert torch.equal(outputs(model, inputs), outputs(plain, inputs))
    pair, listed = build({"name": "test_outer", "over": [GRC, RELATIVE_XL]}), build([GRC, RELATIVE_XL])
    listed.load_state_dict({name.replace(".memory.inner.", ".memory."): t for name, t in pair.state_dict().items()})
    assert torch.equal(outputs(pair, inputs), outputs(listed, inputs))
    refuses("facts=", build, {"name": "test_outer", "over": knn, "facts": {"depth": 1}})
