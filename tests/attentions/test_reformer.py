"""Reformer's hashed attention against its definition, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree_by_definition
from attentions.cases import B, E, H, build
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.reformer import ReformerAttention, usual_buckets
from cached_transformers.interfaces.memory import Context

WIDTH = H * E


def reformer(**options: Any) -> ReformerAttention:
    torch.manual_seed(3)
    core = ReformerAttention(WIDTH, H, **{"chunk": 4, "rounds": 2, "buckets": 4, **options})
    return core.double().eval()


def tokens_of(count: int, width: int = E, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, count, E, dtype=torch.double, generator=generator)
    return q.requires_grad_(), torch.randn(B, H, count, width, dtype=torch.double, generator=generator).requires_grad_()


def buckets_of(core: ReformerAttention, q: Tensor, head: int, turn: int) -> list[int]:
    found = []
    for vector in q:
        bucket, count, column = 0, 1, 0
        for factor in core.factors:
            turned = vector @ core.rotations[head, :, turn, column : column + factor // 2]
            bucket += count * int(torch.cat([turned, -turned]).argmax()) if factor > 1 else 0
            count, column = count * factor, column + factor // 2
        found.append(bucket)
    return found


def seen_by(core: ReformerAttention, buckets: list[int], valid: list[int], *, causal: bool) -> list[set[int]]:
    """The keys of each token in one round."""
    order = sorted(valid, key=lambda i: (buckets[i], i))
    chunks = [order[at : at + core.chunk] for at in range(0, len(order), core.chunk)]
    result: list[set[int]] = [set() for _ in buckets]
    for at, chunk in enumerate(chunks):
        for i in chunk:
            if causal and not core.allow_leak:
                fellows = [j for j in valid if buckets[j] == buckets[i] and j <= i]
                result[i] = set(fellows[-core.chunk - 1 :])
                continue
            result[i] = {*chunk, *chunks[at - 1]}
            if not core.across_buckets:
                result[i] = {j for j in result[i] if buckets[j] == buckets[i]}
            if causal:
                result[i] = {j for j in result[i] if j <= i}
    return result


def twin(
    core: ReformerAttention, q: Tensor, v: Tensor, *, causal: bool = False, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values and log-sum-exps by the paper's sum over rounds, with N_ij; 0 for padding."""
    rows, heads, count, width = q.shape
    factor = {"scaled": width**-0.5, "unscaled": 1.0, "lra": width**0.5}[core.logits]
    outs, lses = torch.zeros_like(v), torch.zeros(rows, heads, count, dtype=q.dtype)
    for b in range(rows):
        valid = [i for i in range(count) if padding is None or not padding[b, i]]
        for h in range(heads):
            rounds = [
                seen_by(core, buckets_of(core, q[b, h], h, turn), valid, causal=causal) for turn in range(core.rounds)
            ]
            for i in valid:
                found = [place[i] if core.see_self == "always" else place[i] - {i} for place in rounds]
                if not any(found):
                    found = [{i}]
                terms = []
                for keys in found:
                    for j in sorted(keys):
                        times = sum(j in other for other in found) if core.count_once else 1
                        key = q[b, h, j] if core.logits == "lra" else q[b, h, j] / q[b, h, j].norm()
                        terms.append((factor * q[b, h, i] @ key - math.log(times), v[b, h, j]))
                logits = torch.stack([logit for logit, _ in terms])
                lses[b, h, i] = logits.logsumexp(0)
                outs[b, h, i] = logits.softmax(0) @ torch.stack([value for _, value in terms])
    return outs, lses


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rounds": 1},
    {"rounds": 3, "logits": "unscaled", "across_buckets": False},
    {"logits": "lra", "see_self": "always", "buckets": [2, 2]},
    {"count_once": False},
    {"allow_leak": True, "rounds": 3},
    {"buckets": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 9, 14])
def test_values_and_gradients_are_those_of_the_definition(options: dict[str, Any], count: int) -> None:
    core = reformer(**options)
    q, v = tokens_of(count, E + 1)
    agree_by_definition(
        lambda given, **call: core(given["q"], torch.randn_like(q), given["v"], **call),
        lambda given, **call: twin(core, given["q"], given["v"], **call),
        {"q": q, "v": v},
    )


def test_the_published_causal_form_leaks_and_the_strict_one_does_not() -> None:
    q, v = tokens_of(32)
    later = torch.cat([q[:, :, :20], tokens_of(32, seed=7)[0][:, :, 20:]], 2)
    for leak in (False, True):
        core = reformer(allow_leak=leak)
        moved = (core(q, q, v, causal=True).out_BHNV - core(later, later, v, causal=True).out_BHNV)[:, :, :20]
        assert (moved.abs().max() > 0.1) == leak


def test_a_context_is_compared_as_the_keys_of_the_segment_are() -> None:
    for logits in ("scaled", "unscaled", "lra"):
        core = reformer(chunk=16, logits=logits, see_self="always")
        q, v = tokens_of(9)
        k, value = torch.randn(2, B, H, 5, E, dtype=torch.double)
        valid = torch.rand(B, 5) < 0.6
        got = core(q, q, v, context=Context(k, value, torch.zeros(B, 5, 1), valid), want_lse=True)
        factor = {"scaled": E**-0.5, "unscaled": 1.0, "lra": E**0.5}[logits]
        keys = torch.cat([k, q], 2)
        keys = keys if logits == "lra" else F.normalize(keys, dim=-1)
        all_logits = factor * q @ keys.mT
        hidden = F.pad(~valid, (0, 9))[:, None, None]
        all_logits = all_logits.masked_fill(hidden, -torch.inf)
        want = all_logits.softmax(-1) @ torch.cat([value, v], 2)
        torch.testing.assert_close(got.out_BHNV, want, rtol=0, atol=1e-10)
        torch.testing.assert_close(got.lse_BHN, all_logits.logsumexp(-1), rtol=0, atol=1e-10)


def test_keys_are_not_read_can_be_checked_and_may_be_zero() -> None:
    q, v = tokens_of(9)
    k = torch.randn_like(q)
    core = reformer()
    torch.testing.assert_close(core(q, k, v).out_BHNV, core(q, q, v).out_BHNV, rtol=0, atol=0)
    strict = reformer(check_shared=True)
    torch.testing.assert_close(strict(q, q.clone(), v).out_BHNV, core(q, q, v).out_BHNV, rtol=0, atol=0)
    with pytest.raises(ValueError, match="keys differ from queries; make both by one projection"):
        strict(q, k, v)
    core = build("reformer").half()
    q = torch.zeros(B, H, 9, E, dtype=torch.half, requires_grad=True)
    out = core(q, q, torch.ones_like(q)).out_BHNV
    assert (out == 1).all()
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_how_many_buckets_there_are_and_how_often_vectors_meet() -> None:
    assert usual_buckets(256, 64) == [8] and usual_buckets(300, 64) == [8] and usual_buckets(10, 64) == [2]
    assert usual_buckets(4096, 64) == [128] and usual_buckets(8192, 64) == [16, 16]
    assert ReformerAttention(WIDTH, H, length=512).rotations.shape == (H, E, 2, 8)
    # With 2 buckets a rotation is one random plane: vectors at an angle t share a bucket with 1 - t / pi.
    core = ReformerAttention(2, 1, rounds=5_000, buckets=2).eval()
    for angle in (0.3, 1.2, 2.5):
        q = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])[None, None]
        placed = core._sort(q, torch.ones(1, 2, dtype=torch.bool), None)
        met = sum(int(place.bucket_BHN[0, 0, 0] == place.bucket_BHN[0, 0, 1]) for place in placed) / core.rounds
        assert abs(met - (1 - angle / math.pi)) < 4 * 0.5 / math.sqrt(core.rounds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("buckets", [4, [2, 4]])
@pytest.mark.parametrize("causal", [False, True])
def test_one_round_is_that_of_transformers(causal: bool, buckets: int | list[int]) -> None:
    try:
        modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    except RuntimeError as reason:  # a torchvision of another torch, which transformers imports where it finds it
        pytest.skip(f"transformers cannot be imported: {reason}")
    config = modeling.ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=H,
        attention_head_size=E,
        num_hashes=1,
        num_buckets=buckets,
        lsh_attn_chunk_length=4,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=5,
        is_decoder=causal,
        attn_layers=["lsh"],
        axial_pos_embds=False,
    )
    theirs = modeling.LSHSelfAttention(config, layer_idx=0).double().eval()
    core = reformer(rounds=1, logits="unscaled", buckets=buckets, allow_leak=True)
    x = torch.randn(B, 16, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    q, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (theirs.query_key, theirs.value))
    torch.manual_seed(5)
    core.rotations.copy_(torch.randn(H, E, 1, core.rotations.shape[-1], dtype=torch.double))
    want = theirs(x).hidden_states
    got = core(q, q, v, causal=causal).out_BHNV.transpose(1, 2).flatten(2)
    # Their keys have 1e-6 added below the root of the mean square.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
