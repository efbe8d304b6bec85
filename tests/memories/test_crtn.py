"""CRTN: a slow twin, the scope of its queries, planted regions, its BiLSTM; golden values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memories import harness
from memories.crtn_twin import Row, Twin
from memories.harness import agree, recorded, run
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.crtn.crtn import CRTN
from cached_transformers.memories.crtn.store import CRTNState
from cached_transformers.positions import RelativePositions

VOCABULARY, L = 7, 4


def build(name: str = "crtn", *, model: dict[str, Any] | None = None, **memory: Any) -> Any:
    given = {"segment": L, "regions": 3, "topk": 2} if name == "crtn" else {}
    sizes = {"vocabulary": VOCABULARY, "feed_forward": 12, **(model or {})}
    return harness.build({"name": name, **given, **memory}, **sizes)


def tokens(count: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, VOCABULARY, (count, 2, L), generator=torch.Generator().manual_seed(3))
    return ids.unbind(0)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"rescale": True, "temperature": 0.5},
    "second softmax": {"renormalise": "softmax", "scale": True, "summary": "mlp"},
    "unweighted": {"weighted": False},
    "to the letter": {"alpha_grad": False},
    "compete": {"empty": "compete", "topk": 3},
    "packed": {"placed": "packed"},
    "segment": {"scope": "segment", "allow_leak": True},
    "token": {"scope": "token"},
    "token unweighted": {"scope": "token", "weighted": False, "topk": 1},
    "compute first": {"query": "compute_first"},
    "compute first, segment": {"query": "compute_first", "scope": "segment", "allow_leak": True, "rescale": True},
    "compute first, token": {"query": "compute_first", "scope": "token", "regions": 2, "topk": 1},
    "short memory": {"short_memory": 1},
    "draft": {"short_memory": 1, "query": "compute_first", "scope": "token", "rescale": True, "renormalise": "softmax"},
    "short memory, packed": {"short_memory": 2, "placed": "packed", "query": "compute_first"},
}


# Some segments of the padded text are whole; without any padding the way through the code is that of these four.
WHOLE = ("default", "token", "compute first", "short memory, packed")


@pytest.mark.parametrize(("label", "padded"), [*((label, True) for label in OPTIONS), *((o, False) for o in WHOLE)])
def test_the_slow_twin_agrees_in_values_and_gradients(label: str, padded: bool) -> None:
    options = OPTIONS[label]
    model, ids = build(model={"positions": "alibi"}, **options), tokens(6)
    sizes = [[4, 4], [3, 4], [4, 0], [1, 2], [4, 4], [2, 4]] if padded else [[L, L]] * 6
    paddings = [torch.arange(L) >= torch.tensor(size)[:, None] for size in sizes]
    paddings[3] = paddings[3].flip(1)  # in front
    outs = run(model, ids, paddings=paddings if padded else ())
    twin, rows = Twin(model, **{"segment": L, "regions": 3, "topk": 2, **options}), [Row(), Row()]
    want, got = [], []
    for segment, padding, out in zip(ids, paddings, outs, strict=True):
        for b, row in enumerate(rows):
            want += twin.segment(row, segment[b][~padding[b]].tolist())
            got += list(out.outputs[b][~padding[b]])
    gradients = agree([torch.stack(got)], [torch.stack(want)], model, least=None)
    trained = all(bool(g.any()) for name, g in gradients.items() if "summary" in name)
    assert trained == (options.get("weighted", True) and options.get("alpha_grad", True))


def first_moves(model: Any) -> float:
    """How much the first outputs of the last of three segments move with its last token."""
    segments = tokens(3)
    changed = [*segments[:2], segments[2].clone()]
    changed[2][:, -1] = (changed[2][:, -1] + 1) % VOCABULARY
    a, b = (run(model, some)[-1].outputs[:, :-1] for some in (segments, changed))
    return (a - b).abs().max().item()


@pytest.mark.parametrize("query", ["standard", "compute_first"])
def test_the_scope_of_the_text_shows_the_future_and_the_others_do_not(query: str) -> None:
    assert first_moves(build(query=query, scope="segment", allow_leak=True, rescale=True, model={"scale": 0.1})) > 1e-3
    for scope in ("previous", "token"):
        assert first_moves(build(query=query, scope=scope, rescale=True)) == 0


@pytest.mark.parametrize(("scope", "short"), [("previous", 1), ("token", 0)])
def test_a_planted_region_is_found(scope: str, short: int) -> None:
    """With tokens as keys, a segment that repeats the planted one recalls it, whatever came between."""
    options = {"summary": "mean", "regions": 5, "topk": 1, "scope": scope, "short_memory": short, "temperature": 0.1}
    model = build(model={"width": 16, "depth": 1}, **options)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(VOCABULARY, 16))
        for linear in (model.stack.blocks[0].attention.output, model.stack.blocks[0].feed_forward.leave):
            linear.weight.zero_(), linear.bias.zero_()
    given: list[Any] = []
    model.stack.blocks[0].register_forward_pre_hook(lambda _m, _a, kw: given.append(kw["context"]), with_kwargs=True)
    planted, noise = torch.tensor([[5, 6, 5, 6]]), [torch.tensor([[i % 4, i % 3, i % 4, 0]]) for i in range(4)]
    run(model, [noise[0], planted, *noise[1:3], planted, noise[3]])
    if scope == "token":
        told = given[4].keywords  # while the planted one is read again
        visible_BNR, weight_BNR = told["visible_BNR"], told["weight_BNR"]
        assert visible_BNR[0, -1].tolist() == [False, False, True, False, False] and weight_BNR[0, -1, 2] > 0.8
    else:
        told = given[5].keywords
        assert told["positions_BMP"][0, :, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
        assert told["weight_BM"][0].min() > 0.8


def test_the_bilstm_is_that_of_torch_on_the_real_tokens() -> None:
    memory: Any = CRTN(6, 2, depth=1, segment=5, summary="bilstm", key_width=8)
    reference = nn.LSTM(6, 4, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for cell, suffix in ((memory.summary.ahead, ""), (memory.summary.back, "_reverse")):
            for name, parameter in cell.named_parameters():
                getattr(reference, f"{name}_l0{suffix}").copy_(parameter)
    x = torch.randn(3, 5, 6)
    got = memory.summary(x, torch.tensor([5, 2, 1]))
    for row, n in enumerate((5, 2, 1)):
        want = reference(x[row : row + 1, :n])[0][0]
        torch.testing.assert_close(got[row], torch.cat([want[-1, :4], want[0, 4:]]), rtol=0, atol=1e-6)


def test_a_longer_segment_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"5.*segment=4.*segment_length=4.*segment=5"):
        build()(torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.device
@pytest.mark.parametrize("placed", ["slot", "packed"])
def test_golden_values_of_the_equations(shared: Path, placed: str) -> None:
    """The regions recalled there stand next to the segment, so that both ways of placing them are the same."""
    g = recorded(shared, "memories/spec_memformer_crtn", "crtn/")
    memory = CRTN(8, 2, depth=1, segment=4, regions=3, placed=placed)
    positions = RelativePositions(2, 4, biases=(nn.Parameter(g["u"]), nn.Parameter(g["v"]))).double()
    layer = SelfAttention(8, 2, positions=positions, causal=True, bias=False, output_bias=False).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([g["Wq"], g["WkE"], g["Wv"]]))
        layer.output.weight.copy_(g["Wo"])
        positions.project.weight.copy_(g["WkR"])
    state = CRTNState(
        g["keys"][None],
        g["Z"].flatten(0, 1)[None, None],
        torch.arange(12)[None, :, None],
        torch.full((1, 3), 4),
        g["h"][None],
    )
    where = g["pos_q"][None, :, None]
    alpha, chosen = memory._alpha(state, g["query"][None, None])
    assert sorted(chosen.flatten().tolist()) == g["idx"].tolist()
    torch.testing.assert_close(alpha[0, 0, g["idx"]], g["alpha"], rtol=0, atol=1e-12)
    (offer,) = memory._by_segment(state, where, g["query"][None])
    got = layer(g["h"][None], where, context=offer).y_BND[0]
    torch.testing.assert_close(got, g[f"{placed}pos/attn_out"], rtol=0, atol=1e-6)


def released(g: dict[str, Tensor], tag: str, **memory: Any) -> Any:
    """The model of the authors' last code, with its weights."""
    options = {
        "segment": 4,
        "regions": 3,
        "query": "compute_first",
        "scope": "token",
        "summary": "last",
        "short_memory": 1,
    }
    model = create_model(
        "language_model",
        **{"vocabulary": 11, "width": 8, "depth": 2, "heads": 2, "feed_forward": 12},
        **{"norm": "post", "activation": "relu", "bias": False},
        memory={"name": "crtn", **options, **memory},
    ).eval()
    weights, p = {}, f"{tag}/param/encoder."
    weights["embedding.weight"] = weights["head.weight"] = g[f"{p}decoder.weight"]
    for i in range(2):
        ours, theirs = f"stack.blocks.{i}.", f"{p}layers.{i}."
        weights[f"{ours}attention.qkv.weight"] = torch.cat(
            [g[f"{theirs}attn.lin_q.weight"], g[f"{theirs}attn.lin_kv.weight"]]
        )
        weights[f"{ours}attention.output.weight"] = g[f"{theirs}attn.lin_o.weight"]
        weights[f"{ours}attention.positions.project.weight"] = g[f"{theirs}attn.lin_relemb.weight"]
        for name, bias in (("content_bias", "pos_bias_u"), ("position_bias", "pos_bias_v")):
            weights[f"{ours}attention.positions.{name}"] = g[p + bias]
        for end in ("weight", "bias"):
            weights[f"{ours}attention_norm.{end}"] = g[f"{theirs}attn.layer_norm.{end}"]
            weights[f"{ours}feed_forward_norm.{end}"] = g[f"{theirs}pos_ff.layer_norm.{end}"]
            for name, place in (("enter", 0), ("leave", 3)):
                weights[f"{ours}feed_forward.{name}.{end}"] = g[f"{theirs}pos_ff.FFNet.{place}.{end}"]
    model.load_state_dict(weights)
    return model


def after(model: Any, g: dict[str, Tensor], tag: str, segment: int) -> Any:
    """The state that the authors' code had after a segment; all its regions are filled from segment 3 on."""
    values = g[f"{tag}/seg{segment}/cache_value"].view(3, 2, 4, 3, 8).permute(1, 3, 0, 2, 4).flatten(2, 3)
    short = g[f"{tag}/seg{segment}/short_mem"].view(3, 4, 2, 8).permute(2, 0, 1, 3)
    top = short[:, 2]
    keys = torch.cat([g[f"{tag}/seg{segment}/cache_key"].transpose(0, 1), top[:, -1:]], 1)
    places = (torch.arange(-12, 4) + 4 * segment)[None, :, None].expand(2, -1, -1)
    state = CRTNState(keys, torch.cat([values, short], 2)[:, :2], places, torch.full((2, 4), 4), top)
    return model.init_state(2)._replace(clock_B=torch.full((2,), 4 * (segment + 1)), model=state)


@pytest.mark.device
def test_golden_values_of_the_released_code_with_all_regions(shared: Path) -> None:
    """From the empty memory on; its empty keys are random, but nothing is chosen by them here."""
    g, tag = recorded(shared, "memories/crtn_head"), "head_k_eq_N_unweighted"
    model = released(g, tag, topk=3, weighted=False)
    for segment, out in enumerate(run(model, list(g[f"{tag}/x"].T.split(4, 1)))):
        torch.testing.assert_close(out.outputs, g[f"{tag}/seg{segment}/logits"].transpose(0, 1), rtol=0, atol=1e-5)
        if segment >= 3:
            for a, b in zip(out.state.model[:4], after(model, g, tag, segment).model[:4], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # keys, values, places, sizes


@pytest.mark.device
@pytest.mark.parametrize("tag", ["head_single_last", "head_single_last_unweighted", "head_single_mean"])
def test_golden_values_of_the_released_code_where_its_distances_are_right(shared: Path, tag: str) -> None:
    """Its shift of relative positions runs over the gaps that unrecalled regions leave.

    Distances are right for the last token of a segment, and where the newest regions are recalled. There the first
    layer agrees: selection, a second softmax over what is selected, times topk. Its query is a token's own top layer,
    whatever makes the keys.
    """
    g = recorded(shared, "memories/crtn_head")
    heard = (
        {"weighted": False}
        if tag.endswith("unweighted")
        else {"renormalise": "softmax", "rescale": True, "scale": True}
    )
    model = released(g, tag, **heard)
    x, counted = g[f"{tag}/x"].T, 0
    for segment in (4, 5, 6):
        state = after(model, g, tag, segment - 1)
        given: list[Any] = []
        handle = model.stack.blocks[0].register_forward_pre_hook(
            lambda _m, _a, kw, given=given: given.append(kw["context"]), with_kwargs=True
        )
        level = model(x[:, 4 * segment :][:, :4], state).state.model.hidden_BVSD[:, 1, -4:]
        handle.remove()
        visible = given[-1].keywords["visible_BNR"]
        right = (~visible[..., 0]) | (torch.arange(4) == 3)
        want = after(model, g, tag, segment).model.hidden_BVSD[:, 1, -4:]
        torch.testing.assert_close(level[right], want[right], rtol=0, atol=1e-5)
        counted += int(right.sum())
    assert counted >= 8
