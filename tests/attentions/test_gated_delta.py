"""The gated delta rule and its relatives: options are their recurrence, and begin with the half-lives asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attentions.cases import B, E, H
from attentions.linearised_twins import V, compare, leaves
from attentions.test_scan import Recorded
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.gated_delta import PUBLISHED, GatedDelta
from cached_transformers.extras import require
from cached_transformers.interfaces.capabilities import in_words
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.models import LanguageModel

LN2 = math.log(2)


def core_of(preset: str | None = None, *, moved: bool = True, **options: Any) -> GatedDelta:
    """In float64, for values of width V, with no parameter where it begins."""
    torch.manual_seed(0)
    core = GatedDelta(H * E, H, **{"value_width": V, "chunk": 4, **PUBLISHED.get(preset or "", {}), **options}).double()
    with torch.no_grad():
        for parameter in core.parameters() if moved else ():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return core.eval()


def log_decay(core: GatedDelta, x: Tensor, options: dict[str, Any], head: int) -> Tensor:
    """g of one head, (B, N, channels), as the papers have it."""
    kind, gate = options.get("decay", "scalar"), options.get("decay_gate", "softplus")
    rows, tokens = x.shape[:2]
    if kind == "none":
        return x.new_zeros(rows, tokens, 1)
    if kind == "fixed":
        half_life = options.get("half_life", (32.0, 4096.0))
        if half_life is None:
            value = math.log(1 - 2.0 ** (-5 - head))
        else:
            value = -LN2 / (half_life[0] * (half_life[1] / half_life[0]) ** (head / (H - 1)))
        return x.new_full((rows, tokens, 1), value)
    assert core.decay is not None
    middle = x if core.decay.middle_RD is None else x @ core.decay.middle_RD.mT
    count = E if kind == "channel" else 1
    part = slice(head * count, (head + 1) * count)
    raw = middle @ core.decay.weight_OR[part].mT + core.decay.bias_O[part]
    if gate == "logsigmoid":
        return torch.log(1 / (1 + torch.exp(-raw))) / 16
    assert core.decay.rate_H is not None
    rate = torch.exp(core.decay.rate_H[head])
    if gate == "safe":
        return -5 / (1 + torch.exp(-rate * raw))
    return -rate * torch.log(1 + torch.exp(raw))


def twin_of(core: GatedDelta, options: dict[str, Any]) -> Any:
    def features(t: Tensor) -> Tensor:
        kind = options.get("features", "unit")
        t = t if kind == "none" else t / (1 + torch.exp(-t))
        return t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) if kind == "unit" else t

    def maps(module: Any, x: Tensor, head: int) -> Tensor:
        steps = max(options.get("steps", 1) - 1, 1)
        return (x @ module.weight.chunk(H)[head].mT).unflatten(-1, (steps, -1))

    def gate(module: Any, x: Tensor, head: int) -> Tensor:
        return 1 / (1 + torch.exp(-(x @ module.weight.chunk(H)[head].mT)))

    most = 2 if options.get("negative_eigenvalues") else 1

    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: Any) -> Tensor:
        heads = []
        for h in range(H):
            of_q, of_k, values = features(q[:, h]), features(k[:, h]), v[:, h]
            of_q = of_q * (options.get("scale") or E**-0.5)
            state = torch.zeros(B, E, V).double()
            if context is not None:
                slots = features(context.k_BHME[:, h]) * context.valid_BM[..., None]
                state = slots.mT @ context.v_BHME[:, h]
            g, outs = log_decay(core, x, options, h), []
            for t in range(q.shape[2]):
                there = seen[:, t, None, None]
                decayed = torch.exp(g[:, t, :, None]) * state
                key, new = of_k[:, t], values[:, t]
                if options.get("step_length"):
                    assert core.decay is not None
                    raw = x[:, t] @ core.decay.weight_OR[h] + core.decay.bias_O[h]
                    new = new * torch.log(1 + torch.exp(raw))[:, None]
                written = decayed
                for step in range(options.get("steps", 1)):
                    if step:
                        key, new = (
                            maps(module, x[:, t], h)[:, step - 1] for module in (core.more_keys, core.more_values)
                        )
                        key = features(key)
                    if options.get("rule", "delta") == "delta":
                        beta = most * gate(core.share, x[:, t], h)[:, step]
                        new = beta[:, None] * (new - (written * key[..., None]).sum(1))
                    elif options["rule"] == "gates":
                        erased = most * gate(core.share, x[:, t], h) * key
                        new = gate(core.write_gate, x[:, t], h) * new - (written * erased[..., None]).sum(1)
                    written = written + key[..., None] * new[:, None]
                state = torch.where(there, written, state)
                outs.append((state * of_q[:, t, :, None]).sum(1))
            out = torch.stack(outs, 1)
            if options.get("output_norm"):
                assert core.norm_V is not None
                out = out / torch.sqrt((out * out).mean(-1, keepdim=True) + 1e-5) * core.norm_V
            if (activation := options.get("output_gate", "none")) != "none":
                assert core.gate is not None
                raw = x @ core.gate.weight[h * V : (h + 1) * V].mT
                share = 1 / (1 + torch.exp(-raw))
                out = out * (raw * share if activation == "swish" else share)
            heads.append(out)
        return torch.stack(heads, 1)

    return twin


OPTIONS: list[dict[str, Any]] = [
    *PUBLISHED.values(),
    {},
    {"chunk": 1},
    {"chunk": 64},
    {"negative_eigenvalues": True},
    {"decay": "none"},
    {"steps": 3, "decay": "channel", "chunk": 5},
    {"steps": 2, "decay": "none"},
    {"rule": "gates", "negative_eigenvalues": True},
    {"decay": "fixed"},
    {"decay_gate": "safe"},
    {"decay": "channel", "decay_gate": "safe", "decay_rank": 3, "chunk": 5},
    {"decay_gate": "logsigmoid", "scale": 2.0},
    {"rule": "sum", "decay": "none", "features": "silu"},
    {"rule": "sum", "decay": "channel", "output_gate": "sigmoid"},
    {"output_norm": True},
]


def in_short(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "default"


@pytest.mark.parametrize("options", OPTIONS, ids=in_short)
def test_it_is_the_recurrence(options: dict[str, Any]) -> None:
    core = core_of(**options)
    compare(core, twin_of(core, options), forms=(True,), atol=1e-9)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_set_options_together(preset: str) -> None:
    core = create_attention({"name": "gated_delta", "preset": preset, "chunk": 8}, width=12, heads=2)
    assert isinstance(core, GatedDelta) and core.chunk == 8
    torch.manual_seed(0)
    want = GatedDelta(12, 2, **PUBLISHED[preset])
    torch.manual_seed(0)
    got = create_attention({"name": "gated_delta", "preset": preset}, width=12, heads=2)
    assert {n: t.shape for n, t in got.state_dict().items()} == {n: t.shape for n, t in want.state_dict().items()}
    q, k, v = torch.randn(3, 1, 2, 5, 6)
    x = torch.randn(1, 5, 12)
    outs = [c(q, k, v, x_BND=x, causal=True).out_BHNV for c in (got, want)]
    assert torch.equal(*outs)
    refuses("'gated_delta'", create_attention, {"name": "gated_delta", "preset": "mamba3"}, width=12, heads=2)


HALF_LIVES: list[dict[str, Any]] = [
    {"decay": decay, **more}
    for decay in ("scalar", "channel")
    for more in (
        {},
        {"decay_gate": "safe"},
        {"decay_gate": "logsigmoid"},
        {"decay_rank": 3},
        {"negative_eigenvalues": True},
        {"rule": "sum", "features": "none"},
    )
] + [{"decay": "fixed"}]


@pytest.mark.parametrize("options", HALF_LIVES, ids=in_short)
def test_half_lives_at_the_start_are_those_asked_for(options: dict[str, Any]) -> None:
    """Of what a state holds, half is left after so many tokens of another model's input, that write nothing."""
    heads, width, size = 64, 256, 4
    for low, high in ((8.0, 8.0), (16.0, 256.0)):
        torch.manual_seed(0)
        spec = {"name": "gated_delta", "half_life": (low, high), **options}
        core = LanguageModel(7, width, 1, heads, 8, attention=spec).stack.blocks[0].attention.core.double()
        tokens = int(low)
        held = torch.ones(1, heads, size, size, dtype=torch.double)
        silent = torch.zeros(1, heads, tokens, size, dtype=torch.double)
        x = torch.randn(1, tokens, width, dtype=torch.double)
        _, left = core.scan(silent, silent, silent, held, x_BND=x)
        measured = -tokens * LN2 / left[..., 0].log()  # (1, heads, channels)
        assert (low * (1 - 1e-4) < measured).all() and (measured < high * (1 + 1e-4)).all()
        if low < high:  # log-uniform: the mean of the logarithm is in the middle, its deviation that of an interval
            logs = measured.log()
            middle, span = (math.log(low) + math.log(high)) / 2, math.log(high / low)
            assert abs(logs.mean() - middle) < 0.15 * span and abs(logs.std() - span / 12**0.5) < 0.1 * span


def test_the_published_start_forgets_within_a_segment() -> None:
    lives = {}
    for preset in ("gated_deltanet", "kda", "gla"):
        core = GatedDelta(4 * 512, 512, **{**PUBLISHED[preset], "output_gate": "none"})
        assert core.decay is not None
        g = core.decay(torch.zeros(1, 1, 4 * 512))[0]
        lives[preset] = LN2 / -g.double().flatten()
    quantiles = lives["gated_deltanet"].quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    torch.testing.assert_close(quantiles, torch.tensor([3.3, 11, 37]).double(), rtol=0.35, atol=0)
    assert (lives["gated_deltanet"] > 512).double().mean() < 0.06
    torch.testing.assert_close(lives["kda"].median(), torch.tensor(9.8).double(), rtol=0.35, atol=0)
    torch.testing.assert_close(lives["gla"].median(), torch.tensor(16.0).double(), rtol=0.1, atol=0)
    fixed = GatedDelta(32, 8, **{**PUBLISHED["retnet"], "output_norm": False, "output_gate": "none"}).double()
    silent, held = torch.zeros(1, 8, 1, 4).double(), torch.ones(1, 8, 4, 4).double()
    left = fixed.scan(silent, silent, silent, held)[1][0, :, 0, 0]
    torch.testing.assert_close(left, 1 - 2.0 ** -(5 + torch.arange(8)).double(), rtol=0, atol=1e-15)


def test_recorded_gates_of_kimi_delta_attention(shared: Path) -> None:
    recorded = Recorded(shared / "golden" / "recurrent" / "kda.npz")
    raw = recorded["gate/raw"].flatten(2)  # heads before channels, as the bias has them
    for gate, name in (("softplus", "gate/g"), ("safe", "gate/g_lower5")):
        core = GatedDelta(32, 4, decay="channel", decay_gate=gate).double()  # type: ignore[arg-type]
        decay = core.decay
        assert decay is not None and decay.rate_H is not None
        with torch.no_grad():
            decay.weight_OR.copy_(torch.eye(32))
            decay.bias_O.copy_(recorded["gate/dt_bias"])
            decay.rate_H.copy_(recorded["gate/A_log"])
        torch.testing.assert_close(decay(raw)[0].transpose(1, 2), recorded[name], rtol=0, atol=1e-10)


def test_recorded_layer_of_gated_deltanet(shared: Path) -> None:
    """Convolutions (with SiLU on values) and output projection are made here; what lies between them is the core."""
    recorded = Recorded(shared / "golden" / "recurrent" / "gated_delta_net_layer.npz")
    options = {**PUBLISHED["gated_deltanet"], "value_width": 6, "carry": True, "chunk": 4}
    core = GatedDelta(8, 2, **options).double()
    assert core.share is not None and core.gate is not None and core.norm_V is not None and core.decay is not None
    assert core.decay.rate_H is not None
    places = {
        "b": core.share.weight,
        "g": core.gate.weight,
        "norm": core.norm_V,
        "a": core.decay.weight_OR,
        "A_log": core.decay.rate_H,
        "dt_bias": core.decay.bias_O,
    }
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(recorded[f"param/{name}"])
    x = recorded["x"]

    def filtered(name: str) -> Tensor:
        projected, taps = x @ recorded[f"param/{name}"].mT, recorded[f"param/c{name}"]
        convolved = F.conv1d(F.pad(projected.mT, (3, 0)), taps, groups=taps.shape[0]).mT
        return convolved.unflatten(-1, (2, -1)).transpose(1, 2)

    q, k, v = (filtered(name) for name in "qkv")
    v = F.silu(v)
    for name, t in {"q": core.features(q, None), "k": core.features(k, None), "v": v}.items():
        torch.testing.assert_close(t, recorded.heads_first(f"mid/{name}"), rtol=0, atol=1e-10)
    torch.testing.assert_close(core.decay(x)[0], recorded.heads_first("mid/g"), rtol=0, atol=1e-10)
    same_in_two_parts(recorded, core, (q, k, v), (), "o")


def same_in_two_parts(recorded: Recorded, core: Any, qkv_BHNE: Any, state: Any, output: str) -> None:
    cut, outs = int(recorded["cut"]), []
    for part, name in ((slice(0, cut), "mid_state"), (slice(cut, 13), "state")):
        result = core(*(t[:, :, part] for t in qkv_BHNE), x_BND=recorded["x"][:, part], causal=True, state=state)
        state = result.state
        outs.append(result.out_BHNV)
        torch.testing.assert_close(state, recorded[name], rtol=0, atol=1e-10)
    merged = torch.cat(outs, 2).transpose(1, 2).flatten(2) @ recorded[f"param/{output}"].mT
    torch.testing.assert_close(merged, recorded["out"], rtol=0, atol=1e-10)


def gdn2_layer(shared: Path, **options: Any) -> tuple[Recorded, Any]:
    """A core for the sizes of the file, whose features pass on keys that have the length 1 already."""
    recorded = Recorded(shared / "golden" / "2026" / "gdn2_layer.npz")
    return recorded, GatedDelta(10, 2, value_width=4, chunk=4, carry=True, **options).double()


def test_recorded_layer_of_gated_deltanet_2(shared: Path) -> None:
    """The output gate of low rank, with its bias, is one map here."""
    recorded, core = gdn2_layer(shared, **{**PUBLISHED["gdn2"], "decay_rank": 4})
    core.gate = torch.nn.Linear(10, 8, dtype=torch.double)
    gate = recorded["param/g_proj1"] @ recorded["param/g_proj0"]
    places = {
        "b_proj": core.share.weight,
        "w_proj": core.write_gate.weight,
        "f_proj0": core.decay.middle_RD,
        "f_proj1": core.decay.weight_OR,
        "A_log": core.decay.rate_H,
        "dt_bias": core.decay.bias_O,
        "o_norm": core.norm_V,
        "g_bias": core.gate.bias,
    }
    with torch.no_grad():
        core.gate.weight.copy_(gate)
        for name, place in places.items():
            place.copy_(recorded[f"param/{name}"])
    x = recorded["x"]
    q, k, v = ((x @ recorded[f"param/{name}_proj"].mT).unflatten(-1, (2, -1)).transpose(1, 2) for name in "qkv")
    for name, t in {"q": core.features(q, None), "k": core.features(k, None), "v": F.silu(v)}.items():
        torch.testing.assert_close(t, recorded.heads_first(name), rtol=0, atol=1e-10)
    same_in_two_parts(recorded, core, (q, k, F.silu(v)), recorded["state0"], "o_proj")


def test_recorded_delta_product(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's input holds keys, values and logits of beta of the steps; maps pick those of each head."""
    recorded, core = gdn2_layer(shared, steps=3, decay="none", scale=1.0, negative_eigenvalues=True)
    monkeypatch.setattr(core, "features", lambda t, maps: t)
    k, v, beta = (recorded[f"product/{name}"].unflatten(1, (13, 3)).transpose(2, 3) for name in ("k", "v", "beta"))
    parts = [t.flatten(2) for t in (k[..., 1:, :], v[..., 1:, :], torch.logit(beta / 2))]
    x, start = torch.cat(parts, -1), 0
    for name, part in zip(("more_keys", "more_values", "share"), parts, strict=True):
        module = torch.nn.Linear(x.shape[-1], part.shape[-1], bias=False, dtype=torch.double)
        with torch.no_grad():
            module.weight.copy_(torch.eye(x.shape[-1])[start : (start := start + part.shape[-1])])
        setattr(core, name, module)
    first = (recorded.heads_first("q"), k[..., 0, :].transpose(1, 2), v[..., 0, :].transpose(1, 2))
    result = core(*first, x_BND=x, causal=True, state=recorded["state0"])
    torch.testing.assert_close(result.out_BHNV, recorded.heads_first("product/out"), rtol=0, atol=1e-10)
    torch.testing.assert_close(result.state, recorded["product/state"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunked", [False, True])
def test_it_is_the_gated_delta_rule_of_transformers(chunked: bool) -> None:
    """Qwen3-Next's, which adds 1e-6 under the root of the lengths, too."""
    peer = require("transformers.models.qwen3_next.modeling_qwen3_next", extra="transformers")
    rule = peer.torch_chunk_gated_delta_rule if chunked else peer.torch_recurrent_gated_delta_rule
    core = core_of(half_life=None, chunk=16).float()
    given = {key: t.detach().float() for key, t in leaves(70).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    assert core.share is not None and core.decay is not None
    active = [F.silu(t).transpose(1, 2) for t in (q, k)]
    g, beta = core.decay(x)[0][..., 0].mT, torch.sigmoid(core.share(x))
    want, last = rule(*active, v.transpose(1, 2), g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    out, state = core.scan(q, k, v, core.init_step(B, H, E, V, like=q), x_BND=x)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=0, atol=2e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"negative_eigenvalues": True}, *PUBLISHED.values()], ids=in_short)
def test_a_long_text_of_equal_keys_and_large_inputs_stays_bounded(options: dict[str, Any]) -> None:
    options = {**options, "chunk": 64}
    core = core_of(**options, moved=False).float()
    given = {key: t.detach().float() for key, t in leaves(4000).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    large = k[:, :, :1].expand_as(k) * (1e3 if options.get("rule", "delta") != "sum" else 1.0)
    out, state = core.scan(q, large, v, core.init_step(B, H, E, V, like=q), x_BND=3 * x)
    assert out.isfinite().all() and state.isfinite().all()
    if options.get("rule", "delta") != "sum":
        assert state.abs().max() < 2 * 4000**0.5 * v.abs().max()
    core.double()
    wide = {key: t.double() for key, t in {"q": q, "k": large, "v": v, "x": 3 * x}.items()}
    start = core.init_step(B, H, E, V, like=wide["q"])
    want, last = core.scan(wide["q"], wide["k"], wide["v"], start, x_BND=wide["x"])
    assert (out - want).abs().max() < 2e-3 * want.abs().max()
    assert (state - last).abs().max() < 2e-3 * last.abs().max()


@pytest.mark.parametrize("preset", [None, *PUBLISHED])
def test_state_and_decay_are_of_float32_in_half_models_and_under_autocast(preset: str | None) -> None:
    core = core_of(preset, chunk=64, moved=False).float()
    given = {key: t.detach().float() for key, t in leaves(300).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    start = core.init_step(B, H, E, V, like=q)
    want, last = core.scan(q, k, v, start, x_BND=x)
    with torch.autocast("cpu", torch.bfloat16):
        auto, kept = core.scan(q, k, v, start, x_BND=x)
    assert torch.equal(auto, want) and torch.equal(kept, last)
    half = [t.bfloat16() for t in (q, k, v, x)]
    core.bfloat16()
    out, kept = core.scan(*half[:3], core.init_step(B, H, E, V, like=half[0]), x_BND=half[3])
    assert out.dtype == torch.bfloat16 and kept.dtype == torch.float32
    # Weights and inputs are rounded, and nothing between them.
    wide = core.double()
    exact, _ = wide.scan(*(t.double() for t in half[:3]), start.double(), x_BND=half[3].double())
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    "preset", [None, "kda", *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name != "kda")]
)
def test_a_carried_state_is_one_compiled_graph(preset: str | None) -> None:
    core, given = core_of(preset, carry=True), leaves(12)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager", dynamic=False)
    outs = []
    for module in (core, compiled):
        state, parts = core.init_state(B, H, E, V, like=given["q"]), []
        for part in (slice(0, 6), slice(6, 12)):
            pieces = [given[name][:, :, part] for name in "qkv"]
            result = module(*pieces, x_BND=given["x"][:, part], causal=True, state=state)
            state = result.state
            parts.append(result.out_BHNV)
        outs.append(torch.cat(parts, 2))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), [given["k"], *core.parameters()]) for out in outs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_what_the_call_lacks_is_named() -> None:
    given = leaves(3)
    q, k, v, x = (given[name] for name in ("q", "k", "v", "x"))
    refuses(r"gated_delta.*x_BND", core_of(), q, k, v, causal=True)
    refuses(r"gated_delta.*x_BND", core_of("gla"), q, k, v, causal=True)
    refuses("gated_delta", core_of("retnet"), q, k, v, causal=True)
    with pytest.raises(ValueError, match=f"values of width {V}: .* were made for {E}; give value_width={V}"):
        core_of("kda", value_width=None)(q, k, v, x_BND=x, causal=True)
    with pytest.raises(ValueError, match=f"1 heads of width {E}: gated_delta was made for {H} of {E}"):
        core_of()(q[:, :1], k[:, :1], v[:, :1], x_BND=x, causal=True)
    refuses("causal=False", SelfAttention, H * E, H, core=core_of())
    assert "only causal" in in_words(GatedDelta.can)
