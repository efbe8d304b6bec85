"""CRTN: a slow twin, the scope of its queries, planted regions, and its summary by a BiLSTM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories import harness
from memories.crtn_twin import Row, Twin
from memories.harness import agree, run
from torch import Tensor, nn

from cached_transformers.memories.crtn.crtn import CRTN

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
    assert first_moves(build(query=query, scope="segment", allow_leak=True, rescale=True)) > 1e-3
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
