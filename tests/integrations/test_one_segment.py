"""Training that never reaches a memory warns once, and a misspelt state is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations import family_checks as checks
from integrations.families import ALL, GROUPED, SEGMENT, decoder, encoder, words
from integrations.hosts import library
from memories.harness import build

from cached_transformers import SegmentLoop, remove_memory
from cached_transformers.state import detach

SHARED = [family for family in ALL if family.name in ("bert", "vit", "deberta", "t5")]
LLAMA, BERT = decoder("llama", "Llama", **GROUPED), encoder("Bert", "BERT", "ForTokenClassification")
UNTRAINED = {name: name not in ("rmt", "memory_transformer") for name in checks.STREAMS}
"""Memories that a text of one segment does not train; the others are read in it."""


def told(step: Any, times: int = 4) -> int:
    """Number of warnings of so many steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            step()
    return sum("segment_length=5" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", checks.STREAMS)
def test_rows_of_one_segment_warn_once_if_they_train_no_memory(name: str) -> None:
    model, short = LLAMA.with_memory(checks.STREAMS[name]).train(), words(tokens=SEGMENT)
    assert told(lambda: model(short).logits.sum().backward(), times=1) == 0  # a loop that carries begins so
    assert told(lambda: model(short).logits.sum().backward()) == UNTRAINED[name]
    assert told(lambda: model(short).logits.sum().backward()) == 0


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=str)
def test_steps_that_reach_the_memory_do_not_warn(family: Any) -> None:
    def fresh() -> Any:
        return family.with_memory(checks.STREAMS["grc_stream"], segment_length=SEGMENT).train()

    def carried() -> None:
        out = model(words(tokens=SEGMENT), memory_state=states[-1])
        out.logits.sum().backward()
        states.append(detach(out.memory_state))
        copies.append(pickle.loads(pickle.dumps(copy.deepcopy(model))))

    model, states, copies = fresh(), [None], list[Any]()
    assert told(carried) == 0 and len(copies) == 4
    long, mixed, short = fresh(), fresh(), words(tokens=SEGMENT)
    assert told(lambda: long(words()).logits.sum().backward()) == 0
    assert told(lambda: [mixed(text).logits.sum().backward() for text in (words(), short, short)]) == 0
    alone = fresh()
    assert told(lambda: alone.eval()(short)) == 0
    alone.train()
    assert told(lambda: alone(short).logits.sum().backward()) == 1


@pytest.mark.parametrize("longest", [SEGMENT, SEGMENT + 1])
def test_packed_documents_of_one_segment_warn_once(longest: int) -> None:
    lengths = torch.tensor([3, longest, 2])
    ids, numbers = words(2, int(lengths.sum())), torch.arange(3).repeat_interleave(lengths).expand(2, -1)
    places = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    for told_by in ({"document_ids": numbers}, {"position_ids": places}):
        model = LLAMA.with_memory(checks.STREAMS["grc_stream"]).train()
        assert told(lambda: model(ids, **told_by).logits.sum().backward()) == (longest == SEGMENT)  # noqa: B023
    state = model.init_memory_state(2)
    carried = LLAMA.with_memory(checks.STREAMS["grc_stream"]).train()
    assert told(lambda: carried(ids, memory_state=state, document_ids=numbers).logits.sum().backward()) == 0


def test_trainer_with_short_rows_warns_once(tmp_path: Path) -> None:
    transformers = library("transformers")
    model, rows = LLAMA.with_memory(checks.STREAMS["grc_stream"]), [{"input_ids": w, "labels": w} for w in words(8, 4)]
    settings = transformers.TrainingArguments(tmp_path, max_steps=4, report_to=[], disable_tqdm=True, use_cpu=True)
    assert told(transformers.Trainer(model, settings, train_dataset=rows).train, times=1) == 1


@pytest.mark.parametrize("memory", ["grc_stream", "transformer_xl", "rmt", None])
def test_segment_loop_warns_too(memory: str | None) -> None:
    text, state = words() % 11, None
    loops = [SegmentLoop(build(memory), SEGMENT) for _ in range(3)]
    assert told(lambda: loops[0](text[:, :5], text[:, 1:6])[0].backward()) == (
        memory in ("grc_stream", "transformer_xl")
    )
    assert told(lambda: loops[1](text[:, :-1], text[:, 1:])[0].backward()) == 0
    for _ in range(3):
        loss, state = loops[2](text[:, :5], text[:, 1:6], state)
        loss.backward()


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=str)
def test_a_misspelt_state_is_refused(family: Any) -> None:
    model = family.with_memory(checks.STREAMS["grc_stream"], segment_length=SEGMENT)
    for call in (model, getattr(model, "bert", None) or model.model):
        refuses("memory_sate", call, words(), raises=(ValueError, TypeError), memory_sate=model.init_memory_state(2))
    if family is LLAMA:
        refuses("memory_sate", model.generate, words(), memory_sate=model.init_memory_state(2), max_new_tokens=2)


@pytest.mark.parametrize("family", SHARED, ids=str)
@pytest.mark.parametrize("keyword", ["memory_sate", "memory_state"])
def test_a_shared_memory_swallows_no_state(family: Any, keyword: str) -> None:
    model, given = family.with_memory({"name": "grc"}).eval(), family.given()
    body = {name: t for name, t in given.items() if name != "labels"}
    copies = [(copied, given) for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    for called, inputs in ((model, given), (model.base_model, body), *copies):
        refuses(keyword, called, raises=(ValueError, TypeError), **inputs, **{keyword: ()})
    remove_memory(model)(**given, **{keyword: ()})
