"""ListOps as data sets: splits, batches, the cache on disk."""

from __future__ import annotations

import json
import lzma
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from common import refuses
from data.listops_oracle import evaluate, to_tokens

from cached_lab.data import LabelledDataset, store
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.listops import datasets as listops_datasets
from cached_lab.tasks.classification.listops.datasets import ListOps

SMALL = {"max_depth": 4, "max_args": 4, "min_length": 10, "max_length": 64}
SIZES = {"train_size": 300, "validation_size": 60, "test_size": 40}


def small(split: str, **options: object) -> ListOps:
    return ListOps(split, **{**SMALL, **SIZES, **options})  # type: ignore[arg-type]


def tokens_of(dataset: ListOps) -> list[bytes]:
    return [expression.tokens for expression in dataset.expressions()]


class TestSplits:
    def test_sizes_and_disjointness(self):
        splits = {split: tokens_of(small(split)) for split in ("train", "validation", "test")}
        assert {split: len(tokens) for split, tokens in splits.items()} == {"train": 300, "validation": 60, "test": 40}
        assert len(set().union(*splits.values())) == 400

    def test_splits_stay_disjoint_where_they_would_collide(self):
        """400 expressions exist, and 390 are asked for: independent streams would overlap."""
        tiny = {"max_depth": 2, "max_args": 2, "min_length": 3, "max_length": 5}
        sizes = {"train_size": 190, "validation_size": 100, "test_size": 100}
        splits = [tokens_of(ListOps(split, **tiny, **sizes)) for split in ("train", "validation", "test")]
        assert len(set().union(*splits)) == 390

    def test_the_size_of_the_training_split_touches_nothing_else(self):
        larger = {"train_size": 500}
        assert tokens_of(small("test")) == tokens_of(small("test", **larger))
        assert tokens_of(small("validation")) == tokens_of(small("validation", **larger))
        assert tokens_of(small("train", **larger))[:300] == tokens_of(small("train"))

    def test_what_a_model_needs_is_told_without_generating(self, monkeypatch):
        """A dry run of the arena's recipe took a minute, for three numbers."""
        needed = {key: small("train").describe()[key] for key in ("classes", "vocabulary", "max_length")}
        monkeypatch.setattr(listops_datasets, "islice", lambda stream, size: islice(stream, one(size)))
        assert needed.items() <= ListOps.foretell(**SMALL, train_size=10_000_000).items()
        refuses(r"train_size=10000001.*000,000", ListOps.foretell, **SMALL, train_size=10_000_001)


def one(size: int) -> int:
    assert size == 1, f"{size} expressions were generated, where one was enough"
    return size


class TestItems:
    def test_items_are_tokens_and_value(self):
        dataset = small("train")
        for index in (0, 1, 299, -1):
            tokens_N, label = dataset[index]
            assert tokens_N.dtype == torch.long
            assert evaluate(to_tokens(bytes(tokens_N.tolist()))) == label
        assert torch.equal(dataset[-1][0], dataset[299][0])

    def test_collate_pads_to_the_longest(self):
        dataset = small("train")
        items = [dataset[index] for index in range(8)]
        inputs_BN, targets_B, padding_BN = dataset.collate(items)
        lengths = [len(tokens) for tokens, _ in items]
        assert inputs_BN.shape == (8, max(lengths)) and len(set(lengths)) > 1
        assert targets_B.tolist() == [label for _, label in items]
        for row, (tokens_N, _) in enumerate(items):
            assert torch.equal(inputs_BN[row, : lengths[row]], tokens_N)
            assert not padding_BN[row, : lengths[row]].any()
            assert padding_BN[row, lengths[row] :].all() and not inputs_BN[row, lengths[row] :].any()

    def test_collate_pads_to_the_maximum(self):
        dataset = small("train", pad_to="max")
        batch = dataset.collate([dataset[0], dataset[1]])
        assert batch.inputs.shape == batch.padding.shape == (2, 64)
        assert (~batch.padding).sum(1).tolist() == [len(dataset[0][0]), len(dataset[1][0])]

    def test_baselines(self):
        found = small("test").baselines(small("train"))
        assert list(found) == ["majority class", "root operator", "root operator and direct digits"]
        labels = small("train").labels
        majority = np.bincount(labels).argmax()
        assert found["majority class"] == pytest.approx(np.mean(small("test").labels == majority))

    @pytest.mark.parametrize("name", ["listops", "digits"])
    def test_the_protocol_is_kept(self, name):
        dataset = create_dataset(name, "train", **({**SMALL, **SIZES} if name == "listops" else {}))
        assert isinstance(dataset, LabelledDataset)
        assert json.loads(json.dumps(dataset.describe())) == dataset.describe()
        assert len(list(dataset)) == len(dataset)
        with pytest.raises(IndexError, match=str(len(dataset))):
            dataset[len(dataset)]
        copy = pickle.loads(pickle.dumps(dataset))  # as a loader's worker gets it
        copy.augment = dataset.augment = False
        assert torch.equal(copy[7][0], dataset[7][0]) and copy[7][1] == dataset[7][1]


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "trian"}, "unknown split 'trian'; did you mean 'train'?"),
            ({"pad_to": "longest"}, "pad_to='longest' must be one of 'batch'"),
            ({"train_size": 0}, "train_size=0 must lie in 1"),
            ({"max_dept": 3}, "unknown option of dataset 'listops' 'max_dept'; did you mean 'max_depth'?"),
            ({"max_args": 1}, "max_args=1"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            create_dataset("listops", **{"split": "train", **SMALL, **SIZES, **options})


class TestCache:
    def test_the_second_time_nothing_is_generated(self, cache, monkeypatch):
        first = tokens_of(small("train"))
        assert len(list(cache.iterdir())) == 3

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("generated again")

        monkeypatch.setattr(listops_datasets, "generate_trees", refuse)
        assert tokens_of(small("train")) == first
        refuses("generated again", small, "train", seed=1, raises=AssertionError)

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
    def test_a_damaged_file_is_reported_and_replaced(self, cache, damage):
        first = tokens_of(small("test"))
        (file,) = cache.iterdir()
        whole = file.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        file.write_bytes({"flip": flipped, "cut": whole[:middle], "empty": b""}[damage])
        with pytest.warns(RuntimeWarning, match="is damaged .* generating its content again"):
            assert tokens_of(small("test")) == first
        assert file.read_bytes() == whole
        assert tokens_of(small("test")) == first

    def test_a_folder_that_cannot_be_written_does_not_stop_the_run(self, tmp_path, monkeypatch):
        obstacle = tmp_path / "file"
        obstacle.touch()
        monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(obstacle))
        with pytest.warns(RuntimeWarning, match="set CACHED_TRANSFORMERS_CACHE to a folder that can be written"):
            assert len(small("test")) == 40

    def test_the_default_folder(self, monkeypatch):
        monkeypatch.delenv("CACHED_TRANSFORMERS_CACHE")
        monkeypatch.setenv("HOME", "/somewhere")
        assert store.cache_folder() == Path("/somewhere/.cache/cached-transformers")


HEADER = "Source\tTarget\r\n"


class TestTSV:
    def test_items(self, tmp_path):
        rows = "( ( ( [MAX 2 ) 9 ) ] )\t9\r\n[SM 1 [MIN 3 4 ] 8 ]\t2\r\n"
        (tmp_path / "basic_test.tsv.xz").write_bytes(lzma.compress(f"{HEADER}{rows}".encode()))
        (tmp_path / "basic_contest.tsv").touch()
        dataset = create_dataset("listops_tsv", "test", path=str(tmp_path), max_length=12)
        assert [(tokens.tolist(), label) for tokens, label in dataset] == [  # type: ignore[attr-defined]
            ([12, 3, 10, 15], 9),
            ([14, 2, 11, 4, 5, 15, 9, 15], 2),
        ]
        assert dataset.describe()["max_length"] == 12
        refuses(r"basic_test.tsv.*max_length=5", create_dataset, "listops_tsv", "test", path=tmp_path, max_length=5)
        refuses(r"'train'.*none", create_dataset, "listops_tsv", "train", path=tmp_path, raises=FileNotFoundError)
        (tmp_path / "test.tsv").touch()
        refuses(r"'test'.*basic_test.tsv.xz, test.tsv", create_dataset, "listops_tsv", "test", path=tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (f"{HEADER}7\t7\r\n( ( [MAX 1 ) ] )", "line 3: expected an expression, a tab and a digit"),
            (f"{HEADER}7\t7\r\n( ( [MAX 1 ) ] )\t1\t1", "line 3: expected"),
            (f"{HEADER}7\t7\r\n( ( [TOP 1 ) ] )\t1", r"line 3: token '\[TOP' is not in the vocabulary"),
            (f"{HEADER}\t1", "line 2: the expression is empty"),
            (f"{HEADER}7\t10", "line 2: expected"),
            ("7\t7\r\n", "line 1: expected 'Source<TAB>Target'"),
            ("", "line 1: expected"),
            (HEADER, "line 1: expected .* and rows"),
            ("\udcff\udcfe", "not UTF-8"),
        ],
    )
    def test_malformed_files_are_named_with_the_line(self, tmp_path, content, message):
        (tmp_path / "basic_test.tsv").write_bytes(content.encode("utf-8", "surrogateescape"))
        refuses(f"basic_test.tsv.*{message}", create_dataset, "listops_tsv", "test", path=tmp_path)

    def test_files_of_the_original_generator(self, shared):
        dataset = create_dataset("listops_tsv", "validation", path=shared / "data" / "lra-listops", pad_to="max")
        expressions = list(dataset.expressions())  # type: ignore[attr-defined]
        lengths = [len(expression.tokens) for expression in expressions]
        assert len(lengths) == 2000 and min(lengths) > 500 and max(lengths) < 2000
        assert all(evaluate(to_tokens(one.tokens)) == one.label for one in expressions)
        assert dataset.collate([dataset[0]]).inputs.shape == (1, 2000)
