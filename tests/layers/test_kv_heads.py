"""Keys and values that heads share: the model whose heads have equal ones of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contracts import CONTRACTS
from torch import Tensor, nn

from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers import create_model
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.models.generation import generate

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
