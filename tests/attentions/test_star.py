"""Star-Transformer against loops over tokens, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs, paddings, softmax_of
from torch import Tensor

from cached_transformers.attentions.star import StarAttention, StarLayer, prefix_attend

B, H, E, V = 2, 2, 5, 3
D = H * E


def neighbours(place: int, there: list[int], radius: int, causal: bool) -> list[int]:
    """Tokens that are at most `radius` steps away on the ring of those that are there, each once."""
    own = there.index(place)
    if causal:
        return there[max(own - radius, 0) : own + 1]
    steps = range(-radius, radius + 1)
    return [there[r] for r in sorted({(own + step) % len(there) for step in steps})]


def nearest(place: int, there: list[int], radius: int, causal: bool) -> list[int]:
    return neighbours(place, there, min(radius, len(there)), causal)


def twin(core: StarAttention, q: Tensor, k: Tensor, v: Tensor, padding: Tensor, *, causal: bool) -> Tensor:
    """The core, token by token; tokens of padding are left 0."""
    out = torch.zeros(B, H, q.shape[2], V, dtype=q.dtype)
    for b in range(B):
        there = [i for i in range(q.shape[2]) if not padding[b, i]]
        for h in range(H):
            for i in there:
                seen = nearest(i, there, core.radius, causal)
                keys, values = [k[b, h, j] for j in seen], [v[b, h, j] for j in seen]
                if core.embedding:
                    keys.append(k[b, h, i]), values.append(v[b, h, i])
                if core.relay_HE is not None:
                    some = [j for j in there if j <= i or not causal]
                    all_keys, all_values = [k[b, h, j] for j in some], [v[b, h, j] for j in some]
                    keys.append(softmax_of(core.relay_HE[h], all_keys, all_keys))
                    values.append(softmax_of(core.relay_HE[h], all_keys, all_values))
                out[b, h, i] = softmax_of(q[b, h, i], keys, values)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"radius": 3}, {"radius": 0, "embedding": False}, {"relay": False}])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_the_core_is_its_loop_over_tokens(tokens: int, options: dict[str, Any], causal: bool) -> None:
    core = StarAttention(D, H, **options).double()
    if core.relay_HE is not None:
        torch.nn.init.normal_(core.relay_HE)
    for padding in paddings(tokens):
        q, k, v = inputs(tokens, width=E, values=V)
        got = core(q, k, v, causal=causal, key_padding_mask=padding if padding.any() else None).out_BHNV
        got = got * ~padding[:, None, :, None]
        want = twin(core, q, k, v, padding, causal=causal)
        agree(got, want, [q, k, v, *core.parameters()])


def test_a_prefix_of_many_chunks_is_a_softmax_and_survives_large_logits() -> None:
    k = torch.randn(1, 1, 200, 4)
    k[..., 0] = torch.linspace(-400, 400, 200).roll(60)
    query, values = torch.tensor([2.0, 0.5, 0.5, 0.5])[None, None, None], torch.randn(1, 1, 200, 3)
    out, lse = prefix_attend(query, k, values, None)
    logits = (k @ query.mT)[0, 0, :, 0].double() / 2
    for i in (0, 1, 59, 60, 61, 128, 199):
        torch.testing.assert_close(lse[0, 0, i].double(), logits[: i + 1].logsumexp(0), rtol=1e-6, atol=1e-5)
        want = logits[: i + 1].softmax(0) @ values[0, 0, : i + 1].double()
        torch.testing.assert_close(out[0, 0, i].double(), want, rtol=1e-4, atol=1e-4)
    query, k, v = (torch.randn(B, H, n, E, dtype=torch.double) for n in (1, 150, 150))
    padding = torch.rand(B, 150) < 0.3
    padding[0, :70] = True
    out, _ = prefix_attend(query, k, v, padding)
    logits = (query @ k.mT / math.sqrt(E)).expand(B, H, 150, 150)
    seen = torch.ones(150, 150, dtype=torch.bool).tril() & ~padding[:, None, None]
    want = torch.where(seen, logits, -torch.inf).softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


def layer_twin(layer: StarLayer, x: Tensor, embedded: Tensor, relay: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's two updates, token by token and head by head."""
    n = x.shape[1]

    def heads(vector: Tensor) -> tuple[Tensor, Tensor]:
        """(H, E) keys and values from (H, 2 E)."""
        k, v = vector.view(H, 2 * E).chunk(2, -1)
        return k, v

    def ask(query: Tensor, context: list[Tensor], weight: Tensor) -> Tensor:
        pairs = [heads(weight @ c) for c in context]
        return torch.cat([softmax_of(query[h], [k[h] for k, _ in pairs], [v[h] for _, v in pairs]) for h in range(H)])

    tokens, relays = torch.zeros_like(x), torch.zeros_like(relay)
    for b in range(len(x)):
        there = [i for i in range(n) if not padding[b, i]]
        new: dict[int, Tensor] = {}
        for i in there:
            r = relay[b, i if layer.causal else 0]
            context = [x[b, j] for j in nearest(i, there, layer.radius, layer.causal)] + [embedded[b, i], r]
            found = ask((layer.query.weight @ x[b, i]).view(H, E), context, layer.keys_values.weight)
            tokens[b, i] = new[i] = layer.norm((layer.output.weight @ found).relu())
        for m in there if layer.causal else [0]:
            r = relay[b, m]
            context = [r] + [new[j] for j in there if j <= m or not layer.causal]
            query = layer.query_HE if layer.causal else (layer.relay_query.weight @ r).view(H, E)  # type: ignore[union-attr]
            found = ask(query, context, layer.relay_keys_values.weight)  # type: ignore[arg-type]
            relays[b, m] = layer.relay_norm((layer.relay_output.weight @ found).relu())
    return tokens, relays


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_the_layer_is_its_loop_over_tokens(tokens: int, causal: bool) -> None:
    layer = StarLayer(D, H, causal=causal).double()
    if layer.query_HE is not None:
        torch.nn.init.normal_(layer.query_HE)
    for padding in paddings(tokens):
        x, embedded = torch.randn(2, B, tokens, D, dtype=torch.double, requires_grad=True)
        relay = torch.randn(B, tokens if causal else 1, D, dtype=torch.double, requires_grad=True)
        got = layer(x, embedded, relay, padding if padding.any() else None)
        want = layer_twin(layer, x, embedded, relay, padding)
        keep = ~padding[..., None]
        seen = keep if causal else keep.any(1, keepdim=True)
        sources = [x, embedded, relay, *layer.parameters()]
        agree(got[0], want[0], sources)
        agree(got[1], want[1], sources, weight=seen)


@pytest.mark.parametrize("causal", [False, True])
def test_the_first_relay_is_the_mean_of_the_tokens_that_are_there(causal: bool) -> None:
    x = torch.randn(B, 9, D, dtype=torch.double)
    torch.testing.assert_close(StarLayer.first_relay(x)[:, 0], x.mean(1))
    for padding in paddings(9):
        relay = StarLayer.first_relay(x, padding, causal=causal)
        for b, i in (~padding).nonzero().tolist():
            there = [j for j in range(9) if not padding[b, j] and (j <= i or not causal)]
            torch.testing.assert_close(relay[b, i if causal else 0], x[b, there].mean(0), rtol=0, atol=1e-12)
