"""Clustered attention and its improved form against loops over hashes, clusters and queries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs, tail
from torch import Tensor

from cached_transformers.attentions import SoftmaxAttention, create_attention
from cached_transformers.attentions.clustered import ClusteredAttention
from cached_transformers.attentions.parts.hamming import lloyd

NAMES = ("clustered", "improved_clustered")
Code = tuple[int, ...]


def make(name: str, **options: Any) -> Any:
    if name == "improved_clustered":
        options = {"topk": 3, **options}
    return create_attention({"name": name, "clusters": 4, "bits": 8, **options}, width=12, heads=2).double().eval()


def slow_lloyd(codes: list[Code], clusters: int, iterations: int) -> list[int]:
    """Of one row and head, as the description says it."""

    def distance(a: Code, b: Code) -> int:
        return sum(x != y for x, y in zip(a, b, strict=True))

    if len(codes) <= clusters:
        return list(range(len(codes)))
    centroids = [codes[c * len(codes) // clusters] for c in range(clusters)]
    for step in range(iterations):
        chosen = [min(range(clusters), key=lambda c: (distance(code, centroids[c]), c)) for code in codes]
        if step == iterations - 1:
            break
        lost = sorted(range(len(codes)), key=lambda i: (-distance(codes[i], centroids[chosen[i]]), i))
        empty = [c for c in range(clusters) if c not in chosen]
        for c in range(clusters):
            inside = [code for code, own in zip(codes, chosen, strict=True) if own == c]
            if inside:
                centroids[c] = tuple(int(2 * sum(bit) > len(inside)) for bit in zip(*inside, strict=True))
            else:
                centroids[c] = codes[lost[empty.index(c)]]
    return chosen


def twin(core: Any, q: Tensor, k: Tensor, v: Tensor, there_q: Tensor, there_k: Tensor) -> Tensor:
    """One query at a time. What is not there as a query gets 0 here."""
    root, rows = math.sqrt(q.shape[-1]), []
    for b in range(len(q)):
        members = [i for i in range(q.shape[2]) if there_q[b, i]]
        for h in range(q.shape[1]):
            keys = [j for j in range(k.shape[2]) if there_k[b, j]]
            planes = list(zip(core.planes_RE, core.offsets_R, strict=True))
            codes = [tuple(int(q[b, h, i] @ plane + offset > 0) for plane, offset in planes) for i in members]
            cluster = dict(zip(members, slow_lloyd(codes, core.clusters, core.iterations), strict=True))
            for i in range(q.shape[2]):
                if i not in cluster or not keys:
                    rows.append(0 * v[b, h, 0])
                    continue
                friends = [q[b, h, j] for j in members if cluster[j] == cluster[i]]
                mean = sum(friends, torch.zeros(())) / len(friends)
                weights = torch.stack([mean @ k[b, h, j] / root for j in keys]).softmax(0)
                if hasattr(core, "topk"):
                    best = weights.topk(min(core.topk, len(keys))).indices.tolist()
                    own = torch.stack([q[b, h, i] @ k[b, h, keys[j]] / root for j in best]).softmax(0)
                    mass = weights[best].sum()
                    weights = [mass * own[best.index(j)] if j in best else weights[j] for j in range(len(keys))]
                rows.append(sum((w * v[b, h, j] for w, j in zip(weights, keys, strict=True)), torch.zeros(())))
    return torch.stack(rows).view(*q.shape[:3], -1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
def test_loops_over_clusters_and_queries_give_the_same(name: str, padded: bool) -> None:
    for tokens, options in ((1, {}), (3, {}), (9, {}), (14, {"hash_bias": False}), (14, {"bits": 3})):
        core = make(name, **options)
        q, k, v = inputs(tokens)
        padding = tail(2, tokens) if padded else torch.zeros(2, tokens, dtype=torch.bool)
        if padded and tokens == 9:
            padding[0, 3:] = True  # fewer queries than clusters
        got = core(q, k, v, key_padding_mask=padding if padded else None).out_BHNV
        agree(got, twin(core, q, k, v, ~padding, ~padding), [q, k, v], weight=(~padding).double()[:, None, :, None])


@pytest.mark.parametrize("name", NAMES)
def test_other_keys_than_queries(name: str) -> None:
    core = make(name)
    q, k, v = inputs(9, 5)
    padding = tail(2, 5)
    got = core(q, k, v, key_padding_mask=padding).out_BHNV
    agree(got, twin(core, q, k, v, torch.ones(2, 9, dtype=torch.bool), ~padding), [q, k, v])


@pytest.mark.parametrize("bits", [2, 4, 12])
def test_lloyd_with_hashes_that_repeat_and_clusters_that_become_empty(bits: int) -> None:
    hashes = torch.rand(3, 2, 40, bits) < 0.4
    there = torch.rand(3, 40) < 0.7
    got, masked = lloyd(hashes, 7, 6), lloyd(hashes, 7, 6, there)
    for b in range(3):
        for h in range(2):
            codes = [tuple(code) for code in hashes[b, h].int().tolist()]
            assert got[b, h].tolist() == slow_lloyd(codes, 7, 6)
            kept = [code for code, here in zip(codes, there[b], strict=True) if here]
            assert masked[b, h, there[b]].tolist() == slow_lloyd(kept, 7, 6)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_clusters_as_queries_are_exact_even_where_hashes_are_equal(name: str) -> None:
    q, k, v = inputs(9)
    want = SoftmaxAttention()(q, k, v).out_BHNV
    agree(make(name, clusters=9, bits=1).double()(q, k, v).out_BHNV, want, [q, k, v])
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 7:] = True
    got = make(name, clusters=7, bits=1)(q, k, v, key_padding_mask=padding).out_BHNV
    want = SoftmaxAttention()(q[:1, :, :7], k[:1, :, :7], v[:1, :, :7]).out_BHNV
    agree(got[:1, :, :7], want, [q, k, v])


def weights_of(core: ClusteredAttention, q: Tensor, k: Tensor) -> Tensor:
    tokens = k.shape[2]
    out: Tensor = core(q, k, torch.eye(tokens, dtype=q.dtype).expand(*k.shape[:2], tokens, tokens)).out_BHNV
    return out


def test_the_improved_form_is_nearer_and_planes_tell_no_lengths() -> None:
    """Proposition 2 of the paper: the L1 distance of a query's weights to those of full attention does not grow."""
    for seed in range(5):
        torch.manual_seed(seed)
        q, k, _ = (t.detach() for t in inputs(40))
        plain, improved = make("clustered"), make("improved_clustered", topk=10)
        improved.load_state_dict(plain.state_dict())
        exact = (2 * q @ k.mT / math.sqrt(6)).softmax(-1)
        far, near = ((weights_of(core, 2 * q, k) - exact).abs().sum(-1) for core in (plain, improved))
        assert (near <= far + 1e-12).all() and near.mean() < 0.9 * far.mean()
    q, flat = torch.randn(1, 1, 50, 6).double(), make("clustered", redraw=True, hash_bias=False).train()
    assert torch.equal(*(flat.assign(t, None, torch.Generator().manual_seed(1)) for t in (q, 5 * q)))


def test_groups_of_like_queries_are_found() -> None:
    """Queries close to one of four directions: each cluster is one of them, and its attention almost theirs."""
    direction = torch.linalg.qr(torch.randn(6, 6))[0][:4].double() * 4
    group = torch.randint(4, (2, 2, 60))
    q = direction[group] + 0.01 * torch.randn(2, 2, 60, 6)
    core = make("clustered", bits=32)
    index = core.assign(q)
    same = index[..., None] == index[..., None, :]
    # The first centroids may leave a group out; an empty cluster finds it.
    assert torch.equal(same, group[..., None] == group[..., None, :])
    _, k, v = inputs(60)
    exact = SoftmaxAttention()(q, k, v).out_BHNV
    assert (core(q, k, v).out_BHNV - exact).abs().max() < 0.05


def test_a_bit_differs_as_often_as_the_angle_says() -> None:
    """Planes through the origin part two vectors with probability angle / pi; those with an offset tell lengths."""
    a, b = torch.randn(2, 12).double()
    core = create_attention({"name": "clustered", "bits": 20000, "hash_bias": False}, width=12, heads=1).double()
    assert isinstance(core, ClusteredAttention)
    bits = torch.stack([a, b]) @ core.planes_RE.T > -core.offsets_R
    angle = torch.arccos(a @ b / a.norm() / b.norm()) / math.pi
    assert abs((bits[0] != bits[1]).double().mean() - angle) < 4 * math.sqrt(0.25 / 20000)
    assert (core.offsets_R == 0).all()
    with_offset = create_attention({"name": "clustered", "bits": 20000}, width=12, heads=1).double()
    assert isinstance(with_offset, ClusteredAttention)
    bits = torch.stack([a, 3 * a]) @ with_offset.planes_RE.T > -with_offset.offsets_R
    assert (bits[0] != bits[1]).double().mean() > 0.02
