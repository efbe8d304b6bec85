"""Delta-mem: recorded values in a host's layer, the rule token by token, and the effect of a state on a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memories.harness import DOUBLE, SEGMENT, build, recorded, run, segments, wild
from torch import Tensor, nn

from cached_transformers import SegmentLoop, add_memory
from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.delta_mem import DeltaMem, DeltaState
from cached_transformers.memories.parts.composite import SideBySide
from cached_transformers.positions import RotaryPositions

OWN: dict[str, Any] = {"update": "outside", "decay": "own"}
TAGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "lambda_outside": OWN,
    "no_lambda": {"update": "plain"},
    "scalar_gate": {"gates": "one"},
    "heads2": {"states": 2},
}
KINDS: list[dict[str, Any]] = [
    *TAGS.values(),
    {"update": "outside"},
    {"decay": "own"},
    {"states": 2, "gates": "one"},
]
tags = pytest.mark.parametrize("tag", TAGS)
kinds = pytest.mark.parametrize("options", KINDS, ids=str)


def load(memory: DeltaMem, weights: dict[str, Tensor]) -> DeltaMem:
    """The memory with recorded weights."""
    gates = [name for name in ("beta", "lambda") if f"{name}_proj" in weights]
    maps = [weights[f"memory_{name}_proj"] for name in "qkv"] + [weights[f"{name}_proj"] for name in gates]
    with torch.no_grad():
        memory.map_OD.copy_(torch.cat(maps))
        memory.gate_bias_G.copy_(torch.cat([weights[f"{name}_bias"] for name in gates]))
        memory.query_DC.copy_(weights["delta_q_proj"])
        memory.output_DC.copy_(weights["delta_o_proj"])
    return memory


def state_of(matrix: Tensor) -> DeltaState:
    return DeltaState(matrix if matrix.dim() == 4 else matrix[:, None], torch.ones(len(matrix), dtype=torch.long))


def part(values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in values.items() if name.startswith(prefix)}


def equal(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected.view_as(found), rtol=0, atol=tolerance)


class RecordedLayer:
    """The recorded attention layer in a Qwen3 model, with a memory added; in float64, where the host rounds more."""

    def __init__(self, values: dict[str, Tensor], tag: str, **options: Any) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
        config = transformers.Qwen3Config(
            vocab_size=9, num_hidden_layers=1, intermediate_size=8, rope_theta=1e4, max_position_embeddings=16, **sizes
        )
        self.model = transformers.Qwen3Model(config).double().eval()
        block = self.model.layers[0]
        block.input_layernorm = nn.Identity()
        block.self_attn.q_norm, block.self_attn.k_norm = (nn.RMSNorm(4, eps=1e-6, **DOUBLE) for _ in range(2))
        block.self_attn.load_state_dict(part(values, "base/"))
        self.model.rotary_emb.forward = lambda x, _: (values["cos"].to(x), values["sin"].to(x))
        self.model.requires_grad_(False)
        self.outputs: list[Tensor] = []
        block.self_attn.register_forward_hook(lambda layer, args, output: self.outputs.append(output[0]))
        add_memory(self.model, "delta_mem", rank=4, scale=4.0, segment_length=None, **options)
        self.memory = load(block.self_attn.memory, part(values, f"{tag}/param/"))

    def __call__(self, x: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
        given = self.model.init_memory_state(len(x))
        out = self.model(inputs_embeds=x, memory_state=given._replace(layers=(state,)), use_cache=False)
        return self.outputs.pop(), out.memory_state.layers[0]


@tags
def test_a_layer_of_a_host_gives_the_recorded_values(shared: Path, tag: str) -> None:
    values = recorded(shared, "2026/delta_mem")
    layer, own = RecordedLayer(values, tag, **TAGS[tag]), part(values, f"{tag}/")
    x = values["x"].clone().requires_grad_()
    y, state = layer(x, state_of(own["state0"]))
    equal(y, own["layer_out"])
    equal(state.matrix_BSVK, own["state"])
    (y * values["w_out"]).sum().add(state.matrix_BSVK.square().sum()).backward()
    assert x.grad is not None
    equal(x.grad, own["grad_x"], 1e-9)


@tags
def test_reads_and_padding_give_the_recorded_values(shared: Path, tag: str) -> None:
    values = recorded(shared, "2026/delta_mem")
    own = part(values, f"{tag}/")
    memory = load(DeltaMem(12, 3, rank=4, scale=4.0, **TAGS[tag]).double(), part(own, "param/"))
    reading = memory.read(memory.open(state_of(own["state0"]), None, None), Query(values["x"]), None)
    equal(reading.carry.read_BNC, 4 * own["reads"])
    assert reading.query_BND is not None
    equal(reading.query_BND, own["delta_q"])
    equal(
        memory.project(torch.zeros(2, 3, 11, 4, **DOUBLE), Query(values["x"]), reading, lambda t: t, None),
        own["delta_o"],
    )
    hidden = ~values["mask_valid"].bool()
    x = values["x"].masked_fill(hidden[..., None], torch.nan)
    reading = memory.read(memory.open(state_of(own["state0"]), None, None), Query(x, padding_BN=hidden), None)
    equal(reading.carry.read_BNC.masked_fill(hidden[..., None], 0), 4 * own["padded/reads"])
    equal(reading.carry.after.matrix_BSVK, own["padded/state"])
    assert (reading.carry.after.tokens_B - 1).tolist() == (~hidden).sum(1).tolist()


@tags
def test_a_segment_that_does_not_write_before_it_is_read_gives_the_recorded_values(shared: Path, tag: str) -> None:
    values = recorded(shared, "2026/delta_mem")
    layer, own = RecordedLayer(values, tag, write="segment", **TAGS[tag]), part(values, f"{tag}/")
    equal(layer(values["x"], state_of(own["state0"]))[0], own["read_only_out"])


def test_means_of_groups_give_the_recorded_values(shared: Path) -> None:
    values = recorded(shared, "2026/delta_mem")
    layer = RecordedLayer(values, "standard", write="segment")
    state = state_of(values["standard/state0"])
    equal(layer(values["x"], state)[0], values["message_mean/layer_out"])
    for group in range(3):
        query = Query(values["x"], padding_BN=values["message_mean/ids"] != group)
        state, _ = layer.memory.write(
            state, Trace(query.x_BND, query.x_BND, query, layer.memory.read(state, query, None))
        )
    equal(state.matrix_BSVK, values["message_mean/state"])


def test_p_begins_with_columns_of_the_host(shared: Path) -> None:
    values = recorded(shared, "2026/delta_mem")
    layer = RecordedLayer(values, "standard").model.layers[0].self_attn
    memory = DeltaMem(12, 3, rank=4).double()
    memory.start_from(lambda count: layer.q_proj.weight[:, :count], lambda count: layer.o_proj.weight[:, :count])
    equal(memory.query_DC, values["init/delta_q_proj"])
    equal(memory.output_DC, values["init/delta_o_proj"])


@pytest.mark.parametrize(
    ("options", "second"),
    [({}, (1 / 8, 1 / 4)), ({"update": "outside"}, (9 / 64, 1 / 4)), ({"update": "plain"}, (3 / 16, 1 / 4))],
)
def test_a_step_by_hand(options: dict[str, Any], second: tuple[float, float]) -> None:
    """Width 1, keys and queries of 1, b = 1/4: S_1 = v_1 / 4, and S_2 as the rule says."""
    memory = DeltaMem(2, 1, rank=1, **options).double()
    with torch.no_grad():
        memory.map_OD.copy_(torch.tensor([[0.0, 9.0], [0.0, 9.0], [1.0, 0.0], [0.0, 0.0]]))
        memory.gate_bias_G.fill_(-torch.tensor(3.0).log())
    v = torch.tensor([3.0, -5.0], **DOUBLE)
    query = Query(torch.stack([v, torch.ones(2, **DOUBLE)], -1)[None])
    state = memory.open(memory.init_state(1, query.x_BND), None, None)
    carry = memory.read(state, query, None).carry
    assert carry.read_BNC.flatten().tolist() == pytest.approx([0, 2 * 3 / 4])
    assert carry.after.matrix_BSVK.item() == pytest.approx(second[0] * 3 + second[1] * -5)


def token_by_token(memory: DeltaMem, x_BND: Tensor, padding_BN: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is written, one token after the other."""
    r, s, gates = memory.rank, memory.states, memory.gates
    reads = []
    for x_BD, hidden_B in zip(x_BND.unbind(1), padding_BN.unbind(1), strict=True):
        t_BO = x_BD @ memory.map_OD.mT
        q, k, v = (t.unflatten(-1, (s, r)) for t in t_BO[:, : 3 * r * s].split(r * s, -1))
        q, k = (t.tanh() / t.tanh().norm(dim=-1, keepdim=True) for t in (q, k))
        logit, *own = (t_BO[:, 3 * r * s :] + memory.gate_bias_G).split(gates, -1)
        b = logit.sigmoid()
        forget = torch.ones_like(b) if memory.update == "plain" else own[0].sigmoid() if own else 1 - b
        b, forget = (t.unflatten(-1, (s, -1))[..., None] for t in (b, forget))
        reads.append(torch.where(hidden_B[:, None], 0, (matrix @ q[..., None]).flatten(1)))
        erased = matrix @ k[..., None] * k[..., None, :]
        if memory.update == "outside":
            erased = forget * erased
        new = forget * matrix - b * erased + b * v[..., None] * k[..., None, :]
        matrix = torch.where(hidden_B[:, None, None, None], matrix, new)
    return torch.stack(reads, 1), matrix


@kinds
def test_chunks_are_the_rule_token_by_token(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    memory = DeltaMem(6, 2, rank=3, half_life=6.0, **options).double()
    with torch.no_grad():
        memory.map_OD.normal_()
    matrix = torch.randn(2, memory.states, 3, 3, **DOUBLE)
    x, weight = torch.randn(2, 150, 6, **DOUBLE), torch.randn(2, 150, 3 * memory.states, **DOUBLE)
    padding = torch.rand(2, 150) < 0.2
    found = []
    for twin in (False, True):
        given = [t.clone().requires_grad_() for t in (x, matrix)]
        if twin:
            read, after = token_by_token(memory, given[0], padding, given[1])
        else:
            opened = memory.open(DeltaState(given[1], torch.ones(2, dtype=torch.long)), None, None)
            carry = memory.read(opened, Query(given[0], padding_BN=padding), None).carry
            read, after = carry.read_BNC / memory.scale, carry.after.matrix_BSVK
        total = (read * weight).sum() + after.square().sum()
        found.append((read, after, *torch.autograd.grad(total, [*given, memory.map_OD, memory.gate_bias_G])))
    for one, other in zip(*found, strict=True):
        equal(one, other, 1e-9)


def read_on(memory: DeltaMem, state: DeltaState, pieces: list[Tensor]) -> tuple[Tensor, DeltaState]:
    """Reads of segments, and the state after them."""
    reads = []
    for x in pieces:
        query = Query(x)
        reading = memory.read(memory.open(state, None, None), query, None)
        state, _ = memory.write(state, Trace(x, x, query, reading))
        reads.append(reading.carry.read_BNC)
    return torch.cat(reads, 1), state


@kinds
def test_where_a_stream_is_cut_changes_nothing(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    memory = DeltaMem(6, 2, rank=3, half_life=6.0, **options).double()
    with torch.no_grad():
        memory.map_OD.normal_()
    x = torch.randn(2, 100, 6, **DOUBLE)
    found = [
        read_on(memory, memory.init_state(2, x), list(x.split(sizes, 1)))
        for sizes in ([100], [1] * 100, [33, 0, 1, 0, 66])
    ]
    for read, state in found[1:]:
        equal(read, found[0][0], 1e-12)
        equal(state.matrix_BSVK, found[0][1].matrix_BSVK, 1e-12)
        assert state.tokens_B.tolist() == [100, 100]


def test_a_segment_of_one_token_writes_what_the_token_does() -> None:
    x, weights, after = torch.randn(2, 7, 6, **DOUBLE), None, []
    for write in ("token", "segment"):
        torch.manual_seed(0)
        memory = DeltaMem(6, 2, rank=3, half_life=2.0, write=write).double()
        weights = memory.state_dict() if weights is None else weights
        memory.load_state_dict(weights)
        after.append(read_on(memory, memory.init_state(2, x), list(x.split(1, 1))))
    equal(after[1][0], after[0][0], 1e-12)
    equal(after[1][1].matrix_BSVK, after[0][1].matrix_BSVK, 1e-12)


@pytest.mark.parametrize(("options", "writes"), [({}, 512), ({"half_life": 64.0}, 64), ({"write": "segment"}, 3.44)])
def test_half_of_what_is_held_is_forgotten_at_first(options: dict[str, Any], writes: float) -> None:
    bias = DeltaMem(6, 2, **options).gate_bias_G
    assert (-torch.log(torch.tensor(2.0)) / nn.functional.logsigmoid(-bias[0])).item() == pytest.approx(writes, 1e-2)
    own = DeltaMem(6, 2, decay="own", **options).gate_bias_G
    assert (own[:8] == -1.5).all() and own[8:].tolist() == pytest.approx([-bias[0].item()] * 8)


def test_gates_that_close_or_open_fully_stay_finite() -> None:
    for options in KINDS:
        memory = DeltaMem(6, 2, rank=3, **options)
        with torch.no_grad():
            memory.gate_bias_G.copy_(torch.tensor([-200.0, 200.0, 0.0]).repeat(4)[: len(memory.gate_bias_G)])
        x = torch.randn(2, 40, 6, requires_grad=True)
        carry = memory.read(memory.init_state(2, x), Query(x), None).carry
        (carry.read_BNC.sum() + carry.after.matrix_BSVK.sum()).backward()
        for t in (carry.read_BNC, carry.after.matrix_BSVK, x.grad, memory.map_OD.grad, memory.gate_bias_G.grad):
            assert t is not None and t.isfinite().all()


@pytest.mark.parametrize("write", ["token", "segment"])
def test_a_closed_one_is_the_model_without_it(write: str) -> None:
    plain, model = build(scale=0), build({"name": "delta_mem", "write": write}, scale=0)
    model.load_state_dict(plain.state_dict(), strict=False)
    outs = run(plain, segments(3))
    with torch.no_grad():
        changed = [(a.outputs - b.outputs).abs().max() for a, b in zip(run(model, segments(3)), outs, strict=True)]
    assert changed[1] > 0 and (changed[0] > 0) == (write == "token")
    for block in model.stack.blocks:
        block.attention.memory.close_gate()
    for a, b in zip(run(model, segments(3)), outs, strict=True):
        assert torch.equal(a.outputs, b.outputs)


@pytest.mark.parametrize("write", ["token", "segment"])
@pytest.mark.parametrize("bptt", [1, 2])
def test_gates_learn_over_segments_that_read_what_they_wrote(write: str, bptt: int) -> None:
    model = build({"name": "delta_mem", "write": write, "half_life": 4.0}, scale=0)
    loop, ids = SegmentLoop(model, SEGMENT, bptt=bptt), torch.cat(segments(3), 1)
    loop(ids[:, :-1], ids[:, 1:])[0].backward()
    for name, parameter in model.named_parameters():
        if "memory" in name:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            writing = gradient[8:] if "map" in name else gradient
            assert bool(writing.any()) == (write == "token" or bptt == 2 or "_DC" in name), name


def test_rows_of_the_matrix_matter() -> None:
    for correct in ("queries", "output"):
        model = build({"name": "delta_mem", "half_life": 4.0, "correct": [correct]})
        first, second = segments(2)
        state = run(model, [first])[-1].state
        moved = [layer._replace(matrix_BSVK=layer.matrix_BSVK.flip(2)) for layer in state.layers]
        outs = [model(second, one).outputs for one in (state, state._replace(layers=tuple(moved)))]
        assert (outs[0] - outs[1]).abs().max() > 1e-3


def test_queries_are_corrected_before_their_scale_and_positions() -> None:
    memory = DeltaMem(8, 2, rank=3, correct=["queries"])
    layer: Any = wild(SelfAttention(8, 2, memory=memory, causal=True, positions=RotaryPositions(4), scale=0.3))
    x, places = torch.randn(2, 6, 8, **DOUBLE), torch.arange(6)[None, :, None].expand(2, -1, -1)
    state = layer.memory.init_state(2, x)
    attended = layer(x, places, state=state)
    term = layer.memory.read(layer.memory.open(state, None, None), Query(x), None).query_BND
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    q = q + term.unflatten(-1, (2, 4)).transpose(1, 2)
    y = nn.functional.scaled_dot_product_attention(
        layer.positions.rotate(q, places), layer.positions.rotate(k, places), v, is_causal=True, scale=0.3
    )
    equal(attended.y_BND, layer.output(y.transpose(1, 2).flatten(2)), 1e-12)
    assert term.abs().max() > 1e-3 and attended.query.x_BND is x


def test_several_correct_the_same_queries() -> None:
    """Two of one matrix each are one of two matrices, as far as queries are concerned."""
    torch.manual_seed(0)
    members = [DeltaMem(8, 2, rank=3, half_life=4.0) for _ in range(2)]
    joint = DeltaMem(8, 2, rank=3, states=2, half_life=4.0)
    with torch.no_grad():
        parts = zip(*(member.map_OD.split([3, 3, 3, 3]) for member in members), strict=True)
        joint.map_OD.copy_(torch.cat([torch.cat(part) for part in parts]))
        joint.query_DC.copy_(torch.cat([member.query_DC for member in members], 1))
        joint.output_DC.copy_(torch.cat([member.output_DC for member in members], 1))
    layers = [SelfAttention(8, 2, memory=memory, causal=True) for memory in (SideBySide(members), joint)]
    layers[1].load_state_dict(layers[0].state_dict(), strict=False)
    x = torch.randn(2, 6, 8)
    outs = [layer(x, state=layer.memory.init_state(2, x)).y_BND for layer in layers]
    equal(outs[0], outs[1], 1e-6)


@pytest.mark.parametrize("write", ["token", "segment"])
@torch.no_grad()
def test_each_token_of_a_generated_text_is_corrected(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released code read 0 in each step of a text that is generated, and nothing failed."""
    model = build({"name": "delta_mem", "half_life": 4.0, "write": write}).eval()
    state, norms, own = run(model, segments(2))[-1].state, [], DeltaMem.read

    def read(*given: Any) -> Any:
        reading = own(*given)
        norms.append((given[2].x_BND.shape[1], reading.query_BND.norm(dim=-1).min(), reading.carry.read_BNC.norm()))
        return reading

    monkeypatch.setattr(DeltaMem, "read", read)
    said = model.generate(segments(1, seed=3)[0][:, :2], state, tokens=8, segment_length=20)
    assert sum(tokens == 1 for tokens, *_ in norms) >= 2 * 6
    assert min(term for _, term, _ in norms) > 1e-4 and min(term for *_, term in norms) > 1e-4
    assert said is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"half_life": 0.5}, "half_life=0.5 must be"),
        ({"correct": []}, r"correct=\[\] must name"),
        ({"correct": ["keys"]}, "correct=.*keys"),
        ({"rank": 0}, "rank=0"),
        ({"update": "plain", "decay": "own"}, "decay='own': update='plain'"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaMem(8, 2, **options)


def test_a_layer_whose_queries_are_its_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_query_key=True: memory DeltaMem corrects queries"):
        SelfAttention(8, 2, memory=DeltaMem(8, 2), shared_query_key=True)
    SelfAttention(8, 2, memory=DeltaMem(8, 2, correct=["output"]), shared_query_key=True)


@kinds
def test_memory_tokens_read_and_write_nothing(options: dict[str, Any]) -> None:
    """Tokens before the segment read the state before it, tokens after it the state that it has written."""
    torch.manual_seed(0)
    memory, x = DeltaMem(6, 2, rank=3, half_life=2.0, **options).double(), torch.randn(2, 9, 6, **DOUBLE)
    past = read_on(memory, memory.init_state(2, x), [x])[1]
    carry = memory.read(memory.open(past, None, None), Query(x, segment=(2, 4)), None).carry
    parts = [x[:, :2], x[:, 2:6], x[:, 6:]]
    middle, after = read_on(memory, past, parts[1:2])
    padded = [
        memory.read(state, Query(part, segment=(0, 0)), None).carry.read_BNC
        for part, state in ((parts[0], past), (parts[2], after))
    ]
    equal(carry.read_BNC, torch.cat([padded[0], middle, padded[1]], 1), 1e-12)
    equal(carry.after.matrix_BSVK, after.matrix_BSVK, 1e-12)
    assert torch.equal(carry.after.tokens_B, after.tokens_B)
    assert (memory.read(past, Query(x, segment=(0, 0)), None).carry.after.matrix_BSVK == past.matrix_BSVK).all()
