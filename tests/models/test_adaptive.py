"""Adaptive embedding and softmax: against a slow twin, as probabilities, in both forms, and what they share.

Legend: B rows, N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.loops.segments import SegmentLoop, token_losses
from cached_transformers.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from cached_transformers.models.initial_weights import initialise

V, D = 23, 8
CUTOFFS = [5, 9, 17]
FORMS: dict[str, dict[str, Any]] = {
    "one cluster": {"cutoffs": []},
    "one cluster, projected": {"cutoffs": [], "embedding_width": 6},
    "one width": {"cutoffs": CUTOFFS},
    "one width, projected": {"cutoffs": CUTOFFS, "embedding_width": 6},
    "narrower": {"cutoffs": CUTOFFS, "div_value": 2},
    "narrower, projected": {"cutoffs": CUTOFFS, "embedding_width": 12, "div_value": 2},
}
TIES: list[dict[str, Any]] = [{}, {"tied": False}, {"tied_projections": False}]
TIES += [{"tied": False, "tied_projections": False}]
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def build(form: dict[str, Any], **ties: Any) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    options = dict(form)
    embedding = AdaptiveEmbedding(V, D, options.pop("cutoffs"), **options).double()
    softmax = AdaptiveSoftmax(embedding, **ties).double()
    if not ties:
        assert softmax.weights[0] is embedding.weights[0]
    with torch.no_grad():
        for parameter in [*embedding.parameters(), *softmax.parameters()]:
            parameter.normal_(std=0.5)
    return embedding, softmax


def cluster(word: int, bounds: list[int]) -> int:
    return next(i for i in range(len(bounds) - 1) if bounds[i] <= word < bounds[i + 1])


def slow_embedding(embedding: AdaptiveEmbedding, word: int) -> Tensor:
    i = cluster(word, embedding.bounds)
    vector = embedding.weights[i][word - embedding.bounds[i]]
    if len(embedding.projections) == 0:
        return vector
    projection = embedding.projections[i if embedding.div_value > 1 else 0]
    return torch.stack([sum(projection[d, e] * vector[e] for e in range(len(vector))) for d in range(D)])


def slow_score(softmax: AdaptiveSoftmax, h_D: Tensor, word: int) -> Tensor:
    """log p(word | h), from the two softmaxes' definitions, one product at a time."""
    i, bounds = cluster(word, softmax.bounds), softmax.bounds

    def logit(vector: Tensor, bias: Tensor, j: int) -> Tensor:
        h = h_D if len(softmax.projections) == 0 else h_D @ softmax.projections[j]
        return (vector * h).sum() + bias

    def word_logits(j: int) -> list[Tensor]:
        return [logit(softmax.weights[j][w - bounds[j]], softmax.bias[w], j) for w in range(bounds[j], bounds[j + 1])]

    head = word_logits(0)
    head += [logit(vector, bias, 0) for vector, bias in zip(softmax.cluster_weight, softmax.cluster_bias, strict=True)]
    normal = sum(x.exp() for x in head).log()
    if i == 0:
        return head[word] - normal
    tail = word_logits(i)
    return head[bounds[1] + i - 1] - normal + tail[word - bounds[i]] - sum(x.exp() for x in tail).log()


def gradients(loss: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for p in nn.ModuleList(modules).parameters() if p.numel()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@forms
@pytest.mark.parametrize("ties", TIES, ids=str)
@pytest.mark.parametrize("sparse", [True, False])
def test_values_and_gradients_are_those_of_a_slow_twin(form: Any, ties: Any, sparse: bool) -> None:
    embedding, softmax = build(form, **ties)
    softmax.sparse = sparse
    words = torch.tensor([[0, 4, 5, 8], [9, 16, 17, 22]])  # both ends of every cluster
    targets = torch.tensor([[22, 9, -100, 4], [5, 0, 8, 17]])
    x_BND = embedding(words)
    losses_BN = softmax.losses(x_BND.tanh(), targets)
    slow_x = torch.stack([slow_embedding(embedding, int(w)) for w in words.flatten()])
    slow = [
        -slow_score(softmax, h, int(t)) if t != -100 else torch.zeros(()).double()
        for h, t in zip(slow_x.tanh(), targets.flatten(), strict=True)
    ]
    torch.testing.assert_close(x_BND.flatten(0, 1), slow_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(losses_BN.flatten(), torch.stack(slow), rtol=0, atol=1e-12)
    weight = torch.arange(1.0, 9.0).double()
    fast_g = gradients((losses_BN.flatten() * weight).sum(), embedding, softmax)
    slow_g = gradients((torch.stack(slow) * weight).sum(), embedding, softmax)
    torch.testing.assert_close(fast_g, slow_g, rtol=0, atol=1e-10)


@forms
def test_all_words_together_have_probability_one_and_losses_are_their_entries(form: Any) -> None:
    _, softmax = build(form)
    h_BND = torch.randn(3, 4, D).double()
    logp_BNV = softmax(h_BND)
    assert logp_BNV.shape == (3, 4, V)
    torch.testing.assert_close(logp_BNV.exp().sum(-1), torch.ones(3, 4).double(), rtol=0, atol=1e-12)
    targets = torch.randint(V, (3, 4))
    want = -logp_BNV.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(softmax.losses(h_BND, targets), want, rtol=0, atol=1e-12)


def test_clusters_without_a_target_have_gradients_in_one_graph() -> None:
    """Data-parallel training waits for the gradient of every parameter."""
    _, softmax = build(FORMS["narrower"], tied=False, tied_projections=False)
    for softmax.sparse in (True, False):
        softmax.zero_grad()
        softmax.losses(torch.randn(2, 3, D).double(), torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        for name, parameter in softmax.named_parameters():
            assert parameter.grad is not None, name
        assert softmax.weights[3].grad.count_nonzero() == 0 and softmax.weights[0].grad.count_nonzero() > 0
    # A graph takes the dense form by itself; its results equal the sparse form.
    _, softmax = build(FORMS["narrower"])
    compiled = torch.compile(softmax.losses, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        torch.manual_seed(seed)
        h_BND, targets = torch.randn(2, 5, D).double(), torch.randint(V, (2, 5))
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(h_BND, targets), softmax.losses(h_BND, targets), rtol=0, atol=1e-12)


def test_what_is_tied_is_one_parameter_and_plain_models_score() -> None:
    embedding, softmax = build(FORMS["narrower"], tied_projections=[False, True, True, False])
    assert [a is b for a, b in zip(softmax.projections, embedding.projections, strict=True)] == [0, 1, 1, 0]
    assert all(a is b for a, b in zip(softmax.weights, embedding.weights, strict=True))
    _, untied = build(FORMS["narrower"], tied=False)
    both = {id(p) for p in untied.weights} & {id(p) for p in embedding.weights}
    assert not both
    # With one width for all, the softmax may still have a projection for each cluster, or share the embedding's.
    embedding, softmax = build(FORMS["one width, projected"], tied_projections=[True, False, True, True])
    assert [p is embedding.projections[0] for p in softmax.projections] == [True, False, True, True]
    model = language_model()
    tokens = torch.randint(V, (2, 6))
    targets = tokens[:, 1:].clone()
    targets[1, 2] = -100
    assert not model.scores_targets
    want = token_losses(model, tokens[:, :-1], targets).outputs
    torch.testing.assert_close(model(tokens[:, :-1], targets=targets).outputs, want, rtol=0, atol=0)
    assert want[1, 2] == 0


def test_initial_weights_have_the_deviations_asked_for() -> None:
    embedding = AdaptiveEmbedding(4000, 64, [1000, 2000], div_value=2)
    softmax = AdaptiveSoftmax(embedding, tied=False, tied_projections=[False, True, True])
    model = nn.ModuleList([embedding, softmax, nn.LayerNorm(4096)])
    initialise(model, 0.05, 0.01)
    for weight in [*embedding.weights, *softmax.weights]:
        assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    for projection in [*embedding.projections, softmax.projections[0]]:
        assert projection.std().item() == pytest.approx(0.01, rel=0.1)
    norm = model[2].weight
    assert norm.mean().item() == pytest.approx(1, abs=0.01) and norm.std().item() == pytest.approx(0.05, rel=0.1)
    assert not softmax.bias.any() and not softmax.cluster_bias.any()
    initialise(model)
    assert embedding.weights[0].std().item() == pytest.approx(0.02, rel=0.1)
    assert embedding.projections[0].std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": [9, 5]}, r"cutoffs=\[9, 5\] must ascend between 0 and vocabulary=23"),
        ({"cutoffs": [5, 23]}, "must ascend"),
        ({"cutoffs": [0]}, "must ascend"),
        ({"cutoffs": [5], "div_value": 0}, "div_value=0 must be at least 1"),
        ({"cutoffs": [5, 9], "div_value": 4}, r"widths \[8, 2, 0\]"),
        ({"embedding_width": 0}, "embedding_width=0"),
        ({"cutoffs": [5], "tied_projections": [True]}, "each of the 2 clusters"),
        ({"div_value": 4}, "need cutoffs or embedding_width"),
        ({"tied_projections": [False]}, "need cutoffs or embedding_width"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        language_model(**options)


def language_model(**options: Any) -> Any:
    sizes = {"vocabulary": V, "width": D, "depth": 1, "heads": 2, "feed_forward": 16, "positions": "relative"}
    return create_model("language_model", **{**sizes, **options})


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_scores_its_targets_as_its_probabilities_say(tied: bool) -> None:
    model = language_model(cutoffs=CUTOFFS, div_value=2, tied=tied, memory={"name": "transformer_xl", "length": 4})
    tokens = torch.randint(V, (2, 11))
    assert model.scores_targets
    loss, state = SegmentLoop(model, 5, bptt=2)(tokens[:, :-1], tokens[:, 1:])
    want, last = [], None
    for inputs, targets in zip(tokens[:, :-1].split(5, 1), tokens[:, 1:].split(5, 1), strict=True):
        logp_BNV, last, _ = model(inputs, last)
        want.append(-logp_BNV.gather(-1, targets[..., None])[..., 0])
    torch.testing.assert_close(loss, torch.cat(want, 1).mean(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-6)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
