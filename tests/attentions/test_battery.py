"""What holds for every attention mechanism, whatever it does: run over all that are registered."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from attentions.agreement import agree, tail
from attentions.cases import CASES, LENGTHS, LONGEST, B, Case, E, H, build
from common import refuses
from torch import Tensor

from cached_transformers.attentions import Attention, SoftmaxAttention
from cached_transformers.interfaces.capabilities import CORE_WORDS
from cached_transformers.interfaces.memory import Context
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.grc_attention import GRCAttention
from cached_transformers.registry import ATTENTIONS

NAMES = ATTENTIONS.names()
LOWEST = torch.finfo(torch.double).min


def able(*words: str, rule: str | None = None) -> pytest.MarkDecorator:
    """Parametrise over the mechanisms that can do this and are not exempt from the rule."""
    held = [
        name
        for name in NAMES
        if set(words) <= ATTENTIONS.entry(name).factory.can and rule not in CASES.get(name, Case()).exempt
    ]
    return pytest.mark.parametrize("name", held)


def inputs(tokens: int, *, seed: int = 1, rows: int = B) -> dict[str, Tensor]:
    """Queries, keys, values and the layer's input, of float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, H, tokens, E, dtype=torch.double, generator=generator)
    return {"q": q, "k": k, "v": v, "x": torch.randn(rows, tokens, H * E, dtype=torch.double, generator=generator)}


def run(core: Attention, given: dict[str, Tensor], **call: Any) -> Any:
    call.setdefault("causal", "bidirectional" not in core.can)
    return core(given["q"], given["k"], given["v"], x_BND=given["x"], **call)


def causal_forms(name: str) -> list[bool]:
    kind = ATTENTIONS.entry(name).factory
    return [causal for causal in (False, True) if ("causal" if causal else "bidirectional") in kind.can]


def test_each_mechanism_has_a_case() -> None:
    assert set(CASES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_registered_is_told(name: str) -> None:
    entry = ATTENTIONS.entry(name)
    assert entry.paper and entry.summary.endswith(".")
    assert {"order", "cost", "equation"} <= set(entry.info)


@able("exact_padding", rule="padding")
def test_a_padded_row_is_the_trimmed_row_whatever_the_padding_holds(name: str) -> None:
    core = build(name)
    padding = torch.zeros(B, LONGEST, dtype=torch.bool)
    padding[0, LONGEST - 2 :] = True
    given = inputs(LONGEST)
    for causal in causal_forms(name):
        got = run(core, given, causal=causal, key_padding_mask=padding).out_BHNV
        trimmed = {key: t[:1, ..., : LONGEST - 2, :] for key, t in given.items()}
        want = run(core, trimmed, causal=causal).out_BHNV
        torch.testing.assert_close(got[:1, :, : LONGEST - 2], want, rtol=0, atol=1e-10)
        torch.testing.assert_close(got[1:], run(core, {k: t[1:] for k, t in given.items()}, causal=causal).out_BHNV)
        other = {key: t.clone() for key, t in given.items()}
        for t in other.values():
            t[0, ..., LONGEST - 2 :, :] = 3.0
        again = run(core, other, causal=causal, key_padding_mask=padding).out_BHNV
        torch.testing.assert_close(again[0, :, : LONGEST - 2], want[0], rtol=0, atol=1e-10)


@able("exact_padding")
def test_a_row_of_padding_alone_gives_zeros_and_finite_gradients(name: str) -> None:
    core = build(name).train()
    padding = torch.zeros(B, 13, dtype=torch.bool)
    padding[1] = True
    for causal in causal_forms(name):
        given = {key: t.requires_grad_() for key, t in inputs(13).items()}
        out = run(core, given, causal=causal, key_padding_mask=padding).out_BHNV
        assert (out[1] == 0).all()
        wanted = [given["q"], given["k"], given["v"], *core.parameters()]
        for gradient in torch.autograd.grad(out.square().sum(), wanted, allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


@able("exact_padding")
@pytest.mark.parametrize("held", [torch.nan, torch.inf])
def test_nothing_that_padding_holds_reaches_another_token(name: str, held: float) -> None:
    padding = tail(B, 13)
    there = ~padding
    for causal in causal_forms(name):
        results = []
        for value in (0.0, held):
            core, given = build(name).train(), inputs(13)
            for t in given.values():
                hidden = padding[..., None] if t.dim() == 3 else padding[:, None, :, None]
                t.masked_fill_(hidden, value).requires_grad_()
            torch.manual_seed(3)  # of what training draws
            out = run(core, given, causal=causal, key_padding_mask=padding)
            real = out.out_BHNV.transpose(1, 2)[there]
            loss = (real * torch.arange(real.numel()).view(real.shape).cos()).sum()
            loss = loss if out.auxiliary_loss is None else loss + out.auxiliary_loss
            sources = [*given.values(), *core.parameters()]
            gradients = list(torch.autograd.grad(loss, sources, allow_unused=True))
            for index in range(len(given)):  # those of the tokens that are there
                of_token = gradients[index]
                if of_token is not None:
                    of_token = of_token if of_token.dim() == 3 else of_token.transpose(1, 2)
                    gradients[index] = of_token[there]
            results.append((real, loss, gradients))
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@able("exact_padding", rule="ties")
def test_a_padded_row_is_the_trimmed_row_where_tokens_are_equal(name: str) -> None:
    core, padding = build(name), torch.zeros(B, LONGEST, dtype=torch.bool)
    for kinds, kept in itertools.product((1, 2, 4), (5, 11, 17, 22)):
        given, few = inputs(LONGEST), torch.randint(kinds, (LONGEST,), generator=torch.Generator().manual_seed(kept))
        for key in ("q", "k", "x"):  # what chooses; the values stay as different as they were
            given[key] = given[key][..., few, :]
        padding[0] = torch.arange(LONGEST) >= kept
        for causal in causal_forms(name):
            got = run(core, given, causal=causal, key_padding_mask=padding).out_BHNV
            want = run(core, {key: t[:1, ..., :kept, :] for key, t in given.items()}, causal=causal).out_BHNV
            torch.testing.assert_close(got[:1, :, :kept], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_any_length_and_large_logits_give_finite_results_and_gradients(name: str) -> None:
    large = itertools.product((LONGEST, LONGEST - 1), (0, 5), (4, 8, 12, 60))
    for tokens, padded, size in [*((tokens, 0, 1) for tokens in LENGTHS), *large]:
        padding = torch.arange(tokens).expand(B, -1) >= tokens - padded
        for causal in causal_forms(name):
            core = build(name).float().train()
            given = {key: (t * size).float().requires_grad_() for key, t in inputs(tokens).items()}
            out, _, loss, *_ = run(core, given, causal=causal, key_padding_mask=padding if padded else None)
            assert out.shape == (B, H, tokens, E) and out.isfinite().all()
            total = out.square().mean() + (0 if loss is None else loss)
            for gradient in torch.autograd.grad(total, [*given.values(), *core.parameters()], allow_unused=True):
                assert gradient is None or gradient.isfinite().all(), (tokens, padded, size)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_that_is_not_bool_or_of_another_shape_is_refused(name: str) -> None:
    core, given = build(name), inputs(8)
    wrong = [torch.zeros(B, 8, dtype=torch.long), torch.zeros(B, 8), torch.zeros(8).bool(), torch.zeros(B, 7).bool()]
    for mask in wrong:
        with pytest.raises(ValueError, match=r"mask of .*; it must be bool, True = padding, of \(rows, keys"):
            run(core, given, key_padding_mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_without_tokens_there_is_an_empty_result_and_without_keys_one_of_zeros(name: str) -> None:
    core = build(name)
    for causal in causal_forms(name):
        want_lse = "lse" in core.can
        for mask in (None, torch.zeros(B, 0, dtype=torch.bool)):
            out = run(core, inputs(0), causal=causal, key_padding_mask=mask, want_lse=want_lse)
            assert out.out_BHNV.shape == (B, H, 0, E) and out.out_BHNV.dtype == torch.double
            assert not want_lse or out.lse_BHN.shape == (B, H, 0)
    if {"cross", "bidirectional"} <= core.can:
        given, slots = inputs(5), torch.randn(2, B, H, 5, E, dtype=torch.double)
        nothing = {**given, "k": given["k"][:, :, :0], "v": given["v"][:, :, :0]}
        out = run(core, nothing, causal=False)
        assert out.out_BHNV.shape == (B, H, 5, E) and not out.out_BHNV.any()
        for valid in (0.0, 1.0):
            context = Context(*slots, torch.zeros(B, 5, 1), torch.full((B, 5), valid).bool())
            out = run(core, nothing, causal=False, context=context, want_lse=want_lse)
            assert out.out_BHNV.isfinite().all() and bool(out.out_BHNV.any()) == bool(valid)
            assert not want_lse or bool((out.lse_BHN > LOWEST).all()) == bool(valid)


@able("causal", rule="causal")
@pytest.mark.parametrize("tokens", [13, 24])
def test_no_output_depends_on_a_later_token(name: str, tokens: int) -> None:
    core = build(name)
    given, later = inputs(tokens), inputs(tokens, seed=2)
    want = run(core, given, causal=True).out_BHNV
    for first in (1, 4, 5, 11, tokens - 1):
        changed = {key: torch.cat([t[..., :first, :], later[key][..., first:, :]], -2) for key, t in given.items()}
        got = run(core, changed, causal=True).out_BHNV
        torch.testing.assert_close(got[:, :, :first], want[:, :, :first], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_mechanism_cannot_do_is_refused(name: str) -> None:
    core, given = build(name), inputs(8)
    offered = Context(given["k"], given["v"], torch.zeros(B, 8, 1), torch.ones(B, 8, dtype=torch.bool))
    calls: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "bias": {"bias_BHNM": torch.zeros(1, 1, 8, 8, dtype=torch.double)},
        "context": {"context": offered},
        "lse": {"want_lse": True},
    }
    calls["bidirectional"] = {"causal": False}
    for word, call in calls.items():
        if word not in core.can:
            refuses(rf"call needs {word} \(.*\), which attention \w+.* does not give", run, core, given, **call)
    if "cross" not in core.can:
        with pytest.raises(ValueError, match="this call needs cross"):
            core(given["q"][:, :, :5], given["k"], given["v"], x_BND=given["x"][:, :5], causal="causal" in core.can)
    assert {"causal", "bidirectional"} & core.can and core.can <= CORE_WORDS.keys()
    assert {*calls, "cross", "exact_padding", "weights"} == CORE_WORDS.keys()


@pytest.mark.parametrize("name", [name for name in NAMES if CASES.get(name, Case()).exact is not None])
def test_in_its_limit_it_is_softmax_attention(name: str) -> None:
    core, softmax = build(name, exact=True), SoftmaxAttention()
    padding = torch.zeros(B, 13, dtype=torch.bool)
    padding[0, 11:] = True
    context = Context(*torch.randn(2, B, H, 5, E).double(), torch.zeros(B, 5, 1), torch.rand(B, 5) < 0.6)
    calls: list[dict[str, Any]] = [{"causal": causal} for causal in causal_forms(name)]
    if "exact_causal" in CASES[name].exempt:
        calls = [{"causal": False}]
    if "exact_padding" in core.can:
        calls += [{**call, "key_padding_mask": padding} for call in calls]
    if "context" in core.can:
        calls += [{**call, "context": context} for call in calls]
    for call in calls:
        given = {key: t.requires_grad_() for key, t in inputs(13).items()}
        want_lse = "lse" in core.can
        got, want = (run(c, given, **call, want_lse=want_lse) for c in (core, softmax))
        there = torch.ones(B, 13, dtype=torch.bool)
        if "key_padding_mask" in call:
            there = ~padding
        sources = [given[key] for key in ("q", "k", "v")]
        agree(got.out_BHNV, want.out_BHNV, sources, weight=there[:, None, :, None], where=str(call))
        if want_lse:
            some = there[:, None].expand(B, H, 13) & (want.lse_BHN > -1e300)
            torch.testing.assert_close(got.lse_BHN[some], want.lse_BHN[some], rtol=0, atol=1e-10)


@able("lse", rule="lse")
def test_weights_and_log_sum_exp_are_of_one_softmax(name: str) -> None:
    """Values of one-hot vectors show the weights: each that is not 0 is exp(logit - lse), and they add up to 1."""
    core, given = build(name), inputs(13)
    given["v"] = torch.eye(13, dtype=torch.double).expand(B, H, 13, 13)
    logits = given["q"] @ given["k"].mT / E**0.5
    for causal in causal_forms(name):
        weights, lse = run(core, given, causal=causal, want_lse=True)[:2]
        plain = run(core, given, causal=causal).out_BHNV
        torch.testing.assert_close(plain, weights, rtol=0, atol=1e-10)
        seen = weights > 1e-14
        want = torch.where(seen, (logits - lse[..., None]).exp(), 0)
        torch.testing.assert_close(weights, want, rtol=0, atol=1e-10)
        sums = weights.sum(-1)
        torch.testing.assert_close(sums, torch.where(lse > LOWEST, 1.0, 0.0).double(), rtol=0, atol=1e-10)


@able("lse")
def test_the_log_sum_exp_of_half_precision_is_finite_beyond_its_range(name: str) -> None:
    core = build(name).half()
    given = {key: (t * 300).half() for key, t in inputs(13).items()}
    for causal in causal_forms(name):
        out, lse = run(core, given, causal=causal, want_lse=True)[:2]
        assert out.isfinite().all() and lse.isfinite().all() and lse.dtype == torch.float32


@able("lse", rule="lse")
def test_logits_of_half_precision_are_as_exact_as_those_of_the_fused_kernels(name: str) -> None:
    if "precision" in CASES[name].exempt:
        pytest.skip(CASES[name].exempt["precision"])
    core = build(name).bfloat16()
    given = {key: (t * 3).bfloat16() for key, t in inputs(13).items()}
    wide = {key: t.double() for key, t in given.items()}
    for causal in causal_forms(name):
        want = run(build(name), wide, causal=causal, want_lse=True)
        fused = run(core, given, causal=causal).out_BHNV
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                got = run(core, given, causal=causal, want_lse=True)
            torch.testing.assert_close(got.lse_BHN.double(), want.lse_BHN, rtol=0, atol=2e-5)
            errors = [(out.double() - want.out_BHNV).abs().max() for out in (got.out_BHNV, fused)]
            assert errors[0] <= 1.5 * errors[1] + 1e-2


@able("context")
def test_an_empty_context_is_none_and_a_full_one_is_read(name: str) -> None:
    core, given = build(name), inputs(13)
    slots = torch.randn(2, B, H, 5, E, dtype=torch.double)
    for causal in causal_forms(name):
        empty = Context(*slots, torch.zeros(B, 5, 1), torch.zeros(B, 5, dtype=torch.bool))
        full = empty._replace(valid_BM=torch.ones(B, 5, dtype=torch.bool))
        alone = run(core, given, causal=causal).out_BHNV
        torch.testing.assert_close(run(core, given, causal=causal, context=empty).out_BHNV, alone, rtol=0, atol=1e-10)
        assert (run(core, given, causal=causal, context=full).out_BHNV - alone).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_with_large_logits(name: str, dtype: torch.dtype) -> None:
    if "half" in CASES[name].exempt:
        pytest.skip(CASES[name].exempt["half"])
    core = build(name).to(dtype)
    given = {key: t.to(dtype) for key, t in inputs(13).items()}
    given["q"] = given["q"] * (50 * E**0.5 / (given["q"].float() @ given["k"].float().mT).abs().max()).to(dtype)
    for causal in causal_forms(name):
        out = run(core, given, causal=causal).out_BHNV
        assert out.dtype == dtype and out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_repeats_itself_and_is_saved_whole(name: str) -> None:
    core, given = build(name), inputs(13)
    want = run(core, given).out_BHNV
    torch.manual_seed(5)
    torch.testing.assert_close(run(core, given).out_BHNV, want, rtol=0, atol=0)
    other = build(name, seed=9)
    other.load_state_dict(copy.deepcopy(core.state_dict()))
    torch.testing.assert_close(run(other, given).out_BHNV, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["clustered", "improved_clustered", "informer", "performer", "reformer"])
def test_training_redraws_by_the_generator_and_leaves_what_is_saved(name: str) -> None:
    core, given = build(name, redraw=True), inputs(LONGEST)

    def out(seed: int) -> Tensor:
        return run(core, given, generator=torch.Generator().manual_seed(seed)).out_BHNV

    saved, fixed = copy.deepcopy(core.state_dict()), out(1)
    assert torch.equal(fixed, out(2))
    core.train()
    first = out(1)
    assert torch.equal(first, out(1)) and all((first - other).abs().max() > 1e-3 for other in (out(2), fixed))
    assert all(torch.equal(t, saved[key]) for key, t in core.state_dict().items())
    assert torch.equal(run(core.eval(), given).out_BHNV, fixed)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_is_compiled(name: str, every: bool) -> None:
    """Both forms are captured as one graph; one of them, or `every` one, is differentiated by the compiler too."""
    if "compiled" in CASES[name].exempt:
        pytest.skip(CASES[name].exempt["compiled"])
    core, given, forms = build(name), inputs(9), causal_forms(name)
    for causal in forms:
        backend = "aot_eager" if every or causal == forms[-1] else "eager"
        compiled = torch.compile(core, fullgraph=True, backend=backend, dynamic=False)
        want = run(core, given, causal=causal).out_BHNV
        torch.testing.assert_close(run(compiled, given, causal=causal).out_BHNV, want)


@pytest.mark.parametrize("name", NAMES)
def test_under_a_closed_cache_it_is_itself(name: str) -> None:
    if "bidirectional" not in ATTENTIONS.entry(name).factory.can:
        refuses("causal=False", GRCAttention, H * E, H, 13, core=build(name))
        return
    torch.manual_seed(0)
    layer = GRCAttention(H * E, H, 13, core=build(name), initial_gate=-60.0).double()
    plain = SelfAttention(H * E, H, core=layer.core).double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("memory.")})
    x = inputs(13)["x"]
    layer.eval(), plain.eval()
    torch.testing.assert_close(layer(x).y_BND, plain(x).y_BND, rtol=0, atol=1e-10)
