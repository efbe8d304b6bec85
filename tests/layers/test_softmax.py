"""The softmax core against the formula, for every combination of masks, with gradients; shared keys.

Legend: B rows, H heads, N tokens, M slots, E head width."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree
from contract.contracts import CONTRACTS
from torch import Tensor, nn

from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers import create_model
from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.memory import Context
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.models.generation import generate

B, H, N, M, E = 2, 2, 5, 3, 4


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen_BNL: Tensor) -> Tensor:
    """softmax over what each query sees, spelled out; a query that sees nothing gives zeros."""
    logits = q @ k.mT / math.sqrt(E)
    if bias is not None:
        logits = logits + bias
    weight = torch.where(seen_BNL[:, None], (logits - logits.amax(-1, keepdim=True).detach()).exp(), 0)
    return (weight @ v) / weight.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize(("causal", "padded", "context", "biased"), list(itertools.product([False, True], repeat=4)))
def test_values_and_gradients(causal: bool, padded: bool, context: bool, biased: bool) -> None:
    q, k, v = (torch.randn(B, H, N, E, dtype=torch.double, requires_grad=True) for _ in range(3))
    ck, cv = (torch.randn(B, H, M, E, dtype=torch.double, requires_grad=True) for _ in range(2))
    m = M if context else 0
    bias = torch.randn(B, H, N, m + N, dtype=torch.double, requires_grad=True) if biased else None
    # Row 0 begins with padding: with causal and no valid slot its first query sees nothing at all.
    padding = torch.tensor([[True, False, False, True, False], [False, False, False, True, True]]) if padded else None
    valid = torch.tensor([[False, False, False], [True, False, True]])

    seen_BNL = torch.ones(B, N, m + N, dtype=torch.bool)
    for b, i, j in itertools.product(range(B), range(N), range(N)):
        seen_BNL[b, i, m + j] = not (causal and j > i) and not (padding is not None and padding[b, j])
    if context:
        seen_BNL[:, :, :m] = valid[:, None]

    offered = Context(ck, cv, torch.zeros(B, M, 1), valid) if context else None
    got = SoftmaxAttention()(q, k, v, causal=causal, key_padding_mask=padding, context=offered, bias_BHNM=bias).out_BHNV
    keys, values = (torch.cat(pair, 2) if context else pair[1] for pair in ((ck, k), (cv, v)))
    want = formula(q, keys, values, bias, seen_BNL)
    sources = [q, k, v, *([ck, cv] if context else []), *([] if bias is None else [bias])]
    agree(got, want, sources)
    if causal and padded:
        assert (got[0, :, 0] == 0).all()

    seen = {"causal": causal, "key_padding_mask": padding, "context": offered, "bias_BHNM": bias}
    both = SoftmaxAttention()(q, k, v, **seen, want_lse=True)
    torch.testing.assert_close(both.out_BHNV, got, rtol=0, atol=1e-12)
    lse = both.lse_BHN
    logits = q @ keys.mT / math.sqrt(E) + (0 if bias is None else bias)
    logits = logits.masked_fill(~seen_BNL[:, None], -torch.inf)
    some = seen_BNL.any(-1)[:, None].expand(B, H, N)
    assert (lse[~some] < -1e300).all()
    agree(lse[some], logits[some].logsumexp(-1), sources)


def test_a_context_of_one_row_other_numbers_of_keys_and_dropout() -> None:
    q, k, v = torch.randn(3, B, H, N, E, dtype=torch.double)
    one = Context(*torch.randn(2, 1, H, M, E).double(), torch.zeros(1, M, 1), torch.tensor([[True, False, True]]))
    each = Context(*(t.expand(B, *t.shape[1:]) for t in one[:4]))
    core = SoftmaxAttention()
    for causal in (False, True):
        a, b = (core(q, k, v, causal=causal, context=c).out_BHNV for c in (one, each))
        assert torch.equal(a, b)
    q, k, v = (torch.randn(B, H, n, E, dtype=torch.double) for n in (N, 2, 2))
    want = formula(q, k, v, None, torch.ones(B, N, 2, dtype=torch.bool))
    torch.testing.assert_close(SoftmaxAttention()(q, k, v).out_BHNV, want, rtol=0, atol=1e-10)
    q, k, v = torch.randn(3, B, H, N, E)
    core, plain = SoftmaxAttention(dropout=0.5), SoftmaxAttention()
    assert not torch.allclose(core(q, k, v).out_BHNV, plain(q, k, v).out_BHNV)
    assert torch.equal(core.eval()(q, k, v).out_BHNV, plain(q, k, v).out_BHNV)


HEADS, WIDTH, SEGMENT = 4, 16, 8


def model(kv_heads: int | None, memory: Any, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocabulary": 11, "width": WIDTH, "depth": 2, "heads": HEADS, "feed_forward": 48}
    return create_model("language_model", **sizes, memory=memory, kv_heads=kv_heads, **options).double()


def repeated(t: Tensor, kv_heads: int) -> Tensor:
    """Keys and values of every head from a fused projection's weight or bias."""
    head = WIDTH // HEADS
    q, *shared = t.split([WIDTH, kv_heads * head, kv_heads * head])
    return torch.cat(
        [q, *(s.unflatten(0, (kv_heads, head)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1) for s in shared)]
    )


def pair(kv_heads: int, memory: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    shared, own = model(kv_heads, memory, **options), model(None, memory, **options)
    shapes = {name: t.shape for name, t in own.state_dict().items()}
    weights = shared.state_dict().items()
    own.load_state_dict({name: t if t.shape == shapes[name] else repeated(t, kv_heads) for name, t in weights})
    return shared, own


@pytest.mark.parametrize(
    ("memory", "kv_heads"), [(None, 1), ("transformer_xl", 1), *((m, 2) for m in stream_memories())]
)
def test_every_memory_reads_and_writes_as_with_equal_keys_and_values_of_each_head(
    memory: str | None, kv_heads: int
) -> None:
    spec = None if memory is None else {"name": memory, **CONTRACTS[memory].options}
    shared, own = pair(kv_heads, spec)
    tokens = torch.randint(11, (2, 3 * SEGMENT))
    totals = []
    for m in (shared, own):
        m.eval()
        state, total = None, 0
        for index in range(3):
            out = m(tokens[:, index * SEGMENT : (index + 1) * SEGMENT], state)
            state, total = out.state, total + out.outputs.square().sum()
        total.backward()
        totals.append(total.item())
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)
    head, found = WIDTH // HEADS, dict(shared.named_parameters())
    for name, expected in own.named_parameters():
        if expected.grad is None:
            continue
        gradient = expected.grad
        if gradient.shape != found[name].shape:
            q, *of_heads = gradient.split(WIDTH)
            gradient = torch.cat(
                [q, *(t.view(kv_heads, -1, head, *t.shape[1:]).sum(1).flatten(0, 1) for t in of_heads)]
            )
        torch.testing.assert_close(found[name].grad, gradient, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_tokens_are_written_one_by_one_as_with_all_heads() -> None:
    shared, own = pair(2, "transformer_xl")
    prompt = torch.randint(11, (2, 5))
    written = [
        generate(m, prompt, tokens=2 * SEGMENT, segment_length=SEGMENT, temperature=0).tokens for m in (shared, own)
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, r"kv_heads=3 must divide heads=4"),
        ({"kv_heads": 0}, r"kv_heads=0 must divide heads=4"),
        ({"kv_heads": 2, "shared_query_key": True}, r"leave kv_heads=2 out"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfAttention(WIDTH, HEADS, **options)
