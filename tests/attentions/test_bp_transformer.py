"""BP-Transformer against loops over tokens that cut spans from where the last ones ended."""

from __future__ import annotations

import math

import pytest
import torch
from attentions.agreement import agree, inputs, paddings, softmax_of
from attentions.dense import padding_last
from torch import Tensor
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers.attentions import bp_transformer as bp
from cached_transformers.attentions.bp_layer import BPLayer, tree_levels
from cached_transformers.attentions.bp_transformer import BPAttention

B, H, E, V = 2, 2, 5, 3
D = H * E
Span = tuple[int, int, int, int]
"""First token, token after the last, type, level."""


def spans_of(place: int, tokens: int, k: int, clip: int, causal: bool) -> list[Span]:
    """What a token sees, by the definition: spans of a level start where those of the level below ended."""
    whole = 1 << max(tokens - 1, 0).bit_length()
    result = [(place, place + 1, 0, 0)]
    left, right, level = place, place + 1, 0
    while left > 0 or (right < tokens and not causal):
        for rank in range(k):
            kind = (2 * k + 1) * min(level, clip) + 2 * rank + 1
            if left > 0:
                own = level if left % 2**level == 0 else level - 1
                assert left % 2**own == 0
                result.append((left - 2**own, left, kind, own))
                left -= 2**own
            if right < whole and not causal:
                own = level if right % 2**level == 0 else level - 1
                assert right % 2**own == 0
                if right < tokens:
                    result.append((right, min(right + 2**own, tokens), kind + 1, own))
                right += 2**own
        level += 1
    return result


def mean_of(t_NE: Tensor, span: Span, there: Tensor) -> Tensor | None:
    first, end, *_ = span
    some = [t_NE[j] for j in range(first, end) if there[j]]
    return torch.stack(some).mean(0) if some else None


def twin(core: BPAttention, q: Tensor, k: Tensor, v: Tensor, padding: Tensor, *, causal: bool) -> Tensor:
    """The core, token by token."""
    tokens = q.shape[2]
    rows = []
    for b in range(B):
        for h in range(H):
            for i in range(tokens):
                keys, values = [], []
                for span in spans_of(i, tokens, core.k, core.clip, causal):
                    key, value = (mean_of(t[b, h], span, ~padding[b]) for t in (k, v))
                    if key is not None and value is not None:
                        keys.append(key if core.types_TE is None else key + core.types_TE[span[2]])
                        values.append(value)
                rows.append(softmax_of(q[b, h, i], keys, values) if keys else torch.zeros(V).double())
    return torch.stack(rows).view(B, H, tokens, V)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("k", "clip", "types"), [(1, 5, True), (2, 1, True), (3, 0, False)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 13])
def test_the_core_is_its_loop_over_tokens(tokens: int, k: int, clip: int, types: bool, causal: bool) -> None:
    core = BPAttention(D, H, k=k, clip=clip, types=types).double()
    for padding in paddings(tokens):
        sources = inputs(tokens, width=E, values=V)
        got = core(*sources, causal=causal, key_padding_mask=padding if padding.any() else None).out_BHNV
        want = padding_last(lambda *given: twin(core, *given, causal=causal), sources, padding)
        agree(got, want, [*sources, *core.parameters()])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_a_token_sees_each_token_once_whatever_the_length(k: int, causal: bool) -> None:
    for tokens in (*range(1, 40), 63, 64, 65, 100, 333):
        nearby = bp.reach(tokens, k, 5, causal=causal, device=torch.device("cpu"))
        levels = nearby.levels
        at_S = [at for at, level in enumerate(levels) for _ in range(level.width)]
        height_S1 = torch.tensor([[levels[at].height] for at in at_S])
        first_NS1 = nearby.node_NS[..., None] * height_S1
        held = (torch.arange(tokens) >= first_NS1) & (torch.arange(tokens) < first_NS1 + height_S1)
        counts = (held & nearby.seen_NS[..., None]).sum(1)
        want = torch.ones(tokens, tokens, dtype=torch.long)
        assert torch.equal(counts, want.tril() if causal else want)
        for i in {0, tokens // 3, tokens - 1}:
            got = {
                (node << at, min(node + 1 << at, tokens), kind, at)
                for at, node, seen, kind in zip(at_S, *(t[i].tolist() for t in nearby[1:]), strict=True)
                if seen
            }
            assert got == set(spans_of(i, tokens, k, 5, causal))
        if tokens > k:
            assert len(levels) <= 2 + math.log2(tokens / k) and len(levels) <= tree_levels(tokens)


def test_the_context_grows_with_the_logarithm_and_is_summed_in_single() -> None:
    for tokens, k, most in [(64, 1, 12), (64, 2, 19), (64, 4, 27), (257, 4, 44), (4096, 4, 75)]:
        nearby = bp.reach(tokens, k, 5, causal=False, device=torch.device("cpu"))
        assert int(nearby.seen_NS.sum(1).max()) == most
    ones = torch.full((1, 1, 4096, 1), 1.0, dtype=torch.float16)
    means, _ = bp.span_means(ones, None, tree_levels(4096))
    assert all(t.dtype == torch.float16 and (t == 1).all() for t in means)


def products(tokens: int, k: int, causal: bool) -> int:
    """Pairs of tokens and nodes in reach: all of a small level, else blocks of A nodes with their neighbours."""
    block = 1 << math.ceil(math.log2(2 * k))
    reach, total = block * (2 if causal else 3), 0
    for level in range(bp.levels_used(tokens, k)):
        nodes = math.ceil(tokens / 2**level)
        total += tokens * nodes if nodes <= reach else math.ceil(nodes / block) * block * 2**level * reach
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 4), (100, 3), (7, 1)])
def test_cost(n: int, k: int, causal: bool) -> None:
    core = BPAttention(D, H, k=k, clip=3)
    q, keys, v = torch.randn(B, H, n, E), torch.randn(B, H, n, E), torch.randn(B, H, n, V)
    kinds = (2 * k + 1) * 4
    want = products(n, k, causal) * (E + V) + n * kinds * E
    assert count_flops(core, q, keys, v, causal=causal) == 2 * B * H * want
    if n == 256:  # no block is filled up
        levels = bp.levels_used(n, k)
        assert products(n, k, causal) <= n * (4 if causal else 6) * k * levels
    if n < 64:
        return
    layer = BPLayer(D, H, 12, k=k, clip=3)
    nodes = BPLayer.first_nodes(torch.randn(B, n, D))
    spans = sum(math.ceil(n / 2**level) * 2**level for level in range(1, tree_levels(n)))
    mixing = products(n, k, causal) * 2 * E * H + n * kinds * E * H + spans * 2 * E * H
    rest = nodes.shape[1] * (4 * D * D + 2 * D * 12)
    assert count_flops(layer, nodes, n, causal=causal) == 2 * B * (mixing + rest)
    assert n != 256 or nodes.shape[1] == 2 * n - 1


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_and_their_neighbours_hold_all_that_is_seen(causal: bool) -> None:
    """At lengths whose levels are cut into blocks: the same as a dense mask over the means of all spans."""
    for tokens, k in [(40, 1), (77, 2), (131, 3)]:
        core = BPAttention(D, H, k=k).double()
        q, keys = torch.randn(2, B, H, tokens, E, dtype=torch.double)
        v = torch.randn(B, H, tokens, V, dtype=torch.double)
        padding = torch.zeros(B, tokens, dtype=torch.bool)
        padding[0, tokens - 9 :] = True
        for hidden in (None, padding):
            got, lse = core(q, keys, v, causal=causal, key_padding_mask=hidden, want_lse=True)[:2]
            there = torch.ones(B, tokens, dtype=torch.double) if hidden is None else (~hidden).double()
            for i in (0, tokens // 2, tokens - 10, tokens - 1):
                spans = spans_of(i, tokens, k, 5, causal)
                member_ST = torch.zeros(len(spans), tokens, dtype=torch.double)
                for row, (first, end, *_) in zip(member_ST, spans, strict=True):
                    row[first:end] = 1
                member_BST = member_ST * there[:, None]
                mean_B1ST = (member_BST / member_BST.sum(-1, keepdim=True).clamp(min=1))[:, None]
                types = core.types_TE[[span[2] for span in spans]]  # type: ignore[index]
                logits = (mean_B1ST @ keys + types) @ q[:, :, i, :, None] / math.sqrt(E)
                seen = member_BST.any(-1)[:, None]
                logits = torch.where(seen, logits[..., 0], -torch.inf)
                torch.testing.assert_close(lse[:, :, i], logits.logsumexp(-1), rtol=0, atol=1e-10)
                want = (logits.softmax(-1)[..., None, :] @ (mean_B1ST @ v))[..., 0, :]
                torch.testing.assert_close(got[:, :, i], want, rtol=0, atol=1e-10)


def layer_twin(layer: BPLayer, nodes: Tensor, tokens: int, padding: Tensor, *, causal: bool) -> Tensor:
    """The layer as attention over the whole graph with a dense mask; nodes without a token are 0."""
    levels = tree_levels(tokens)
    sizes = bp.level_sizes(tokens, levels)
    spans = [(j * 2**level, min((j + 1) * 2**level, tokens)) for level, n in enumerate(sizes) for j in range(n)]
    level_of = [level for level, n in enumerate(sizes) for _ in range(n)]
    out = torch.zeros_like(nodes)
    for b in range(len(nodes)):
        there = [bool((~padding[b, first:end]).any()) for first, end in spans]
        mask = torch.zeros(len(spans), len(spans), dtype=torch.bool)
        kind = torch.zeros(len(spans), len(spans), dtype=torch.long)
        for node, (first, end) in enumerate(spans):
            if node >= tokens:
                mask[node, first:end] = True
                kind[node, first:end] = (2 * layer.k + 1) * min(level_of[node], layer.clip)
                continue
            for start, _, own_kind, level in spans_of(node, tokens, layer.k, layer.clip, causal):
                other = sum(sizes[:level]) + start // 2**level
                mask[node, other] = True
                kind[node, other] = own_kind
        mask &= torch.tensor(there)
        q, k, v = layer.qkv(nodes[b]).chunk(3, -1)
        mixed = []
        for h in range(H):
            part = slice(h * E, (h + 1) * E)
            logits = q[:, part] @ k[:, part].T + torch.einsum("me,mne->mn", q[:, part], layer.types_TE[kind])
            weights = (logits / math.sqrt(E)).masked_fill(~mask, -1e300).softmax(-1) * mask
            mixed.append(weights @ v[:, part])
        y = layer.attention_norm(nodes[b] + layer.output(torch.cat(mixed, -1)))
        y = layer.norm(y + layer.feed_forward(y))
        out[b] = torch.where(torch.tensor(there)[:, None], y, 0)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (2, 1), (6, 1), (8, 2), (13, 2)])
def test_the_layer_is_attention_over_its_graph(tokens: int, k: int, causal: bool) -> None:
    layer = BPLayer(D, H, 7, k=k, clip=9).double()
    for padding in paddings(tokens):
        nodes = torch.randn_like(BPLayer.first_nodes(torch.zeros(B, tokens, D).double())).requires_grad_()
        want = layer_twin(layer, nodes, tokens, padding, causal=causal)
        mask = padding if padding.any() else None
        got = torch.where(want == 0, 0, layer(nodes, tokens, causal=causal, padding_BN=mask))
        keep = ~padding  # outputs at padding are not read
        keep = F.pad(keep, (0, nodes.shape[1] - tokens), value=True)[..., None]
        agree(got, want, [nodes, *layer.parameters()], weight=keep)


@pytest.mark.parametrize("causal", [False, True])
def test_layers_carry_the_spans_and_ignore_padding(causal: bool) -> None:
    layers = [BPLayer(D, H, 7, k=1).double() for _ in range(3)]

    def run(x: Tensor, padding: Tensor | None = None) -> Tensor:
        nodes = BPLayer.first_nodes(x)
        for layer in layers:
            nodes = layer(nodes, x.shape[1], causal=causal, padding_BN=padding)
        return nodes[:, : x.shape[1]]

    x = torch.randn(B, 13, D, dtype=torch.double)
    padding = torch.zeros(B, 13, dtype=torch.bool)
    padding[0, 6:] = True
    torch.testing.assert_close(run(x, padding)[:1, :6], run(x[:1, :6]), rtol=0, atol=1e-10)
    changed = torch.cat([x[:, :5], torch.randn(B, 8, D).double()], 1)
    moved = (run(changed) - run(x))[:, :5].abs().max()
    assert moved < 1e-12 if causal else moved > 1e-3
