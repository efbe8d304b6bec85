"""Random feature attention: the quadratic form of its features, the gate's weights, and what the estimate tends to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.cases import B, E, H
from attentions.linearised_twins import V, compare, keys_and_mask, leaves
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.rfa import RandomFeatureAttention


def core_of(seed: int = 0, **options: Any) -> RandomFeatureAttention:
    torch.manual_seed(seed)
    core = RandomFeatureAttention(H * E, H, **{"features": 7, **options}).double().eval()
    with torch.no_grad():
        core.scale_H1E.add_(0.3 * torch.randn_like(core.scale_H1E))
    return core


def features(core: RandomFeatureAttention, x: Tensor) -> Tensor:
    """As the paper writes them, head by head."""
    found = []
    for head in range(H):
        w = core.frequencies_PRE[head] * core.scale_H1E[head] / core.temperature
        angles = (x[:, head] / x[:, head].norm(dim=-1, keepdim=True)) @ w.mT
        parts = [angles.relu()] if core.kernel == "arccos" else [angles.sin(), angles.cos()]
        found.append(torch.cat(parts, -1) / math.sqrt(len(w)))
    return torch.stack(found, 1)


def bounded(core: RandomFeatureAttention, weights: Tensor, kernel: Tensor, v: Tensor) -> Tensor:
    """sum w f v / sum w f, with |sum w f| at least `floor` times sum w."""
    total, whole = (weights * kernel).sum(-1, keepdim=True), weights.sum(-1, keepdim=True)
    sign = torch.where(total < 0, -1.0, 1.0).double()
    total = sign * torch.maximum(total.abs(), core.floor * whole)
    return (weights * kernel) @ v / torch.where(whole == 0, 1, total)


@pytest.mark.parametrize(
    "options",
    [{"chunk": 1}, {"chunk": 4, "temperature": 0.5}, {"kernel": "arccos", "chunk": 64}, {"chunk": 4, "floor": 0.4}],
)
def test_it_is_the_quadratic_form_of_its_features(options: dict[str, Any]) -> None:
    core = core_of(**options)

    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: Any) -> Tensor:
        keys, values, mask = keys_and_mask(k, v, causal, seen, context)
        return bounded(core, mask.double(), features(core, q) @ features(core, keys).mT, values)

    compare(core, twin)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_with_the_gate_it_is_the_recurrence(chunk: int) -> None:
    core = core_of(gate=True, chunk=chunk)
    assert core.gate is not None

    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: Any) -> Tensor:
        assert causal and core.gate is not None
        gates = torch.sigmoid(core.gate(x)).mT  # B, H, N
        of_q, of_k = features(core, q), features(core, k)
        sums, z = torch.zeros(B, H, of_q.shape[-1], V).double(), torch.zeros(B, H, of_q.shape[-1]).double()
        whole = torch.zeros(B, H).double()
        if context is not None:
            of_c = features(core, context.k_BHME) * context.valid_BM[:, None, :, None]
            sums, z = of_c.mT @ context.v_BHME, of_c.sum(2)
            whole = whole + context.valid_BM.sum(-1)[:, None]
        outs = []
        for t in range(q.shape[2]):
            there = seen[:, t, None]
            g = torch.where(there, gates[:, :, t], 1.0)
            new = torch.where(there, 1 - gates[:, :, t], 0.0)
            sums = g[..., None, None] * sums + new[..., None, None] * of_k[:, :, t, :, None] * v[:, :, t, None]
            z = g[..., None] * z + new[..., None] * of_k[:, :, t]
            whole = g * whole + new
            total = (of_q[:, :, t] * z).sum(-1)
            total = torch.where(total < 0, -1.0, 1.0) * torch.maximum(total.abs(), core.floor * whole)
            read = (of_q[:, :, t, None] @ sums)[:, :, 0]
            outs.append(read / torch.where(whole == 0, 1, total)[..., None])
        return torch.stack(outs, 2)

    compare(core, twin, forms=(True,))


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_the_kernel_is_unbiased_and_many_features_are_softmax_attention(temperature: float) -> None:
    core = RandomFeatureAttention(H * E, H, features=40_000, temperature=temperature).double()
    given = {name: F.normalize(t.detach(), dim=-1) for name, t in leaves(9).items()}
    q, k, v = (given[name] for name in "qkv")
    of_q, of_k = (core.features(5 * t, core.maps()) for t in (q, k))
    want = (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1) / (2 * temperature**2)).exp()
    assert ((of_q @ of_k.mT - want).abs() < 5 / math.sqrt(2 * 40_000)).all()  # of a mean of cosines
    for causal in (False, True):
        softmax = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / temperature**2)
        got = core(5 * q, 0.2 * k, v, causal=causal).out_BHNV
        torch.testing.assert_close(got, softmax, rtol=0, atol=0.05)


def test_the_arccosine_kernel_is_what_it_tends_to() -> None:
    core = RandomFeatureAttention(H * E, H, features=40_000, kernel="arccos").double()
    q, k = (F.normalize(leaves(9)[name].detach(), dim=-1) for name in "qk")
    angle = (q @ k.mT).clamp(-1, 1).acos()
    want = (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    of_q, of_k = (core.features(t, core.maps()) for t in (q, k))
    assert ((of_q @ of_k.mT - want).abs() < 0.04).all()


def test_a_normaliser_near_zero_and_calls_that_it_cannot_serve() -> None:
    """One frequency: the kernel of one key is cos(w (q - k)), which passes through 0."""
    core = RandomFeatureAttention(1, 1, features=1, floor=0.01).double()
    core.frequencies_PRE.fill_(math.pi / 4)
    q, k, v = (torch.full((1, 1, 1, 1), value).double() for value in (1.0, -1.0, 1.0))
    assert core(q, k, v).out_BHNV.abs() < 1e-10  # 0 over the floor
    core.frequencies_PRE.fill_(math.pi / 4 - 1e-4)  # cos = 2e-4
    assert float(core(q, k, v).out_BHNV.detach()) == pytest.approx(0.02, rel=1e-3)
    core.frequencies_PRE.fill_(math.pi / 4 + 0.1)  # cos = -0.2: a negative normaliser is as good as any
    assert float(core(q, k, v).out_BHNV.detach()) == pytest.approx(1.0)
    given = leaves(3)
    q, k, v = (given[name] for name in "qkv")
    gated = core_of(gate=True)
    refuses("this call needs bidirectional", gated, q, k, v, x_BND=given["x"])
    refuses("x_BND", gated, q, k, v, causal=True)
    refuses("2 heads of width 6: the random features are of 4 heads of width 3", RandomFeatureAttention(12, 4), q, k, v)


def test_training_takes_other_draws_of_the_pool() -> None:
    core, given = core_of(pool=6), leaves(5)
    q, k, v = (given[name] for name in "qkv")
    assert torch.equal(core.maps(), core.frequencies_PRE[:H])
    taken = set()
    for seed in range(20):
        maps = core.maps(torch.Generator().manual_seed(seed), fixed=False)
        places = [int((core.frequencies_PRE == w).flatten(1).all(1).nonzero()) for w in maps]
        assert len(set(places)) == H
        taken |= set(places)
    assert taken == set(range(6))
    fixed = core(q, k, v).out_BHNV
    core.train()
    first, again, other = (core(q, k, v, generator=torch.Generator().manual_seed(s)).out_BHNV for s in (1, 1, 3))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, fixed)
