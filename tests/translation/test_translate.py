"""`cached translate`: one output line per input line, for any lines, and its state after a stop."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from cached_lab.cli.main import main
from cached_lab.tasks.translation import lines
from cached_lab.tasks.translation.lines import read_lines


@pytest.fixture
def said(trained: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]):  # type: ignore[no-untyped-def]
    """Call the command with bytes on standard input: status, output, errors."""

    def call(text: str | bytes, *options: str, folder: Path = trained) -> tuple[int, str, str]:
        content = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        written = io.TextIOWrapper(io.BytesIO())
        monkeypatch.setattr(sys, "stdout", written)
        status = main(["translate", str(folder), "--device", "cpu", *options])
        error = capfdbinary.readouterr().err.decode()
        return status, written.buffer.getvalue().decode(), error  # type: ignore[attr-defined]

    return call


def test_lines_keep_their_order_and_empty_ones_stay(said, trained: Path, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    sources = (corpus / "test.de").read_text(encoding="utf-8").splitlines()
    status, whole, error = said("\n".join(sources) + "\n")
    assert status == 0 and error == "" and whole.count("\n") == 30
    blocks = (trained / "translations.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert whole.splitlines() == [block.split("hypothesis\t")[1] for block in blocks]  # the summary's model and options
    holes = "\n".join(["", sources[0], "   ", sources[1], "", ""])  # the last line has no end
    _, found, _ = said(holes + "\n", "--batch", "2")
    first, second = whole.splitlines()[:2]
    assert found == f"\n{first}\n\n{second}\n\n\n"
    assert said(f"{sources[0]}\n{sources[1]}")[1] == f"{first}\n{second}\n"
    assert said("")[1] == ""
    for batch in ("1", "7"):
        assert said("\n".join(sources) + "\n", "--batch", batch)[1] == whole


def test_lines_are_read_as_they_come_and_long_ones_truncated(said) -> None:  # type: ignore[no-untyped-def]
    _, plain, _ = said("der hund\n")
    status, found, error = said("der hund\n" + "groß " * 500 + "\nder hund\n")
    assert status == 0 and found.splitlines()[0] == found.splitlines()[2] == plain.strip() and found.count("\n") == 3
    assert "warning: line 2 has " in error and "the first 63 are translated" in error
    text = "a\r\n\u2028b\n" + "x" * 30
    assert [line.text for line in read_lines(io.BytesIO(text.encode()), "f")] == ["a", "\u2028b", "x" * 30]
    assert [line.number for line in read_lines(io.BytesIO(b"a\n\nb\n"), "f", skip=1)] == [2, 3]


def test_what_comes_before_a_bad_line_is_there_and_other_runs_are_refused(said, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    good = said("der hund\ndie katze\n")[1]
    status, found, error = said(b"der hund\ndie katze\n" + "groß\n".encode("latin1") + b"hund\n", "--batch", "9")
    assert status == 2 and found == good
    assert "standard input, line 3 is not UTF-8" in error
    status, _, error = said("der hund\n", folder=tmp_path)
    assert status == 2 and "is not a run folder" in error


def test_an_output_goes_on_behind_its_whole_lines(said, corpus: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    whole = said((corpus / "test.de").read_text(encoding="utf-8"))[1]
    output = tmp_path / "out.txt"
    options = ["--input", str(corpus / "test.de"), "--output", str(output)]
    assert said("", *options)[:2] == (0, "") and output.read_text(encoding="utf-8") == whole
    kept = "".join(f"{line}\n" for line in whole.splitlines()[:11])
    output.write_text(kept + whole.splitlines()[11][:2], encoding="utf-8")  # stopped in the middle of a line
    status, _, error = said("", *options, "--resume", "--batch", "4")
    assert status == 0 and output.read_text(encoding="utf-8") == whole and "continuing after line 11" in error
    assert said("", *options, "--resume")[0] == 0 and output.read_text(encoding="utf-8") == whole


def test_a_crash_leaves_the_batches_before_it(said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    good = said("der hund\ndie katze\n")[1]
    real, count = lines.translate, iter(range(9))

    def breaks(*args: object, **options: object) -> object:
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(lines, "translate", breaks)
    output = tmp_path / "out.txt"
    status = said("der hund\ndie katze\nvogel\nhund\n", "--batch", "1", "--output", str(output))[0]
    assert status == 130 and output.read_text(encoding="utf-8") == good


def test_options_of_the_search(said) -> None:  # type: ignore[no-untyped-def]
    text = "der hund sieht die katze\ngroß und schnell\n"
    scored = said(text, "--scores")[1]
    assert [line.split("\t")[1] for line in scored.splitlines()] == said(text)[1].splitlines()
    assert all(float(line.split("\t")[0]) < 0 for line in scored.splitlines())
    greedy, wide = (said(text, "--scores", "--length-penalty", "0", *more)[1] for more in (["--beams", "1"], []))
    for one, many in zip(greedy.splitlines(), wide.splitlines(), strict=True):
        assert float(one.split("\t")[0]) <= float(many.split("\t")[0]) + 1e-3
    short = said(text, "--tokens", "1")[1]
    assert all(len(line) < 8 for line in short.splitlines()) and short.count("\n") == 2
    for option in (["--average", "3"], ["--checkpoint", "tested"]):
        assert said(text, "--scores", *option)[1] == scored
    assert said(text, "--scores", "--average", "1")[1] == said(text, "--scores", "--checkpoint", "last")[1] != scored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams", "0"], "beams=0 must lie in 1.."),
        (["--tokens", "-1"], "tokens=-1 must lie in 1..64"),
        (["--tokens", "65"], "tokens=65 must lie in 1..64"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--length-penalty", "nan"], "length_penalty=nan must lie in -50..50"),
        (["--resume"], "--resume True: it has an effect with --output FILE"),
        (["--input", "nothing.txt"], "nothing.txt is not a file"),
        (["--average", "7"], "so 7 cannot be averaged"),
        (["--average", "2", "--checkpoint", "best"], "name different weights; give one of them"),
    ],
)
def test_bad_options(said, options: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    status, found, error = said("der hund\n", *options)
    assert (status, found) == (2, "") and message in error


def test_a_closed_pipe_ends(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"der hund\n" * 5)))
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["translate", str(trained), "--device", "cpu", "--batch", "1"]) == 141
    assert capsys.readouterr().err == ""
