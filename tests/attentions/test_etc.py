"""ETC against dense attention in which every pair has its own label vector; the core and the layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree
from torch import Tensor
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers.attentions.etc import ETC, Labels
from cached_transformers.attentions.etc_layer import ETCLayer

B, H, E = 2, 2, 5


def dense(q: Tensor, k: Tensor, v: Tensor, labels_HNME: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over labelled keys of one row; a query that sees nothing gives 0."""
    keys = k[:, None] if labels_HNME is None else k[:, None] + labels_HNME
    logits = torch.einsum("hne,hnme->hnm", q, keys.expand(-1, q.shape[1], -1, -1)) / math.sqrt(q.shape[-1])
    weights = logits.exp() * mask
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1) @ v, total[..., 0].log()


def by_distance(labels: Labels, far: int) -> Tensor:
    return labels.distance_HLE[:, max(-labels.clip, min(labels.clip, far)) + labels.clip]


def by_segment(labels: Labels, own: bool) -> Tensor:
    assert labels.segment_H2E is not None
    return labels.segment_H2E[:, 0 if own else 1]


def stacked(rows: list[list[Tensor]]) -> Tensor:
    """(H, N, M, E) from a label (H, E) for each pair."""
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def core_twin(core: ETC, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One row without padding, key by key."""
    tokens, size = q.shape[1], core.segment or q.shape[1]
    firsts = [] if core.segment is None else range(0, tokens, size)
    kg, vg = ([t[:, g : g + size].mean(1) for g in firsts] for t in (k, v))
    labels, mask = [], torch.zeros(tokens, len(firsts) + tokens, dtype=torch.bool)
    for i in range(tokens):
        for place, g in enumerate(firsts):
            mask[i, place] = not causal or g + size - 1 <= i
        for j in range(tokens):
            mask[i, len(firsts) + j] = abs(i - j) <= core.radius and (not causal or j <= i)
        if core.labels is not None:
            to_globals = [by_segment(core.labels, g <= i < g + size) for g in firsts]
            labels.append([*to_globals, *(by_distance(core.labels, j - i) for j in range(tokens))])
    keys, values = (torch.cat([torch.stack(g, 1), t], 1) if g else t for g, t in ((kg, k), (vg, v)))
    return dense(q, keys, values, stacked(labels) if labels else None, mask)


@pytest.mark.parametrize("options", [{}, {"clip": None}, {"segment": None}, {"radius": 50, "segment": 7}])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 9, 17])
def test_the_core_is_softmax_over_labelled_keys(tokens: int, causal: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    core = ETC(H * E, H, **{"radius": 3, "segment": 4, "clip": 2, **options}).double()
    q, k, v = (torch.randn(B, H, tokens, width, dtype=torch.double, requires_grad=True) for width in (E, E, 3))
    for lengths in ([tokens, tokens], [tokens, max(1, tokens - 6)]):
        padding = torch.arange(tokens) >= torch.tensor(lengths)[:, None]
        mask = padding if padding.any() else None
        got = core(q, k, v, causal=causal, key_padding_mask=mask, want_lse=True)
        rows = [core_twin(core, *(t[b, :, :n] for t in (q, k, v)), causal) for b, n in enumerate(lengths)]
        want = torch.stack([F.pad(out, (0, 0, 0, tokens - n)) for (out, _), n in zip(rows, lengths, strict=True)])
        agree(got.out_BHNV, want, [q, k, v, *core.parameters()], weight=~padding[:, None, :, None])
        for b, n in enumerate(lengths):
            torch.testing.assert_close(got.lse_BHN[b, :, :n], rows[b][1], rtol=0, atol=1e-10)


def layer_twin(layer: ETCLayer, x: Tensor, g: Tensor, segment: list[int]) -> tuple[Tensor, Tensor]:
    """One row (N, D), (G, D) without padding: one dense attention over [global tokens, tokens]."""
    tokens, count = len(x), len(g)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(0, 1) for t in layer.qkv(torch.cat([g, x])).chunk(3, -1))
    mask = torch.ones(count + tokens, count + tokens, dtype=torch.bool)
    labels = []
    for i in range(-count, tokens):
        row = []
        for j in range(-count, tokens):
            table = layer.labels if i >= 0 else layer.global_labels
            if (i < 0) == (j < 0):
                row.append(None if table is None else by_distance(table, j - i))
            else:
                row.append(None if table is None else by_segment(table, segment[max(i, j)] == min(i, j) + count))
            mask[i + count, j + count] = min(i, j) < 0 or abs(i - j) <= layer.radius
        labels.append(row)
    heads, _ = dense(q, k, v, None if layer.labels is None else stacked(labels), mask)  # type: ignore[arg-type]
    joined = heads.transpose(0, 1).flatten(1)
    out_g, out_x = layer.global_output(joined[:count]), layer.output(joined[count:])
    x, g = layer.norm(x + out_x), layer.global_norm(g + out_g)
    x, g = (layer.last_norm(t + layer.feed_forward(t)) for t in (x, g))
    return x, g


@pytest.mark.parametrize("clip", [2, None])
@pytest.mark.parametrize(("tokens", "count", "radius"), [(1, 1, 3), (9, 3, 3), (13, 4, 2), (5, 2, 20)])
def test_the_layer_is_one_dense_attention(tokens: int, count: int, radius: int, clip: int | None) -> None:
    torch.manual_seed(1)
    layer = ETCLayer(H * E, H, radius=radius, clip=clip).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(B, tokens, H * E, dtype=torch.double, requires_grad=True)
    g = torch.randn(B, count, H * E, dtype=torch.double, requires_grad=True)
    segment = torch.randint(-1, count, (B, tokens))
    for lengths in ([(tokens, count)] * 2, [(tokens, count), (max(1, tokens - 4), max(1, count - 1))]):
        padding, padding_g = (
            torch.arange(size) >= torch.tensor([pair[i] for pair in lengths])[:, None]
            for i, size in enumerate((tokens, count))
        )
        got = layer(x, g, segment_BN=segment, padding_BN=padding, padding_BG=padding_g)
        rows = [layer_twin(layer, x[b, :n], g[b, :m], segment[b].tolist()) for b, (n, m) in enumerate(lengths)]
        for part in range(2):
            for b, pair in enumerate(lengths):
                agree(got[part][b, : pair[part]], rows[b][part], [x, g, *layer.parameters()])


def test_labels_start_at_the_scale_of_keys() -> None:
    labels = Labels(8, 64, 12, between=True)
    values = torch.cat([p.flatten() for p in labels.parameters()])
    assert abs(values).max() <= 1 and 0.42 < values.std() < 0.46 and abs(values.mean()) < 0.02


def test_what_the_layer_costs() -> None:
    tokens, radius, clip, count = 48, 4, 2, 8
    layer = ETCLayer(H * E, H, radius=radius, clip=clip, hidden=7)
    products = tokens * (2 * E * (3 * radius + count) + (2 * clip + 3) * E)
    products += count * (2 * E * (tokens + count) + (2 * clip + 3) * E)
    products = H * products + (tokens + count) * (4 * (H * E) ** 2 + 2 * H * E * 7)
    x, g = torch.randn(B, tokens, H * E), torch.randn(B, count, H * E)
    assert count_flops(layer, x, g) == 2 * B * products
