"""ProbSparse attention against loops over queries and samples; its leak; the distilling layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs, tail
from torch import Tensor

from cached_transformers.attentions import SoftmaxAttention, create_attention
from cached_transformers.attentions.informer import POWERS, STEPS, InformerAttention
from cached_transformers.interfaces.memory import Context
from cached_transformers.torchvision_guard import ensure_torchvision


@pytest.fixture(scope="module")
def hosted() -> Any:
    """The file of transformers that has Informer."""
    ensure_torchvision()
    return pytest.importorskip("transformers.models.informer.modeling_informer")


def make(**options: Any) -> InformerAttention:
    core = create_attention({"name": "informer", "factor": 1, **options}).double().eval()
    assert isinstance(core, InformerAttention)
    return core


def share(factor: int, count: int) -> int:
    return min(factor * max(math.ceil(math.log(count)), 1), count) if count else 0


def twin(
    core: InformerAttention, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, there_q: Tensor, there_k: Tensor
) -> Tensor:
    """One query at a time. What is not there as a query gets 0 here."""
    out = [[[v[0, 0, 0] * 0] * q.shape[2] for _ in range(q.shape[1])] for _ in range(len(q))]
    for b in range(len(q)):
        members = [i for i in range(q.shape[2]) if there_q[b, i]]
        keys = [j for j in range(k.shape[2]) if there_k[b, j]]
        samples = share(core.factor, len(keys))
        for h in range(q.shape[1]):
            measures = {}
            for i in members:
                scores = []
                for s in range(samples):
                    place = int(core.jitter_U[s])
                    if core.sampling == "own":
                        place = (place + members.index(i) * (2 * int(core.stride_U[s]) + 1)) % STEPS
                    key = keys[(s * STEPS + place) * len(keys) // (samples * STEPS)]
                    scores.append((q[b, h, i] @ k[b, h, key]).item())
                measures[i] = max(scores) - sum(scores) / len(scores) if scores else 0
            chosen = sorted(members, key=lambda i: (-measures[i], i))[: share(core.factor, len(members))]
            for i in members:
                seen = [j for j in keys if not causal or j <= i]
                if not seen:
                    continue
                weight = 1.0 if causal and core.lazy_sum else 1 / len(seen)
                weights = torch.full((len(seen),), weight, dtype=torch.double)
                if i in chosen:
                    weights = torch.stack([q[b, h, i] @ k[b, h, j] / math.sqrt(q.shape[-1]) for j in seen]).softmax(0)
                out[b][h][i] = sum((w * v[b, h, j] for w, j in zip(weights, seen, strict=True)), torch.zeros(()))
    return torch.stack([torch.stack([torch.stack(head) for head in row]) for row in out])


@pytest.mark.parametrize("sampling", ["shared", "own"])
@pytest.mark.parametrize("padded", [False, True])
def test_loops_over_queries_and_samples_give_the_same(sampling: str, padded: bool) -> None:
    for tokens, options in ((1, {}), (2, {}), (8, {"factor": 3}), (13, {}), (21, {"lazy_sum": True, "factor": 2})):
        core = make(sampling=sampling, allow_leak=True, **options)
        for causal in (False, True):
            q, k, v = inputs(tokens)
            padding = tail(2, tokens) if padded else torch.zeros(2, tokens, dtype=torch.bool)
            got = core(q, k, v, causal=causal, key_padding_mask=padding if padded else None).out_BHNV
            want = twin(core, q, k, v, causal=causal, there_q=~padding, there_k=~padding)
            agree(got, want, [q, k, v], weight=(~padding).double()[:, None, :, None])


@pytest.mark.parametrize(("queries", "keys"), [(9, 5), (1, 20), (6, 21)])
def test_other_keys_than_queries(queries: int, keys: int) -> None:
    core, padding = make(), tail(2, keys)
    q, k, v = inputs(queries, keys)
    everyone = torch.ones(2, queries, dtype=torch.bool)
    got = core(q, k, v, key_padding_mask=padding).out_BHNV
    agree(got, twin(core, q, k, v, causal=False, there_q=everyone, there_k=~padding), [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_a_memory_are_sampled_averaged_and_attended(causal: bool) -> None:
    core = make(allow_leak=True, sampling="shared")
    q, k, v = inputs(13)
    slots = torch.randn(2, 2, 4, 6).double(), torch.randn(2, 2, 4, 5).double()
    context = Context(*slots, torch.zeros(2, 4, 1), torch.tensor([[True] * 3 + [False], [False] * 4]))
    padding = tail(2, 13)
    got = core(q, k, v, causal=causal, context=context, key_padding_mask=padding).out_BHNV
    there = torch.cat([context.valid_BM, ~padding], 1)
    # The slots as tokens in front, which ask nothing.
    nobody = torch.cat([torch.zeros(2, 4, dtype=torch.bool), ~padding], 1)
    longer = [
        torch.cat([first, t], 2) for first, t in zip((torch.zeros(2, 2, 4, 6).double(), *slots), (q, k, v), strict=True)
    ]
    want = twin(core, *longer, causal=causal, there_q=nobody, there_k=there)[:, :, 4:]
    agree(got, want, [q, k, v], weight=(~padding).double()[:, None, :, None])


def test_as_many_queries_are_chosen_as_told_those_far_from_uniform() -> None:
    core = make(factor=5)
    assert [core.share(n) for n in (1, 2, 4, 96, 256, 1024, 2048)] == [1, 2, 4, 25, 30, 35, 40]
    counts = torch.tensor([0, 1, 2, 3, 7, 8, 20, 21, 54, 55, 1096, 1097, 162754, 162755, 10**9])
    assert core._shares(counts).tolist() == [share(5, n) for n in counts.tolist()]
    assert [core.share(n) for n in counts.tolist()[1:]] == [share(5, n) for n in counts.tolist()[1:]]
    assert len(core.jitter_U) == 5 * len(POWERS) and math.exp(len(POWERS)) > 2**31
    # Half the queries have no direction: their attention is uniform, and the mean of the values is what they get.
    q, k, v = (t.detach() for t in inputs(64))
    sharp = torch.rand(2, 2, 64, 1) < 0.1
    q = torch.where(sharp, 3 * q, 1e-3 * q)
    core = make(factor=4)
    chosen = torch.zeros(2, 2, 64, dtype=torch.bool).scatter(2, core.choose(q, k), True)
    assert chosen[sharp[..., 0]].all()
    exact = SoftmaxAttention()(q, k, v).out_BHNV
    assert (core(q, k, v).out_BHNV - exact).abs().max() < 5e-3


def test_a_sample_is_spread_over_the_keys_and_one_of_all_keys_is_all() -> None:
    for sampling in ("shared", "own"):
        core = make(factor=2, sampling=sampling)
        index, used, count = core._sample(torch.ones(1, 50, dtype=torch.bool), 1000, None, None)
        assert index.shape == (1, 1 if sampling == "shared" else 50, 14) and used.all() and count.item() == 14
        stretch = index * 14 // 1000
        assert (stretch - torch.arange(14)).abs().max() <= 1 and index.min() >= 0 and index.max() < 1000
        whole, _, _ = make(factor=10, sampling=sampling)._sample(torch.ones(1, 50, dtype=torch.bool), 30, None, None)
        assert (whole == torch.arange(30)).all()
    # Over many queries each key is as likely as any other: 20000 draws from 50 keys, 400 each.
    index, _, _ = make(factor=1, sampling="own")._sample(torch.ones(1, 5000, dtype=torch.bool), 50, None, None)
    assert (torch.bincount(index.flatten(), minlength=50) - 400).abs().max() < 100


def test_the_causal_form_leaks_and_is_refused_unless_asked_for() -> None:
    q, k, v = (t.detach() for t in inputs(24))
    with pytest.raises(ValueError, match="needs causal"):
        make()(q, k, v, causal=True)
    core = make(allow_leak=True)
    before = core(q, k, v, causal=True).out_BHNV
    torch.testing.assert_close(
        core(q, k, torch.cat([v[:, :, :12], -v[:, :, 12:]], 2), causal=True).out_BHNV[:, :, :12], before[:, :, :12]
    )
    louder = torch.cat([q[:, :, :12], 100 * q[:, :, 12:]], 2)
    leak = (core(louder, k, v, causal=True).out_BHNV - before)[:, :, :12].abs().max()
    assert leak > 0.1  # louder later queries push earlier ones out of the choice


@pytest.mark.parametrize("causal", [False, True])
def test_transformers_computes_the_same_where_all_queries_are_chosen(causal: bool, hosted: Any) -> None:
    theirs = hosted.InformerProbSparseAttention(12, 2, sampling_factor=20, is_decoder=causal).double()
    x = torch.randn(2, 24, 12, dtype=torch.double, requires_grad=True)
    mask = torch.full((24, 24), -torch.inf).triu(1).expand(2, 1, 24, 24).double() if causal else None
    want = theirs(x, attention_mask=mask)[0]
    q, k, v = (f(x).unflatten(-1, (2, 6)).transpose(1, 2) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    got = make(factor=20, allow_leak=True)(q, k, v, causal=causal).out_BHNV
    agree(theirs.out_proj(got.transpose(1, 2).flatten(2)), want, [x, *theirs.parameters()])


@pytest.mark.parametrize("causal", [False, True])
def test_transformers_chooses_the_same_and_gives_others_the_same(
    causal: bool, hosted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it samples every key once, it divides by the right number. Queries not chosen get a mean, or a sum."""
    theirs = hosted.InformerProbSparseAttention(6, 1, sampling_factor=1, is_decoder=causal).double()
    x = torch.randn(1, 24, 6, dtype=torch.double, requires_grad=True)
    mask = torch.full((24, 24), -torch.inf).triu(1).expand(1, 1, 24, 24).double() if causal else None
    core, all_keys = make(factor=1, allow_leak=True, lazy_sum=True), make(factor=24)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", lambda _low, high, _size: torch.arange(high))
        want = theirs(x, attention_mask=mask)[0]
    q, k, v = (f(x)[:, None] for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    place = all_keys.choose(q, k)[..., : core.share(24)]
    monkeypatch.setattr(core, "choose", lambda *_: place)
    got = core(q, k, v, causal=causal).out_BHNV
    atol = 1e-5 if causal else 1e-10  # its sums are in float32
    agree(theirs.out_proj(got[:, 0]), want, [x, *theirs.parameters()], atol=atol)
