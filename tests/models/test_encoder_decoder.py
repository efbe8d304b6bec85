"""The encoder-decoder against a slow twin; padding, causality and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from common import refuses, stirred
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import create_model
from cached_transformers.layers.token_loss import IGNORED, token_losses
from cached_transformers.memories.grc.shared_cache import caches
from cached_transformers.models.encoder_decoder import EncoderDecoder
from cached_transformers.positions import BucketedPositions

V, W, D, H, ROWS, N, T = 13, 11, 8, 2, 3, 6, 5
LENGTHS = torch.tensor([6, 2, 4])
PADDING = torch.arange(N) >= LENGTHS[:, None]


def build(seed: int = 0, **options: Any) -> EncoderDecoder:
    """A small model in evaluation mode, none of whose weights keeps an initial value that would hide its effect."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocabulary": V, "max_length": 32, "width": D, "depth": 2, "heads": H, "feed_forward": 12}
    model = create_model("encoder_decoder", **{**sizes, "dropout": 0.0, **options})
    assert isinstance(model, EncoderDecoder)
    return stirred(model.eval(), 0.2)


def sources(seed: int = 0) -> Tensor:
    return torch.randint(V, (ROWS, N), generator=torch.Generator().manual_seed(seed))


def said(seed: int = 0) -> Tensor:
    return torch.randint(W, (ROWS, T), generator=torch.Generator().manual_seed(100 + seed))


def twin_norm(x: Tensor, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.Identity):
        return x
    assert isinstance(norm, nn.LayerNorm)
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def twin_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """(N, D) from queries (N, D), keys and values (M, D), head by head and token by token."""
    rows = []
    for i in range(len(q)):
        seen = i + 1 if causal else len(k)
        heads = []
        for part in range(H):
            e = slice(part * D // H, (part + 1) * D // H)
            weights = torch.softmax(k[:seen, e] @ q[i, e] / math.sqrt(D // H), 0)
            heads.append(weights @ v[:seen, e])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def twin_embed(tokens: Tensor, table: Tensor) -> Tensor:
    rows = []
    for place, token in enumerate(tokens.tolist()):
        code = torch.zeros(D, dtype=table.dtype)
        for i in range(D // 2):
            angle = place / 10000 ** (2 * i / D)
            code[2 * i], code[2 * i + 1] = math.sin(angle), math.cos(angle)
        rows.append(table[token] * math.sqrt(D) + code)
    return torch.stack(rows)


def twin(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    """Logits (T, W) of one sentence without padding, one head at a time."""

    def residual(x: Tensor, inner: nn.Module, outer: nn.Module, fn: Any) -> Tensor:
        return twin_norm(x + fn(twin_norm(x, inner)), outer)

    def feed_forward(h: Tensor, layer: Any) -> Tensor:
        inner = torch.clamp(h @ layer.enter.weight.T + layer.enter.bias, min=0)
        return inner @ layer.leave.weight.T + layer.leave.bias

    def attend(h: Tensor, layer: Any, causal: bool) -> Tensor:
        q, k, v = (h @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
        return twin_attention(q, k, v, causal) @ layer.output.weight.T + layer.output.bias

    def cross(h: Tensor, layer: Any) -> Tensor:
        weights, biases = layer.key_value.weight.chunk(2), layer.key_value.bias.chunk(2)
        k, v = (hidden @ w.T + b for w, b in zip(weights, biases, strict=True))
        q = h @ layer.query.weight.T + layer.query.bias
        return twin_attention(q, k, v, False) @ layer.output.weight.T + layer.output.bias

    x = twin_embed(source, model.embedding.weight)
    blocks: Any = model.stack.blocks
    for b in blocks:
        x = residual(x, b.attention.norm, b.attention_norm, lambda h, b=b: attend(h, b.attention, False))
        x = residual(x, b.feed_forward.norm, b.feed_forward_norm, lambda h, b=b: feed_forward(h, b.feed_forward))
    hidden = twin_norm(x, model.stack.norm)
    y = twin_embed(target, model.target_embedding.weight)
    blocks = model.decoder.blocks
    for b in blocks:
        y = residual(y, b.attention.norm, b.attention_norm, lambda h, b=b: attend(h, b.attention, True))
        y = residual(y, b.cross_attention.norm, b.cross_attention_norm, lambda h, b=b: cross(h, b.cross_attention))
        y = residual(y, b.feed_forward.norm, b.feed_forward_norm, lambda h, b=b: feed_forward(h, b.feed_forward))
    return twin_norm(y, model.decoder.norm) @ model.head.weight.T


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_values_and_gradients_are_those_of_a_slow_twin(norm: str) -> None:
    model = build(norm=norm, target_vocabulary=W).double()
    inputs, targets = sources(), said()
    out = model(inputs, targets, PADDING).outputs
    want = torch.stack([twin(model, inputs[i, : LENGTHS[i]], targets[i]) for i in range(ROWS)])
    near: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}  # angles of positions are float32, whatever the model
    torch.testing.assert_close(out, want, **near)
    weight = torch.randn_like(out)
    got, expected = (torch.autograd.grad((y * weight).sum(), list(model.parameters())) for y in (out, want))
    torch.testing.assert_close(got, expected, **near)


KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post", "embedding_norm": True, "positions": "learned"},
    "t5": {
        **{"positions": "bucketed", "norm_kind": "rms", "bias": False, "attention_scale": 1.0, "head_width": 3},
        **{"activation": "gated_gelu_tanh", "scale_embedding": False, "init": "t5", "buckets": 8, "reach": 6},
    },
    "grc": {"memory": {"name": "grc", "length": 5}},
    "rotary": {"positions": "rotary", "norm": "post", "final_norm": True},
    "experts": {"experts": {"experts": 3, "every": 1, "capacity_factor": None}},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_output_depends_on_a_later_target(kind: str) -> None:
    model = build(target_vocabulary=W, **KINDS[kind])
    targets = said()
    before = model(sources(), targets, PADDING).outputs
    for t in range(1, T):
        changed = targets.clone()
        changed[:, t:] = (changed[:, t:] + 1) % W
        after = model(sources(), changed, PADDING).outputs
        torch.testing.assert_close(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_changes_nothing(kind: str) -> None:
    model = build(target_vocabulary=W, **KINDS[kind])
    inputs, targets = sources(), said()
    want = [model(inputs[i : i + 1, : LENGTHS[i]], targets[i : i + 1]).outputs[0] for i in range(ROWS)]
    for shift in (False, True):
        rows, padding = inputs.clone(), PADDING
        if shift:
            rows = torch.stack([inputs[i].roll(N - int(LENGTHS[i])) for i in range(ROWS)])
            padding = PADDING.flip(1)
        got = model(rows.masked_fill(padding, 3), targets, padding).outputs
        torch.testing.assert_close(got, torch.stack(want), atol=2e-5, rtol=1e-4)


def test_a_cache_learns_of_valid_tokens_alone_and_has_64_slots() -> None:
    model = build(memory="grc").train()
    assert {cache.cache_MC.shape for cache in caches(model)} == {(64, D // 2)}
    found = []
    for filler in (0, 7):
        for cache in caches(model):
            cache.reset_cache()
        model(sources().masked_fill(PADDING, filler), said(), PADDING)
        model.eval()
        found.append([cache.cache_MC.clone() for cache in caches(model)])
        model.train()
    assert all(cache.abs().sum() > 0 for cache in found[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "memory",
    [{"name": "grc_stream", "length": 4}, {"name": "rmt", "length": 3}, {"name": "transformer_xl", "length": 8}],
)
@torch.no_grad()
def test_a_stream_memory_carries_sentences_of_a_document_on(memory: dict[str, Any]) -> None:
    model = build(memory=memory)
    first, second = model(sources(), said(), PADDING), model(sources(5), said(), PADDING)
    on = model(sources(), said(), PADDING, first.state)
    other = model(sources(), said(), PADDING, second.state)
    assert not torch.allclose(other.outputs, first.outputs, atol=1e-5)
    assert not torch.allclose(on.outputs, other.outputs, atol=1e-5)
    assert on.state.clock_B.tolist() == (2 * LENGTHS).tolist()
    padded = build(memory=memory)(sources().masked_fill(PADDING, 2), said(), PADDING, first.state)
    torch.testing.assert_close(padded.outputs, on.outputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [30, 10**6])
def test_losses_and_gradients_are_those_of_cross_entropy(
    smoothing: float, bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cached_transformers.layers.token_loss.CHUNK", chunk)
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=bias).double()
    h = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (9,)).masked_fill(torch.arange(9) % 4 == 0, IGNORED)
    weight = torch.rand(9, dtype=torch.float64)
    want = F.cross_entropy(head(h), targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    got = token_losses(h, head, targets, smoothing, IGNORED)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad((got * weight).sum(), (h, *head.parameters()), retain_graph=True),
        torch.autograd.grad((want * weight).sum(), (h, *head.parameters())),
    )
    fresh = token_losses(h, head, targets, smoothing, IGNORED)
    again = (torch.autograd.grad(losses.sum(), h) for losses in (got, fresh))  # the kept logits are as they were
    torch.testing.assert_close(*again)


def test_losses_of_half_precision_are_float32_and_near() -> None:
    head, h, targets = nn.Linear(16, 50), torch.randn(40, 16), torch.randint(50, (40,))
    want = token_losses(h, head, targets, 0.1, IGNORED)
    for autocast in (False, True):
        x = (h if autocast else h.bfloat16()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = token_losses(x, head if autocast else head.bfloat16(), targets, 0.1, IGNORED)
            got.sum().backward()
        head = head.float()
        assert got.dtype == torch.float32 and x.grad is not None and x.grad.dtype == x.dtype
        torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("kind", ["pre", "t5", "grc", "experts"])
def test_targets_give_losses_and_all_weights_learn(kind: str) -> None:
    model = build(target_vocabulary=W, **KINDS[kind]).train()
    targets = said().masked_fill(torch.arange(T) >= torch.tensor([5, 2, 3])[:, None], IGNORED)
    options: dict[str, Any] = {"targets": targets, "label_smoothing": 0.1}
    out = model(sources(), said(1), PADDING, **options)
    logits = build(target_vocabulary=W, **KINDS[kind]).train()(sources(), said(1), PADDING).outputs
    want = F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(out.outputs, want)
    (out.outputs.sum() + out.auxiliary_loss).backward()
    # An empty cache is met by a reset gate that has nothing to reset yet.
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert all("from_cache" in name for name in idle)


def test_targets_behind_the_end_and_checkpoints_change_nothing() -> None:
    model = build(experts={"experts": 3, "every": 1, "capacity_factor": 1.0}).train()
    targets = said().masked_fill(torch.arange(T) >= torch.tensor([5, 2, 3])[:, None], IGNORED)
    outs = [model(sources(), said(1).masked_fill(targets == IGNORED, f), PADDING, targets=targets) for f in (0, 9)]
    assert outs[0].auxiliary_loss > 0
    torch.testing.assert_close(outs[0].outputs, outs[1].outputs)
    torch.testing.assert_close(outs[0].auxiliary_loss, outs[1].auxiliary_loss)
    gradients = []
    for enabled in (False, True):
        model = build(memory="grc", dropout=0.1).train()
        model.set_activation_checkpointing(enabled)
        torch.manual_seed(3)
        model(sources(), said(), PADDING, targets=said(1)).outputs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_embeddings_are_shared_as_told() -> None:
    def tables(**options: Any) -> int:
        model = build(**options)
        return len({id(t) for t in (model.embedding.weight, model.target_embedding.weight, model.head.weight)})

    assert [tables(shared_embeddings=shared) for shared in ("all", "decoder", "none")] == [1, 2, 3]
    assert tables() == 1 and tables(target_vocabulary=W) == 2
    assert build(target_vocabulary=W)(sources(), said()).outputs.shape == (ROWS, T, W)


def test_default_sizes_are_of_iwslt_and_buckets_are_t5s() -> None:
    """fairseq's transformer_iwslt_de_en with one dictionary of 10,000 types has 36.7 million parameters."""
    with torch.device("meta"):
        model = EncoderDecoder(10_000)
    blocks = 6 * (4 * 512 * 512 + 2 * 512 * 1024) + 6 * (8 * 512 * 512 + 2 * 512 * 1024)
    vectors = 6 * (4 * 512 + 1024 + 512 + 4 * 512) + 6 * (8 * 512 + 1024 + 512 + 6 * 512) + 4 * 512
    assert sum(p.numel() for p in model.parameters()) == 10_000 * 512 + blocks + vectors
    # Values that were checked against the published function.
    both, causal = BucketedPositions(1), BucketedPositions(1, causal=True)
    distance = torch.tensor([0, 7, 8, 11, 12, 15, 16, 23, 32, 46, 64, 90, 91, 1000])
    want = [0, 7, 8, 8, 9, 9, 10, 11, 12, 13, 14, 14, 15, 15]
    assert both.bucket(-distance).tolist() == want
    assert both.bucket(distance).tolist() == [0, *(16 + bucket for bucket in want[1:])]
    distance = torch.tensor([0, 15, 16, 18, 19, 21, 24, 31, 64, 100, 112, 113, 999])
    assert causal.bucket(-distance).tolist() == [0, 15, 16, 16, 17, 18, 19, 21, 26, 30, 30, 31, 31]
    assert causal.bucket(distance).tolist() == [0] * len(distance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "bucket"}, "did you mean 'bucketed'"),
        ({"activation": "gated_relu6"}, "activation='gated_relu6' must be one of"),
        ({"shared_embeddings": "some"}, "unknown shared_embeddings 'some'"),
        ({"shared_embeddings": "all", "target_vocabulary": W}, "needs one vocabulary"),
        ({"init": "t6"}, "unknown init 't6'"),
        ({"init": 0.0}, "unknown init 0.0"),
        ({"buckets": 3, "positions": "bucketed"}, "buckets=3 must be at least 4 and even"),
        ({"head_width": 3, "memory": "grc"}, "head_width=3"),
        ({"experts": {"experts": 2, "every": 3}}, "every=3 must lie between 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, build, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": torch.zeros(ROWS, 33).long(), "padding": None}, "inputs of 33 tokens, but max_length=32"),
        ({"targets_in": torch.full((ROWS, T), -1)}, "a token id of decoder_inputs is not in a vocabulary"),
        ({"targets_in": torch.zeros(ROWS + 1, T, dtype=torch.long)}, "3 rows of inputs, but 4 of decoder_inputs"),
        ({"targets_in": torch.zeros(ROWS, 33, dtype=torch.long)}, "decoder_inputs of 33 tokens, but max_length=32"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 must lie in"),
        ({"targets": said(), "label_smoothing": 1.0}, "label_smoothing=1.0 must lie in"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"inputs": sources(), "targets_in": said(), "padding": PADDING, **change}
    refuses(message, build(), given.pop("inputs"), given.pop("targets_in"), **given)
    refuses("batch_size=0", build().init_state, 0)


def test_training_is_one_graph() -> None:
    model, reference = (build(depth=1).train() for _ in range(2))
    run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    given: dict[str, Any] = {"padding": PADDING, "targets": said(1), "label_smoothing": 0.1}
    for step in range(2):
        out, want = run(sources(step), said(step), **given), reference(sources(step), said(step), **given)
        torch.testing.assert_close(out.outputs, want.outputs)
    out.outputs.sum().backward()
    want.outputs.sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, reference.embedding.weight.grad)
