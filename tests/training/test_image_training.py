"""Training on images: averaged weights, resume with all augmentation, bad files, weights to begin with, repeats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from common import refuses
from data.pictures import class_folders, write_files, write_tar

from cached_lab.cli.main import main
from cached_lab.data.image_files import BadFile
from cached_lab.experiments import run as run_module
from cached_lab.experiments.load import load_run
from cached_lab.experiments.run import run_training
from cached_lab.experiments.run_outputs import write_report
from cached_lab.tasks.recipes import config_from_dict, load_config
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.ema import WeightAverage
from cached_lab.training.loader import TrainingOrder
from cached_lab.training.metrics import read_metrics
from cached_lab.training.optim import OptimizerConfig, ScheduleConfig, learning_rate
from cached_lab.training.progress import Reporter
from cached_lab.training.stored_weights import head_names, load_initial_weights
from cached_transformers import create_model
from cached_transformers.extras import require
from cached_transformers.memories.grc.shared_cache import caches

MODEL = dict(name="vision_transformer", patch_size=4, width=16, depth=1, heads=2, feed_forward=16, memory="grc")
DEIT = {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """A cache folder of its own, and no drawing, which takes longer than the training; two tests ask for the report."""
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "write_report", lambda *_: None)


def report_of(folder: Path) -> str:
    write_report(folder, Reporter("", 0, None))
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def images(tmp_path) -> Path:
    return write_files(tmp_path / "images", class_folders(classes=3, images=20))


def recipe(images: Path, data: dict[str, object] | None = None, model: dict[str, object] = MODEL, **training: object):
    options = {"path": str(images), "image_size": 8, "augmentation": DEIT}
    settings = dict(steps=6, batch_size=12, evaluate_every=3, log_every=1, tensorboard=False, device="cpu")
    tree = {"name": "images", "data": {"name": "image_folder", **options, **(data or {})}, "model": model}
    tree |= {"schedule": {"name": "cosine", "warmup_steps": 2, "initial_ratio": 0.1}}
    return config_from_dict(tree | {"training": {**settings, **training}, "optimizer": {"learning_rate": 0.01}})


class TestAverage:
    def test_it_follows_the_formula_and_copies_caches(self):
        model = create_model(**MODEL, image_size=8, classes=3).train()
        average = WeightAverage(model, 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        by_hand: dict[str, torch.Tensor] = {}
        for step in range(4):
            model(torch.randn(5, 3, 8, 8)).outputs.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            for name, value in model.named_parameters():
                by_hand[name] = value.detach().clone() if step == 0 else 0.9 * by_hand[name] + 0.1 * value.detach()
        assert average.updates == 4
        for name, value in average.module.named_parameters():
            assert torch.allclose(value, by_hand[name], atol=1e-6), name
        ours, theirs = next(iter(caches(average.module))), next(iter(caches(model)))
        assert ours.cache_MC.abs().sum() > 0 and torch.equal(ours.cache_MC, theirs.cache_MC)
        before = ours.cache_MC.clone()
        average.module.eval()  # which would commit a proposal, if the copy had one of its own
        assert torch.equal(ours.cache_MC, before)

    def test_the_average_is_what_is_evaluated_and_saved(self, images, tmp_path):
        run_training(recipe(images, ema_decay=0.8, evaluate_every=6), tmp_path / "run")
        stored = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000006")
        live = stored.training["live_weights"]
        assert stored.training["averaged_steps"] == 6
        assert not torch.equal(live["head.weight"], stored.weights["head.weight"])
        assert all(torch.equal(live[n], stored.weights[n]) for n in live if n.endswith("cache_MC"))
        _, model, _ = load_run(tmp_path / "run")
        assert torch.equal(model.state_dict()["head.weight"], stored.weights["head.weight"])


class TestRepeats:
    def test_each_image_is_in_its_batch_so_often_and_copies_lie_apart(self):
        order = TrainingOrder(12, 6, seed=1, repeats=3)
        batches = [order.rows(step) for step in range(4)]
        for rows in batches:
            assert len(set(rows)) == 6 and len({index for _, index, _ in rows}) == 2
            assert [copy for _, _, copy in rows] == [0, 0, 1, 1, 2, 2]
            assert all(rows[i][1] != rows[i + 1][1] for i in range(0, 6, 2))  # the pairs that are mixed
        assert {epoch for epoch, _, _ in batches[1]} == {0} and {epoch for epoch, _, _ in batches[2]} == {1}
        plain = TrainingOrder(12, 6, seed=1)
        assert [i for _, i, _ in batches[0][:2]] == [i for _, i in plain.rows(0)][:2]

    def test_batches_must_divide(self):
        refuses(r"batch_size=8.*training.repeats=3", TrainingOrder, 20, 8, 0, repeats=3)


class TestBadFiles:
    @pytest.fixture
    def damaged(self, images):
        for name in ("class0/3.png", "class1/7.png", "class2/0.png"):
            (images / name).write_bytes(b"")
        content = (images / "class0/5.png").read_bytes()
        (images / "class0/5.png").write_bytes(content[: len(content) // 2])
        return images

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_first_one_stops_the_run(self, damaged, tmp_path, workers):
        with pytest.raises(BadFile, match=r"class\d/\d.png cannot be used as an image: .*data.bad_files=skip"):
            run_training(recipe(damaged, workers=workers), tmp_path / "run")

    @pytest.mark.parametrize("workers", [0, 2])
    def test_or_all_are_skipped_counted_and_named(self, damaged, tmp_path, workers):
        with pytest.warns(RuntimeWarning, match=r"skipped .*png: .*\(bad file 1\)"):
            summary = run_training(recipe(damaged, {"bad_files": "skip"}, workers=workers, steps=12), tmp_path / "run")
        found = json.loads((tmp_path / "run" / "bad_files.json").read_text())
        names = {"/".join(Path(file).parts[-2:]) for file in found["files"]}
        assert names == {"class0/3.png", "class0/5.png", "class1/7.png", "class2/0.png"}
        assert summary["bad_files"] == found["count"] == 4
        assert summary["steps"] == 12
        if not workers:
            assert "skipped data files</dt><dd>4<" in report_of(tmp_path / "run")

    def test_the_rows_that_are_scored_are_counted(self, damaged, tmp_path):
        data = {"bad_files": "skip", "validation_fraction": 0.0}
        (damaged / "val").mkdir()
        folders = [damaged / f"class{c}" for c in range(3)]
        (damaged / "train").mkdir()
        for folder in folders:
            folder.rename(damaged / "train" / folder.name)
        write_files(damaged / "val", {**class_folders(3, 4), "class1/2.png": b"not an image"})
        with pytest.warns(RuntimeWarning):
            summary = run_training(recipe(damaged, data, test="none"), tmp_path / "run")
        assert summary["best"]["rows"] == 11

    def test_a_replacement_keeps_its_own_label(self, tmp_path):
        files = class_folders(2, 4)
        path = write_tar(tmp_path / "a.tar", {**files, "class0/3.png": b""})
        from cached_lab.tasks.classification.images.class_folders import ImageFolder
        from cached_lab.training.loader import SeededRows

        data = ImageFolder("train", path=path, image_size=8, validation_fraction=0, test_fraction=0, bad_files="skip")
        rows = SeededRows(data, 0)
        assert rows[(0, 3)][1] == 1 and torch.equal(rows[(0, 3)][0], rows[(0, 3)][0])
        assert [error.file.endswith("class0/3.png") for error in rows.met] == [True] * 3


class TestInitialWeights:
    def test_a_run_of_other_classes_needs_a_new_head(self, images, tmp_path):
        run_training(recipe(images), tmp_path / "first")
        other = write_files(tmp_path / "other", class_folders(classes=5, images=12))
        start = {"initial_weights": str(tmp_path / "first")}
        with pytest.raises(ValueError, match=r"head.\w+ has 3 outputs, this model 5; set training.new_head=true"):
            run_training(recipe(other, **start), tmp_path / "second")
        config = recipe(other, **start, new_head=True, steps=3)
        slow = dataclasses.replace(config, optimizer=OptimizerConfig(learning_rate=1e-7))
        run_training(slow, tmp_path / "third")
        stored = read_checkpoint(Checkpoints(tmp_path / "first" / "checkpoints").named("best")).weights
        taken = read_checkpoint(tmp_path / "third" / "checkpoints" / "step_00000003").weights
        assert taken["head.weight"].shape == (5, 16)
        # So small a learning rate leaves the others where they began.
        assert (taken["patches.weight"] - stored["patches.weight"]).abs().max() < 1e-5

    def test_plain_weights_of_timm_fit_a_cached_model(self, tmp_path):
        torch.manual_seed(1)
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 7}
        plain = require("timm", extra="vision").create_model("vit_tiny_patch16_224", **sizes)
        torch.save({"model": plain.state_dict()}, tmp_path / "plain.pth")
        sizes.pop("num_classes")
        said: list[str] = []
        cached = create_model("timm", architecture="vit_tiny_patch16_224", classes=7, memory="grc", **sizes)
        load_initial_weights(cached, tmp_path / "plain.pth", say=said.append)
        own = cached.state_dict()
        assert all(torch.equal(own[f"model.{name}"], value) for name, value in plain.state_dict().items())
        assert "new: " in said[0] and ".memory." in said[0]
        assert head_names(cached) == ("model.head.",)
        ten = create_model("timm", architecture="vit_tiny_patch16_224", classes=10, memory=None, **sizes)
        with pytest.raises(ValueError, match=r"number of classes: its model.head.\w+ has 7 outputs, this model 10"):
            load_initial_weights(ten, tmp_path / "plain.pth")
        head = ten.state_dict()["model.head.weight"].clone()
        load_initial_weights(ten, tmp_path / "plain.pth", new_head=True, say=said.append)
        assert torch.equal(ten.state_dict()["model.head.weight"], head)
        assert torch.equal(ten.model.patch_embed.proj.weight, plain.patch_embed.proj.weight)

    def test_caches_of_other_sizes_are_left_out(self, tmp_path):
        small, large = (create_model(**MODEL, image_size=size, classes=3) for size in (8, 16))
        from safetensors.torch import save_file

        weights = {n: v for n, v in small.state_dict().items() if "positions" not in n}
        save_file(weights | {"positions.weight": large.state_dict()["positions.weight"]}, tmp_path / "old.safetensors")
        load_initial_weights(large, tmp_path / "old.safetensors", say=lambda text: None)
        assert all(not cache.cache_MC.any() for cache in caches(large))

    def test_other_models_and_files_are_refused(self, tmp_path):
        model = create_model(**MODEL, image_size=8, classes=3)
        torch.save({"something": torch.zeros(2)}, tmp_path / "other.pth")
        with pytest.raises(ValueError, match=r"of another model \(unknown to this model: something \(1\); missing"):
            load_initial_weights(model, tmp_path / "other.pth")
        (tmp_path / "text.pth").write_text("hello")
        refuses(r"text.pth", load_initial_weights, model, tmp_path / "text.pth")
        refuses(r"nothing: there is no such file", load_initial_weights, model, tmp_path / "nothing")


def test_single_images_train_no_memory_of_frames(images, tmp_path):
    require("timm", extra="vision")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = {"name": "timm", "architecture": "vit_tiny_patch16_224", "memory": "grc_stream", **sizes}
    refuses(r"model.memory='grc_stream'", run_training, recipe(images, model=model), tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_warm_up_begins_where_it_is_told():
    optimizer = OptimizerConfig(learning_rate=1e-3)
    schedule = ScheduleConfig("cosine", 10, initial_ratio=0.1, final_ratio=0.01)
    rates = [learning_rate(optimizer, schedule, step, 100) for step in (1, 5, 10, 55, 100)]
    assert rates == pytest.approx([1.9e-4, 5.5e-4, 1e-3, 5.05e-4, 1e-5])
    CosineLRScheduler = require("timm.scheduler", extra="vision").CosineLRScheduler
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = CosineLRScheduler(theirs, t_initial=100, lr_min=1e-5, warmup_t=10, warmup_lr_init=1e-4)
    for step in (1, 5, 9):
        scheduler.step(step)
        assert theirs.param_groups[0]["lr"] == pytest.approx(learning_rate(optimizer, schedule, step, 100))


def test_top_five_and_intervals_reach_the_summary_the_report_and_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    images = write_files(tmp_path / "images", class_folders(classes=12, images=10))
    summary = run_training(recipe(images, steps=3), tmp_path / "run")
    test = summary["test"]
    low, high = test["top5_accuracy_interval"]
    assert test["rows"] == 12 and low <= test["top5_accuracy"] <= high
    assert test["accuracy_interval"][0] <= test["accuracy"] <= test["accuracy_interval"][1]
    report = report_of(tmp_path / "run")
    assert "top5 accuracy" in report and "<td>12</td>" in report
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"][0]
    assert scores["top5_accuracy_interval"] == pytest.approx([low, high])
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert f"{test['top5_accuracy']:.2%} [" in capsys.readouterr().out
    line = next(line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "validation")
    assert line["rows"] == 12 and "top5_accuracy" in line


def test_recipes_of_older_runs_may_go_on(images, tmp_path):
    """A stored configuration without today's options is the same as one with their defaults."""
    from cached_lab.training.config import config_to_dict, differing_keys, with_defaults

    config = config_to_dict(load_config("digits_vit_grc"))
    older = {**config, "training": {k: v for k, v in config["training"].items() if k not in ("mixup", "ema_decay")}}
    assert differing_keys(older, config) != [] and differing_keys(with_defaults(older), config) == []
