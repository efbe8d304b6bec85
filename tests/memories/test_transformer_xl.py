"""Transformer-XL: the official PyTorch code's recorded values, a twin in loops, reach, and invariance to cutting.

Legend: B rows, N tokens, M slots, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories.harness import agree, sines
from memories.xl_family import HEADS, WIDTH, copying, joined, language_model, run, text, twin
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.loops.segments import token_losses
from cached_transformers.memories.parts.fifo_store import Rows, push
from cached_transformers.memories.transformer_xl import TransformerXL
from cached_transformers.models.language_model import LanguageModel


@pytest.fixture(scope="module")
def golden(shared: Path) -> Any:
    return np.load(shared / "golden/memories/transformer_xl.npz", allow_pickle=False)


def recorded_model(golden: Any, tag: str, norm: str = "post", **memory: Any) -> tuple[LanguageModel, dict[str, Any]]:
    """Our model with the recorded weights of `tag`, and the recorded name of each of its parameters."""
    spec = {"name": "transformer_xl", **memory}
    model = LanguageModel(
        50, 16, 3, 2, 32, memory=spec, norm=norm, activation="relu", bias=False, scale_embedding=True
    ).double()
    model.head = nn.Linear(16, 50).double()
    model.head.weight = model.embedding.weight
    if norm == "pre":
        model.stack.norm = nn.Identity()  # the reference has no final norm
    names: dict[str, Any] = {"word_emb.emb_layers.0": model.embedding, "crit.out_layers.0": model.head}
    frequencies = torch.tensor(golden["base/buffer/inv_freq"])
    first: Any = None
    for index, block in enumerate(model.stack.blocks):
        layer: Any = block.attention
        scheme = layer.positions
        first = first or scheme
        # The reference shares u and v between layers, and its frequencies were rounded to float32.
        scheme.content_bias, scheme.position_bias = first.content_bias, first.position_bias
        scheme.angles = lambda positions: positions[..., :1] * frequencies
        inside: dict[str, Any] = {
            "dec_attn.qkv_net": layer.qkv,
            "dec_attn.o_net": layer.output,
            "dec_attn.r_net": scheme.project,
            "dec_attn.layer_norm": block.attention_norm if norm == "post" else layer.norm,
            "pos_ff.CoreNet.0": block.feed_forward.enter,
            "pos_ff.CoreNet.3": block.feed_forward.leave,
            "pos_ff.layer_norm": block.feed_forward_norm if norm == "post" else block.feed_forward.norm,
        }
        names |= {f"layers.{index}.{name}": module for name, module in inside.items()}
    places = {
        f"{name}.{kind}": getattr(module, kind, None) for name, module in names.items() for kind in ("weight", "bias")
    }
    places |= {"r_w_bias": first.content_bias, "r_r_bias": first.position_bias}
    recorded = [key.removeprefix(f"{tag}/param/") for key in golden.files if key.startswith(f"{tag}/param/")]
    places = {name: places[name] for name in recorded}
    assert {id(p) for p in places.values()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        for name, parameter in places.items():
            parameter.copy_(torch.tensor(golden[f"{tag}/param/{name}"]))
    return model.eval(), places


def check_segment(golden: Any, tag: str, model: LanguageModel, ids: tuple[Tensor, Tensor], state: Any) -> Any:
    """Hidden states, losses and memories of one segment are the recorded ones; returns the state after it."""
    hidden: list[Tensor] = []
    handle = model.stack.register_forward_hook(lambda _m, _i, out: hidden.append(out.outputs))
    losses, state, _ = token_losses(model, *ids, state)
    handle.remove()
    pairs = {"hidden": hidden[0].transpose(0, 1), "nll": losses.T}
    if f"{tag}/mems" in golden.files:
        mems = torch.tensor(golden[f"{tag}/mems"])
        for index, layer in enumerate(state.layers):
            kept = mems.shape[1]
            assert layer.count_B.tolist() == [kept, kept]
            close(layer.hidden_BMD[:, -kept:].transpose(0, 1), mems[index], f"{tag}: memory of layer {index}")
    for name, ours in pairs.items():
        close(ours, torch.tensor(golden[f"{tag}/{name}"]), f"{tag}/{name}")
    return state


def close(ours: Tensor, wanted: Tensor, what: str = "", tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def recorded_segments(golden: Any, cuts: list[int]) -> list[tuple[Tensor, Tensor]]:
    ids_BN = torch.tensor(golden["ids"]).T
    total = sum(cuts)
    pairs = zip(ids_BN[:, :total].split(cuts, 1), ids_BN[:, 1 : total + 1].split(cuts, 1), strict=True)
    return [(a.contiguous(), b.contiguous()) for a, b in pairs]


@pytest.mark.device
@pytest.mark.parametrize(
    ("tag", "weights", "norm", "cuts", "options"),
    [
        ("base", "base", "post", [6] * 5, {"length": 8}),
        ("prelnorm", "prelnorm", "pre", [6] * 5, {"length": 8}),
        ("same_length_clamp", "base", "post", [4] * 7 + [2], {"length": 10, "same_length": True, "clamp": 5}),
        ("longmem", "base", "post", [6] * 5, {"length": 64}),
        ("fullpass", "base", "post", [30], {"length": 8}),
    ],
)
def test_the_recorded_streams(
    golden: Any, tag: str, weights: str, norm: str, cuts: list[int], options: dict[str, Any]
) -> None:
    model, _ = recorded_model(golden, weights, norm, **options)
    state = None
    for index, ids in enumerate(recorded_segments(golden, cuts)):
        state = check_segment(golden, f"{tag}/seg{index}", model, ids, state)


@pytest.mark.device
def test_the_recorded_gradient_reaches_the_projections_through_the_memory(golden: Any) -> None:
    model, places = recorded_model(golden, "base", length=8)
    state = None
    for ids in recorded_segments(golden, [6] * 3):
        losses, state, _ = token_losses(model, *ids, state)
    loss = losses.mean()  # of the third segment
    close(loss, torch.tensor(golden["base/grad_seg2/loss"]))
    loss.backward()
    for name, parameter in places.items():
        close(parameter.grad, torch.tensor(golden[f"base/grad_seg2/{name}"]), name)


@pytest.mark.device
@pytest.mark.parametrize(("queries", "held", "slots"), [(4, 0, 10), (4, 8, 10), (4, 10, 10), (2, 10, 10)])
def test_the_recorded_masks(golden: Any, queries: int, held: int, slots: int) -> None:
    """Which stored states and tokens an output has a gradient to."""
    blocked = torch.tensor(golden[f"unit/same_length_mask_q{queries}_m{held}_M{slots}"])
    memory = TransformerXL(8, 2, slots, same_length=True)
    layer = SelfAttention(8, 2, memory=memory, positions=memory.position_scheme(), causal=True).double()
    stored = torch.randn(1, slots, 8, dtype=torch.double, requires_grad=True)
    x = torch.randn(1, queries, 8, dtype=torch.double, requires_grad=True)
    where = torch.arange(50 - slots, 50 + queries)[None, :, None]
    state = Rows(stored, where[:, :slots], torch.tensor([held]))
    y = layer(x, where[:, slots:], state=state, consecutive=True).y_BND
    for i in range(queries):
        grads = torch.autograd.grad(y[0, i].square().sum(), [stored, x], retain_graph=True)
        seen = torch.cat([g[0].abs().sum(-1) for g in grads]) > 0
        assert torch.equal(seen[slots - held :], ~blocked[i])
        assert not seen[: slots - held].any()


@pytest.mark.parametrize("options", [{}, {"clamp": 3}, {"same_length": True}])
def test_the_model_is_its_slow_twin(options: dict[str, Any]) -> None:
    length, segment, n = 5, 3, 11
    model, tokens = language_model({"name": "transformer_xl", "length": length, **options}), text(2, n)
    limit = options.get("clamp", n)
    rows = [
        twin(
            model,
            row.tolist(),
            [(i,) for i in range(n)],
            segment,
            length,
            lambda i, j: sines(min(i[0] - j[0], limit), WIDTH),
            window=length if "same_length" in options else None,
        )
        for row in tokens
    ]
    agree([joined(run(model, tokens, segment))], [torch.stack(rows)], model, least=1e-6)


class Attached(TransformerXL):
    """Stores without detaching, so that the gradient shows what an output depends on."""

    def write(self, state: Rows, trace: Trace) -> tuple[Rows, None]:
        assert trace.query.positions_BNP is not None
        return push(state, trace.x_BND, trace.query.positions_BNP), None


@pytest.mark.parametrize(
    ("slots", "depth", "same_length"),
    [*((*row, False) for row in ((2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (8, 3), (2, 3))), (5, 3, True)],
)
def test_the_reach_is_that_of_the_formula(slots: int, depth: int, same_length: bool) -> None:
    segment, n = 4, 36
    spec = {"name": "transformer_xl", "length": slots, "same_length": same_length}
    model = language_model(spec, depth, feed_forward=4)
    for block in model.stack.blocks:
        block.attention.memory = Attached(WIDTH, HEADS, slots, same_length=same_length)  # type: ignore[union-attr]
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, y: embedded.append(y))
    out = joined(run(model, text(1, n), segment))
    for t in range(n):
        grads = torch.autograd.grad(out[0, t].sum(), embedded, retain_graph=True, materialize_grads=True)
        touched = torch.cat([g[0].abs().sum(-1) for g in grads]) > 0
        reach = t % segment + slots + (depth - 1) * math.ceil(slots / segment) * segment
        if same_length:
            reach = depth * (slots - 1)
        wanted = [0 <= t - s <= reach for s in range(n)]
        assert touched.tolist() == wanted, f"output {t}"


def test_evaluation_may_look_back_further_and_far_distances_are_exact() -> None:
    model, tokens = language_model({"name": "transformer_xl", "length": 3, "eval_length": 20}), text(2, 20)
    assert model.train().init_state(1).layers[0].hidden_BMD.shape[1] == 3
    model.eval()
    close(joined(run(model, tokens, 4)), model(tokens).outputs)
    model, tokens = language_model({"name": "transformer_xl", "length": 5}), text(1, 12)
    late = model.init_state(1)
    late = late._replace(clock_B=late.clock_B + 10**8)
    padding = torch.zeros_like(tokens, dtype=torch.bool)  # with a mask the general form of the positions is taken
    for state in (None, late):
        near, far = model(tokens, state, padding=padding), model(tokens)
        close(near.outputs, far.outputs)


def test_it_learns_to_copy_and_without_it_nothing_is_copied() -> None:
    assert copying({"name": "transformer_xl", "length": 4}, 150) > 0.95
    assert copying(None, 150) < 0.3
