"""Statements of docs/security.md about foreign files: none of their code runs, and nothing uses a network."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import standin
import torch
import yaml
from drills.frame import in_child

from cached_lab.cli.main import main
from cached_lab.data.archives import Listing
from cached_lab.training.checkpoint import _sealed

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src" / "cached_transformers"

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    *(("pickle", name) for name in ("load", "loads", "Unpickler")),
    *(("os", name) for name in ("system", "popen")),
    *(("yaml", name) for name in ("unsafe_load", "full_load", "load_all")),
    ("marshal", "loads"),
    ("shelve", "open"),
    ("joblib", "load"),
}
REQUIRED_KEYWORDS = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}
REFUSED_KEYWORDS = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "filter": "fully_trusted"}


def objections(tree: ast.AST) -> list[str]:
    """Calls by which content could become code."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: {node.func.id}")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = (node.func.value.id, node.func.attr)
            name, value = REQUIRED_KEYWORDS.get(called, ("", None))
            if called in FORBIDDEN_ATTRIBUTES or (name and keywords.get(name) is not value):
                found.append(f"line {node.lineno}: {'.'.join(called)}")
        found += [f"line {node.lineno}: {k}={v}" for k, v in REFUSED_KEYWORDS.items() if keywords.get(k) == v]
    return found


def test_such_a_call_would_be_seen() -> None:
    for line in (
        "pickle.loads(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x)",
        "eval(x)",
        "subprocess.run(x, shell=True)",
        "cls.from_pretrained(x, trust_remote_code=True)",
    ):
        assert objections(ast.parse(line)), line
    assert not objections(ast.parse("torch.load(x, weights_only=True), np.load(x, allow_pickle=False), model.eval()"))


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def recipe(folder: Path, **changes: Any) -> list[str]:
    file = folder / "standin.yaml"
    file.write_text(yaml.safe_dump(standin.recipe(steps=2, evaluate_every=1, **changes)), encoding="utf-8")
    return ["train", str(file), "--out", str(folder / "run")]


def test_a_payload_works_and_no_call_of_the_source_runs_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "made")))
    assert (tmp_path / "made").is_dir()
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 200
    bad = {str(f.relative_to(SOURCE)): found for f in files if (found := objections(ast.parse(f.read_text("utf-8"))))}
    assert not bad


@pytest.mark.parametrize("form", ["zip", "old"])
def test_weights_in_a_file_of_torch_run_nothing(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    marker, file = tmp_path / "made", tmp_path / "weights.pth"
    torch.save({"weight": Payload(marker)}, file, _use_new_zipfile_serialization=form == "zip")
    assert main([*recipe(tmp_path), f"training.initial_weights={file}"]) == 2
    assert "cannot be read as weights" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.usefixtures("no_run_reports")
def test_a_checkpoint_with_a_payload_and_matching_sums_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(recipe(tmp_path)) == 0
    marker = tmp_path / "made"
    for step in (tmp_path / "run" / "checkpoints").glob("step_*"):
        buffer = io.BytesIO()
        torch.save({"optimizer": Payload(marker)}, buffer)
        (step / "training.pt").write_bytes(buffer.getvalue())
        meta = json.loads((step / "meta.json").read_text())
        meta["sha256"]["training.pt"] = hashlib.sha256(buffer.getvalue()).hexdigest()
        (step / "meta.json").write_bytes(_sealed(meta))
    assert main(recipe(tmp_path)) in (1, 2)
    assert "can be read" in capsys.readouterr().err
    assert not marker.exists()


def test_members_of_an_archive_stay_in_it(tmp_path: Path) -> None:
    """Names that lead out of the folder, links, devices: nothing is unpacked under the name that an archive gives."""
    file = tmp_path / "inside" / "bad.tar.gz"
    file.parent.mkdir()
    with tarfile.open(file, "w:gz") as tar:
        for name in ("../escaped.txt", str(tmp_path / "absolute.txt"), "fine.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    listing = Listing(file)
    assert listing.read("fine.txt") == b"text"
    assert not (tmp_path / "escaped.txt").exists() and not (tmp_path / "absolute.txt").exists()
    if "link.txt" in listing.names:
        with pytest.raises((ValueError, OSError)):
            listing.read("link.txt")


WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "os.system", "os.exec", "os.posix_spawn")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="an audit hook stays for good, so it needs a forked process")
def test_nothing_goes_over_a_network(tmp_path: Path) -> None:
    """Training, resuming and evaluating connect to nothing; the only program started is git, for the commit."""
    seen: list[str] = []

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in WATCHED or (event == "subprocess.Popen" and "git" not in str(values[1][0])):
            seen.append(f"{event} {values}")

    def work() -> bool:
        sys.addaudithook(hook)
        ended = [main(recipe(tmp_path)), main(recipe(tmp_path)), main(["evaluate", str(tmp_path / "run")])]
        ended.append(main(["list", "memories"]))
        print(*seen)
        return bool(seen) or any(ended)

    assert in_child(work) == 0
