"""The Delta Network: its chunked form is the recurrence, which writes what a key retrieves and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentions.cases import B, E, H
from attentions.linearised_twins import V, compare, leaves
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.delta_net import DeltaNet
from cached_transformers.extras import require
from cached_transformers.interfaces.capabilities import in_words
from cached_transformers.layers.attention import SelfAttention


def core_of(**options: Any) -> DeltaNet:
    torch.manual_seed(0)
    return DeltaNet(H * E, H, **options).double().eval()


def features(x: Tensor, kind: str, order: int) -> Tensor:
    if kind == "silu":
        x = x * torch.sigmoid(x)
        return x / x.norm(dim=-1, keepdim=True)
    if kind == "elu":
        phi = F.elu(x) + 1
    else:
        y = torch.cat([F.relu(x), F.relu(-x)], -1)
        size = y.shape[-1]
        phi = torch.stack([y[..., a] * y[..., (a - j) % size] for j in range(1, order + 1) for a in range(size)], -1)
    return phi / phi.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 1},
        {"chunk": 4},
        {"chunk": 64},
        {"chunk": 4, "order": 3},
        {"chunk": 4, "features": "elu"},
        {"chunk": 4, "features": "silu"},
    ],
)
def test_it_is_the_recurrence(options: dict[str, Any]) -> None:
    core = core_of(**options)

    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: Any) -> Tensor:
        beta = torch.sigmoid(core.share(x)).mT * seen[:, None]  # B, H, N
        of_q, of_k = (features(t, core.kind, core.order) for t in (q, k))
        weights = torch.zeros(B, H, of_k.shape[-1], V).double()
        if context is not None:
            of_c = features(context.k_BHME, core.kind, core.order) * context.valid_BM[:, None, :, None]
            weights = of_c.mT @ context.v_BHME
        outs = []
        for t in range(q.shape[2]):
            retrieved = (of_k[:, :, t, None] @ weights)[:, :, 0]
            wrong = beta[:, :, t, None] * (v[:, :, t] - retrieved)
            weights = weights + of_k[:, :, t, :, None] * wrong[:, :, None]
            outs.append((of_q[:, :, t, None] @ weights)[:, :, 0])
        return torch.stack(outs, 2)

    compare(core, twin, forms=(True,))


@pytest.mark.parametrize("kind", ["dpfp", "elu", "silu"])
def test_a_long_text_leaves_float32_exact_and_the_state_small(kind: str) -> None:
    core = core_of(features=kind)
    given = {key: t.detach() for key, t in leaves(2000).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    assert core.features(k, None).norm(dim=-1).max() < 1 + 1e-9
    state = core.init_step(B, H, E, V, like=q)
    out, last = core.scan(q, k, v, state, x_BND=x)
    core.float()
    short, _ = core.scan(q.float(), k.float(), v.float(), state.float(), x_BND=x.float())
    torch.testing.assert_close(short.double(), out, rtol=0, atol=1e-4)
    # The most that the features' length of at most 1 lets it be, by far: what a key retrieves is of the size of values.
    assert (core.features(k, None) @ last).abs().max() < 10 * v.abs().max()


@pytest.mark.parametrize("chunked", [False, True])
def test_it_is_the_delta_rule_of_transformers(chunked: bool) -> None:
    """Qwen3-Next without decay; it divides queries by sqrt(E) and adds 1e-6 under the root of the lengths."""
    peer = require("transformers.models.qwen3_next.modeling_qwen3_next", extra="transformers")
    rule = peer.torch_chunk_gated_delta_rule if chunked else peer.torch_recurrent_gated_delta_rule
    core = core_of(features="silu", chunk=16).float()
    given = {key: t.detach().float() for key, t in leaves(70).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    active = [F.silu(t).transpose(1, 2) for t in (q, k)]
    beta = torch.sigmoid(core.share(x))
    want, last = rule(
        *active, v.transpose(1, 2), torch.zeros_like(beta), beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, state = core.scan(q, k, v, core.init_step(B, H, E, V, like=q), x_BND=x)
    torch.testing.assert_close(out, want.transpose(1, 2) * E**0.5, rtol=0, atol=2e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=2e-5)


def test_it_is_causal_alone_and_needs_the_input() -> None:
    core, given = core_of(), leaves(3)
    q, k, v = (given[name] for name in "qkv")
    refuses(r"delta_net.*x_BND", core, q, k, v, causal=True)
    refuses("causal=False", SelfAttention, H * E, H, core=core)
    layer = SelfAttention(H * E, H, core=core, causal=True).double()
    assert layer(given["x"]).y_BND.isfinite().all() and "only causal" in in_words(DeltaNet.can)
