"""`data.reset=packed`: documents follow each other in a row, and each is read as if it were the only one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from common import refuses
from torch.nn import functional as F
from training.small_language import CPU, fitted, make, own_cache, write_text  # noqa: F401

from cached_lab.experiments.memory_use import emptied_in_training
from cached_lab.tasks.language.scores import split_losses

PACKED = ("data.reset=packed", "data.shuffle=true", "model.dropout=0.0")
SIZES = (3, 1, 5, 2, 4)
"""Lines of seven letters."""


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder of several documents a split."""
    folder = write_text(tmp_path / "text")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").unlink()
        (folder / split).mkdir()
        for number, lines in enumerate(SIZES * (8 if split == "train" else 1)):
            words = "".join("abcdefgh"[(number * line + 3 * line) % 8] * 6 + "\n" for line in range(lines))
            (folder / split / f"{number:02}.txt").write_text(words, encoding="utf-8")
    return folder


def alone(model: torch.nn.Module, tokens: list[int], start: int) -> float:
    """Summed loss of a document that is read as a whole."""
    logits = model(torch.tensor([[start, *tokens[:-1]]])).outputs[0]
    return float(F.cross_entropy(logits, torch.tensor(tokens), reduction="sum").detach())


def test_a_split_scores_as_its_documents_alone(tmp_path, text):
    # A memory that holds a whole document, so that the cut of a text does not matter.
    options = (*PACKED, "training.evaluation_batch_size=1", "model.memory.length=64")
    trainer = make(tmp_path / "run", text, *options)
    data, model = trainer.task.validation, trainer.model
    found = split_losses(model, data, CPU, trainer.config)
    documents = [data.tokens[a:b].tolist() for a, b in zip(data.starts, [*data.starts[1:], len(data)], strict=True)]
    assert [len(document) for document in documents] == [7 * lines for lines in SIZES]
    model.eval()
    want = [alone(model, document, data.tokenizer.start) for document in documents]
    assert found.documents[0].tolist() == pytest.approx(want, rel=1e-5)
    # By the segments of 8 tokens since a document began, wherever in one that was.
    begin, carried = 0, []
    for document in documents:
        carried += [place // 8 - begin // 8 for place in range(begin, begin + len(document))]
        begin += len(document)
    assert found.carried[1, :3].tolist() == [sum(a <= n <= b for n in carried) for a, b in ((0, 0), (1, 2), (3, 6))]
    assert emptied_in_training(data, trainer.config)["trained_on"]


def test_a_step_trains_each_document_as_if_it_stood_alone(tmp_path, text):
    sizes = ("model.memory=null", "training.segments=1", "training.segment_length=24")
    trainer = make(tmp_path / "run", text, *PACKED, *sizes)
    batch = next(trainer.task.batches(0))
    assert batch.told is not None and int((batch.told.diff() != 0).sum()) > 1
    runner, _ = trainer.task.runner()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    total = trainer.task.backward(runner, batch, scaler)
    want = sum(
        float(F.cross_entropy(trainer.model(ids[None]).outputs[0], targets, reduction="sum").detach())
        for row in range(len(batch.told))
        for document in batch.told[row].unique()
        if document >= 0
        for ids, targets in [(t[row, batch.told[row] == document] for t in (batch.inputs, batch.targets))]
    )
    assert float(total[0]) == pytest.approx(want, rel=1e-5) and int(total[1]) == batch.tokens


def test_what_does_not_go_with_packed_documents_is_refused(tmp_path, text):
    passes = ("model.memory={name: read_twice, scope: earlier}", "training.passes=2")
    refuses(r"data\.reset=packed with training\.passes=2", make, tmp_path / "run", text, *PACKED, *passes)
    refuses(r"'never'.*'document'.*'packed'", make, tmp_path / "run", text, "data.reset=pack")
