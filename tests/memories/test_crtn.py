"""CRTN against a slow twin, Transformer-XL, and the rules that its paper implies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from memories import harness
from memories.crtn_twin import Row, Twin
from memories.harness import agree, run
from torch import Tensor, nn

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.crtn.crtn import CRTN
from cached_transformers.memories.crtn.store import choose
from cached_transformers.memories.parts.fifo_store import recalled
from cached_transformers.positions import RelativePositions

VOCABULARY, L = 7, 4


def build(name: str = "crtn", *, model: dict[str, Any] | None = None, **memory: Any) -> Any:
    given = {"segment": L, "regions": 3, "topk": 2} if name == "crtn" else {}
    sizes = {"vocabulary": VOCABULARY, "feed_forward": 12, **(model or {})}
    return harness.build({"name": name, **given, **memory}, **sizes)


def tokens(count: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, VOCABULARY, (count, 2, L), generator=torch.Generator().manual_seed(3))
    return ids.unbind(0)


def memory_of(model: Any) -> CRTN:
    return model.stack.model_memory


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


@pytest.mark.parametrize("placed", ["slot", "packed"])
@pytest.mark.parametrize("scope", ["previous", "token"])
def test_all_regions_unweighted_are_transformer_xl(placed: str, scope: str) -> None:
    if placed == "packed" and scope == "token":
        return
    xl = build("transformer_xl", length=3 * L)
    model = build(topk=3, weighted=False, placed=placed, scope=scope)
    result = model.load_state_dict(xl.state_dict(), strict=False)
    assert not result.unexpected_keys and all("summary" in key for key in result.missing_keys)
    for a, b in zip(run(model, tokens(7)), run(xl, tokens(7)), strict=True):
        torch.testing.assert_close(a.outputs, b.outputs, rtol=0, atol=1e-12)


def test_short_memory_is_transformer_xl_and_regions_begin_where_it_ends() -> None:
    """Before any segment has left the short memory there is nothing to choose."""
    xl = build("transformer_xl", length=2 * L)
    model = build(short_memory=2)
    model.load_state_dict(xl.state_dict(), strict=False)
    outs, others = run(model, tokens(5)), run(xl, tokens(5))
    for a, b in zip(outs[:3], others[:3], strict=True):
        torch.testing.assert_close(a.outputs, b.outputs, rtol=0, atol=1e-6)
    assert (outs[3].outputs - others[3].outputs).abs().max() > 1e-3


def test_a_weight_of_zero_mutes_values_and_leaves_keys() -> None:
    layer = SelfAttention(8, 2, positions=RelativePositions(2, 4), causal=True).double()
    hidden, x = torch.randn(1, 4, 8).double(), torch.randn(1, 3, 8).double()
    positions, places = torch.arange(4, 7)[None, :, None], torch.arange(4)[None, :, None]
    valid, weight = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0.0, 0.0, 1.0, 1.0]]).double()
    region = torch.tensor([[0, 0, 1, 1]])

    def offer(**how: Any) -> Any:
        return partial(recalled, **{"hidden_BMD": hidden, "positions_BMP": places, "valid_BM": valid, **how})

    def attend(**how: Any) -> Tensor:
        return layer(x, positions, context=offer(**how)).y_BND

    def choosing(project_kv: Any) -> Any:
        weight_BNR, every = torch.tensor([0.0, 1.0]).double().expand(1, 3, 2), torch.ones(1, 3, 2, dtype=torch.bool)
        return choose(offer(), project_kv, region_BM=region, visible_BNR=every, weight_BNR=weight_BNR)

    plain, muted, masked = attend(), attend(weight_BM=weight), attend(valid_BM=weight > 0)
    by_token = layer(x, positions, context=choosing).y_BND
    torch.testing.assert_close(by_token, muted, rtol=0, atol=1e-12)
    for other in (plain, masked):
        assert (muted - other).abs().max() > 1e-3
    # What the muted values would have added, with the softmax that sees all keys.
    q, k, v = layer._project(x, None)
    context = offer()(layer.project_kv)
    keys, values = torch.cat([context.k_BHME, k], 2), torch.cat([context.v_BHME, v], 2)
    every = torch.cat([places, positions], 1)
    logits = layer.positions.query(q, positions) @ keys.mT / 2 + layer.positions.bias(q, positions, every)
    p = logits.masked_fill(torch.ones(3, 7, dtype=torch.bool).triu(5), -torch.inf).softmax(-1)
    lost = (p[..., :2] @ values[:, :, :2]).transpose(1, 2).flatten(2) @ layer.output.weight.mT
    torch.testing.assert_close(plain - lost, muted, rtol=0, atol=1e-6)


def test_the_oldest_region_leaves_first_and_what_is_kept_is_what_the_layers_saw() -> None:
    model = build()
    seen: list[list[Tensor]] = [[], []]
    for index, block in enumerate(model.stack.blocks):
        block.register_forward_pre_hook(lambda _m, args, index=index: seen[index].append(args[0]))
    tops: list[Tensor] = []
    model.stack.blocks[-1].register_forward_hook(lambda _m, _i, out: tops.append(out[0]))
    summary = memory_of(model).summary
    for t, out in enumerate(run(model, tokens(5)), start=1):
        state = out.state.model
        filled = min(t, 3)
        assert state.size_BR.tolist() == [[0] * (3 - filled) + [L] * filled] * 2
        for level in range(2):
            want = torch.cat(seen[level][t - filled : t], 1)
            assert torch.equal(state.hidden_BVSD[:, level, -filled * L :], want)
        keys = torch.stack([summary(top, torch.full((2,), L)) for top in tops[t - filled : t]], 1)
        torch.testing.assert_close(state.keys_BRK[:, -filled:], keys, rtol=0, atol=0)
        places = torch.arange((t - filled) * L, t * L)
        assert torch.equal(state.positions_BSP[:, -filled * L :, 0], places.expand(2, -1))
        assert not state.hidden_BVSD.requires_grad and state.keys_BRK.requires_grad


@pytest.mark.parametrize(
    "options", [{}, {"scope": "token"}, {"empty": "compete"}, {"short_memory": 1, "renormalise": "softmax"}]
)
def test_no_empty_region_is_ever_recalled(options: dict[str, Any]) -> None:
    """With as many places as regions and a store half full, what is recalled counts the real tokens, no more."""
    model = build(topk=3, **options)
    given: list[Any] = []
    model.stack.blocks[0].register_forward_pre_hook(lambda _m, _a, kw: given.append(kw["context"]), with_kwargs=True)
    outs = run(model, tokens(3))
    for before, offer in enumerate(given):
        told = (offer.args[0] if offer.args else offer).keywords
        assert told["valid_BM"].sum(1).tolist() == [before * L] * 2
        if told["weight_BM"] is not None:
            assert told["weight_BM"][~told["valid_BM"]].abs().sum() == 0 or options.get("short_memory")
    assert outs[-1].outputs.isfinite().all()


def test_compute_first_with_blocks_that_do_nothing_asks_as_the_standard_query() -> None:
    models = [
        build(model={"depth": 1}, query=query, scope="token", rescale=True) for query in ("standard", "compute_first")
    ]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        with torch.no_grad():
            block = model.stack.blocks[0]
            for linear in (block.attention.output, block.feed_forward.leave):
                linear.weight.zero_(), linear.bias.zero_()
    for a, b in zip(*(run(model, tokens(5)) for model in models), strict=True):
        torch.testing.assert_close(a.state.model.source_BLD, b.state.model.source_BLD, rtol=0, atol=0)
        torch.testing.assert_close(a.outputs, b.outputs, rtol=0, atol=1e-12)


def first_moves(model: Any) -> float:
    """How much the first outputs of the last of three segments move with its last token."""
    segments = tokens(3)
    changed = [*segments[:2], segments[2].clone()]
    changed[2][:, -1] = (changed[2][:, -1] + 1) % VOCABULARY
    a, b = (run(model, some)[-1].outputs[:, :-1] for some in (segments, changed))
    return (a - b).abs().max().item()


@pytest.mark.parametrize("query", ["standard", "compute_first"])
def test_the_scope_of_the_text_shows_the_future_and_the_others_do_not(query: str) -> None:
    assert first_moves(build(query=query, scope="segment", allow_leak=True, rescale=True)) > 1e-3
    for scope in ("previous", "token"):
        assert first_moves(build(query=query, scope=scope, rescale=True)) == 0


def test_the_gradient_reaches_summary_and_keys_and_no_value() -> None:
    """Through alpha: into the queries' and the keys' segments. To the letter: into neither."""
    for alpha_grad in (True, False):
        model = build(alpha_grad=alpha_grad)
        embedded: list[Tensor] = []
        model.embedding.register_forward_hook(lambda _m, _i, y, got=embedded: (y.retain_grad(), got.append(y))[1])
        run(model, tokens(4))[-1].outputs.square().sum().backward()
        reached = [x.grad is not None and bool(x.grad.abs().max() > 0) for x in embedded]
        assert reached == [alpha_grad] * 3 + [True]
        assert all((p.grad is not None) == alpha_grad for p in memory_of(model).summary.parameters())
    model = build(weighted=False)
    run(model, tokens(4))[-1].outputs.square().sum().backward()
    assert all(p.grad is None for p in memory_of(model).summary.parameters())


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


# ------------------------------------------------------------------------------------------------ summaries


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


@pytest.mark.parametrize("name", ["linear", "mlp", "bilstm", "last", "mean"])
def test_a_summary_sees_tokens_and_nothing_behind_them(name: str) -> None:
    summary = CRTN(6, 2, depth=1, segment=5, summary=name).summary
    x, size = torch.randn(2, 5, 6), torch.tensor([3, 0])
    poisoned = torch.where(torch.arange(5)[:, None] < size[:, None, None], x, torch.nan)
    assert torch.equal(summary(x, size), summary(poisoned, size)) and summary(poisoned, size).isfinite().all()
    assert summary(x, size).shape == (2, summary.key_width)
    moved = summary(x.index_add(1, torch.tensor([2]), torch.ones(2, 1, 6)), size) - summary(x, size)
    assert moved[0].abs().max() > 0 and moved[1].abs().max() == 0


# ------------------------------------------------------------------------------------------------ wrong arguments


def test_a_longer_segment_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"5.*segment=4.*segment_length=4.*segment=5"):
        build()(torch.zeros(2, 5, dtype=torch.long))
