"""Caches taken away, exchanged, and updated in evaluation as in training."""

from __future__ import annotations

import copy

import pytest
import torch

from cached_lab.experiments.cache_use import (
    ShuffledDataset,
    caches_updated_by_the_batch,
    modes_of,
    score_cache_use,
    take_caches,
)
from cached_lab.tasks.classification.images.digits import Digits
from cached_lab.tasks.classification.scores import evaluate
from cached_lab.training.distributed import World
from cached_transformers import create_model
from cached_transformers.memories.grc.shared_cache import caches, commit_caches

WORLD = World(torch.device("cpu"))


def model_of(memory, seed=0):
    torch.manual_seed(seed)
    sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10}
    model = create_model("vision_transformer", width=16, depth=2, heads=2, feed_forward=16, memory=memory, **sizes)
    for _ in range(3):  # caches that hold something
        model(torch.randn(5, 1, 8, 8))
    commit_caches(model)
    return model.eval()


def values(model):
    return [cache.cache_MC.clone() for cache in caches(model)]


@pytest.mark.parametrize("memory", ["grc", {"name": "attention_cache"}, {"name": "grc", "dropout": 0.5}])
def test_inside_evaluation_computes_what_training_computes(memory):
    model, images = model_of(memory), torch.randn(6, 1, 8, 8)
    before = values(model)
    frozen = model(images).outputs
    with caches_updated_by_the_batch(model), torch.no_grad():
        found = model(images).outputs
        part = model(images[:2]).outputs
    twin = copy.deepcopy(model).train()
    for module in twin.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    assert torch.allclose(found, twin(images).outputs, atol=1e-6)
    assert not torch.allclose(found, frozen, atol=1e-4)
    assert not torch.allclose(found[:2], part, atol=1e-6)  # it depends on the rest of the batch
    assert torch.equal(model(images).outputs, frozen) and not any(m.training for m in model.modules())
    commit_caches(model)  # nothing was proposed
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_each_way_of_treating_a_cache_does_what_it_says():
    models = {seed: model_of("grc", seed) for seed in (0, 1)}
    data = Digits("test")
    modes = modes_of(models[0], 16, other=True)
    assert modes == ["carry", "reset", "shuffle", "other", "batch 4", "batch 16", "batch 256"]

    def load():
        return copy.deepcopy(models[0])

    rows = score_cache_use(load, data, modes, WORLD, 64, seed=3, other=models[1])
    losses = {row["mode"]: row["loss"] for row in rows}
    assert losses["carry"] == evaluate(models[0], data, WORLD, 64)["loss"]
    emptied = load()
    for cache in caches(emptied):
        cache.cache_MC.zero_()
    assert losses["reset"] == pytest.approx(evaluate(emptied, data, WORLD, 64)["loss"], abs=1e-7)
    exchanged = load()
    for cache, other in zip(caches(exchanged), caches(models[1]), strict=True):
        cache.cache_MC.copy_(other.cache_MC)
    assert losses["other"] == pytest.approx(evaluate(exchanged, data, WORLD, 64)["loss"], abs=1e-7)
    assert len(set(losses.values())) == len(modes)
    mixed = evaluate(load(), ShuffledDataset(data), WORLD, 16, inside=caches_updated_by_the_batch)
    assert losses["batch 16"] == mixed["loss"]
    with pytest.raises(ValueError, match=r"other run's caches are of \[\(17, 16\), .* this run's of \[\(17, 8\)"):
        take_caches(load(), model_of({"name": "grc", "ratio": 1.0}))


@pytest.mark.parametrize("memory", [dict(name="grc", variant="released"), dict(name="attention_cache", update="store")])
def test_only_what_makes_a_difference_is_asked(memory):
    """Rows that read their own update, or what was stored, do so in evaluation as in training."""
    model = model_of(memory)
    assert modes_of(model, 16, other=False) == ["carry", "reset", "shuffle"]
    images = torch.randn(3, 1, 8, 8)
    with caches_updated_by_the_batch(model), torch.no_grad():
        assert torch.allclose(model(images).outputs[:1], model(images[:1]).outputs, atol=1e-6)


def test_the_order_is_mixed_and_complete():
    data = Digits("test")
    mixed = ShuffledDataset(data)
    assert sorted(mixed.order) == list(range(len(data))) != mixed.order
    assert torch.equal(mixed[0][0], data[mixed.order[0]][0])
