"""A run resumes only with its own data: fingerprints, refusals, and the way out."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml
from common import refuses
from drills import _small_data
from training.small_language import own_cache, recipe, write_text  # noqa: F401

from cached_lab.cli.main import main
from cached_lab.data import samples
from cached_lab.data.samples import described, digest_of
from cached_lab.experiments.load import load_run, read_categories
from cached_lab.tasks import create_dataset
from cached_lab.training.metrics import read_metrics

SOURCES = ("image_folder", "image_folder_gz", "image_shards_cls", "imagenet", "tiny_imagenet", "cifar10", "coco",
           "listops_tsv", "text", "translation_tsv", "denoising")  # fmt: skip
"""One for each way in which a data set gives samples."""


@pytest.mark.parametrize("name", SOURCES)
def test_data_are_known_again_elsewhere_and_told_from_others(tmp_path, monkeypatch, name):
    source = _small_data.SOURCES[name]
    source.make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    made = _small_data.picture
    monkeypatch.setattr(_small_data, "picture", lambda number, kind="PNG": made(number + 1, kind))
    source.make(tmp_path / "c")
    for file in (tmp_path / "c").rglob("*"):
        if file.suffix in (".txt", ".tsv") and file.name not in ("val.txt", "words.txt", "val_annotations.txt"):
            header, *lines = file.read_bytes().split(b"\n")
            file.write_bytes(b"\n".join([header, *lines[:-1][::-1], b""]))
        elif file.suffix == ".bin":
            file.write_bytes(file.read_bytes()[:-3073])
        elif file.suffix == ".gz" and name == "denoising":
            file.write_bytes(_small_data.gzip.compress(_small_data.TEXT[::-1].encode()))

    def told(folder: str) -> dict[str, object]:
        return described(create_dataset(source.dataset, "train", **source.arguments(tmp_path / folder)))

    assert told("a") == told("b") != told("c")
    assert set(told("a")) == {"size", "sha256"}


def test_generated_data_follow_from_their_options():
    small = {"max_depth": 3, "max_args": 3, "min_length": 6, "max_length": 24, "train_size": 20}
    first, again, other = (
        described(create_dataset("listops", "train", **small, validation_size=4, test_size=4, seed=seed))
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert described(create_dataset("digits", "train")) != described(create_dataset("digits", "test"))


def test_of_a_large_array_blocks_are_hashed_and_every_other_array_whole(monkeypatch):
    array = np.arange(1000, dtype=np.int32)
    changed = array.copy()
    changed[501] += 1
    assert digest_of([array]) != digest_of([changed])
    assert digest_of([array]) != digest_of([array.astype(np.int64)]) != digest_of([array.reshape(2, 500)])
    monkeypatch.setattr(samples, "WHOLE", 64)
    monkeypatch.setattr(samples, "_BLOCK", 16)
    changed = array.copy()
    changed[[0, -1]] += 1
    assert digest_of([array]) != digest_of([changed])


@pytest.fixture
def run(tmp_path):
    """A run that has taken eight of twelve steps, and its command."""
    text = write_text(tmp_path / "text")
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(text, "training.test=best")), encoding="utf-8")
    command = ["train", str(file), "--out", str(tmp_path / "run")]
    assert main([*command, "training.steps=8"]) == 0
    return command


def other_text(folder, kind):
    for name in ("train", "test") if kind != "cut" else ("train",):
        path = folder / f"{name}.txt"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[::-1] if kind == "reversed" else lines[:-3]), encoding="utf-8")


@pytest.mark.parametrize("kind", ["reversed", "cut"])
@pytest.mark.usefixtures("no_run_reports")
def test_other_data_are_refused_unless_they_are_wanted(tmp_path, run, kind, capsys):
    other_text(tmp_path / "text", kind)
    before = (tmp_path / "run" / "data.json").read_bytes()
    for resume in ("auto", str(tmp_path / "run" / "checkpoints" / "step_00000004")):
        assert main([*run, "--resume", resume]) == 2
        said = capsys.readouterr().err
        assert "--resume anyway" in said
    assert (tmp_path / "run" / "data.json").read_bytes() == before
    assert main([*run, "--resume", "anyway"]) == 0
    assert "continuing with them" in " ".join(capsys.readouterr().out.split())
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 12
    assert (tmp_path / "run" / "data.json").read_bytes() != before
    assert main([*run, "training.steps=13"]) == 0  # from now on these are the run's


@pytest.mark.usefixtures("no_run_reports")
def test_a_damaged_or_lost_data_file_is_written_again(tmp_path, run, capsys):
    path = tmp_path / "run" / "data.json"
    before = path.read_bytes()
    path.write_bytes(b"{")
    assert main(run) == 0 and path.read_bytes() == before
    path.write_bytes(b"{")
    other_text(tmp_path / "text", "cut")
    assert main([*run, "training.steps=13"]) == 2
    assert "--resume anyway" in capsys.readouterr().err


@pytest.mark.usefixtures("no_run_reports")
def test_an_exchanged_tokenizer_or_model_is_refused(tmp_path, run):
    folder = tmp_path / "run"
    load_run(folder)
    path = folder / "tokenizer.json"
    before = path.read_bytes()
    path.write_bytes(b'{"kind":  "byte"}')
    refuses(r"tokenizer.json", load_run, folder)
    path.write_bytes(before)
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8")
    assert "length: 6\n" in text
    config.write_text(text.replace("length: 6\n", "length: 5\n"), encoding="utf-8")
    refuses(r"config.yaml.*model.memory.length", load_run, folder)


@pytest.mark.parametrize("content", ["", "3", '{"id": 1}', '[{"id": 1}]', '[{"id": "1", "name": "a"}]', "[" * 9000])
def test_damaged_classes_of_a_detector_are_named(tmp_path, content):
    (tmp_path / "categories.json").write_text(content, encoding="utf-8")
    refuses(r"categories.json", read_categories, tmp_path)
    (tmp_path / "categories.json").write_text(json.dumps([{"id": 1, "name": "a"}]), encoding="utf-8")
    assert read_categories(tmp_path) == [{"id": 1, "name": "a"}]
