"""Recipes of images and of translation at full size: they match the papers, and train two steps on made data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from data.pictures import encoded, write_files, write_tar
from translation.made import write_corpus

from cached_lab.cli.main import main
from cached_lab.experiments import run as run_module
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.run import run_training
from cached_lab.resources import recipes_folder
from cached_lab.tasks.recipes import load_config
from cached_lab.training.metrics import read_metrics
from cached_lab.training.optim import learning_rate
from cached_transformers import create_model

pytestmark = pytest.mark.usefixtures("no_run_reports")
NAMES = sorted(path.stem for path in recipes_folder().glob("imagenet*.yaml"))
IMAGES = 1_281_167
# Published parameters of the plain models, in millions (1,000 classes).
SIZES = {
    "imagenet_vit_small_grc": 22.1,
    "imagenet_vit_small_attention_cache": 22.1,
    "imagenet_pvt_tiny_grc": 13.2,
    "imagenet_pvt_small_grc": 24.5,
    "imagenet_pvt_medium_grc": 44.2,
    "imagenet_pvt_v2_b2_grc": 25.4,
    "imagenet_pvt_v2_b3_grc": 45.2,
    "imagenet_pvt_v2_b4_grc": 62.6,
    "imagenet_swin_tiny_grc": 28.3,
    "imagenet22k_swin_tiny_grc": 28.3,
    "imagenet22k_swin_tiny_grc_finetune": 28.3,
}
# Two steps of the whole would take long: the same architecture with fewer layers and, for PVTs, fewer pixels.
STAGES = ["model.depths=[1,1,1,1]"]
SHALLOW = {"deit_small": ["model.depth=2"], "pvt_": [*STAGES, "data.image_size=112"], "swin": STAGES}

# With so few layers PVT-Small is PVT-Tiny, and PVTv2-B3 is PVTv2-B4, setting for setting; the other two differ from
# these in the drop path and the clipping of gradients, and each setting has one form. Swin on 22,000 classes has a
# wider head, and finetuning images of 384 pixels.
ALIKE = (
    *("imagenet_pvt_small_grc", "imagenet_pvt_medium_grc", "imagenet_pvt_v2_b2_grc", "imagenet_pvt_v2_b3_grc"),
    "imagenet22k_swin_tiny_grc_finetune",
)


def test_there_is_one_for_every_row_and_two_for_every_track() -> None:
    assert set(NAMES) == set(SIZES)
    assert set(TRACKED) == {f"{track}_{kind}" for track in (*TRACKS, "multi30k_en_de") for kind in ("plain", "grc")}


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_model_has_the_published_size(name):
    config = load_config(name, ["model.memory=null"])
    with torch.device("meta"):
        plain = create_model(**config.model, classes=1000)
    assert count_parameters(plain) / 1e6 == pytest.approx(SIZES[name], abs=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_the_published_ones(name):
    config = load_config(name)
    steps, batch, share = config.training.steps, config.training.batch_size, config.training.batch_size / 512
    images = IMAGES if config.data["name"] == "imagenet" else round(14_197_122 * 0.995)
    epoch = images // batch
    epochs = {"imagenet22k_swin_tiny_grc": 90, "imagenet22k_swin_tiny_grc_finetune": 30}.get(name, 300)
    assert steps / epoch == pytest.approx(epochs, rel=1e-3)
    peak, first, last = {
        "imagenet22k_swin_tiny_grc": (1.25e-4 * share, 1.25e-7 * share, 1.25e-6 * share),
        "imagenet22k_swin_tiny_grc_finetune": (2e-5 * share, 2e-8 * share, 2e-7 * share),
    }.get(name, (5e-4 * share, 1e-6, 1e-5))
    warm = 20 if name == "imagenet_swin_tiny_grc" else 5
    rates = [learning_rate(config.optimizer, config.schedule, t, steps) for t in (0, warm * epoch, steps)]
    assert rates == pytest.approx([first, peak, last], rel=1e-3)
    assert config.training.repeats == (1 if "swin" in name else 3) and config.optimizer.weight_decay in (0.05, 1e-8)
    assert (config.training.mixup, config.training.cutmix, config.training.label_smoothing) == (0.8, 1.0, 0.1)
    assert config.data["augmentation"]["auto_augment"] == "rand-m9-mstd0.5-inc1"
    assert math.floor(config.data["image_size"] / config.data["crop_ratio"]) == 256


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A few images in the layouts of ImageNet-1k, one class packed, and of ImageNet-22k."""
    root = tmp_path_factory.mktemp("imagenet")
    names = [f"n{number:08}" for number in range(6)]
    photo = {n: {f"{n}_{i}.JPEG": encoded(10 * c + i, (48, 36), "JPEG") for i in range(4)} for c, n in enumerate(names)}
    for c, name in enumerate(names):
        if c:
            write_files(root / "train" / name, photo[name])
        else:
            write_tar(root / "train" / f"{name}.tar", photo[name])
        write_tar(root / "22k" / f"{name}.tar", photo[name])
    write_files(root / "val", {f"ILSVRC2012_val_{i:08}.JPEG": encoded(100 + i, (40, 50), "JPEG") for i in range(6)})
    (root / "val.txt").write_text("".join(f"ILSVRC2012_val_{i:08}.JPEG {i}\n" for i in range(6)))
    return root


def shallow(name: str) -> list[str]:
    architecture = load_config(name).model["architecture"]
    return next(options for start, options in SHALLOW.items() if architecture.startswith(start))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in NAMES])
def test_they_train_two_steps_on_made_data_of_the_right_shape(name, imagenet, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    wide = load_config(name).data["name"] == "image_shards"
    data = [f"data.path={imagenet / '22k' if wide else imagenet}", *(["data.validation_fraction=0.25"] if wide else [])]
    batch = 6 if "swin" not in name else 4
    training = ["training.steps=2", f"training.batch_size={batch}", "training.workers=0", "training.evaluate_every=2"]
    training += ["training.device=cpu", "training.tensorboard=false", "training.log_every=1", "schedule.warmup_steps=1"]
    training += ["training.evaluation_batch_size=6", "training.precision=float32"]
    if "finetune" in name:  # its initial weights come from a training on other classes
        first = [f"data.path={imagenet / '22k'}", "data.validation_fraction=0.25", "data.label=tar", *training]
        run_training(load_config("imagenet22k_swin_tiny_grc", [*first, *shallow(name)]), tmp_path / "first")
        training.append(f"training.initial_weights={tmp_path / 'first'}")
    summary = run_training(load_config(name, [*data, *training, *shallow(name)]), tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 3 and all(0.5 < loss < 10 for loss in losses) and summary["steps"] == 2
    kept = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert kept["variant"] == load_config(name).model["memory"]["name"]
    assert (kept["test"] is None) == (name == "imagenet22k_swin_tiny_grc")


@pytest.mark.parametrize("ratio", [0.125, 0.25, 1.0])
def test_the_ratios_of_table_10_are_overrides(ratio):
    config = load_config("imagenet_pvt_tiny_grc", [f"model.memory.ratio={ratio}", "model.depths=[1,1,1,1]"])
    model = create_model(**config.model, classes=10)
    widths = [cache.shape[1] for name, cache in model.named_buffers() if name.endswith("cache_MC")]
    assert widths == [int(ratio * width) for width in (64, 128, 320, 512)]


TRACKED = sorted(path.stem for path in recipes_folder().glob("*.yaml") if path.stem.startswith(("iwslt", "multi30k")))
TRACKS = {f"iwslt{pair}" for pair in ("14_de_en", "14_es_en", "14_en_fr", "15_de_en", "15_en_vi", "15_cs_en")}

QUICK = ["training.steps=2", "training.evaluate_every=1", "training.log_every=1", "training.tensorboard=false"]
FEW = ["schedule.warmup_steps=1", "training.batch_tokens=300", "training.keep=2"]
FEW += ["training.average_last=2", "training.device=cpu"]

SMALL = ["data.vocabulary_size=280", "data.max_length=64", "model.depth=1", "model.width=32", "evaluation.tokens=4"]


@pytest.mark.parametrize("name", [n for n in TRACKED if n.endswith("_grc")])
def test_the_two_differ_in_the_memory_alone(name: str) -> None:
    grc, plain = load_config(name), load_config(name.replace("_grc", "_plain"))
    assert grc.model.pop("memory") == {"name": "grc", "variant": "algorithm1", "ratio": 0.5, "length": 64}
    for section in ("data", "model", "training", "optimizer", "schedule", "evaluation"):
        assert getattr(grc, section) == getattr(plain, section)


@pytest.mark.parametrize("name", [n for n in TRACKED if n.startswith("iwslt")])
def test_the_tracks_have_the_settings_of_the_paper(name: str) -> None:
    config = load_config(name)
    campaign, source, target, _ = name.split("_")
    assert (config.data["source"], config.data["target"]) == (source, target) and campaign in ("iwslt14", "iwslt15")
    settings = config.training
    assert (settings.batch_tokens, settings.label_smoothing, settings.average_last) == (4096, 0.1, 10)
    assert config.data["max_length"] == 512 and config.optimizer.betas == [0.9, 0.98]
    assert config.optimizer.weight_decay == 1e-4 and config.model["dropout"] == 0.3
    rates = [learning_rate(config.optimizer, config.schedule, t, settings.steps) for t in (400, 4000, 16_000)]
    assert rates == pytest.approx([1.5e-4, 1.5e-3, 7.5e-4], rel=1e-3)


def test_plain_translators_have_the_published_sizes() -> None:
    config = load_config("iwslt14_de_en_plain")
    with torch.device("meta"):
        model = create_model(**config.model, vocabulary=10_000)
    width, hidden = 512, 1024
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * hidden + width + hidden
    encoder = 6 * (attention + feed_forward + 4 * width) + 2 * width
    decoder = 6 * (2 * attention + feed_forward + 6 * width) + 2 * width
    assert count_parameters(model) == encoder + decoder + 10_000 * width
    model = load_config("multi30k_en_de_plain").model
    assert [model[key] for key in ("width", "depth", "heads", "feed_forward")] == [128, 4, 4, 256]


@pytest.mark.parametrize("name", ["iwslt14_de_en_grc", "iwslt15_en_vi_plain", "multi30k_en_de_grc"])
def test_they_train_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "write_report", lambda *_: None)
    corpus = write_corpus(tmp_path / "corpus", (60, 6, 6))
    config = load_config(name)
    renamed = {"train": "train", "val": config.data.get("validation") or "valid"}
    renamed["test"] = config.data.get("test") or {"multi30k": "test_2016_flickr"}.get(config.data["name"], "test")
    for file in list(corpus.iterdir()):
        language = {".de": config.data.get("source", "en"), ".en": config.data.get("target", "de")}[file.suffix]
        file.rename(corpus / f"{renamed[file.stem]}.{language}_")
    for file in list(corpus.iterdir()):
        file.rename(file.with_suffix(file.suffix.rstrip("_")))
    chosen = load_config(name, [*QUICK, *FEW, *SMALL, f"data.path={corpus}"])
    summary = run_training(chosen, tmp_path / "run")
    assert summary["steps"] == 2 and math.isfinite(summary["test"]["loss"]) and summary["test"]["step"] == 2
    assert (summary["variant"] == "grc") is name.endswith("grc")
    assert "bleu" in json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["test"]


@pytest.mark.slow
def test_multi30k_from_training_to_translation(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 steps teach no translation; that they end below the entropy of single words shows the path from end to end."""
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    changes = ["training.steps=60", "training.evaluate_every=60", "schedule.warmup_steps=20", "training.device=cpu"]
    data = [f"data.path={shared / 'data' / 'multi30k'}", "training.tensorboard=false", "evaluation.tokens=20"]
    out = str(tmp_path / "run")
    assert main(["train", "multi30k_en_de_plain", *changes, *data, "--out", out]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test"]["loss"] < 6
    text = tmp_path / "some.en"
    text.write_text("A man is riding a bike.\n\nTwo dogs play.\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["translate", out, "--input", str(text), "--output", str(tmp_path / "some.de"), "--device", "cpu"]) == 0
    said = (tmp_path / "some.de").read_text(encoding="utf-8").split("\n")
    assert len(said) == 4 and said[0] and not said[1] and said[2]
