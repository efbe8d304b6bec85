"""BigBird against a loop over single tokens that is written from the paper's pattern, and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs
from torch import Tensor

from cached_transformers.attentions import SoftmaxAttention
from cached_transformers.attentions.bigbird import BigBird
from cached_transformers.extras import require

B, H, E, V, W = 2, 2, 5, 3, 4


def mixed(x: int) -> int:
    """The hash in plain numbers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def drawn(core: BigBird, head: int, block: int, blocks: int, causal: bool) -> list[int]:
    """What a block of one head draws, from the definition."""
    side = core.window // 2
    free = [j for j in range(1, blocks - 1) if abs(j - block) > side]
    if causal:
        free = [j for j in range(1, block) if block - j > side]
    state = mixed(core.seed)
    for part in (core.index, head, block):
        state = mixed(state ^ part)
    return sorted(free, key=lambda j: -mixed(state ^ j))[: core.random]


def visible(core: BigBird, tokens: int, causal: bool) -> Tensor:
    """(H, N, N) of a row of so many tokens, one block at a time."""
    blocks = -(-tokens // core.block)
    mask = torch.zeros(core.heads, tokens, tokens, dtype=torch.bool)
    for head in range(core.heads):
        for i in range(blocks):
            seen = {0, *range(max(0, i - core.window // 2), i + core.window // 2 + 1)}
            seen |= set(drawn(core, head, i, blocks, causal))
            if causal:
                seen = {j for j in seen if j <= i}
            elif i in (0, blocks - 1):
                seen = set(range(blocks))
            else:
                seen |= {blocks - 1}
            for j in seen:
                mask[head, i * W : (i + 1) * W, j * W : (j + 1) * W] = True
    return mask.tril() if causal else mask


def twin(core: BigBird, q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: list[int]) -> Tensor:
    """Each row by itself, without its padding; 0 where that is."""
    rows = []
    for b, length in enumerate(lengths):
        mask = visible(core, length, causal)
        logits = q[b, :, :length] @ k[b, :, :length].mT / math.sqrt(E)
        out = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v[b, :, :length]
        rows.append(torch.nn.functional.pad(out, (0, 0, 0, q.shape[2] - length)))
    return torch.stack(rows)


@pytest.mark.parametrize("options", [{}, {"random": 2, "index": 3}, {"random": 0}, {"window": 5, "random": 1}])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 17, 24, 37])
def test_it_is_softmax_over_the_pattern(tokens: int, causal: bool, options: dict[str, int]) -> None:
    core = BigBird(H, block=W, **{"random": 1, **options}).double()
    for lengths in ([tokens, tokens], [tokens, max(1, tokens - 7)], [max(1, tokens - 13), tokens]):
        padding = torch.arange(tokens) >= torch.tensor(lengths)[:, None]
        given = inputs(tokens, width=E, values=V)
        got = core(*given, causal=causal, key_padding_mask=padding if padding.any() else None).out_BHNV
        agree(got, twin(core, *given, causal, lengths), given, weight=~padding[:, None, :, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "random"), [(13, 1), (20, 1), (20, 2), (24, 2), (32, 4)])
def test_few_blocks_see_all_and_the_table_says_the_same(
    tokens: int, random: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to r + 4 blocks (causal: r + 3) the pattern is full; the path of the table gives it as well."""
    core, blocks = BigBird(H, block=W, random=random), -(-tokens // W)
    given = inputs(tokens, width=E, values=V)
    full = visible(core, tokens, causal)
    allowed = torch.ones_like(full).tril() if causal else torch.ones_like(full)
    assert core.sees_all(blocks, causal) == bool((full == allowed).all())
    plain = core(*given, causal=causal, want_lse=True)
    monkeypatch.setattr(core, "sees_all", lambda blocks, causal: False)
    table = core(*given, causal=causal, want_lse=True)
    torch.testing.assert_close(table.out_BHNV, plain.out_BHNV, rtol=0, atol=1e-10)
    torch.testing.assert_close(table.lse_BHN, plain.lse_BHN, rtol=0, atol=1e-10)
    exact = SoftmaxAttention()(*given, causal=causal).out_BHNV
    if blocks <= random + (3 if causal else 4):
        torch.testing.assert_close(plain.out_BHNV, exact, rtol=0, atol=1e-10)
    else:
        assert (plain.out_BHNV - exact).abs().max() > 1e-3


def test_blocks_are_drawn_evenly_and_otherwise_for_each_layer_head_and_block() -> None:
    """Chi-square of how often each of 12 free blocks is drawn in 4000 draws of 3: 11 degrees of freedom, mean 11."""
    blocks, asks, heads, layers = 17, 8, 200, 20
    tables = [
        BigBird(heads, index=index, random=3).draw(blocks, torch.full((1, 1, 1, 1), blocks - 1), False)[0][0]
        for index in range(layers)
    ]
    counts = torch.stack(tables)[:, :, asks].flatten().bincount(minlength=blocks)
    assert counts[[0, 7, 8, 9, 16]].sum() == 0
    free = counts[counts > 0].double()
    expected = heads * layers * 3 / 12
    assert len(free) == 12
    # Draws without replacement spread less than a multinomial: 9 / 11 of it for 3 of 12.
    assert 2 < ((free - expected).square() / expected).sum() < 24
    pairs = torch.stack(tables)[:, :, asks].sort(-1).values.flatten(0, 1)
    assert len(pairs.unique(dim=0)) == math.comb(12, 3)
    assert not torch.equal(tables[0], tables[1]) and not torch.equal(tables[0][0], tables[0][1])
    other = BigBird(heads, random=3, seed=1).draw(blocks, torch.full((1, 1, 1, 1), blocks - 1), False)[0][0]
    assert not torch.equal(tables[0], other)


def huggingface(tokens: int, training: bool) -> tuple[Any, Tensor, Tensor, list[Tensor]]:
    """Their layer, its table (H, Q, R), its output and q, k, v; the last 6 tokens of the second row are padding."""
    pytest.importorskip("transformers")
    big_bird = require("transformers.models.big_bird.modeling_big_bird", extra="transformers")
    torch.manual_seed(0)
    config = big_bird.BigBirdConfig(
        hidden_size=H * E, num_attention_heads=H, block_size=W, num_random_blocks=2, attention_probs_dropout_prob=0.0
    )
    layer, tables = big_bird.BigBirdBlockSparseAttention(config, seed=3).double(), []
    draw = layer._bigbird_block_rand_mask_with_head
    layer._bigbird_block_rand_mask_with_head = lambda **options: tables.append(draw(**options)) or tables[-1]
    layer.train(training)
    x = torch.randn(B, tokens, H * E, dtype=torch.double)
    keep = torch.ones(B, tokens, dtype=torch.double)
    keep[1, -6:] = 0
    blocked, band, of_queries, of_keys = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(keep, W)
    out = layer(x, band, of_queries, of_keys, blocked, blocked)[0].unflatten(-1, (H, E)).transpose(1, 2)
    qkv = [linear(x).unflatten(-1, (H, E)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)]
    table = torch.nn.functional.pad(torch.tensor([t.tolist() for t in tables[0]]), (0, 0, 1, 1))
    return layer, table, out, qkv


def test_transformers_gives_the_same_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their table and no padding: there, a padded row keeps the last block of the longest row as a global one."""
    _, table, theirs, qkv = huggingface(40, training=True)
    core = BigBird(H, block=W, random=2)
    drawn = (table[None], torch.ones(1, 1, *table.shape[1:], dtype=torch.bool))
    monkeypatch.setattr(core, "draw", lambda blocks, last_B111, causal: drawn)
    ours = core(*qkv).out_BHNV
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-7)
    assert (ours[1] - theirs[1]).abs().max() > 1e-3


def test_transformers_counts_the_first_block_again_for_each_drawn_one_in_evaluation() -> None:
    """Their table is then all zeros: the weight of a key of block 0 is 1 + r times that of one softmax."""
    _, table, theirs, (q, k, v) = huggingface(40, training=False)
    assert (table == 0).all()
    core = BigBird(H, block=W, random=0)
    mask = visible(core, 40, False)
    times = torch.ones(40, 40, dtype=torch.double)
    times[W:-W, :W] = 3
    logits = (q @ k.mT / math.sqrt(E)).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(theirs[0], ((logits + times.log()).softmax(-1) @ v)[0], rtol=0, atol=1e-7)
    assert (theirs[0] - core(q, k, v).out_BHNV[0]).abs().max() > 1e-2
