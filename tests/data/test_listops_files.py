"""ListOps files: reading, writing, verification, and which file holds which split."""

from __future__ import annotations

import lzma
from itertools import islice

import pytest

from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.listops.expressions import Expression, generate_trees, to_source, tokenize
from cached_lab.tasks.classification.listops.files import find_tsv, read_tsv, verify_tsv, write_tsv

HEADER = "Source\tTarget\r\n"


@pytest.fixture(scope="module")
def expressions() -> list[Expression]:
    return list(islice(generate_trees(0, max_depth=4, max_args=4, min_length=10, max_length=64), 40))


@pytest.mark.parametrize("name", ["basic_train.tsv", "basic_train.tsv.xz"])
def test_round_trip(tmp_path, expressions, name):
    path = tmp_path / name
    assert write_tsv(path, iter(expressions)) == 40
    assert read_tsv(path) == expressions
    assert verify_tsv(path) == 40
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [name]


def test_written_form_is_the_arenas(tmp_path):
    write_tsv(tmp_path / "x.tsv", [Expression(tokenize("[MAX 2 9 ]"), 9)])
    assert (tmp_path / "x.tsv").read_bytes() == b"Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n"


def test_every_row_made_by_the_original_generator_agrees(shared):
    folder = shared / "data" / "lra-listops"
    assert verify_tsv(folder / "basic_train.tsv.xz") == 10_000
    assert verify_tsv(folder / "basic_val.tsv.xz") == 2_000


def test_our_text_form_is_byte_equal_to_the_original_generators(shared):
    with lzma.open(shared / "data" / "lra-listops" / "basic_val.tsv.xz", "rt", newline="\r\n") as file:
        rows = [line.rstrip("\r\n").split("\t")[0] for line in islice(file, 1, 101)]
    assert [to_source(tokenize(row)) for row in rows] == rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("( ( [MAX 1 ) ] )", "line 3: expected 2 columns separated by a tab, found 1"),
        ("( ( [MAX 1 ) ] )\t1\t1", "line 3: expected 2 columns separated by a tab, found 3"),
        ("", "line 3: expected 2 columns"),
        ("( ( [TOP 1 ) ] )\t1", r"line 3: token '\[TOP' is not in the vocabulary"),
        ("\t1", "line 3: the expression is empty"),
        ("( ( [MAX 1 ) ] )\t10", "line 3: the label must be a digit 0..9, found '10'"),
        ("( ( [MAX 1 ) ] )\t", "line 3: the label must be a digit 0..9, found ''"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path, row, message):
    path = tmp_path / "basic_test.tsv"
    path.write_bytes(f"{HEADER}( ( [MAX 1 ) ] )\t1\r\n{row}\r\n".encode())
    with pytest.raises(ValueError, match=f"basic_test.tsv, {message}"):
        read_tsv(path)
    with pytest.raises(ValueError, match=f"basic_test.tsv, {message}"):
        create_dataset("listops_tsv", "test", path=tmp_path)


def test_a_wrong_label_is_found_by_verification_alone(tmp_path):
    path = tmp_path / "basic_test.tsv"
    path.write_bytes(f"{HEADER}( ( [MAX 1 ) ] )\t1\r\n( ( ( [MAX 1 ) 7 ) ] )\t1\r\n".encode())
    assert [expression.label for expression in read_tsv(path)] == [1, 1]
    with pytest.raises(ValueError, match=r"basic_test.tsv.*1,"):
        verify_tsv(path)


def test_an_incomplete_expression_is_found_by_verification(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_bytes(f"{HEADER}[MAX 1\t1\r\n".encode())
    with pytest.raises(ValueError, match="line 2: the expression ends after 2 tokens"):
        verify_tsv(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: expected the header"),
        (b"7\t7\r\n", "line 1: expected the header 'Source<TAB>Target', found '7\\\\t7'"),
        (b"Source\tTarget\r\n", "holds a header and no row"),
        (b"\xff\xfe\x00", "is damaged or no ListOps file"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "x.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tsv(path)


def test_damaged_compression(tmp_path, expressions):
    path = tmp_path / "x.tsv.xz"
    write_tsv(path, expressions)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"x.tsv.xz"):
        read_tsv(path)


def test_writing_refuses_a_wrong_label_and_a_wrong_name(tmp_path):
    with pytest.raises(ValueError, match="label 3 of row 1 is not its value, 9"):
        write_tsv(tmp_path / "x.tsv", [Expression(tokenize("[MAX 2 9 ]"), 3)])
    with pytest.raises(ValueError, match=r"must end in .tsv"):
        write_tsv(tmp_path / "x.csv", [])
    assert not list(tmp_path.glob("x.*"))


class TestFind:
    def test_names_of_splits(self, tmp_path):
        for name in ("basic_train.tsv", "basic_val.tsv.xz", "test.tsv", "basic_contest.tsv", "train.txt"):
            (tmp_path / name).touch()
        assert find_tsv(tmp_path, "train").name == "basic_train.tsv"
        assert find_tsv(tmp_path, "validation").name == "basic_val.tsv.xz"
        assert find_tsv(str(tmp_path), "test").name == "test.tsv"

    def test_one_file_serves_only_the_split_it_is_named_after(self, tmp_path):
        file = tmp_path / "basic_train.tsv"
        file.touch()
        assert find_tsv(file, "train") == file
        with pytest.raises(ValueError, match="'validation'"):
            find_tsv(file, "validation")

    def test_a_mapping_takes_any_name(self, tmp_path):
        assert find_tsv({"train": tmp_path / "a.tsv"}, "train") == tmp_path / "a.tsv"
        with pytest.raises(FileNotFoundError, match="'test'"):
            find_tsv({"train": "a.tsv"}, "test")

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"train.tsv"):
            find_tsv(tmp_path / "nowhere", "train")
        (tmp_path / "basic_train.tsv").touch()
        with pytest.raises(FileNotFoundError, match=r"'test'.*basic_train.tsv"):
            find_tsv(tmp_path, "test")
        with pytest.raises(FileNotFoundError, match=r"gone.tsv"):
            read_tsv(tmp_path / "gone.tsv")

    def test_ambiguous(self, tmp_path):
        (tmp_path / "a_train.tsv").touch()
        (tmp_path / "b_train.tsv").touch()
        with pytest.raises(ValueError, match=r"'train'.*a_train.tsv.*b_train.tsv"):
            find_tsv(tmp_path, "train")
