"""`SelfAttention` against a loop over rows, heads and tokens, and its refusals.

Legend: B rows, N tokens, M slots, H heads, E head width, D = H * E.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree
from common import refuses, stirred
from torch import Tensor, nn

from cached_transformers.interfaces.attention import Attention, AttentionOutput
from cached_transformers.interfaces.contexts import join
from cached_transformers.interfaces.memory import Context, LayerMemory, Query, Reading
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.context_attention import ContextAttention
from cached_transformers.layers.reduction import SpatialReduction
from cached_transformers.memories.compressive import mean_weight
from cached_transformers.positions import ALiBiPositions, Positions, RotaryPositions

ROWS, TOKENS, SLOTS, HEADS, WIDTH = 2, 4, 3, 2, 8
E = WIDTH // HEADS


class Offer(LayerMemory):
    """Offers a fixed context with some empty slots."""

    needs = frozenset({"context"})

    def __init__(self, seed: int = 0, slots: int = SLOTS) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.hidden_BMD = torch.randn(ROWS, slots, WIDTH, dtype=torch.double, generator=g)
        self.positions_BMP = torch.randint(0, 9, (ROWS, slots, 1), generator=g)
        self.valid_BM = torch.rand(ROWS, slots, generator=g) < 0.6

    def read(self, state: Any, query: Query, project_kv: Any) -> Reading:
        return Reading(Context(*project_kv(self.hidden_BMD), self.positions_BMP, self.valid_BM))


def make(
    positions: Positions | None = None, kind: type[SelfAttention] = SelfAttention, **options: Any
) -> SelfAttention:
    torch.manual_seed(3)
    layer = kind(WIDTH, HEADS, positions=positions, norm=nn.LayerNorm(WIDTH), **options).double()
    return stirred(layer, 0.3)


def rotated(vector: Tensor, position: float) -> Tensor:
    """Rotary positions by complex numbers: each pair of channels is one, turned by position * base^(-2 i / E)."""
    pairs = torch.view_as_complex(vector.view(-1, 2).contiguous())
    angle = torch.tensor([position * 10000 ** (-2 * i / len(vector)) for i in range(len(pairs))], dtype=torch.double)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten()


def twin(
    layer: SelfAttention,
    x_BND: Tensor,
    positions_BN: Tensor,
    *,
    rotary: bool = False,
    slopes: list[float] | None = None,
    padding_BN: Tensor | None = None,
    bias_BHNL: Tensor | None = None,
) -> Tensor:
    """Slow twin of the layer: one query of one head of one row at a time."""
    memory = layer.memory
    w, b = layer.qkv.weight, layer.qkv.bias
    out = torch.zeros_like(x_BND)
    for r, rows in enumerate(x_BND):
        hidden = [layer.norm(token) for token in rows]
        known = []  # (normed hidden state, position, index among the keys, index among the tokens or None)
        if isinstance(memory, Offer):
            for m in range(memory.hidden_BMD.shape[1]):
                if memory.valid_BM[r, m]:
                    known.append((layer.norm(memory.hidden_BMD[r, m]), memory.positions_BMP[r, m, 0].item(), m, None))
        slots = memory.hidden_BMD.shape[1] if isinstance(memory, Offer) else 0
        for j, h in enumerate(hidden):
            if padding_BN is None or not padding_BN[r, j]:
                known.append((h, positions_BN[r, j].item(), slots + j, j))
        for i in range(len(hidden)):
            heads = []
            for head in range(HEADS):
                part = slice(head * E, (head + 1) * E)
                q = (w[:WIDTH] @ hidden[i] + b[:WIDTH])[part]
                place = positions_BN[r, i].item()
                logits, values = [], []
                for h, where, index, j in known:
                    if layer.causal and j is not None and j > i:
                        continue
                    k = (w[WIDTH : 2 * WIDTH] @ h + b[WIDTH : 2 * WIDTH])[part]
                    logit = (rotated(q, place) @ rotated(k, where) if rotary else q @ k) / math.sqrt(E)
                    if slopes is not None:
                        logit = logit - slopes[head] * abs(place - where)
                    if bias_BHNL is not None:
                        logit = logit + bias_BHNL[r, head, i, index]
                    logits.append(logit)
                    values.append((w[2 * WIDTH :] @ h + b[2 * WIDTH :])[part])
                weight = torch.stack([x.exp() for x in logits])
                heads.append((weight[:, None] * torch.stack(values)).sum(0) / weight.sum())
            out[r, i] = layer.output.weight @ torch.cat(heads) + layer.output.bias
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.parametrize("scheme", ["none", "rotary", "alibi"])
def test_the_layer_is_its_slow_twin(causal: bool, padded: bool, offered: bool, scheme: str) -> None:
    schemes = {"none": Positions, "rotary": lambda: RotaryPositions(E), "alibi": lambda: ALiBiPositions(HEADS)}
    layer = make(schemes[scheme](), causal=causal, memory=Offer() if offered else None)
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.double, requires_grad=True)
    positions_BN = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    padding = torch.tensor([[False, False, True, False], [False, True, False, True]]) if padded else None
    slopes = [2**-4, 2**-8] if scheme == "alibi" else None
    got = layer(x, positions_BN[..., None], padding_BN=padding).y_BND
    want = twin(layer, x, positions_BN, rotary=scheme == "rotary", slopes=slopes, padding_BN=padding)
    # The angles are float32 whatever the model's precision.
    tolerance = 1e-5 if scheme == "rotary" else 1e-10
    agree(got, want, [x, *layer.parameters()], atol=tolerance)


@pytest.mark.parametrize("scheme", [Positions, lambda: ALiBiPositions(HEADS)])
def test_a_bias_is_added_to_that_of_the_positions(scheme: Any) -> None:
    layer = make(scheme(), memory=Offer())
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.double)
    positions_BN = torch.arange(TOKENS).expand(ROWS, -1)
    bias = torch.randn(ROWS, HEADS, TOKENS, SLOTS + TOKENS, dtype=torch.double)
    slopes = [2**-4, 2**-8] if isinstance(layer.positions, ALiBiPositions) else None
    got = layer(x, positions_BN[..., None], bias_BHNM=bias).y_BND
    torch.testing.assert_close(got, twin(layer, x, positions_BN, slopes=slopes, bias_BHNL=bias), rtol=0, atol=1e-10)


def test_contexts_of_both_memories_are_attended_and_empty_slots_are_not() -> None:
    memory = Offer()
    layer = make(RotaryPositions(E), memory=memory)
    x, places = torch.randn(ROWS, TOKENS, WIDTH).double(), torch.arange(TOKENS).expand(ROWS, -1)[..., None]
    before = layer(x, places).y_BND
    memory.hidden_BMD = torch.where(memory.valid_BM[..., None], memory.hidden_BMD, torch.nan)
    assert torch.equal(layer(x, places).y_BND, before)
    memory, other = Offer(), Offer(seed=1, slots=2)
    layer = make(RotaryPositions(E), memory=memory)
    x, places = torch.randn(ROWS, TOKENS, WIDTH).double(), torch.arange(TOKENS).expand(ROWS, -1)[..., None]
    got = layer(x, places, context=other.read((), Query(x), layer.project_kv).context).y_BND
    for name in ("hidden_BMD", "positions_BMP", "valid_BM"):
        setattr(memory, name, torch.cat([getattr(memory, name), getattr(other, name)], 1))
    torch.testing.assert_close(got, layer(x, places).y_BND, rtol=0, atol=1e-12)


def test_join_expands_a_context_of_one_row() -> None:
    one, many = ((torch.randn(b, 2, m, 4), torch.randn(b, 2, m, 4)) for b, m in ((1, 2), (3, 5)))
    first = Context(*one, torch.zeros(1, 2, 1, dtype=torch.long), torch.tensor([[True, False]]))
    second = Context(*many, torch.ones(3, 5, 1, dtype=torch.long), torch.ones(3, 5, dtype=torch.bool))
    joined = join(first, second)
    assert joined is not None
    assert [tuple(t.shape) for t in joined[:4]] == [(3, 2, 7, 4), (3, 2, 7, 4), (3, 7, 1), (3, 7)]
    assert torch.equal(joined.k_BHME[1, :, :2], one[0][0]) and torch.equal(joined.v_BHME[:, :, 2:], many[1])
    assert joined.valid_BM.sum(1).tolist() == [6, 6, 6]
    assert join(None, None) is None and join(first, None) is first and join(None, second) is second


def test_a_reduction_shortens_keys_and_values_only() -> None:
    layer = make(reduction=SpatialReduction(WIDTH, 2))
    x = torch.randn(ROWS, 16, WIDTH, dtype=torch.double)
    got = layer(x, size=(4, 4))
    assert got.query.k_BHNE.shape == (ROWS, HEADS, 4, E) and got.y_BND.shape == x.shape
    h = layer.norm(x)
    short = layer.reduction(h, (4, 4))
    heads = lambda t: t.unflatten(-1, (HEADS, E)).transpose(1, 2)  # noqa: E731
    q = heads((h @ layer.qkv.weight.T + layer.qkv.bias)[..., :WIDTH])
    k, v = (heads(t) for t in (short @ layer.qkv.weight.T + layer.qkv.bias)[..., WIDTH:].chunk(2, -1))
    y = ((q @ k.mT / math.sqrt(E)).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got.y_BND, layer.output(y), rtol=0, atol=1e-10)


class Bare(Attention):
    """A core that can do nothing but mix the tokens of a segment."""

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Any) -> AttentionOutput:
        return AttentionOutput(v_BHNV.mean(2, keepdim=True).expand_as(v_BHNV))


class Seer(LayerMemory):
    needs = frozenset({"bidirectional"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"width=8 must be a positive multiple of heads=3"),
        ({"heads": 0}, r"width=8 must be a positive multiple of heads=0"),
        ({"core": Bare(), "memory": Offer()}, r"memory Offer needs context .*which attention Bare does not give"),
        ({"core": Bare(), "causal": True}, r"a layer with causal=True needs causal .*attention Bare does not"),
        ({"memory": Seer(), "causal": True}, r"memory Seer shows .* cannot serve a causal model.*memory='grc_stream'"),
    ],
)
def test_pairs_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, SelfAttention, WIDTH, options.pop("heads", HEADS), **options)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("context", {"context": Context(*torch.zeros(2, 1, 1, 2, 4), torch.zeros(1, 2, 1), torch.ones(1, 2))}),
        ("causal", {"causal": True}),
        ("bias", {"bias_BHNM": torch.zeros(1, 1, 3, 3)}),
        ("cross", {"keys": 5}),
    ],
)
def test_a_core_refuses_what_it_does_not_declare(word: str, call: dict[str, Any]) -> None:
    k = torch.randn(1, 1, call.pop("keys", 3), 4)
    with pytest.raises(
        ValueError, match=f"needs {word} .*which attention Bare does not give; `cached list attentions`"
    ):
        Bare()(torch.randn(1, 1, 3, 4), k, k, **call)


def test_a_core_without_causal_form_serves_and_dropout_is_a_probability() -> None:
    x = torch.randn(ROWS, TOKENS, WIDTH)
    assert SelfAttention(WIDTH, HEADS, core=Bare())(x).y_BND.shape == x.shape
    refuses(r"dropout=1.0.*0,", Bare, dropout=1.0)


@pytest.mark.parametrize("patched", [False, True])
def test_frozen_projections_pass_the_gradient_on_and_keep_none(patched: bool) -> None:
    layer, hidden = make(), torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.double, requires_grad=True)
    vars(layer.norm).update({"forward": layer.norm.forward} if patched else {})  # as accelerate does
    plain, frozen = layer.project_kv(hidden), layer.project_kv(hidden, frozen=True)
    wants = torch.autograd.grad(sum(t.sin().sum() for t in plain), hidden)
    for a, b in zip(frozen, plain, strict=True):
        assert torch.equal(a, b)
    sum(t.sin().sum() for t in frozen).backward()
    torch.testing.assert_close(hidden.grad, wants[0], rtol=0, atol=1e-12)
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


class Weighing(Offer):
    needs = Offer.needs | {"weights"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scheme", [Positions, lambda: ALiBiPositions(HEADS)])
def test_the_weights_of_the_keys_are_means_over_what_sees_them(causal: bool, padded: bool, scheme: Any) -> None:
    """The derivative of a query's output by the value of a key is the weight of that key."""
    layer = make(scheme(), causal=causal, memory=Weighing())
    x, places = (
        torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.double),
        torch.arange(9, 9 + TOKENS)[None, :, None].expand(ROWS, -1, -1),
    )
    padding = torch.tensor([[False, False, True, False], [True] * 4]) if padded else torch.zeros(ROWS, TOKENS).bool()
    calls: list[Any] = []
    handle = layer.core.register_forward_hook(
        lambda m, args, kwargs, out: calls.append((args, kwargs)), with_kwargs=True
    )
    weights = layer(x, places, padding_BN=padding if padded else None).weights_BHWL
    assert weights is not None and weights.shape == (ROWS, HEADS, TOKENS, SLOTS + TOKENS)
    usage = mean_weight(weights)
    handle.remove()
    (q, k, v), masks = calls[0]
    context = masks["context"]
    values = torch.cat([context.v_BHME, v], 2).requires_grad_()
    read = layer.core(q, k, values[:, :, SLOTS:], **{**masks, "context": context._replace(v_BHME=values[:, :, :SLOTS])})
    assert usage.shape == (ROWS, SLOTS + TOKENS)
    for row in range(ROWS):
        for key in range(SLOTS + TOKENS):
            weights = []
            for i in range(TOKENS):
                own = key - SLOTS
                seen = context.valid_BM[row, key] if own < 0 else not padding[row, own] and (own <= i or not causal)
                if seen and not padding[row, i]:
                    for head in range(HEADS):
                        grad = torch.autograd.grad(read.out_BHNV[row, head, i, 0], values, retain_graph=True)[0]
                        weights.append(grad[row, head, key, 0].item())
            want = sum(weights) / len(weights) if weights else 0.0
            assert usage[row, key].item() == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize("scheme", ["none", "rotary", "alibi"])
def test_without_own_keys_tokens_attend_the_context_alone(scheme: str) -> None:
    """The segment acts as padding, except that a row with an empty context reads 0."""
    schemes = {"none": Positions, "rotary": lambda: RotaryPositions(E), "alibi": lambda: ALiBiPositions(HEADS)}
    layer, offer = make(schemes[scheme](), causal=True, memory=Offer(), kind=ContextAttention), Offer()
    offer.valid_BM[1] = False
    layer.memory.valid_BM[1] = False
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.double, requires_grad=True)
    places = torch.arange(9, 9 + TOKENS)[None, :, None].expand(ROWS, -1, -1)
    out = layer(x, places)
    other = make(schemes[scheme](), causal=True, memory=offer)
    want = other(x, places, padding_BN=torch.ones(ROWS, TOKENS, dtype=torch.bool)).y_BND
    torch.testing.assert_close(out.y_BND[0], want[0], rtol=0, atol=1e-10)
    assert torch.equal(out.y_BND[1], layer.output.bias.expand(TOKENS, -1))
    assert out.query.k_BHNE.shape == out.query.v_BHNE.shape == (ROWS, HEADS, 0, E)
    alone = make(causal=True, kind=ContextAttention)
    assert torch.equal(alone(x, places).y_BND[0], alone.output.bias.expand(TOKENS, -1))
    assert len(alone.qkv.weight) == WIDTH < len(layer.qkv.weight) == 3 * WIDTH  # keys only where the memory needs them
    out.y_BND.sin().sum().backward()
    assert x.grad is not None and all(p.grad.isfinite().all() for p in [x, *layer.parameters()] if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_query_key": True}, r"shared_query_key=True"),
        ({"core": Bare()}, r"needs context .*, which attention Bare does not give"),
        ({"memory": Weighing()}, r"memory Weighing needs weights"),
    ],
)
def test_layers_without_keys_need_what_makes_sense_of_it(options: dict[str, Any], message: str) -> None:
    refuses(message, ContextAttention, WIDTH, HEADS, **options)
