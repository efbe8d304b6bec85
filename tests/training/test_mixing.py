"""Mixup and CutMix: timm's, of neighbouring rows, the same for any division of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cached_lab.data.dataset import Batch
from cached_lab.experiments.run import run_training
from cached_lab.experiments.statistics import with_intervals
from cached_lab.tasks.classification.mixing import Mixing, make_mixing, paired
from cached_lab.tasks.classification.scores import averages, score_width, sums
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.settings import TrainingConfig
from cached_transformers.extras import require

CPU = torch.device("cpu")


def batch(rows: int = 8, classes: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 6, 6, generator=generator)
    return Batch(images, torch.arange(rows) % classes, None)


def mixed(rows: Batch, step: int = 3, **settings: float) -> Batch:
    return Mixing(TrainingConfig(seed=2, **settings), 5)(rows, CPU, step)


def test_mixup_is_one_mean_of_neighbours_and_of_their_labels():
    given = batch()
    made = mixed(given, mixup=0.8)
    order = paired(8)
    assert order.tolist() == [0, 2, 4, 6, 7, 5, 3, 1]
    partner = {int(a): int(b) for a, b in zip(order, order.flip(0), strict=True)}
    assert partner == {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4, 6: 7, 7: 6}
    share = float(made.targets[0, 0])
    assert 0 < share < 1
    one_hot = F.one_hot(given.targets, 5).float()
    for place, row in enumerate(order.tolist()):
        other = partner[row]
        expected = share * given.inputs[row] + (1 - share) * given.inputs[other]
        assert torch.allclose(made.inputs[place], expected, atol=1e-6)
        assert torch.allclose(made.targets[place], share * one_hot[row] + (1 - share) * one_hot[other], atol=1e-6)


def test_cutmix_takes_a_box_by_seed_and_step():
    given = batch()
    made = mixed(given, cutmix=1.0, step=5)
    order = paired(8)
    own = (made.inputs == given.inputs[order]).all(1)
    theirs = (made.inputs == given.inputs[order.flip(0)]).all(1)
    assert bool((own | theirs).all()) and 0 < int(theirs[0].sum()) < 36
    assert all(torch.equal(theirs[0], one) for one in theirs)
    assert float(made.targets[0, 0]) == pytest.approx(int(own[0].sum()) / 36)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = mixed(batch(), mixup=0.8, cutmix=1.0)
    assert np.random.get_state()[1].tolist() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    np.random.rand(5)
    assert torch.equal(mixed(batch(), mixup=0.8, cutmix=1.0).inputs, first.inputs)
    others = [mixed(batch(), mixup=0.8, cutmix=1.0, step=step).targets[0, 0].item() for step in range(12)]
    assert len(set(others)) > 8


def test_pieces_and_smoothing_are_those_of_the_batch_and_of_timm():
    whole = batch(8)
    together = mixed(whole, mixup=0.8)
    parts = [mixed(Batch(whole.inputs[a : a + 4], whole.targets[a : a + 4], None), mixup=0.8) for a in (0, 4)]
    places = [paired(8).tolist(), [row + 4 * part for part in range(2) for row in paired(4).tolist()]]
    apart = torch.cat([part.inputs for part in parts])
    for row in range(8):
        assert torch.equal(together.inputs[places[0].index(row)], apart[places[1].index(row)])
    mixup_target = require("timm.data.mixup", extra="vision").mixup_target
    SoftTargetCrossEntropy = require("timm.loss", extra="vision").SoftTargetCrossEntropy
    logits = torch.randn(8, 5)
    targets = torch.arange(8) % 5
    ours = F.cross_entropy(logits, mixup_target(targets, 5, 0.3), label_smoothing=0.1)
    theirs = SoftTargetCrossEntropy()(logits, mixup_target(targets, 5, 0.3, smoothing=0.1))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_scores_of_shares_and_odd_pieces():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    shares = torch.tensor([[0.6, 0.4, 0.0], [0.7, 0.3, 0.0]])
    loss, correct, rows = sums(logits, shares, 3).tolist()
    assert (correct, rows) == (1, 2)
    assert loss == pytest.approx(-(shares * logits.log_softmax(-1)).sum().item(), rel=1e-6)
    with pytest.raises(ValueError, match="leaves 3 rows; make it even"):
        make_mixing(TrainingConfig(mixup=0.5, batch_size=6, accumulate=2), 5, 1)
    assert make_mixing(TrainingConfig(), 5, 1) is None
    with pytest.raises(ValueError, match="mix images; set both to 0 for other data"):
        mixed(Batch(torch.zeros(4, 7, dtype=torch.long), torch.zeros(4, dtype=torch.long), None), mixup=1.0)


def test_top_five_counts_where_there_are_more_than_ten_classes():
    logits = torch.arange(12.0).repeat(4, 1)
    targets = torch.tensor([11, 7, 6, 0])  # first, fifth, sixth and last
    scores = averages(sums(logits, targets, 12))
    assert (scores["accuracy"], scores["top5_accuracy"]) == (0.25, 0.5)
    assert "top5_accuracy" not in averages(sums(logits, targets.clamp(max=9), 10))
    assert (score_width(10), score_width(11)) == (3, 4)
    interval = with_intervals({**scores, "rows": 4})["top5_accuracy_interval"]
    assert interval == pytest.approx([0.1500, 0.8500], abs=1e-3)
    assert with_intervals(scores) == scores


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_a_model_may_have_room_for_more_classes_than_the_data(tmp_path, mixup):
    """Data with ten classes have no top-5 accuracy, even for a model with sixteen outputs."""
    model = {"name": "vision_transformer", "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "classes": 16}
    training = {"steps": 2, "batch_size": 8, "mixup": mixup, "tensorboard": False, "device": "cpu"}
    tree = {"name": "room", "data": {"name": "digits"}, "model": model, "training": training}
    summary = run_training(config_from_dict(tree), tmp_path / "run")
    assert "top5_accuracy" not in summary["test"] and 0 <= summary["test"]["accuracy"] <= 1
