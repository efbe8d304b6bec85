"""Files that are written whole, once, and name themselves when they cannot be written."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from refusals import refuses

from cached_lab.training.metrics import MetricsFile
from cached_transformers.files import NotWritten, write_whole


def test_a_file_is_written_again_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, b"one")
    first = path.stat().st_ino, path.stat().st_mtime_ns
    write_whole(path, b"one")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == first
    write_whole(path, iter([b"t", b"wo"]))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    names = [f"{platform.node()}.{process}", f"{platform.node()}.{os.getppid()}", "mine"]
    left, *kept = [path.with_name(f".{path.name}.{name}.partial") for name in names]
    for file in (left, *kept):
        file.touch()
    write_whole(path, b"{}")
    assert sorted(tmp_path.iterdir()) == sorted([path, *kept])


def test_a_vanished_folder_is_named_and_is_no_missing_input(tmp_path: Path) -> None:
    refuses(r"gone/report\.html", write_whole, tmp_path / "gone" / "report.html", b"page", error=NotWritten)
    assert not issubclass(NotWritten, FileNotFoundError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_names_the_metrics_and_says_what_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path.parent, 0)
    metrics._file.close()
    metrics._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(NotWritten, match=r"metrics\.jsonl") as error:
        metrics.write({"step": 1})
    assert "checkpoints are untouched, and the same command goes on" in str(error.value)
    refuses(r"metrics\.jsonl", metrics.close, error=NotWritten)
