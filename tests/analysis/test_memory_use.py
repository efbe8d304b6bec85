"""The verdict on the use of a memory: paired losses, their interval, and two real runs; the use of shared caches."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.small_language import CPU, fitted, own_cache  # noqa: F401

from cached_lab.experiments import cache_use
from cached_lab.experiments.memory_use import (
    BLOCKS,
    DOCUMENTS,
    about_text,
    emptied_in_training,
    memory_use,
    paired_units,
    text_row,
)
from cached_lab.experiments.reports.run_page import place_table, use_sentence
from cached_lab.experiments.statistics import ratio_interval
from cached_lab.tasks.classification.images.small_images import Digits
from cached_lab.tasks.classification.scores import evaluate
from cached_lab.tasks.language.scores import BUCKETS, SplitLosses, split_losses
from cached_lab.training.distributed import World
from cached_transformers import create_model
from cached_transformers.memories.grc.shared_cache import caches, commit_caches

WORDS: Any = SimpleNamespace(tokenizer=SimpleNamespace(lossless=False))


def made(seed: int, documents: int, rows: int, segments: int, more: float = 0.0) -> SplitLosses:
    """Return losses of a split with 5 tokens per segment, each `more` expensive."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.rand(rows, segments, generator=generator, dtype=torch.float64) + 5 * (1 + more)
    sizes = torch.arange(1, documents + 1).double()
    by_document = torch.rand(documents, generator=generator, dtype=torch.float64) + sizes * more
    pad = torch.zeros(2, BUCKETS, dtype=torch.float64)
    pad[:, :2] = torch.tensor([[1.0, 2.0], [5.0, 5.0]])
    by_segment = torch.stack([parts, torch.full_like(parts, 5.0)])
    return SplitLosses(pad, pad[:, :4], pad.clone(), torch.stack([by_document, sizes]), by_segment)


def test_documents_are_paired_and_one_unit_claims_nothing() -> None:
    carry, shuffle = (made(seed, DOCUMENTS + 1, 2, 3) for seed in range(2))
    carry.documents[:, 4] = shuffle.documents[:, 4] = 0  # of a document without tokens nothing is known
    over, sums_U, counts_U = paired_units(carry, shuffle)
    kept = [d for d in range(DOCUMENTS + 1) if d != 4]
    assert over == "documents" and counts_U.tolist() == [d + 1 for d in kept]
    assert sums_U.tolist() == [float(shuffle.documents[0, d] - carry.documents[0, d]) for d in kept]
    use = memory_use(made(1, 1, 1, 1), made(2, 1, 1, 1, 3.0), WORDS)
    assert use["verdict"] == "not shown" and use["nats"][1:] == [None, None] and use["units"] == 1
    assert use_sentence(use).endswith("a single one of blocks of consecutive segments gives no interval")
    carry, shuffle = made(1, 1, 4, 50), made(2, 1, 4, 50, 3.0)
    carry.carried[:, 1:] = 0
    use = memory_use(carry, shuffle, WORDS)
    assert use["verdict"] == "not shown" and "no segment follows another of its document" in use_sentence(use)
    assert memory_use(carry, shuffle, WORDS, shared=True)["verdict"] == "used", "a cache is read by all segments"


@pytest.mark.parametrize(("rows", "segments"), [(1, 100), (3, 40), (40, 6), (2, 5)])
def test_blocks_of_rows_are_paired_where_documents_are_few(rows: int, segments: int) -> None:
    carry, shuffle = (made(seed, DOCUMENTS - 1, rows, segments) for seed in range(2))
    for losses in (carry, shuffle):
        losses.segments[:, 0, -2:] = 0  # the first row is through before the others
    over, sums_U, counts_U = paired_units(carry, shuffle)
    sums, counts = [], []
    for row in range(rows):
        length = segments - 2 if row == 0 else segments
        number, end = min(math.ceil(BLOCKS / rows), length), 0
        for block in range(number):
            inside = range(end, end := end + length // number + (block < length % number))
            sums.append(sum(float(shuffle.segments[0, row, s] - carry.segments[0, row, s]) for s in inside))
            counts.append(5 * len(inside))
    assert over == "blocks of consecutive segments" and len(sums_U) >= min(math.ceil(BLOCKS / rows), segments - 2)
    assert sums_U.tolist() == pytest.approx(sums) and counts_U.tolist() == counts


@pytest.mark.parametrize(
    ("more", "verdict", "begins"),
    [
        (0.2, "used", "the memory is used: shuffled, it changes the loss by +0."),
        (-0.2, "harmful", "the memory is harmful: shuffled, it changes the loss by −0."),
        (0.0, "not shown", "no use of the memory can be shown: shuffled, it changes"),
    ],
)
def test_the_verdict_says_where_the_interval_lies(more: float, verdict: str, begins: str) -> None:
    carry, shuffle = made(1, 1, 4, 50), made(2, 1, 4, 50, more)
    use = memory_use(carry, shuffle, WORDS)
    twin = ratio_interval(*(t.tolist() for t in paired_units(carry, shuffle)[1:]))
    assert use["nats"] == list(twin) and use["verdict"] == verdict and "bits_per_byte" not in use
    assert abs(use["nats"][0] - more) < 0.03
    assert use_sentence(use).startswith(begins) and "over 32 blocks of consecutive segments" in use_sentence(use)


def judged(folder: Path, repeats: int, *options: str) -> tuple[dict[str, Any], dict[str, SplitLosses], Any]:
    """Train a small model on lines of 8 random letters, each repeated `repeats` times, and judge its memory.

    A segment is a line: it is predictable from the segment before it, or not at all.
    """
    letters = random.Random(3)
    lines = ["".join(letters.choices("abcdefgh", k=8)) for _ in range(900 // repeats)]
    text = "".join(line * repeats for line in lines).encode()
    (folder / "text").mkdir()
    for name, part in {"train": text[:6000], "valid": text[-1200:], "test": text[-1200:]}.items():
        (folder / "text" / f"{name}.txt").write_bytes(part)
    trainer = fitted(
        folder / "run",
        folder / "text",
        *("model.width=32", "model.depth=1", "model.dropout=0.0", "model.memory.length=8", "training.batch_size=12"),
        *("training.evaluate_every=1000", *options),
    )
    data, losses = trainer.task.validation, {}
    for mode in ("carry", "reset", "shuffle"):
        section = dataclasses.replace(trainer.config.evaluation, memory=mode)
        losses[mode] = split_losses(trainer.model, data, CPU, dataclasses.replace(trainer.config, evaluation=section))
    return about_text(losses, data, trainer.config, memory=True, shared=False), losses, data


def test_a_memory_that_must_be_used_is_found_to_be(tmp_path: Path) -> None:
    about, losses, data = judged(tmp_path, 6, "training.steps=120", "training.reset_rows=0.2")
    use = about["use"]
    carry, shuffle = (losses[mode].scores(data)["loss"] for mode in ("carry", "shuffle"))
    assert use["verdict"] == "used" and use["nats"][1] > 0.1 and use["nats"][0] == pytest.approx(shuffle - carry)
    assert use["bits_per_byte"][0] == pytest.approx(use["nats"][0] / math.log(2)), "a token is a byte"
    assert "bits per byte" in use_sentence(use)
    assert about["reset"] == {"reset_rows": 0.2, "documents": False, "trained_on": True}
    rows = [{"memory": mode, **text_row(found, data)} for mode, found in losses.items()]
    table = place_table(rows)
    header, lines = table.columns, table.rows
    assert header == ["place", "tokens", "carry", "reset", "shuffle", "use"]
    first, second = (next(line for line in lines if line[0].startswith(words)) for words in ("0 segments", "1 to 2"))
    assert first[2] == first[3] == first[4], "rows that have read nothing have nothing to exchange"
    assert float(second[-1]) > 0.1 and int(first[1]) == 12 * 8
    assert "unknown" not in about, "bytes know every word"
    json.dumps(about, allow_nan=False)


def test_a_memory_that_cannot_help_is_not_said_to(tmp_path: Path) -> None:
    about, _, _ = judged(tmp_path, 1, "training.steps=30")
    assert about["use"]["verdict"] == "not shown" and about["use"]["nats"][1] < 0 < about["use"]["nats"][2]
    assert not about["reset"]["trained_on"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_document_begins_with_an_empty_memory_too(share: float) -> None:
    """By the option, or by the data themselves."""
    config: Any = SimpleNamespace(training=SimpleNamespace(reset_rows=share), data={"name": "books"})
    data: Any = SimpleNamespace(reset="document")
    assert emptied_in_training(data, config) == {"reset_rows": share, "documents": True, "trained_on": True}


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
    with cache_use.caches_updated_by_the_batch(model), torch.no_grad():
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
    modes = cache_use.modes_of(models[0], 16, other=True)
    assert modes == ["carry", "reset", "shuffle", "other", "batch 4", "batch 16", "batch 256"]

    def load():
        return copy.deepcopy(models[0])

    rows = cache_use.score_cache_use(load, data, modes, WORLD, 64, seed=3, other=models[1])
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
    mixed = evaluate(load(), cache_use.ShuffledDataset(data), WORLD, 16, inside=cache_use.caches_updated_by_the_batch)
    assert losses["batch 16"] == mixed["loss"]
    with pytest.raises(ValueError, match=r"other run's caches are of \[\(17, 16\), .* this run's of \[\(17, 8\)"):
        cache_use.take_caches(load(), model_of({"name": "grc", "ratio": 1.0}))


@pytest.mark.parametrize("memory", [dict(name="grc", variant="released"), dict(name="attention_cache", update="store")])
def test_only_what_makes_a_difference_is_asked(memory):
    """Rows that read their own update, or what was stored, do so in evaluation as in training."""
    model = model_of(memory)
    assert cache_use.modes_of(model, 16, other=False) == ["carry", "reset", "shuffle"]
    images = torch.randn(3, 1, 8, 8)
    with cache_use.caches_updated_by_the_batch(model), torch.no_grad():
        assert torch.allclose(model(images).outputs[:1], model(images[:1]).outputs, atol=1e-6)


def test_the_order_is_mixed_and_complete():
    data = Digits("test")
    mixed = cache_use.ShuffledDataset(data)
    assert sorted(mixed.order) == list(range(len(data))) != mixed.order
    assert torch.equal(mixed[0][0], data[mixed.order[0]][0])
