"""The Long Range Arena's classifier: a slow twin written from its code's description, initial weights, options."""

from __future__ import annotations

import math

import pytest
import torch
from common import refuses, stirred
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.models.sequence_classifier import SequenceClassifier

ARENA = {"init": "lra", "bias": False, "activation": "gelu_tanh", "norm_eps": 1e-6}
ARENA |= {"dropout": 0.1, "attention_dropout": 0.1}


def classifier(**options: object) -> SequenceClassifier:
    sizes = {"vocabulary": 7, "classes": 3, "max_length": 9, "width": 8, "depth": 2, "heads": 2, "feed_forward": 12}
    model = create_model("sequence_classifier", **{**sizes, **options})
    assert isinstance(model, SequenceClassifier)
    return model


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    centred = x - x.mean()
    return centred / (centred.square().mean() + 1e-6).sqrt() * layer.weight + layer.bias


def twin(model: SequenceClassifier, tokens: list[int]) -> Tensor:
    """Logits of one row, one token and one head at a time; 0 is padding, which no token attends."""
    width, heads = model.class_token.shape[-1], 2
    inside = width // heads
    rows = [model.class_token[0, 0], *(model.embedding.weight[token] for token in tokens)]
    hidden = []
    for place, row in enumerate(rows):
        angle = [place / 10000 ** (2 * (c // 2) / width) for c in range(width)]
        wave = [math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angle)]
        placed = model.positions.embed(torch.tensor([[[place]]]))[0, 0]  # in float32, whatever the model's type
        torch.testing.assert_close(placed, torch.tensor(wave), rtol=0, atol=1e-5)
        hidden.append(row + placed)
    seen = [True, *(token != 0 for token in tokens)]
    for block in model.stack.blocks:
        attention, mlp = block.attention, block.feed_forward
        normed = [norm(h, attention.norm) for h in hidden]
        query, key, value = attention.qkv.weight.split(width)
        out = []
        for h, x in zip(hidden, normed, strict=True):
            joined = []
            for head in range(heads):
                part = slice(head * inside, (head + 1) * inside)
                logits = [
                    ((query @ x)[part] @ (key @ other)[part] / math.sqrt(inside)).exp() if keep else torch.tensor(0.0)
                    for other, keep in zip(normed, seen, strict=True)
                ]
                weighted = [w * (value @ other)[part] for w, other in zip(logits, normed, strict=True)]
                joined.append(sum(weighted) / sum(logits))
            out.append(h + attention.output.weight @ torch.cat(joined))
        hidden = []
        for h in out:
            x = mlp.enter.weight @ norm(h, mlp.norm) + mlp.enter.bias
            x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            hidden.append(h + mlp.leave.weight @ x + mlp.leave.bias)
    x = norm(hidden[0], model.stack.norm)
    x = (model.head[0].weight @ x + model.head[0].bias).clamp(min=0)
    return model.head[2].weight @ x + model.head[2].bias


def test_it_is_the_classifier_of_the_long_range_arena() -> None:
    model = classifier(**ARENA).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    rows = [[1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 4, 1, 0, 0, 0, 0, 0, 0], [6] + [0] * 8]
    inputs_BN = torch.tensor(rows)
    logits_BK = model(inputs_BN, padding=inputs_BN == 0).outputs
    expected_BK = torch.stack([twin(model, row) for row in rows])
    torch.testing.assert_close(logits_BK, expected_BK, rtol=0, atol=1e-10)
    own = torch.autograd.grad(logits_BK.sin().sum(), list(model.parameters()))
    slow = torch.autograd.grad(expected_BK.sin().sum(), list(model.parameters()))
    torch.testing.assert_close(own, slow, rtol=0, atol=1e-10)


def test_its_initial_weights_are_those_of_the_arena() -> None:
    model = classifier(**ARENA, width=64, feed_forward=128, head_width=96, vocabulary=500).requires_grad_(False)
    assert model.class_token.abs().max() == 0
    assert model.embedding.weight.std() == pytest.approx(1, rel=0.05)
    attention, mlp = model.stack.blocks[1].attention, model.stack.blocks[1].feed_forward
    assert attention.qkv.bias is None and attention.output.bias is None
    for weight in (*attention.qkv.weight.split(64), attention.output.weight):
        assert weight.abs().max() == pytest.approx(math.sqrt(6 / 128), rel=0.02)  # each projection for itself
        assert weight.std() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    for linear in (mlp.enter, mlp.leave):
        assert linear.weight.std() == pytest.approx(math.sqrt(2 / 192), rel=0.05)
        assert linear.bias.std() == pytest.approx(1e-6, rel=0.3)
    for linear in (model.head[0], model.head[2]):
        assert linear.weight.std() == pytest.approx(linear.in_features**-0.5, rel=0.1)
        assert linear.weight.abs().max() <= 2 * linear.in_features**-0.5 / 0.8796
        assert linear.bias.abs().max() == 0
    assert [model.head[0].out_features, model.head[2].in_features] == [96, 96]


def test_the_options_leave_the_default_model_as_it_was() -> None:
    model = classifier()
    torch.manual_seed(0)
    same = classifier(activation="gelu", norm_eps=1e-5, bias=True, head_width=12, init="xavier")
    torch.testing.assert_close(dict(model.named_parameters()), dict(same.named_parameters()), rtol=0, atol=0)
    assert model.head[0].out_features == 12 and model.stack.norm.eps == 1e-5


def test_shared_queries_and_keys_without_output_projection() -> None:
    """The arena's Reformer: the same logits as a layer with equal weights of queries and keys."""
    shared = classifier(bias=False, shared_query_key=True, project_output=False).double().eval()
    plain = classifier(bias=False).double().eval()
    weights = shared.state_dict()
    for index in range(2):
        weight = f"stack.blocks.{index}.attention.qkv.weight"
        both, value = weights[weight].split(8)
        weights[weight] = torch.cat([both, both, value])
        weights[f"stack.blocks.{index}.attention.output.weight"] = torch.eye(8, dtype=torch.double)
    plain.load_state_dict(weights)
    inputs_BN = torch.randint(1, 7, (2, 9))
    torch.testing.assert_close(shared(inputs_BN).outputs, plain(inputs_BN).outputs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", ["grc", "transformer_xl", "memorizing", "rmt"])
def test_memories_work_with_shared_queries_and_keys(memory: str) -> None:
    model = classifier(memory=memory, shared_query_key=True, project_output=False)
    out = model(torch.randint(1, 7, (2, 9)))
    out = model(torch.randint(1, 7, (2, 9)), out.state)
    out.outputs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "lar"}, "init='lar' must be one of 'xavier', 'lra'"),
        ({"head_width": 0}, "head_width=0 must be at least 1; null takes feed_forward"),
        ({"activation": "swish"}, "activation='swish' must be one of gelu, gelu_tanh, relu"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    refuses(message, classifier, **options)


def test_a_short_convolution_joins_neighbours_and_carries_the_last_of_them() -> None:
    model = classifier(short_convolution=3, memory={"name": "rmt", "length": 2}, positions="rotary").double().eval()
    stirred(model, 0.2)
    long, short = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 6, 1]])
    padded = torch.cat([long, torch.nn.functional.pad(short, (0, 2))])
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    first = model(padded, padding=padding)
    second = model(padded.flip(1), first.state, padding=padding.flip(1))
    alone = model(short)
    torch.testing.assert_close(first.outputs[1:], alone.outputs, rtol=0, atol=1e-7)
    again = model(short.flip(1), alone.state)
    torch.testing.assert_close(second.outputs[1:], again.outputs, rtol=0, atol=1e-7)

    plain = classifier(short_convolution=3, positions="rotary").eval()
    with torch.no_grad():
        for block in plain.stack.blocks:
            block.short_convolution.weight_KD.normal_()
    kept = [plain(torch.tensor([[1, 2, 3, last]])).state for last in (4, 5)]
    a, b = (plain(short, state).outputs for state in kept)
    assert (a - b).abs().max() > 1e-3, "what stood last before the segment is joined to what stands first in it"
