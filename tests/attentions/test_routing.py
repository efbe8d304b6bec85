"""The Routing Transformer's attention against its definition, token by token, and its centroids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, agree_by_definition
from attentions.cases import B, E, H
from common import refuses
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cached_transformers.attentions.routing import RoutingAttention
from cached_transformers.interfaces.memory import Context

WIDTH = H * E


def routing(**options: Any) -> RoutingAttention:
    torch.manual_seed(3)
    return RoutingAttention(WIDTH, H, **{"clusters": 3, "window": 4, **options}).double().eval()


def tokens_of(count: int, width: int = E, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, B, H, count, E, dtype=torch.double, generator=generator)
    v = torch.randn(B, H, count, width, dtype=torch.double, generator=generator)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def nearest(centroid: Tensor, vectors: Tensor, valid: list[int], window: int) -> list[int]:
    near = (centroid @ F.normalize(vectors.detach(), dim=-1).T).tolist()
    return sorted(valid, key=lambda i: -near[i])[:window]


def keys_of(core: RoutingAttention, q: Tensor, k: Tensor, head: int, valid: list[int], causal: bool) -> list[list[set]]:
    """For each token the set of keys of each of its clusters."""
    centroids = core.centroids_HCE[head]
    found: list[list[set]] = [[] for _ in q]
    if causal and not core.allow_leak:
        sums = q / q.norm(dim=-1, keepdim=True) + k / k.norm(dim=-1, keepdim=True)
        cluster = (sums @ centroids.T).argmax(-1).tolist()
        for i in valid:
            found[i] = [set([j for j in valid if j <= i and cluster[j] == cluster[i]][-core.window :])]
        return found
    for centroid in centroids:
        keys = nearest(centroid, k, valid, core.window)
        for i in nearest(centroid, q, valid, core.window):
            found[i].append({j for j in keys if j <= i or not causal})
    return found


def twin(
    core: RoutingAttention, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, heads, count, width = q.shape
    outs = torch.zeros_like(v)
    lses = torch.full((rows, heads, count), torch.finfo(q.dtype).min, dtype=q.dtype)
    for b in range(rows):
        valid = [i for i in range(count) if padding is None or not padding[b, i]]
        for h in range(heads):
            found = keys_of(core, q[b, h], k[b, h], h, valid, causal)
            for i in valid:
                parts = found[i] if core.combine == "mean" else [set().union(*found[i])]
                results = []
                for keys in parts:
                    at = sorted(keys)
                    logits = k[b, h, at] @ q[b, h, i] / math.sqrt(width)
                    results.append(logits.softmax(0) @ v[b, h, at])
                    if at and core.combine == "softmax":
                        lses[b, h, i] = logits.logsumexp(0)
                if results:
                    outs[b, h, i] = torch.stack(results).mean(0)
    return outs, lses


OPTIONS: list[dict[str, Any]] = [{}, {"combine": "mean"}, {"allow_leak": True}, {"clusters": 5, "window": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 9, 14])
def test_values_and_gradients_are_those_of_the_definition(options: dict[str, Any], count: int) -> None:
    core = routing(**options)
    agree_by_definition(
        lambda given, **call: core(*given.values(), **call),
        lambda given, **call: twin(core, *given.values(), **call),
        dict(zip("qkv", tokens_of(count, E + 1), strict=True)),
        lse=core.combine == "softmax",
    )


def test_the_published_causal_form_leaks_and_the_strict_one_does_not() -> None:
    given, later = tokens_of(32), tokens_of(32, seed=7)
    changed = [torch.cat([t[:, :, :20], u[:, :, 20:]], 2) for t, u in zip(given, later, strict=True)]
    for leak in (False, True):
        core = routing(allow_leak=leak, clusters=4, window=8)
        moved = (core(*given, causal=True).out_BHNV - core(*changed, causal=True).out_BHNV)[:, :, :20]
        assert (moved.abs().max() > 0.1) == leak


def test_some_queries_are_nowhere_among_the_nearest_but_served() -> None:
    q, k, v = tokens_of(64)
    core = routing(clusters=8, window=8)
    alone = (core(q, k, v).out_BHNV == 0).all(-1).double().mean()
    assert 0.1 < alone < 0.6
    assert not (core(q, k, v, causal=True).out_BHNV == 0).all(-1).any()
    q, k, v = tokens_of(64)
    core = routing(clusters=8, window=8)
    context = Context(*torch.randn(2, B, H, 5, E).double(), torch.zeros(B, 5, 1), torch.ones(B, 5, dtype=torch.bool))
    alone = (core(q, k, v).out_BHNV == 0).all(-1)
    want = F.scaled_dot_product_attention(q, context.k_BHME, context.v_BHME)
    torch.testing.assert_close(core(q, k, v, context=context).out_BHNV[alone], want[alone], rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_centroids_follow_what_is_near_them_and_the_loss_says_how_far_it_is(causal: bool) -> None:
    core = routing(decay=0.75, commitment=0.5).train()
    q, k, v = tokens_of(9)
    padding = torch.zeros(B, 9, dtype=torch.bool)
    padding[0, 5:] = True
    before = core.centroids_HCE.clone()
    loss = core(q, k, v, causal=causal, key_padding_mask=padding).auxiliary_loss
    want, terms = before.clone(), []
    for h in range(H):
        found: list[list[Tensor]] = [[], [], []]
        for b in range(B):
            for i in range(5 if b == 0 else 9):
                pair = [t[b, h, i] / t[b, h, i].norm() for t in (q, k)]
                for vector in pair:
                    routed = pair[0] + pair[1] if causal else vector
                    cluster = int((before[h] @ routed).argmax())
                    found[cluster].append(vector.detach())
                    terms.append((vector - before[h, cluster]).square().mean())
        for cluster, vectors in enumerate(found):
            if vectors:
                mean = torch.stack(vectors).sum(0)
                moved = 0.75 * before[h, cluster] + 0.25 * mean / mean.norm()
                want[h, cluster] = moved / moved.norm()
    assert (core.centroids_HCE == before).all()
    core.eval()
    torch.testing.assert_close(core.centroids_HCE, want, rtol=0, atol=1e-10)
    want_loss = 0.5 * torch.stack(terms).mean()
    agree(loss, want_loss, [q, k])


def test_evaluation_moves_nothing_and_has_no_loss() -> None:
    core = routing()
    saved = {key: t.clone() for key, t in core.named_buffers()}
    assert core(*tokens_of(9)).auxiliary_loss is None
    assert all((t == saved[key]).all() for key, t in core.named_buffers())
    core.train()
    assert routing(commitment=0.0).train()(*tokens_of(9)).auxiliary_loss is None
    still = routing(decay=1.0).train()
    still(*tokens_of(9))
    still.eval()
    assert (still.centroids_HCE == saved["centroids_HCE"]).all()


def test_updates_by_hand_are_one_update_over_all_calls() -> None:
    core, whole = routing(update="manual", decay=0.5).train(), routing(decay=0.5).train()
    first, second = tokens_of(9), tokens_of(9, seed=2)
    saved = core.centroids_HCE.clone()
    core(*first), core(*second)
    assert (core.centroids_HCE == saved).all()
    core.update_centroids()
    whole(*(torch.cat([a, b]) for a, b in zip(first, second, strict=True)))
    whole.update_centroids()
    torch.testing.assert_close(core.centroids_HCE, whole.centroids_HCE, rtol=0, atol=1e-12)
    assert (core.counts_HC == 0).all() and (core.centroids_HCE != saved).any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repetition_in_the_backward_pass_is_not_learned_twice(reentrant: bool) -> None:
    once, checked = routing(decay=0.5).train(), routing(decay=0.5).train()
    given = tokens_of(9)
    grads = []
    for core in (once, checked):
        for _ in range(2):  # the second time with centroids that moved
            for t in given:
                t.grad = None
            run = lambda *t, core=core: core(*t).out_BHNV  # noqa: E731
            out = checkpoint(run, *given, use_reentrant=reentrant) if core is checked else run(*given)
            out.square().sum().backward()
        grads.append([t.grad.clone() for t in given])
        core.eval()
    torch.testing.assert_close(once.centroids_HCE, checked.centroids_HCE, rtol=0, atol=0)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_centroids_find_clusters_that_are_there() -> None:
    """Vectors around three directions: k-means begins with them, and online updates come to them."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.linalg.qr(torch.randn(H, E, E, dtype=torch.double, generator=generator)).Q[:, :3]
    kind = torch.randint(3, (B, 60), generator=generator)
    noise = 0.1 * torch.randn(2, B, H, 60, E, dtype=torch.double, generator=generator)
    q, k = truth[:, kind].transpose(0, 1) + noise
    core = routing(window=40, decay=0.9)
    core.fit(q, k, generator=torch.Generator().manual_seed(4))
    distance = (1 - core.centroids_HCE @ truth.mT).amin(-1)
    assert distance.max() < 0.02
    core.centroids_HCE.copy_(F.normalize(truth + 0.3 * torch.randn(truth.shape, generator=generator), dim=-1))
    core.train()
    losses = [float(core(q, k, q).auxiliary_loss) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert (1 - core.centroids_HCE @ truth.mT).amin(-1).max() < 0.02


def test_k_means_leaves_padding_out_and_needs_enough_vectors() -> None:
    q, k, _ = tokens_of(12)
    padding = torch.zeros(B, 12, dtype=torch.bool)
    padding[:, 9:] = True
    cores = [routing(), routing()]
    cores[0].fit(q[:, :, :9], k[:, :, :9], generator=torch.Generator().manual_seed(0))
    cores[1].fit(q, k, padding, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cores[0].centroids_HCE, cores[1].centroids_HCE, rtol=0, atol=1e-12)
    refuses(r"4.*clusters=8", routing(clusters=8).fit, q[:, :, :1], k[:, :, :1])


def test_processes_share_their_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same tokens have twice the sums, and so the same centroids."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: t.mul_(2))
    core, alone = routing(decay=0.5, synchronise=True).train(), routing(decay=0.5).train()
    core(*tokens_of(9)), alone(*tokens_of(9))
    core.eval(), alone.eval()
    torch.testing.assert_close(core.centroids_HCE, alone.centroids_HCE, rtol=0, atol=1e-12)


def test_training_compiles_to_one_graph() -> None:
    core, plain, given = routing(decay=0.5).train(), routing(decay=0.5).train(), tokens_of(9)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager", dynamic=False)
    for causal in (False, True):
        got, want = compiled(*given, causal=causal), plain(*given, causal=causal)
        torch.testing.assert_close(got.out_BHNV, want.out_BHNV)
        torch.testing.assert_close(got.auxiliary_loss, want.auxiliary_loss)
    torch.testing.assert_close(core.centroids_HCE, plain.centroids_HCE)


def test_sizes_come_from_the_length_and_means_have_no_log_sum_exp() -> None:
    core = RoutingAttention(WIDTH, H, length=100)
    assert (core.clusters, core.window) == (10, 10)
    assert RoutingAttention(WIDTH, H, clusters=3, length=100).window == 34
    core, given = routing(combine="mean"), tokens_of(9)
    refuses("RoutingAttention", core, *given, want_lse=True)
