"""Linearised mechanisms: the recurrent form is the causal pass, cut anywhere; linear attention; parts of cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentions.agreement import agree
from attentions.cases import B, E, H, build
from attentions.linearised_twins import V, average, compare, keys_and_mask, leaves
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.gated_delta import PUBLISHED
from cached_transformers.attentions.linear import LinearAttention
from cached_transformers.attentions.parts import building_blocks as blocks
from cached_transformers.attentions.parts.linearised import LinearisedAttention, elu_features
from cached_transformers.interfaces.memory import Context
from cached_transformers.registry import ATTENTIONS
from cached_transformers.state import map_state, named_tensors, reorder, reset, signature

NAMES = [e.name for e in ATTENTIONS if isinstance(e.factory, type) and issubclass(e.factory, LinearisedAttention)]
FORMS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES]
FORMS += [("rfa", {"gate": True}), ("performer", {"kernel": "relu"}), ("delta_net", {"features": "silu"})]
FORMS += [("gated_delta", {**options, "value_width": V}) for options in PUBLISHED.values()]


def some_context(slots: int = 4) -> Context:
    given = leaves(1, slots, seed=7)
    valid = torch.tensor([[True, False, True, True], [True, True, False, False]])
    return Context(given["context_k"].detach(), given["context_v"].detach(), torch.zeros(B, slots, 1), valid)


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("with_context", [False, True])
def test_steps_are_the_causal_pass(name: str, options: dict[str, Any], with_context: bool) -> None:
    core, given = build(name, **options), leaves(13)
    assert isinstance(core, LinearisedAttention)
    context = some_context() if with_context else None
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    want = core(q, k, v, x_BND=x, causal=True, context=context).out_BHNV
    for prompt in (0, 6):
        state = core.init_step(B, H, E, V, like=q, context=context)
        kinds = [(path, t.shape, t.dtype) for path, t in named_tensors(state)]
        outs = []
        if prompt:
            head = (t[:, :, :prompt] for t in (q, k, v))
            out, state = core.scan(*head, state, x_BND=x[:, :prompt])
            outs = list(out.unbind(2))
        for i in range(prompt, 13):
            out, state = core.step(q[:, :, i], k[:, :, i], v[:, :, i], state, x_BD=x[:, i])
            outs.append(out)
        got = torch.stack(outs, 2)
        agree(got, want, [q, k, v])
        assert kinds == [(path, t.shape, t.dtype) for path, t in named_tensors(state)]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_padding_leaves_the_state_and_rows_of_it_can_be_moved(name: str, options: dict[str, Any]) -> None:
    core, given = build(name, **options), {key: t.detach() for key, t in leaves(7).items()}
    assert isinstance(core, LinearisedAttention)
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[:, 4:] = True
    fresh = core.init_step(B, H, E, V, like=q)
    _, padded = core.scan(q, k, v, fresh, key_padding_mask=padding, x_BND=x)
    _, trimmed = core.scan(q[:, :, :4], k[:, :, :4], v[:, :, :4], fresh, x_BND=x[:, :4])
    map_state(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12), padded, trimmed)
    swapped = core.step(q[:, :, 4], k[:, :, 4], v[:, :, 4], reorder(padded, torch.tensor([1, 0])), x_BD=x[:, 4])[0]
    mirror = [t[:, :, 4].flip(0) for t in (q, k, v)]
    want = core.step(*mirror, padded, x_BD=x[:, 4].flip(0))[0].flip(0)
    torch.testing.assert_close(swapped, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_states_and_sums_are_of_float32(name: str) -> None:
    """4000 keys of one direction: bfloat16 sums would stop growing at 256."""
    core = build(name, **({"chunk": 64} if "chunk" in ATTENTIONS.entry(name).options else {})).float()
    assert isinstance(core, LinearisedAttention)
    given = {key: t.detach().float() for key, t in leaves(4000, rows=1).items()}
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    k = k[:, :, :1].expand_as(k)
    want = core(q, k, v, x_BND=x, causal=True).out_BHNV
    half = core(*(t.bfloat16() for t in (q, k, v)), x_BND=x.bfloat16(), causal=True).out_BHNV
    with torch.autocast("cpu", torch.bfloat16):
        auto = core(q, k, v, x_BND=x, causal=True).out_BHNV
    scale = want.abs().mean()
    assert half.dtype == torch.bfloat16 and (half.float() - want).abs().mean() < 0.02 * scale
    torch.testing.assert_close(auto, want, rtol=1e-5, atol=1e-5)
    state = core.init_step(1, H, E, V, like=q.bfloat16())
    assert {t.dtype for _, t in named_tensors(state)} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_call_needs_one_key_a_query(name: str) -> None:
    core, given = build(name), leaves(8)
    with pytest.raises(ValueError, match=r"needs cross|a causal call of \w+ needs one key a query"):
        core(given["q"][:, :, :5], given["k"], given["v"], x_BND=given["x"], causal=True)


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("padded", [False, True])
def test_segments_with_a_carried_state_are_the_whole_sequence(name: str, options: dict[str, Any], padded: bool) -> None:
    core, plain, given = build(name, carry=True, **options), build(name, **options), leaves(13)
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    padding = torch.rand(B, 13, generator=torch.Generator().manual_seed(1)) < 0.4 if padded else None
    want = plain(q, k, v, x_BND=x, causal=True, key_padding_mask=padding).out_BHNV
    for first in ((), core.init_state(B, H, E, V, like=q)):
        state, outs, start = first, [], 0
        for size in (0, 5, 0, 1, 7):
            part = slice(start, start + size)
            mask = None if padding is None else padding[:, part]
            segment = [t[:, :, part] for t in (q, k, v)]
            result = core(*segment, x_BND=x[:, part], causal=True, key_padding_mask=mask, state=state)
            outs.append(result.out_BHNV)
            state, start = result.state, start + size
        torch.testing.assert_close(torch.cat(outs, 2), want, rtol=0, atol=1e-10)
        assert signature(state) == signature(core.init_state(B, H, E, V, like=q))
        weight = torch.randn_like(want)
        for model, out in ((core, torch.cat(outs, 2)), (plain, want)):
            sources = [q, k, v, x, *model.parameters()]
            found = torch.autograd.grad((out * weight).sum(), sources, allow_unused=True, retain_graph=True)
            if model is core:
                gradients = found
        for a, b in zip(gradients, found, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_a_row_whose_carried_state_is_reset_has_seen_nothing(name: str, options: dict[str, Any]) -> None:
    core, given = build(name, carry=True, **options), {key: t.detach() for key, t in leaves(8).items()}

    def run(part: slice, state: Any) -> Any:
        segment = [given[key][:, :, part] for key in "qkv"]
        return core(*segment, x_BND=given["x"][:, part], causal=True, state=state)

    state = run(slice(0, 4), ()).state
    kept, anew = run(slice(4, 8), state).out_BHNV, run(slice(4, 8), ()).out_BHNV
    assert (kept - anew).abs().max() > 1e-3
    fresh = core.init_state(B, H, E, V, like=given["q"])
    got = run(slice(4, 8), reset(state, fresh, torch.tensor([False, True]))).out_BHNV
    torch.testing.assert_close(got[0], kept[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], anew[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_carried_state_excludes_is_refused(name: str) -> None:
    core, given = build(name, carry=True), leaves(4)
    q, k, v, x = (given[key] for key in ("q", "k", "v", "x"))
    assert core.can == {"causal", "exact_padding"}
    refuses(r"this call needs bidirectional .* \(its options take away", core, q, k, v, x_BND=x)
    refuses("this call needs context", core, q, k, v, x_BND=x, causal=True, context=some_context())
    state = core.init_state(B, H, E, V, like=q)
    for other in (build(name), build("softmax")):
        assert other.init_state(B, H, E, V, like=q) == ()
        refuses("carries no state from segment to segment", other, q, k, v, x_BND=x, causal=True, state=state)
    changing: dict[str, dict[str, Any]] = {"performer": {"redraw": True}, "rfa": {"pool": 3}}
    if name in changing:
        refuses("carry=True", build, name, carry=True, **changing[name])


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_it_is_its_quadratic_form(chunk: int, epsilon: float) -> None:
    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: object) -> Tensor:
        keys, values, mask = keys_and_mask(k, v, causal, seen, context)  # type: ignore[arg-type]
        weights = (F.elu(q) + 1) @ (F.elu(keys) + 1).mT
        return average(weights, values, mask, epsilon)

    compare(LinearAttention(chunk=chunk, epsilon=epsilon), twin)


def test_small_features_keep_their_digits() -> None:
    x = torch.tensor([-40.0, -20.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(elu_features(x).double(), F.elu(x.double()).add(1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(elu_features(x)[:2], x[:2].exp(), rtol=1e-6, atol=0)
    assert (F.elu(x) + 1)[0] == 0  # the usual form


def test_slope_of_elu_features_is_one_from_zero_on() -> None:
    x = torch.tensor([-2.0, -1e-30, 0.0, 1e-30, 3.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(elu_features(x).sum(), x)
    torch.testing.assert_close(slope, x.detach().clamp(max=0).exp(), rtol=1e-12, atol=0)
    assert elu_features(torch.tensor(-torch.inf)) == 0

    # Queries that see keys of tiny features alone still average their values; with the usual epsilon nothing is left.
    q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[1.0], [3.0]])[None, None]
    k = torch.full((1, 1, 2, 4), -40.0)
    assert LinearAttention()(q, k, v).out_BHNV.flatten().tolist() == [2.0, 2.0]
    assert LinearAttention(epsilon=1e-6)(q, k, v).out_BHNV.abs().max() < 1e-8


def test_keys_alike_are_averaged_and_queries_may_differ_in_number() -> None:
    given = leaves(8)
    k = given["k"][:, :, :1].expand(-1, -1, 8, -1)
    out = LinearAttention()(given["q"][:, :, :3], k, given["v"]).out_BHNV
    torch.testing.assert_close(out, given["v"].mean(2, keepdim=True).expand(-1, -1, 3, -1), rtol=0, atol=1e-12)


def test_two_parts_of_the_keys_make_one_softmax() -> None:
    q, k, v = torch.randn(3, 2, 2, 7, 6, dtype=torch.double)
    mask = torch.rand(7, 7) < 0.4
    mask[2] = False
    first = torch.arange(7) < 3
    whole, lse = blocks.attend(q, k, v, mask, want_lse=True)
    parts = [blocks.attend(q, k, v, mask & part, want_lse=True) for part in (first, ~first)]
    out, merged = blocks.merge(*parts[0], *parts[1])  # type: ignore[arg-type]
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
    assert lse is not None
    some = mask.any(-1)
    torch.testing.assert_close(merged[:, :, some], lse[:, :, some], rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 7, 20, 30])
@pytest.mark.parametrize("kinds", [1, 2, 5, 1000])
def test_of_equal_numbers_the_first_are_the_largest(count: int, kinds: int) -> None:
    t = torch.randint(kinds, (3, 2, 30), generator=torch.Generator().manual_seed(count)).double()
    t[0, 0, ::2] = -torch.inf
    want = t.argsort(dim=-1, descending=True, stable=True)[..., :count]
    assert torch.equal(blocks.largest(t, count), want)
