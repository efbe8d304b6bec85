"""One reading of a split for output caches: resets, padding, queries of the head, and the content of a datastore."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from training.small_language import CPU, make, own_cache, write_text  # noqa: F401

from cached_lab.output_caches import NeuralCache, hidden_states
from cached_lab.output_caches.scoring import build_datastore, cache_losses
from cached_lab.tasks.language.scores import evaluate_language
from cached_lab.training.distributed import World
from cached_lab.training.trainer import Trainer

CACHE = NeuralCache(20, 0.3, 0.4)


def trainer_of(folder: Path, *options: str) -> Trainer:
    return make(folder / "run", write_text(folder / "text"), "model.dropout=0.0", *options)


def of_documents(folder: Path, rows: int) -> Trainer:
    """Return a text of several short files, each a document with an empty memory at its start."""
    text = write_text(folder / "text")
    words = (text / "train.txt").read_text().split()
    for path in text.iterdir():
        path.unlink()
    for part in range(40):
        split = text / ("train" if part < 24 else "valid" if part < 32 else "test")
        split.mkdir(exist_ok=True)
        (split / f"more_{part}.txt").write_text(" ".join(words[7 * part : 7 * part + 9 + part % 4]) + "\n")
    options = ("data.reset=document", f"training.evaluation_batch_size={rows}")
    return make(folder / "run", text, "model.dropout=0.0", *options)


def documents(trainer: Trainer) -> list[list[int]]:
    data = trainer.task.validation
    ends = [*data.starts[1:].tolist(), len(data)]
    return [data.tokens[a:b].tolist() for a, b in zip(data.starts.tolist(), ends, strict=True)]


def test_rows_that_begin_anew_forget_and_padding_is_not_kept(tmp_path: Path) -> None:
    """Twin: each document by itself, in segments of 8, by full distributions."""
    trainer = of_documents(tmp_path, 1)
    assert len(documents(trainer)) > 2 and max(map(len, documents(trainer))) > 16
    model, nats = trainer.model.eval(), torch.zeros(2, dtype=torch.float64)
    for document in documents(trainer):
        state = copies = None
        tokens = torch.tensor([[trainer.task.validation.tokenizer.start, *document]])
        for begin in range(0, len(document), 8):
            inputs, targets = tokens[:, begin:-1][:, :8], tokens[:, begin + 1 :][:, :8]
            with torch.no_grad(), hidden_states(model) as seen:
                logits, state, _ = model(inputs, state)
                mixed, copies = CACHE(logits, seen.take(), targets, copies)
            for place, scores in enumerate((logits.log_softmax(-1), mixed)):
                nats[place] -= scores.double().gather(2, targets[..., None]).sum()
    found, count = cache_losses(trainer.model, trainer.task.validation, CPU, trainer.config, [CACHE])
    assert count == sum(map(len, documents(trainer)))
    torch.testing.assert_close(found, nats, rtol=1e-5, atol=0)


def test_many_settings_in_one_reading_are_each_by_itself(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "training.evaluation_batch_size=2")
    about: Any = (trainer.model, trainer.task.validation, CPU, trainer.config)
    settings = [dataclasses.replace(CACHE, theta=t, lambda_=s) for t in (0.0, 0.5) for s in (0.0, 0.3, 1.0)]
    together, count = cache_losses(*about, settings)
    single = [float(cache_losses(*about, [setting])[0][1]) for setting in settings]
    assert together[1:].tolist() == pytest.approx(single, rel=1e-9)
    assert float(together[0]) / count == pytest.approx(evaluate_language(*about)[0]["loss"], rel=1e-6)
    assert trainer.model.training


@pytest.mark.parametrize("reset", ["never", "document"])
def test_processes_share_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reset: str) -> None:
    """Each process resets the memory at the starts of its own documents only."""
    trainer = (
        of_documents(tmp_path, 3) if reset == "document" else trainer_of(tmp_path, "training.evaluation_batch_size=3")
    )
    about: Any = (trainer.model, trainer.task.validation)
    whole, count = cache_losses(*about, CPU, trainer.config, [CACHE])
    monkeypatch.setattr(World, "sum", lambda _, values: values.double())
    parts = [cache_losses(*about, World(CPU.device, rank, 2), trainer.config, [CACHE]) for rank in range(2)]
    assert sum(part[1] for part in parts) == count
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("key", ["feed_forward", "last_hidden"])
def test_a_datastore_holds_every_context_and_what_followed(tmp_path: Path, key: str) -> None:
    trainer = trainer_of(tmp_path, "training.evaluation_batch_size=1")
    data = trainer.task.validation
    about = (trainer.model, data, CPU, trainer.config, key)
    store = build_datastore(*about, "float32")
    assert store.values_S.tolist() == data.tokens.tolist()
    tokens, state, keys = torch.tensor([[data.tokenizer.start, *data.tokens[:-1].tolist()]]), None, []
    trainer.model.eval()
    for piece in tokens.split(8, 1):
        with torch.no_grad(), hidden_states(trainer.model, key) as seen:
            state = trainer.model(piece, state).state
            keys.append(seen.take()[0])
    torch.testing.assert_close(store.keys_SD, torch.cat(keys), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(build_datastore(*about, "float16").keys_SD, store.keys_SD.half())
    trainer.model.stack.norm.weight.data.mul_(1e6)
    if key == "last_hidden":
        with pytest.raises(ValueError, match="dtype=float16"):
            build_datastore(*about, "float16")
