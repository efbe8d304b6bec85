"""Sparse Sinkhorn attention against its definition, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attentions.agreement import agree_by_definition
from attentions.cases import B, E, H
from common import refuses
from torch import Tensor

from cached_transformers.attentions.sinkhorn import SinkhornAttention, balance

WIDTH = H * E


def sinkhorn(**options: Any) -> SinkhornAttention:
    torch.manual_seed(3)
    return SinkhornAttention(WIDTH, H, **{"block": 4, "length": 24, "iterations": 3, **options}).double().eval()


def tokens_of(count: int, width: int = E, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, B, H, count, E, dtype=torch.double, generator=generator)
    v = torch.randn(B, H, count, width, dtype=torch.double, generator=generator)
    x = torch.randn(B, count, WIDTH, dtype=torch.double, generator=generator)
    return {name: t.requires_grad_() for name, t in {"q": q, "k": k, "v": v, "x": x}.items()}


def run(core: SinkhornAttention, given: dict[str, Tensor], **call: Any) -> Any:
    return core(given["q"], given["k"], given["v"], x_BND=given["x"], **call)


def mean(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(vectors)).mean(0) if vectors else torch.zeros_like(like)


def scores_of(core: SinkhornAttention, given: dict[str, Tensor], b: int, h: int, blocks: list[list[int]], causal: bool):
    """One score for each place and each block that may come there."""
    found: dict[tuple[int, int], Tensor] = {}
    for m, block in enumerate(blocks):
        first = m * core.block
        asking = [i for other in blocks[:m] for i in other] + [i for i in block if i == first] if causal else block
        for n, other in enumerate(blocks):
            open_to = n < m if causal else (n != m or core.own_block or core.sortcut is not None)
            if not (block and other and open_to):
                continue
            if core.sort_net == "scores":
                q = mean([given["q"][b, h, i] for i in asking], given["q"][b, h, 0])
                found[m, n] = q @ mean([given["k"][b, h, j] for j in other], q) / math.sqrt(E)
            else:
                x = mean([given["x"][b, i] for i in asking], given["x"][b, 0])
                inner = (x @ core.inner_HDF[h] + core.inner_H1F[h, 0]).relu()
                found[m, n] = inner @ core.outer_HFP[h, :, n] + core.outer_H1P[h, 0, n]
    return found


def matrix_of(core: SinkhornAttention, scores: dict[tuple[int, int], Tensor], causal: bool) -> dict:
    """The balanced matrix, by sums of numbers above 0."""
    r = {at: (score / core.temperature).exp() for at, score in scores.items()}
    for _ in range(core.iterations):
        columns = {(m, n): sum(r[p, c] for p, c in r if c == n and (p <= m or not causal)) for m, n in r}
        r = {at: r[at] / columns[at] for at in r}
        r = {(m, n): r[m, n] / sum(r[p, c] for p, c in r if p == m) for m, n in r}
    if core.hard:
        best = {m: max((n for p, n in r if p == m), key=lambda n: float(r[m, n].detach())) for m in {m for m, _ in r}}
        r = {(m, n): torch.ones_like(r[m, n]) for m, n in best.items()}
    return r


def beside(m: int, r: dict, k: Tensor, v: Tensor, valid: list[int], size: int) -> list[tuple]:
    """Slot, share, key and value of what stands beside place m."""
    found = []
    for slot in range(size):
        mixed = [(share, n * size + slot) for (p, n), share in r.items() if p == m and n * size + slot in valid]
        if mixed:
            share = sum(s for s, _ in mixed)
            key, value = (sum(s * t[j] for s, j in mixed) / share for t in (k, v))
            found.append((slot, share, key, value))
    return found


def twin(
    core: SinkhornAttention, given: dict[str, Tensor], *, causal: bool = False, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v = given["q"], given["k"], given["v"]
    rows, heads, count, _ = q.shape
    size = core.block
    outs = torch.zeros_like(v)
    lses = torch.full((rows, heads, count), torch.finfo(q.dtype).min, dtype=q.dtype)
    for b in range(rows):
        valid = [i for i in range(count) if padding is None or not padding[b, i]]
        blocks = [[i for i in valid if i // size == m] for m in range(-(-count // size))]
        for h in range(heads):
            r = matrix_of(core, scores_of(core, given, b, h, blocks, causal), causal)
            for i in valid:
                own = [j for j in blocks[i // size] if j <= i or not causal]
                local = [(q[b, h, i] @ k[b, h, j] / math.sqrt(E), v[b, h, j]) for j in own]
                places = range(core.sortcut) if core.sortcut else [i // size]
                other = [entry for m in places for entry in beside(m, r, k[b, h], v[b, h], valid, size)]
                far = [(q[b, h, i] @ key / math.sqrt(E) + share.log(), value) for _, share, key, value in other]
                if core.combine == "scores":
                    at = {slot: (share * key, share * value) for slot, share, key, value in other}
                    zero = (torch.zeros_like(k[b, h, 0]), torch.zeros_like(v[b, h, 0]))
                    pairs = [(j, *at.get(j % size, zero)) for j in own]
                    sets = [[(q[b, h, i] @ (k[b, h, j] + key) / math.sqrt(E), v[b, h, j] + u) for j, key, u in pairs]]
                elif core.combine == "outputs":
                    sets = [local, far]
                else:
                    sets = [far if core.sortcut else local + far]
                for chosen in sets:
                    if chosen:
                        logits = torch.stack([logit for logit, _ in chosen])
                        outs[b, h, i] = outs[b, h, i] + logits.softmax(0) @ torch.stack([value for _, value in chosen])
                        lses[b, h, i] = logits.logsumexp(0)
    return outs, lses


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sort_net": "mlp", "temperature": 0.3},
    {"hard": True},
    {"own_block": True, "iterations": 1},
    {"combine": "scores"},
    {"combine": "outputs"},
    {"sortcut": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 8, 14])
def test_values_and_gradients_are_those_of_the_definition(options: dict[str, Any], count: int) -> None:
    core = sinkhorn(**options)
    agree_by_definition(
        lambda given, **call: run(core, given, **call),
        lambda given, **call: twin(core, given, **call),
        tokens_of(count, E + 1),
        core.parameters(),
        lse=core.combine != "outputs",
        forms=(False,) if core.sortcut else (False, True),
    )


def test_a_causal_balance_depends_on_earlier_places_and_calls_must_fit() -> None:
    scores = torch.randn(1, 1, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    later = torch.cat([scores[:, :, :4], scores[:, :, 4:] + 5], 2)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    for causal in (True, False):
        r, s = (balance(t.clone(), allowed, 5, causal=causal)[:, :, :4] for t in (scores, later))
        assert ((r - s).abs().max() < 1e-12) == causal
    assert (r[:, :, 0] == 0).all()
    given = tokens_of(14)
    refuses("SinkhornAttention", run, sinkhorn(sortcut=1), given, causal=True)
    refuses("SinkhornAttention", run, sinkhorn(combine="outputs"), given, want_lse=True)
    refuses("4 blocks of 4 tokens are more than the 2", run, sinkhorn(sort_net="mlp", length=8), given)
    refuses(r"x_BND.*sort_net='scores'", sinkhorn(sort_net="mlp"), given["q"], given["k"], given["v"])


def test_hard_has_the_gradient_of_the_soft_matrix_in_training() -> None:
    given = tokens_of(14)
    core = sinkhorn(hard=True, sort_net="mlp", noise=False)
    want = run(core, given).out_BHNV
    assert not any(t.requires_grad for t in torch.autograd.grad(want.sum(), [given["v"]]))
    assert torch.autograd.grad(run(core, given).out_BHNV.sum(), [core.outer_HFP], allow_unused=True) == (None,)
    core.train()
    got = run(core, given).out_BHNV
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    gradient = torch.autograd.grad(got.square().sum(), [core.outer_HFP])[0]
    assert gradient.isfinite().all() and gradient.abs().max() > 1e-3


def test_noise_is_of_training_alone_and_chooses_evenly_among_equal_blocks() -> None:
    """Queries of 0 score all blocks alike: each of the 5 others comes to stand beside a block as often."""
    core = sinkhorn(block=1, hard=True, iterations=1).train()
    rows, blocks = 2000, 6
    q = torch.zeros(rows, H, blocks, E, dtype=torch.double)
    given = {"q": q, "k": q, "v": torch.eye(blocks, dtype=torch.double).expand(rows, H, -1, -1), "x": q[:, 0]}
    out = run(core, given, generator=torch.Generator().manual_seed(1)).out_BHNV
    again = run(core, given, generator=torch.Generator().manual_seed(1)).out_BHNV
    other = run(core, given, generator=torch.Generator().manual_seed(2)).out_BHNV
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    assert (out != other).any()
    shares = 2 * out.mean((0, 1)) - torch.eye(blocks, dtype=torch.double)  # half of each softmax is the own block
    want = (1 - torch.eye(blocks, dtype=torch.double)) / 5
    assert (shares - want).abs().max() < 5 * math.sqrt(0.2 * 0.8 / (rows * H))
    core.noise = False
    torch.testing.assert_close(run(core, given).out_BHNV, run(core.eval(), given).out_BHNV, rtol=0, atol=1e-12)
