"""A detector is trained, resumed, evaluated and used by the same commands as every model, and learns by heart."""

from __future__ import annotations

import json
import math

import pairs
import pytest
import torch
import yaml
from common import refuses
from made import folder
from PIL import Image
from pycocotools import mask as codes

from cached_lab.cli.main import main
from cached_lab.experiments.load import load_run
from cached_lab.experiments.run import run_training
from cached_lab.tasks import create_dataset
from cached_lab.tasks.detection.scores import PARTS
from cached_lab.tasks.detection.task import check_categories, evaluate_detector
from cached_lab.tasks.recipes import config_from_dict, load_config
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.distributed import World
from cached_lab.training.metrics import read_metrics
from cached_lab.training.optim import OptimizerConfig, ScheduleConfig, learning_rate

FEW = {"rpn_pre_nms_top_n_train": 60, "rpn_post_nms_top_n_train": 30, "box_batch_size_per_image": 16}
FEW |= dict(rpn_post_nms_top_n_test=20, rpn_pre_nms_top_n_test=60, box_score_thresh=0.0, box_detections_per_img=10)


def recipe(data, name="mask_rcnn", steps=4, **training):
    model = {"name": name, "backbone": "pvt_v2_b0", "min_size": 64, "max_size": 96, "fpn_channels": 16}
    model |= {"memory": {"name": "grc", "ratio": 0.5}, "cache_image_size": [64, 96]}
    model |= {"anchor_sizes": [8, 16, 32, 64, 128], "detector_options": FEW if name == "mask_rcnn" else {}}
    training = {"steps": steps, "batch_size": 2, "evaluate_every": 2, "log_every": 1, "metric": "box_ap"} | training
    training |= {"test": "none", "tensorboard": False, "device": "cpu"}
    tree = {"data": {"name": "coco", "path": str(data)}, "model": model, "training": training}
    tree |= {"name": "made", "schedule": {"name": "constant"}, "optimizer": {"learning_rate": 1e-3}}
    return tree


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run folder of four steps."""
    run = tmp_path_factory.mktemp("runs") / "made"
    return run, run_training(config_from_dict(recipe(data)), run)


def test_a_run_holds_losses_scores_classes_and_a_report(trained):
    run, summary = trained
    lines = read_metrics(run / "metrics.jsonl")
    training = [line for line in lines if line["split"] == "train"]
    parts = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")
    for line in training:
        assert line["loss"] == pytest.approx(sum(line[part] for part in parts), rel=1e-6)
    validation = [line for line in lines if line["split"] == "validation"]
    assert [line["step"] for line in validation] == [2, 4]
    keys = [f"{kind}_{part}" for kind in ("box", "mask") for part in PARTS]
    assert all(set(keys) <= set(line) for line in validation)
    assert summary["best"]["box_ap"] == max(line["box_ap"] for line in validation)
    assert summary["flops"] > 1e8 and summary["test"] is None and summary["baselines"] is None
    named = json.loads((run / "categories.json").read_text(encoding="utf-8"))
    assert named == [{"id": 5, "name": "red"}, {"id": 10, "name": "green"}, {"id": 15, "name": "blue"}]
    assert (run / "gates.json").is_file()
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Average precision" in page and "AP75" in page
    assert f"{100 * summary['best']['box_ap50']:.2f}" in page


def test_scores_do_not_touch_the_model_and_are_those_of_the_run(trained, data, capsys):
    run, summary = trained
    _, model, step = load_run(run, "last")
    dataset = create_dataset("coco", split="validation", path=data)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(2), torch.manual_seed(3)
    values = evaluate_detector(model, dataset, World(torch.device("cpu")), 3)
    assert torch.equal(torch.rand(2), drawn[0]) and model.training and step == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, value in values.items():
        expected = summary["final"][name]
        assert math.isnan(value) == math.isnan(expected) and (math.isnan(value) or value == expected)
    # The command gives the same scores, and those without the memory.
    arguments = ["--split", "validation", "--checkpoint", "last", "--memory", "carry,reset", "--device", "cpu"]
    assert main(["evaluate", str(run), *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["scores"]
    assert [row["memory"] for row in rows] == ["carry", "reset"]
    assert rows[0]["mask_ap50"] == summary["final"]["mask_ap50"]
    assert main(["evaluate", str(run), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "AP75" in printed and f"{summary['final']['mask_ap50']:.2%}" in printed


@pytest.mark.usefixtures("no_run_reports")
def test_pieces_of_a_batch_give_the_gradient_of_the_whole(data, tmp_path):
    """RetinaNet without memory draws nothing and averages over images; two pieces then learn what one batch does."""
    weights = []
    for pieces in (1, 2):
        tree = recipe(data, "retinanet", steps=2, accumulate=pieces, evaluate_every=2)
        tree["model"] |= {"memory": None, "cache_image_size": None}
        tree["data"]["image_ids"] = [100, 105]  # of one size, since attention sees padding
        # Sums in another order differ in the last digit, which Adam's first steps would make much of.
        tree["optimizer"] = {"name": "sgd", "learning_rate": 1e-2}
        run_training(config_from_dict(tree), tmp_path / str(pieces))
        weights.append(Checkpoints(tmp_path / str(pieces) / "checkpoints").newest_valid()[0].weights)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_run_reports")
def test_bfloat16_and_recomputation(data, tmp_path):
    tree = recipe(data, steps=2, precision="bfloat16", activation_checkpointing=True)
    summary = run_training(config_from_dict(tree), tmp_path / "run")
    assert summary["skipped_steps"] == 0
    assert all(math.isfinite(line["loss"]) for line in read_metrics(tmp_path / "run" / "metrics.jsonl")[:1])


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one(data, tmp_path):
    tree = recipe(data, "retinanet", steps=4, batch_size=2, evaluate_every=4)
    tree["model"] |= {"memory": None, "cache_image_size": None}
    tree["data"]["image_ids"] = [100, 105]  # of one size, since attention sees padding
    tree["optimizer"] = {"name": "sgd", "learning_rate": 1e-2}
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["train", str(path), "--out", str(tmp_path / "1")]) == 0
    pairs.commands(["train", str(path), "--out", str(tmp_path / "2")], tmp_path / "meeting")
    curves = [read_metrics(tmp_path / str(n) / "metrics.jsonl") for n in (1, 2)]
    assert len(curves[0]) == len(curves[1]) == 5
    for left, right in zip(*curves, strict=True):
        for key in ("loss", "classification", "box_ap", "box_ap50"):
            assert left.get(key) == pytest.approx(right.get(key), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "training", "change", "message"),
    [
        ("retinanet", {"metric": "mask_ap"}, {}, r"training\.metric='mask_ap' does not suit model 'retinanet'; take b"),
        ("mask_rcnn", {"metric": "accuracy"}, {}, r"training\.metric='accuracy' .* take box_ap or mask_ap"),
        ("mask_rcnn", {"compile": True}, {}, r"training\.compile=true is not for detectors"),
        ("mask_rcnn", {}, {"masks": False}, r"model\.name='mask_rcnn' needs masks .* data\.masks=true"),
        ("mask_rcnn", {"batch_size": 8}, {}, r"training\.batch_size=8 exceeds the 6 training rows"),
    ],
)
def test_settings_that_do_not_suit(data, tmp_path, name, training, change, message):
    tree = recipe(data, name, **training)
    tree["data"] |= change
    refuses(message, run_training, config_from_dict(tree), tmp_path / "run")


def test_other_categories_and_classifiers_are_refused(data, tmp_path):
    dataset = create_dataset("coco", split="validation", path=data)
    for names in (["crimson", "green", "blue"], ["green", "red", "blue"]):
        refuses(r"instances_val2017\.json has other categories", check_categories, names, dataset)
    tree = recipe(data)
    tree["model"] = {"name": "timm", "architecture": "pvt_v2_b0"}
    refuses(r"'timm'.*mask_rcnn.*faster_rcnn", run_training, config_from_dict(tree), tmp_path / "run")


def test_detections_are_drawn_and_written_down(trained, data, tmp_path, capsys):
    run, _ = trained
    pictures = [data / "val2017" / f"00{n}.png" for n in (0, 1)]
    elsewhere = tmp_path / "000.png"  # of the same name as another
    Image.open(pictures[0]).convert("L").save(elsewhere)
    threshold = 0.001
    arguments = [*map(str, [*pictures, elsewhere]), "--out", str(tmp_path / "out"), "--threshold", str(threshold)]
    assert main(["detect", str(run), *arguments, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("objects") == 3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        f"{stem}.{suffix}" for stem in ("000", "000_2", "001") for suffix in ("json", "png")
    ]
    _, model, _ = load_run(run)
    dataset = create_dataset("coco", split="validation", path=data)
    with torch.no_grad():
        (found,) = model.eval()([dataset[0][0]])
    record = json.loads((tmp_path / "out" / "000.json").read_text(encoding="utf-8"))
    kept = [index for index, score in enumerate(found["scores"].tolist()) if score >= threshold]
    assert len(record["detections"]) == len(kept) > 0 and (record["height"], record["width"]) == (48, 64)
    for index, entry in zip(kept, record["detections"], strict=True):
        x, y, w, h = entry["bbox"]
        assert [x, y, x + w, y + h] == pytest.approx(found["boxes"][index].tolist(), abs=1e-3)
        assert entry["score"] == pytest.approx(float(found["scores"][index]))
        assert entry["class"] == dataset.class_names[found["labels"][index]]
        assert codes.decode(entry["segmentation"]).shape == (48, 64)
    with Image.open(tmp_path / "out" / "000.png") as drawn, Image.open(pictures[0]) as original:
        assert drawn.size == original.size and drawn.tobytes() != original.convert("RGB").tobytes()


def test_wrong_files_are_named_and_the_others_are_drawn(trained, data, tmp_path, capsys):
    run, _ = trained
    good, bad = data / "val2017" / "000.png", tmp_path / "notes.jpg"
    bad.write_text("no image", encoding="utf-8")
    assert main(["detect", str(run), str(bad), str(good), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert "notes.jpg cannot be used as an image" in printed.err and "000.png:" in printed.out
    for arguments, message in (
        ([str(run), str(tmp_path / "none.jpg")], "none.jpg: no such file; give image files"),
        ([str(run), str(tmp_path)], "no such file; give image files (a shell expands folder/*.jpg)"),
        ([str(run), str(good), "--threshold", "1.5"], "--threshold 1.5 must lie in 0..1"),
        ([str(tmp_path), str(good)], "has no categories.json: it is not a run of a detector"),
    ):
        assert main(["detect", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_run_reports")
def test_a_run_that_began_with_a_classifier_needs_its_file_no_more(data, tmp_path):
    from cached_transformers.extras import require
    from cached_transformers.integrations.adapters import add_memory

    trained = require("timm", extra="vision").create_model("pvt_v2_b0", num_classes=4)
    path = tmp_path / "classifier.pth"
    torch.save(add_memory(trained, "grc", ratio=0.5).state_dict(), path)
    tree = recipe(data, "retinanet", steps=1)
    tree["data"]["image_ids"] = [100, 105]
    tree["model"] |= {"checkpoint": str(path)}
    run_training(config_from_dict(tree), tmp_path / "run")
    path.unlink()
    config, model, step = load_run(tmp_path / "run", "last")
    assert step == 1 and config.model["checkpoint"] == str(path)
    begun, ended = trained.patch_embed.proj.weight, model.detector.backbone.body.patch_embed.proj.weight
    assert 0 < (begun - ended).abs().max() < 0.05
    tree["training"] |= {"steps": 2}
    assert run_training(config_from_dict(tree), tmp_path / "run")["steps"] == 2


PAPER = [f"coco_{name}_pvt_{size}" for name in ("mask_rcnn", "retinanet") for size in ("tiny", "small", "medium")]
LITTLE = ["model.min_size=64", "model.max_size=96", "training.steps=2", "training.batch_size=2", "training.workers=0"]
LITTLE += ["model.fpn_channels=16", "training.evaluate_every=2", "training.log_every=1"]
LITTLE += ["training.tensorboard=false", "training.device=cpu"]


@pytest.fixture(scope="module")
def eighty(tmp_path_factory):
    """Data of COCO's number of categories."""
    return folder(tmp_path_factory.mktemp("eighty"), count=3, categories=80)


@pytest.mark.usefixtures("no_run_reports")
@pytest.mark.parametrize("name", [n if "tiny" in n else pytest.param(n, marks=pytest.mark.slow) for n in PAPER])
def test_recipes_of_the_paper_take_two_steps(name, eighty, tmp_path):
    detector = [] if "retinanet" in name else [f"model.detector_options={json.dumps(FEW)}"]
    size = ["model.cache_image_size=[64,96]"]
    config = load_config(name, [*LITTLE, *size, *detector, f"data.path={eighty}"])
    summary = run_training(config, tmp_path / "run")
    assert summary["steps"] == 2 and summary["final"]["box_ap"] >= 0
    assert all(0 < line["loss"] < 20 for line in read_metrics(tmp_path / "run" / "metrics.jsonl")[:2])


@pytest.mark.parametrize("name", PAPER)
def test_the_1x_schedule(name):
    config = load_config(name)
    epoch = 117_266 // config.training.batch_size
    assert config.training.steps == 12 * epoch and config.schedule.decay_steps == [8 * epoch, 11 * epoch]
    steps = (1, 250, 500, 8 * epoch, 8 * epoch + 1, 11 * epoch, 11 * epoch + 1, 12 * epoch)
    rates = [learning_rate(config.optimizer, config.schedule, step, config.training.steps) for step in steps]
    assert rates == pytest.approx([2e-7, 5e-5, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6])
    assert (config.optimizer.weight_decay, config.optimizer.decay) == (1e-4, "all")
    assert (config.model["min_size"], config.model["max_size"]) == (800, 1333)


def test_a_schedule_of_steps_says_when():
    flat = ScheduleConfig("step", decay_steps=(2, 3), decay_factor=0.5)
    assert [learning_rate(OptimizerConfig(learning_rate=1.0), flat, t, 4) for t in (1, 2, 3, 4)] == [1, 1, 0.5, 0.25]
    for options, message in (
        ({}, r"schedule\.name=step needs schedule\.decay_steps"),
        ({"decay_steps": (3, 2)}, r"schedule\.decay_steps=\[3, 2\] must grow"),
        ({"decay_steps": (2,), "decay_factor": 0.0}, r"decay_factor=0\.0 must lie in \(0, 1\]"),
    ):
        refuses(message, ScheduleConfig, "step", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name, kinds", [("mask_rcnn", ("box", "mask")), ("retinanet", ("box",))])
def test_a_detector_learns_six_images_by_heart(name, kinds, shared, tmp_path):
    data = shared / "data" / "coco-mini"
    overrides = [f"data.path={data}", "training.tensorboard=false", "training.device=cpu"]
    summary = run_training(load_config(f"coco_overfit_{name}", overrides), tmp_path / "run")
    assert all(summary["final"][f"{kind}_ap"] >= 0.8 for kind in kinds), summary["final"]
