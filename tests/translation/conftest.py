"""Fixtures of the translation tests: a cache folder of their own, and one small trained run for all that read runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from translation.made import recipe, write_corpus

from cached_lab.experiments import run as run_module
from cached_lab.experiments.run import run_training
from cached_lab.tasks.recipes import config_from_dict


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made language in three splits."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned some of the made language, with GRC, and tested the average of its last checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path_factory.mktemp("cache_of_run")))
        patch.setattr(run_module, "write_report", lambda *_: None)
        training = {"steps": 160, "evaluate_every": 80, "save_every": 20, "keep": 3, "average_last": 3}
        run_training(config_from_dict(recipe(corpus, memory="grc", **training)), folder)
    return folder
