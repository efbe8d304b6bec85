"""Text that is read as a stream: rows against a loop over tokens; a run that was killed against one that was not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import launch
import numpy as np
import pytest
import sharded_runs
import torch
from common import refuses
from data import streaming_library
from data.streaming_library import write_shards
from training.same_run import assert_same_run, assert_same_tree, final, train_until_killed
from training.small_language import fitted, make

from cached_lab.data.tokenizers import ByteTokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.language import hub_stream
from cached_lab.tasks.language.hub_stream import StreamedRows
from cached_lab.tasks.language.shard_order import Dealer, HubShards
from cached_lab.tasks.language.streams import IGNORED
from cached_lab.training.distributed import World

ALIKE = ("model.dropout=0.0", "optimizer.name=sgd")
DATA = {"train": 9, "validation": 6}
OPTIONS = ("data.window=5", "training.save_every=3", "training.accumulate=2")


@pytest.fixture(params=["stand-in", pytest.param("datasets", marks=pytest.mark.peers)])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "datasets":
        pytest.importorskip("datasets")
    else:
        put_in_place(monkeypatch)
    hub_stream._splits.cache_clear()
    hub_stream._tokenizer.cache_clear()
    yield request.param
    hub_stream._splits.cache_clear()
    hub_stream._tokenizer.cache_clear()


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    module.load_dataset = streaming_library.load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "text", DATA)


def streamed(folder: Path, *overrides: str) -> tuple[str, ...]:
    data = f"data={{name: huggingface_stream, dataset: {folder}, tokenizer: byte}}"
    return (data, *OPTIONS, *overrides)


def twin(documents: Iterator[str], rows: int, length: int, align: int, packed: bool, steps: int) -> list[Any]:
    """Slow twin, token by token: (input, target, reset, offset, document)."""
    left: list[list[int]] = [[] for _ in range(rows)]
    last, offset, number, count = [10] * rows, [0] * rows, [-1] * rows, -1
    found = []
    for step in range(steps):
        batch = []
        for row in range(rows):
            tokens: list[tuple[Any, ...]] = []
            for place in range(length):
                fresh = step == place == 0
                if not left[row]:
                    if align and place % align:
                        tokens.append((10, IGNORED, False, 0, 0))
                        continue
                    left[row], offset[row], count = list(next(documents).encode()), 0, count + 1
                    number[row] = count
                    if align or packed:
                        last[row] = 10
                        fresh = fresh or bool(align) or place == 0
                token = left[row].pop(0)
                tokens.append((last[row], token, fresh, offset[row], number[row]))
                last[row], offset[row] = token, offset[row] + 1
            batch.append(tokens)
        found.append(batch)
    return found


@pytest.mark.parametrize(("align", "packed"), [(0, False), (4, False), (0, True)])
def test_rows_are_those_of_a_loop_over_tokens(folder: Path, align: int, packed: bool) -> None:
    rows = streaming_library.load_dataset(str(folder), streaming=True)["train"]
    shards = HubShards(rows, "text", "made")
    streams = StreamedRows(shards, ByteTokenizer(), 3, 12, align=align, packed=packed, window=7, seed=4)
    expected = twin(Dealer(shards, window=7, seed=4), 3, 12, align, packed, 60)
    for step in range(60):
        batch = streams.batch(step, slice(0, 3))
        reset_BN = torch.zeros(3, 12, dtype=torch.bool)
        reset_BN[:, :: align or 12] = batch.reset
        columns = (batch.inputs, batch.targets, reset_BN, batch.positions, batch.documents)
        valid = batch.targets != IGNORED
        kept = (*columns[:3], *(torch.where(valid, column, 0) for column in columns[3:]))
        seen = [list(zip(*(column[row].tolist() for column in kept), strict=True)) for row in range(3)]
        assert seen == expected[step]
        assert batch.tokens == int(valid.sum()) and (batch.padding is None) == (not align)
        assert (batch.told is not None) == packed
    assert all(len(row.tokens) < 100 for row in streams.rows)


def test_a_killed_run_goes_on(library: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = streamed(folder)
    fitted(tmp_path / "whole", tmp_path, *text)
    killed = make(tmp_path / "killed", tmp_path, *text)
    train_until_killed(killed, 2 * 10 + 1, monkeypatch)  # between the pieces of the eleventh step; the ninth was saved
    assert final(tmp_path / "killed").step == 9
    fitted(tmp_path / "killed", tmp_path, *text)
    assert_same_run(tmp_path / "killed", tmp_path / "whole", 12)
    carried = final(tmp_path / "whole").training["carried"]
    places = {f"places/{name}" for name in ("dealer", "rows", "left")}
    assert {name for name in carried if name.startswith("places/")} == places


@pytest.mark.parametrize("reset", ["never", "document", "packed"])
def test_pieces_are_rows_of_the_whole_and_a_position_resumes(folder: Path, reset: str) -> None:
    rows = streaming_library.load_dataset(str(folder), streaming=True)["train"]
    source = (HubShards(rows, "text", "made"), ByteTokenizer(), 8, 8)
    options = {"align": 4 if reset == "document" else 0, "packed": reset == "packed", "window": 3, "seed": 1}
    one, two, other = (StreamedRows(*source, **options) for _ in range(3))
    for step in range(9):
        whole = one.batch(step, slice(0, 8))
        pieces = [two.batch(step, slice(begin, begin + 2)) for begin in range(0, 8, 2)]
        for name in ("inputs", "targets", "reset", "positions", "documents"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(piece, name) for piece in pieces]))
        assert {piece.tokens for piece in pieces} == {whole.tokens}
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.batch(9, slice(4, 8)).inputs, one.batch(9, slice(4, 8)).inputs)


def train_streamed(world: World, folder: Path, text: str) -> None:
    """Train in one of two processes, once without and once with a stop in the middle."""
    sys.modules["datasets"] = ModuleType("datasets")
    sys.modules["datasets"].load_dataset = streaming_library.load_dataset  # type: ignore[attr-defined]
    options = streamed(Path(text), *ALIKE)
    sharded_runs.fitted(folder / "whole", folder, world, *options)
    sharded_runs.fitted(folder / "killed", folder, world, *options, "training.steps=6")
    sharded_runs.fitted(folder / "killed", folder, world, *options)


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.world(train_streamed, tmp_path, str(folder))
    killed, whole = (final(tmp_path / name) for name in ("killed", "whole"))
    assert killed.step == whole.step == 12
    assert_same_tree(killed.weights, whole.weights)
    for name in ("carried", "optimizer", "rng", "total"):
        assert_same_tree(killed.training[name], whole.training[name], name)
    put_in_place(monkeypatch)
    fitted(tmp_path / "alone", tmp_path, *streamed(folder, *ALIKE))
    one, two = final(tmp_path / "alone"), final(tmp_path / "whole")
    places = [{k: v for k, v in c.training["carried"].items() if k.startswith("places/")} for c in (one, two)]
    assert_same_tree(*(dict(sorted(tree.items())) for tree in places))
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_held_out_documents_are_never_trained_on(library: str, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "one", {"train": 60})
    splits = {
        split: create_dataset("huggingface_stream", split, dataset=str(folder), held_fraction=0.1, held_out=500)
        for split in ("train", "validation", "test")
    }
    texts = {split: set(hub_stream._once(data.documents)) for split, data in splits.items() if split == "train"}
    held = {split: documents_of(splits[split]) for split in ("validation", "test")}
    rows = HubShards(hub_stream._splits(str(folder), None)["train"], "text", "made")
    everything = list(hub_stream._once(rows))
    assert len(everything) == len(set(everything)) == 246
    assert texts["train"] | held["validation"] | held["test"] == set(everything)
    assert len(texts["train"]) + len(held["validation"]) + len(held["test"]) == 246
    assert min(len(held["validation"]), len(held["test"])) > 8
    few = create_dataset("huggingface_stream", "test", dataset=str(folder), held_fraction=0.1, held_out=3)
    assert documents_of(few) < held["test"] and len(few.starts) == 3


def documents_of(data: Any) -> set[str]:
    return {bytes(part.tolist()).decode() for part in np.split(data.tokens, data.starts[1:])}


def test_vocabularies_of_words(library: str, folder: Path) -> None:
    options = {"dataset": str(folder), "tokenizer": "word"}
    train, validation = (create_dataset("huggingface_stream", split, **options) for split in ("train", "validation"))
    assert train.tokenizer is validation.tokenizer and {"abc", "de", "train"} <= set(train.tokenizer.words)
    facts = train.describe()
    assert facts["shards"] == 4 and facts["vocabulary"] == train.tokenizer.vocabulary and "size" not in facts
    assert validation.describe()["documents"] == 6
    assert set(train.scores(3.0, 2.0)) == {"loss", "perplexity"}
    assert "word_perplexity" not in train.scores(1, 1) and validation.baselines(train) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, r"data.column='body': .*, split train has text"),
        ({"held_fraction": 0.5}, r"data.held_fraction=0.5 must lie between 0 and 0.5"),
        ({"window": 0}, r"data.window=0 must be at least 1"),
        ({"reset": "always"}, r"data.reset='always' must be"),
        ({"dataset": "no/such-data-here"}, r"data.dataset='no/such-data-here' cannot be loaded"),
    ],
)
def test_bad_options_are_named(library: str, folder: Path, options: dict[str, Any], message: str) -> None:
    if library == "datasets" and "dataset" in options:
        pytest.skip("would look for it in the network")
    refuses(message, create_dataset, "huggingface_stream", "train", **{"dataset": str(folder), **options})


def test_without_a_network_or_the_library_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, config: str | None, streaming: bool) -> None:
        raise ConnectionError("Couldn't reach the hub")

    module = ModuleType("datasets")
    module.load_dataset = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    refuses(r"data\.name=text", create_dataset, "huggingface_stream", "train", dataset="x/y")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses("pip install", create_dataset, "huggingface_stream", "train", dataset="x/z", raises=ImportError)


def test_a_damaged_file_is_named_when_its_turn_comes(library: str, folder: Path) -> None:
    with (folder / "train-00002.jsonl").open("a", encoding="utf-8") as file:
        file.write("{broken")
    train = create_dataset("huggingface_stream", "train", dataset=str(folder))
    refuses(r"split train, shard 2 cannot be read: .*the same command goes on", list, hub_stream._once(train.documents))


def test_a_row_without_text_is_passed_over_and_one_of_another_kind_is_named(folder: Path) -> None:
    rows = streaming_library.StandIn([folder / "train-00000.jsonl"])
    rows.files[0].write_text('{"text": null}\n{"text": "good"}\n{"text": 5}\n', encoding="utf-8")
    reader = HubShards(rows, "text", "made").read(0)
    assert next(reader) == "good"
    refuses(r"0.*'text'", next, reader)


def test_a_stream_is_not_scored_and_its_steps_are_consecutive(library: str, folder: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", tmp_path, *streamed(folder))
    refuses(r"is read as a stream, which has no end", trainer.task.evaluate, trainer.model, trainer.task.data)
    with pytest.raises(RuntimeError, match="does not follow step"):
        trainer.task.streams.batch(0, slice(0, 2))
        trainer.task.streams.batch(2, slice(0, 2))
