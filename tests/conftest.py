"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import TORCH

PROJECT = Path(__file__).resolve().parents[1]
# Folders of torch, and the version since which they do all that this package asks: named tuples, FSDP2 on the CPU.
LACKING = {"/_dynamo/": (2, 9), "/_export/": (2, 9), "/fsdp/": (2, 7)}

# Tests are small and may run side by side.
torch.set_num_threads(1)
# Nothing is fetched from the hub, and no test waits for its retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays to the end: to look for garbage in it, then or in a test, takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Skip what fails in a part that an older torch lacks; keep nothing compiled for the next test."""
    try:
        return (yield)
    except Exception as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if any(since > TORCH and part in raised_in for part, since in LACKING.items()):
            pytest.skip(f"torch {torch.__version__}: {error}")
        raise
    finally:
        compiler: Any = sys.modules.get("torch._dynamo")
        if compiler and compiler.utils.counters:
            compiler.reset()
            compiler.utils.counters.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where tests marked `device` run: cpu (the default) or cuda; see make test-gpu")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device of the tests marked `device`."""
    name: str = pytestconfig.getoption("--device") or "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            pytest.fail("--device cuda: torch sees no CUDA device here", pytrace=False)
        # Convolutions would be rounded to ten bits, which no tolerance of float32 covers.
        torch.backends.cudnn.allow_tf32 = False
    return name


@pytest.fixture(autouse=True)
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """New tensors of a test marked `device` are there; all that is read from files is made by `torch.tensor`."""
    marked = request.node.get_closest_marker("device") is not None
    where = request.getfixturevalue("device") if marked else "cpu"
    with torch.device(where) if where != "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def double() -> Iterator[None]:
    """New tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data folder beside the project, or the one that CACHED_TRANSFORMERS_SHARED names.

    Without it the test is skipped; with CI_REQUIRE_SHARED=1 it fails.
    """
    folder = Path(os.environ.get("CACHED_TRANSFORMERS_SHARED") or PROJECT.parent / "shared")
    if folder.is_dir():
        return folder
    reason = f"no data folder at {folder}; CACHED_TRANSFORMERS_SHARED can name another place"
    if os.environ.get("CI_REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def tmp_run(tmp_path: Path) -> Path:
    """An empty folder for one run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def no_run_reports() -> Iterator[None]:
    """Training writes no report.html into the folder of a run: drawing takes longer than a few steps do.

    For tests of something else; those of `cached train` and of detectors see to it that a run has its report.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)
        yield
