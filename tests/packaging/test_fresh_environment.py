"""The built wheel in a new environment with core dependencies only."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import PROJECT, Block, blocks

from cached_transformers import __version__

pytestmark = pytest.mark.slow

CORE = {"cached-transformers", "torch", "numpy", "safetensors"}
EXTRA = {"timm", "torchvision", "transformers", "matplotlib", "scikit-learn", "pillow", "pyyaml", "rich", "scipy"}
UNREACHABLE = re.compile(r"No matching distribution|Temporary failure in name resolution|NewConnectionError")
README = [block for block in blocks("python") if block.page == "README.md"]
TEXT = "It was the best of times, it was the worst of times.\n" * 200


def call(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Call a program; of this environment nothing but the system is left to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run([*map(str, words)], cwd=folder, env=kept, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of a new environment, with the versions and sources of the Makefile."""
    folder = tmp_path_factory.mktemp("fresh")
    built = call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", PROJECT, "-w", folder)
    programs = folder / "env" / "bin"
    made = call(sys.executable, "-m", "venv", programs.parent)
    assert made.returncode == 0, made.stderr
    if built.returncode == 0:
        constraints, (wheel,) = PROJECT / "constraints.txt", folder.glob("*.whl")
        built = call(programs / "python", "-m", "pip", "install", "-q", "-c", constraints, "torch", wheel)
    if built.returncode != 0 and UNREACHABLE.search(built.stderr):
        pytest.skip(f"packages cannot be fetched here: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    return programs


def test_what_is_installed(environment: Path) -> None:
    """The core and its dependencies are installed, and no extra."""
    listed = call(environment / "python", "-m", "pip", "list", "--format=freeze").stdout.lower().split()
    names = {line.partition("==")[0] for line in listed}
    assert names >= CORE and not names & EXTRA


@pytest.mark.parametrize("block", README, ids=lambda block: block.name)
def test_an_example_runs_or_names_what_it_lacks(environment: Path, tmp_path: Path, block: Block) -> None:
    imports = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    (tmp_path / "example.py").write_text(block.text, encoding="utf-8")
    done = call(environment / "python", "example.py", folder=tmp_path)
    last = done.stderr.strip().rpartition("\n")[2]
    if imports & {"timm", "transformers"}:
        assert re.fullmatch("ModuleNotFoundError: No module named '(timm|transformers)'", last), done.stderr
        pytest.skip(f"imports what comes with an extra: {last}")
    if "integrations.transformers" in block.text:
        assert last.startswith("ImportError: transformers is not installed; ")
        assert last.endswith('pip install "cached-transformers[language]"')
    else:
        assert "GRCAttention" in block.text or "language_model" in block.text  # installed for the core only
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def with_lab(environment: Path) -> Path:
    """The same environment with the command `cached`."""
    wheel, constraints = next(environment.parents[1].glob("*.whl")), PROJECT / "constraints.txt"
    done = call(environment / "python", "-m", "pip", "install", "-q", "-c", constraints, "torch", f"{wheel}[lab]")
    assert done.returncode == 0, done.stderr
    return environment


@pytest.mark.parametrize(
    ("words", "status", "answer"),
    [
        (["--version"], 0, f"cached-transformers {__version__}"),
        (["--help"], 0, "usage: cached"),
        (["list"], 0, "transformer_xl"),
        (["list", "recipes"], 0, "demo_text"),
        (["explain", "bigbird", "--plot", "bigbird.png"], 2, "cached-transformers[plot]"),
        (["train", "digits_vit_grc"], 2, "cached-transformers[data]"),
        (["benchmark", "grc"], 2, "python benchmarks/grc.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_answer(with_lab: Path, tmp_path: Path, words: list[str], status: int, answer: str) -> None:
    done = call(with_lab / "cached", *words, folder=tmp_path)
    assert done.returncode == status and answer in done.stdout + done.stderr, done.stderr


def test_a_language_model_trains_and_reads(with_lab: Path, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(TEXT, encoding="utf-8")
    short = ["training.steps=2", "training.batch_size=2"]
    for words in (["train", "demo_text", "data.path=FILE", *short], ["stream", "runs/demo_text", "FILE"]):
        done = call(with_lab / "cached", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
