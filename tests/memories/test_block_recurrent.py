"""Block-Recurrent Transformer: a slow twin, its gates, its layers, and hosts.

Legend: B rows, N tokens, S states, H heads, E head width, D = H E.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import BERT, DECODERS, T5, Architecture, architectures, words
from memories.harness import HEADS, WIDTH, agree, build, inputs, layer_of, run_layer
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories import create_memory
from cached_transformers.memories.block_recurrent import BlockRecurrent

ROWS, E, S = 2, 4, 3
KINDS = [(gate, form) for gate in ("fixed", "lstm") for form in ("skip", "dual", "single")]
kinds = pytest.mark.parametrize(("gate", "form"), KINDS)


def own_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return layer_of(BlockRecurrent(WIDTH, HEADS, S, feed_forward=5, **options))


def rms_norm(x_D: Tensor, weight_D: Tensor) -> Tensor:
    return x_D / (x_D.square().mean() + 1e-6).sqrt() * weight_D


def attended(q_E: Tensor, keys: list[Tensor], values: list[Tensor], scale: Tensor | None) -> Tensor:
    """What one head of one query gets."""
    if scale is None:
        logits = [q_E @ k_E / math.sqrt(E) for k_E in keys]
    else:
        logits = [scale * (q_E @ k_E) / (q_E.norm() * k_E.norm()) for k_E in keys]
    return sum(w * v for w, v in zip(torch.stack(logits).softmax(0), values, strict=True))  # type: ignore[return-value]


class Row:
    """The states of one row, one after the other."""

    def __init__(self, memory: BlockRecurrent) -> None:
        self.memory, self.C = memory, list(memory.initial_SD)

    def maps(self, quarter: int) -> list[list[Tensor]]:
        """Of each state what a quarter of its maps (keys, values, queries for states, for tokens) gives each head."""
        named = [rms_norm(c, self.memory.norm.weight) + n for c, n in zip(self.C, self.memory.names_SD, strict=True)]
        weight_DD = self.memory.maps.weight[quarter * WIDTH : (quarter + 1) * WIDTH]
        return [list((weight_DD @ s).split(E)) for s in named]

    def scale(self, which: int, head: int) -> Tensor | None:
        return None if self.memory.scale_3H11 is None else self.memory.scale_3H11[which, head, 0, 0]

    def read(self, x_D: Tensor) -> Tensor:
        """What a token adds to the attention's result."""
        keys, values = self.maps(0), self.maps(1)
        q = (self.memory.query.weight @ x_D).split(E)
        heads = [attended(q[h], [k[h] for k in keys], [v[h] for v in values], self.scale(0, h)) for h in range(HEADS)]
        return self.memory.output.weight @ torch.cat(heads)

    def write(self, keys: list[list[Tensor]], values: list[list[Tensor]]) -> None:
        """Keys and values of the segment's real tokens, of each the heads."""
        own_k, own_v, own_q, cross_q = map(self.maps, range(4))
        after = []
        for s, c in enumerate(self.C):
            own = [
                attended(own_q[s][h], [k[h] for k in own_k], [v[h] for v in own_v], self.scale(1, h))
                for h in range(HEADS)
            ]
            cross = [
                attended(cross_q[s][h], [k[h] for k in keys], [v[h] for v in values], self.scale(2, h))
                for h in range(HEADS)
            ]
            after.append(self.renewed(c, torch.cat([*own, *cross])))
        self.C = after

    def gated(self, gate: Any, c: Tensor, candidate: Tensor, u: Tensor) -> Tensor:
        if gate.linear is None:
            g = 1 / (1 + (-gate.bias_D).exp())
            return g * c + (1 - g) * candidate
        f, i = (1 / (1 + (-(gate.linear.weight @ u + gate.linear.bias)).exp())).split(WIDTH)
        return f * c + i * candidate

    def renewed(self, c: Tensor, z: Tensor) -> Tensor:
        m = self.memory
        if m.form == "single":
            h = (m.inner.weight @ z).clamp(min=0)
            return self.gated(m.gate, c, (m.outer.weight @ h).tanh(), h)
        after = self.gated(m.gate, c, m.candidate.weight @ z, z)
        if m.form == "skip":
            return after
        h = (m.inner.weight @ rms_norm(after, m.second_norm.weight)).clamp(min=0)
        return self.gated(m.second_gate, after, m.outer.weight @ h, h)


def twin(
    layer: SelfAttention, memory: BlockRecurrent, inputs: list[Tensor], paddings: list[Tensor], window: int = 0
) -> tuple[list[Tensor], Tensor]:
    """The layer row by row, token by token and head by head; tokens also see the `window` last ones before them."""
    rows, outs = [Row(memory) for _ in range(ROWS)], []
    past: list[list[Tensor]] = [[] for _ in range(ROWS)]
    for x, padding in zip(inputs, paddings, strict=True):
        made = []
        for b, row in enumerate(rows):
            q, k, v = ([t.split(E) for t in part] for part in layer.qkv(x[b]).split(WIDTH, -1))
            old = [layer.qkv(t.detach())[WIDTH:].split(WIDTH) for t in past[b][-window:]] if window else []
            tokens = []
            for n in range(x.shape[1]):
                seen = [j for j in range(n + 1) if not padding[b, j]]
                heads = []
                for h in range(HEADS):
                    keys, values = ([t[i].split(E)[h] for t in old] for i in range(2))
                    keys, values = keys + [k[j][h] for j in seen], values + [v[j][h] for j in seen]
                    got = attended(q[n][h], keys, values, None) if keys else torch.zeros(E, dtype=torch.float64)
                    heads.append(got)
                tokens.append(layer.output(torch.cat(heads)) + row.read(x[b, n]))
            real = [j for j in range(x.shape[1]) if not padding[b, j]]
            if real:
                row.write([list(k[j]) for j in real], [list(v[j]) for j in real])
            past[b] += [x[b, j] for j in real]
            made.append(torch.stack(tokens))
        outs.append(torch.stack(made))
    return outs, torch.stack([torch.stack(row.C) for row in rows])


def compare(layer: Any, memory: BlockRecurrent, window: int = 0) -> None:
    paddings = [torch.zeros(ROWS, n, dtype=torch.bool) for n in (5, 3, 4, 5)]
    paddings[0][1] = True  # this row begins a segment later
    paddings[1][0, 0] = paddings[2][0, 2:] = paddings[2][1, 1] = True
    leaves = [x.requires_grad_() for x in inputs(5, 3, 4, 5)]
    outs, after, _ = run_layer(layer, leaves, paddings, counted=True)
    state = after[-1][-1] if window else after[-1]
    want, C = twin(layer, memory, leaves, paddings, window)
    sides = (
        [*(y[~p] for y, p in zip(ys, paddings, strict=True)), c] for ys, c in ((outs, state.states_BSD), (want, C))
    )
    named = {**dict(layer.named_parameters()), **{f"x{i}": x for i, x in enumerate(leaves)}}
    gradients = agree(*sides, named, grads=1e-9, rtol=1e-7, least=1e-5)
    assert gradients["x0"][1].abs().max() == 0  # a row of padding


@kinds
@pytest.mark.parametrize("scale", [None, 2.0])
def test_it_is_its_slow_twin_with_gradients(gate: Any, form: Any, scale: float | None) -> None:
    layer = own_layer(gate=gate, form=form, initial_scale=scale, gate_bias=0.5)
    compare(layer, layer.memory)


def test_beside_transformer_xl_it_is_the_paper_s_sliding_window() -> None:
    xl = {"name": "transformer_xl", "length": 4, "relative": False}
    layer = layer_of(create_memory([xl, {"name": "block_recurrent", "length": S}], WIDTH, HEADS))  # type: ignore[arg-type]
    compare(layer, layer.memory.members[1], window=4)


@kinds
@pytest.mark.parametrize("gates", ["sigmoid", "stretched"])
def test_where_all_stays_and_nothing_comes_the_states_are_those_of_the_start(gate: Any, form: Any, gates: Any) -> None:
    layer = own_layer(gate=gate, form=form, gates=gates)
    given = inputs(4, 4, 4)
    for name, module in layer.memory.named_modules():
        if name in ("gate", "second_gate"):
            with torch.no_grad():  # 4 is beyond where a stretched gate is cut
                far = math.inf if gates == "sigmoid" else 4.0
                if gate == "fixed":
                    module.bias_D.fill_(far)  # type: ignore[operator, union-attr]
                else:
                    module.linear.weight.zero_()  # type: ignore[operator, union-attr]
                    module.linear.bias.copy_(torch.tensor([far, -far]).repeat_interleave(WIDTH))  # type: ignore[operator, union-attr]
    outs, (*_, state), _ = run_layer(layer, given)
    assert torch.equal(state.states_BSD, layer.memory.initial_SD.expand(ROWS, -1, -1))
    assert state.segments_B.tolist() == [3, 3]
    again = run_layer(layer, given[1:])[0]  # states that do not change say nothing of the segments before
    assert all(torch.equal(a, b) for a, b in zip(outs[1:], again, strict=True))


def test_where_gates_begin_and_other_hosts() -> None:
    for bias in (0.0, 3.0):
        fixed, lstm = (BlockRecurrent(WIDTH, HEADS, S, gate=g, gate_bias=bias) for g in ("fixed", "lstm"))  # type: ignore[arg-type]
        assert (fixed.gate.bias_D - bias).abs().max() < 0.6
        assert lstm.gate.linear.bias.tolist() == [1 + bias] * WIDTH + [-1] * WIDTH  # type: ignore[union-attr]
    model, ids = add_memory(BERT.build(), "block_recurrent", length=S, segment_length=5).eval(), words(2, 10)
    (other := ids.clone())[:, 2] += 1
    assert (model(ids).logits - model(other).logits)[:, 5:].abs().max() > 1e-5
    with pytest.raises(ValueError, match="'block_recurrent' needs state"):
        add_memory(T5.build(), "block_recurrent", segment_length=5)


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [
        *((depth, None, [layer]) for depth, layer in ((1, 1), (2, 2), (4, 4), (6, 5), (12, 10))),
        (4, 3, [3]),
        (4, [1, 3], [1, 3]),
        (3, "all", [1, 2, 3]),
    ],
)
def test_which_layers_have_states(depth: int, layers: Any, expected: list[int]) -> None:
    model = build({"name": "block_recurrent", "layers": layers, "length": S}, depth=depth)
    state = model.init_state(ROWS).layers
    assert [n for n, part in enumerate(state, 1) if len(part)] == expected
    memories = [block.attention.memory for block in model.stack.blocks]
    assert [n for n, memory in enumerate(memories, 1) if memory.needs] == expected
    assert [n for n, memory in enumerate(memories, 1) if list(memory.parameters())] == expected


def test_a_slow_gate_adds_up_in_a_model_of_low_precision() -> None:
    """1/200 of the candidate a segment is below what bfloat16 adds to a state near it."""
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        model = build({"name": "block_recurrent", "length": S, "gate_bias": 5.3}, scale=0).to(dtype).eval()
        state, tokens = None, torch.randint(0, 11, (ROWS, 6), generator=torch.Generator().manual_seed(0))
        for _ in range(300):
            with torch.no_grad():
                state = model(tokens, state).state
        results[dtype] = state.layers[1].states_BSD  # type: ignore[union-attr]
    assert results[torch.bfloat16].dtype == torch.float32
    torch.testing.assert_close(results[torch.bfloat16].double(), results[torch.float64], rtol=0, atol=0.03)


@architectures(DECODERS)
def test_in_a_decoder_it_begins_silent_and_closes(host: Architecture) -> None:
    plain, ids = host.build(), words(2, 10)
    silent, loud = (
        add_memory(host.build(), "block_recurrent", segment_length=5, length=S, **options)
        for options in ({"preset": "trained"}, {})
    )
    with torch.no_grad():
        expected = torch.cat([plain(part).logits for part in ids.split(5, 1)], 1)
        torch.testing.assert_close(silent(ids).logits, expected)
        assert (loud(ids).logits - expected).abs().max() > 1e-3
        for module in loud.modules():
            if isinstance(module, BlockRecurrent):
                module.close_gate()
        torch.testing.assert_close(loud(ids).logits, expected)


def test_heads_need_not_be_as_wide_as_the_layer_s_input() -> None:
    """Four heads of 8 channels, of an input of 24."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    )
    torch.manual_seed(0)
    model = add_memory(transformers.LlamaForCausalLM(config), "block_recurrent", length=S, segment_length=5)
    (memory,) = (module for module in model.modules() if isinstance(module, BlockRecurrent))
    assert memory.initial_SD.shape == (S, 32) and memory.query.weight.shape == memory.output.weight.T.shape == (32, 24)
    ids = words(2, 15)
    (other := ids.clone())[:, 0] = (ids[:, 0] + 1) % 50
    assert (model(ids).logits[:, 10:] - model(other).logits[:, 10:]).abs().max() > 1e-5
