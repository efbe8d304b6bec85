"""Which kernel of others is taken, and flash-linear-attention against the plain form on a GPU (`test_flex.py` has
FlexAttention).

flash-linear-attention has Triton kernels alone. That it is called as documented is shown with a stand-in, which is its
documentation as loops.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.parts import kernels
from cached_transformers.attentions.softmax import attend_with_bias

B, H, E = 2, 2, 16
WINDOW = {"name": "longformer", "window": 24}


def core(spec: dict[str, Any], kernel: str) -> Any:
    torch.manual_seed(0)
    return create_attention({**spec, "kernel": kernel}, width=H * E, heads=H, length=300, depth=1).eval()


def inputs(tokens: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(B, H, tokens, E, generator=generator, device="cpu").to(device) for _ in range(3)]


def both(spec: dict[str, Any], kernel: str, *given: Tensor, **call: Any) -> list[Any]:
    return [core(spec, name).to(given[0].device)(*given, **call) for name in (kernel, "plain")]


def test_auto_is_plain_without_a_gpu_and_what_is_asked_for_by_name_is_refused() -> None:
    given = inputs(150)
    auto, plain = both(WINDOW, "auto", *given)
    assert torch.equal(auto.out_BHNV, plain.out_BHNV)
    flex = core(WINDOW, "flex")
    refuses("kernel='flex'", flex, *given)
    dropping = create_attention({**WINDOW, "kernel": "flex", "dropout": 0.5}).train()
    refuses(r"has no dropout of the weights, here 0\.5", dropping, *inputs(150))
    refuses("kernel='flash'", core, WINDOW, "flash")
    refuses(r"mode='sum'.*kernel='flex'", core, {"name": "axial", "mode": "sum", "columns": 4}, "flex")
    assert core({"name": "axial", "mode": "sum", "columns": 4}, "auto").kernel == "plain"


def test_what_stands_in_the_way_of_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():  # as on a GPU
        kinds = ((16, torch.float64), (8, torch.float32), (16, torch.bfloat16))
        wide, narrow, fine = (torch.empty(1, 2, 8, width, dtype=dtype, device="cuda") for width, dtype in kinds)
    given: Any = ((wide,) * 3, (narrow,) * 3)
    refuses("nothing wider than float32", kernels.takes_flex, "flex", *given[0], 0.0)
    refuses("heads of at least 16 channels, not 8", kernels.takes_flex, "flex", *given[1], 0.0)
    refuses(r"torch\.vmap.*schedule='diagonal'", torch.vmap(lambda t: kernels.takes_flex("flex", t, t, t, 0.0)), fine)
    some: Any = (fine,) * 3
    assert kernels.takes_flex("auto", *some, 0.0) and not kernels.takes_flex("auto", *given[0], 0.0)
    assert not kernels.takes_flex("plain", *some, 0.0)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    linear = core({"name": "linear"}, "fla")
    refuses(r'"cached-transformers\[kernels\]"', linear, *inputs(8), causal=True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    refuses("runs on GPUs, not on cpu", linear, *inputs(8), causal=True)
    assert kernels.takes_fla("auto", some[0]) and not kernels.takes_fla("auto", given[0][0])


def documented(delta: bool, decays: int = 0) -> Any:
    """What fla documents of its kernels, token by token: (B, N, H, E), scaled, with a state (B, H, E, V) in and out.

    Those with one decay a head take (B, N, H), those with one a channel (B, N, H, E), as logarithms.
    """

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None = None,
        g: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        normalize: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        assert delta or decays or not normalize
        assert (beta is not None) == delta and (0 if g is None else g.dim() - 2) == decays
        assert all(t is None or t.is_contiguous() for t in (q, k, v, beta, g))
        # The delta rules refuse float32.
        assert not delta or q.dtype == k.dtype == v.dtype == torch.bfloat16
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        state = torch.zeros(*q.shape[::2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
        outs = []
        for at in range(q.shape[1]):
            if g is not None:
                state = state * (g[:, at].exp()[..., None] if decays == 2 else g[:, at].exp()[..., None, None])
            new = v[:, at].float()
            if beta is not None:
                found = torch.einsum("bhf,bhfv->bhv", k[:, at].float(), state)
                new = beta[:, at, :, None].float() * (new - found)
            state = state + torch.einsum("bhf,bhv->bhfv", k[:, at].float(), new)
            outs.append(torch.einsum("bhf,bhfv->bhv", factor * q[:, at].float(), state))
        return torch.stack(outs, 1).to(q.dtype), state if output_final_state else None

    return kernel


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, taken without a GPU."""
    ops: Any = types.ModuleType("fla.ops")
    ops.chunk_linear_attn, ops.chunk_delta_rule = documented(False), documented(True)
    ops.chunk_simple_gla, ops.chunk_gla = documented(False, 1), documented(False, 2)
    ops.chunk_gated_delta_rule = documented(True, 1)
    kda: Any = types.ModuleType("fla.ops.kda")
    kda.chunk_kda = documented(True, 2)
    monkeypatch.setitem(sys.modules, "fla.ops", ops)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", kda)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setattr(kernels, "_fla_lacks", lambda q_BHNF: None)


SCANS: dict[str, tuple[dict[str, Any], float]] = {
    "linear": ({"name": "linear"}, 1e-5),
    "delta_net": ({"name": "delta_net"}, 2e-2),
    **{
        name: ({"name": "gated_delta", "preset": name}, atol)
        for name, atol in {
            "gla": 1e-5,
            "retnet": 1e-5,
            "mamba2": 1e-5,
            "gated_deltanet": 5e-2,
            "kda": 5e-2,
            "delta_product": 5e-2,
        }.items()
    },
    "a sum": ({"name": "gated_delta", "rule": "sum", "decay": "none"}, 1e-5),
    "no decay": ({"name": "gated_delta", "decay": "none"}, 2e-2),
}
"""Cores and tolerances; the kernels of the delta rule take bfloat16."""


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("name", SCANS)
def test_fla_is_called_as_it_documents(name: str) -> None:
    spec, atol = SCANS[name]
    q, k, v = inputs(21)
    x, padding = torch.randn(B, 21, H * E), torch.arange(21) >= torch.tensor([21, 15])[:, None]
    for call in ({}, {"key_padding_mask": padding}):
        got, want = both(spec, "fla", q, k, v, x_BND=x, causal=True, **call)
        torch.testing.assert_close(got.out_BHNV, want.out_BHNV, rtol=0, atol=atol)
    # The state goes on from one segment to the next.
    carrying = core({**spec, "carry": True}, "fla")
    state: Any = ()
    for part in (slice(0, 8), slice(8, 21)):
        out = carrying(q[:, :, part], k[:, :, part], v[:, :, part], x_BND=x[:, part], causal=True, state=state)
        state = out.state
    whole = core(spec, "plain")(q, k, v, x_BND=x, causal=True).out_BHNV
    torch.testing.assert_close(out.out_BHNV, whole[:, :, 8:], rtol=0, atol=atol)


@pytest.mark.device
@pytest.mark.parametrize("name", SCANS)
def test_values_and_gradients_of_fla_on_a_gpu(name: str, device: str) -> None:
    if device != "cuda" or importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention needs a GPU" if device != "cuda" else "fla is not installed")
    (spec, atol), results = SCANS[name], []
    for kernel in ("fla", "plain"):
        given = [t.requires_grad_() for t in inputs(300, device)]
        x = torch.ones(B, 300, H * E, device=device)
        out = core(spec, kernel).to(device)(*given, x_BND=x, causal=True).out_BHNV
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    tolerance = 1e-3 if atol < 1e-4 else 5e-2
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()


def test_attention_with_a_bias_that_learns_is_the_fused_one() -> None:
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(2, 3, *size, dtype=torch.float64) for size in ((4, 8), (6, 8), (6, 5), (4, 6)))
    bias[:, :, 1, 2:], bias[0, 1, 3] = -torch.inf, -torch.inf  # one query of a head sees no key by the bias
    seen = torch.ones(2, 1, 4, 6, dtype=torch.bool).tril(2)
    seen[1, :, 2] = False  # and another one by the mask
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    ours = attend_with_bias(q, k, v, seen, bias)
    fused = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~seen, -torch.inf))
    assert not ours[0, 1, 3].any() and not ours[1, :, 2].any()
    direction = torch.randn_like(ours)
    results = [[out, *torch.autograd.grad(out, leaves, direction)] for out in (ours, fused)]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
