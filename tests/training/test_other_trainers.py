"""Third-party trainers of docs/training-elsewhere.md: the state is carried, and resumed runs are equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from common import refuses
from docs.pages import blocks
from integrations.hosts import library
from torch import nn

from cached_transformers import CarriedState, SegmentLoop, create_model
from cached_transformers.state import named_tensors

PAGE = "docs/training-elsewhere.md"
WORKER = Path(__file__).with_name("other_trainers_worker.py")
BLOCKS = [block.text for block in blocks("python") if block.page == PAGE]
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""Without dropout, as loaders of an evaluation draw from torch's generator."""
SIZES = {"vocabulary": 256, "width": 16, "depth": 2, "heads": 2, "feed_forward": 16}


def defined(*names: str, **given: Any) -> dict[str, Any]:
    """Return the definitions in the code blocks of the page that contain these words, up to the final call."""
    found: dict[str, Any] = {"__name__": "page", **given}
    for name in names:
        (text,) = (text for text in BLOCKS if name in text)
        exec(compile(text, PAGE, "exec"), found)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture
def page(here: Path) -> dict[str, Any]:
    library("transformers")
    return defined('TrainingArguments("trained"', "class StreamTrainer")


def fresh(page: dict[str, Any]) -> None:
    """The page's model as it began, without dropout."""
    torch.manual_seed(3)
    model = page["GPT2LMHeadModel"](page["GPT2Config"](n_embd=32, n_layer=2, n_head=2, vocab_size=256, **DRY))
    page["add_memory"](model, "rmt", length=4, segment_length=32)
    page["model"] = model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_trainer_goes_on_to_the_bit_and_its_state_matters(page: dict[str, Any], here: Path) -> None:
    options = {"gradient_accumulation_steps": 1, "eval_strategy": "no"}
    fresh(page)
    whole = page["stream_trainer"]("whole", page["rows"], **options)
    whole.train()
    fresh(page)
    again = page["stream_trainer"]("whole", page["rows"], **options)
    again.go_on("whole/checkpoint-4")
    assert again.state.global_step == 6 and same(again.model, whole.model)
    fresh(page)
    forgetful = page["stream_trainer"]("other", page["rows"], **options)
    forgetful.train(resume_from_checkpoint=str(here / "whole/checkpoint-4"))
    assert not same(forgetful.model, whole.model)


def test_an_evaluation_leaves_trainers_state_alone(page: dict[str, Any]) -> None:
    fresh(page)
    plain = page["stream_trainer"]("plain", page["rows"])
    plain.train()
    fresh(page)
    often = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = page["stream_trainer"]("evaluated", page["rows"], page["rows"][:8], **often)
    trainer.train()
    assert len([line for line in trainer.state.log_history if "eval_loss" in line]) >= 6
    assert same(trainer.model, plain.model)


def test_what_would_take_the_memory_away_from_trainer_is_refused(page: dict[str, Any]) -> None:
    arguments = page["TrainingArguments"]("shuffled", report_to="none", per_device_train_batch_size=4)
    with pytest.raises(ValueError, match="train_sampling_strategy='sequential'"):
        page["StreamTrainer"](page["model"], arguments, train_dataset=page["rows"])
    trainer = page["stream_trainer"]("short", page["rows"])
    trainer.train()
    with pytest.raises(ValueError, match=r"rows"):  # a last batch of fewer rows
        ids = page["text"].view(4, -1)[:3, :64]
        trainer.compute_loss(page["model"].train(), {"input_ids": ids, "labels": ids})
    plain = page["GPT2LMHeadModel"](page["GPT2Config"](n_embd=32, n_layer=1, n_head=2, vocab_size=256))
    refuses("GPT2LMHeadModel", CarriedState, plain)


def test_accelerate_goes_on_to_the_bit(page: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    page |= defined("def steps_of", **page)
    whole = page["steps_of"]("whole", 5, accumulate=2)
    page["steps_of"]("parts", 5, stop=3, accumulate=2)  # saved after step 2
    assert [path.name for path in Path("parts").iterdir()] == ["step_0002"]
    assert same(page["steps_of"]("parts", 5, accumulate=2), whole)
    (kept,) = Path("parts/step_0002").glob("custom_checkpoint_0.pkl")
    assert any(tensor.abs().sum() > 0 for tensor in torch.load(kept, weights_only=True).values())


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of lightning's own, which depend on the machine
def test_lightning_goes_on_to_the_bit_in_the_middle_of_an_epoch(here: Path) -> None:
    pytest.importorskip("lightning")
    page = defined("import lightning")
    whole = page["fitted"]("whole", 12)
    again = page["fitted"]("again", 12, "whole/step=6.ckpt")
    assert same(again, whole)
    for (name, a), (_, b) in zip(named_tensors(again.carried.state), named_tensors(whole.carried.state), strict=True):
        assert torch.equal(a, b), name
    page["Remembering"].on_load_checkpoint = lambda self, checkpoint: None
    assert not same(page["fitted"]("empty", 12, "whole/step=6.ckpt"), whole)


@pytest.mark.slow
def test_blocks_of_two_processes_learn_what_one_learns(here: Path) -> None:
    """Test transformers' Trainer under FSDP2 with and without groups of blocks, and the hand-written sharded loop."""
    library("transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    launch.python(WORKER, here)
    launch.python(WORKER, here, processes=2)
    one, two = (torch.load(here / f"{count}.pt") for count in (1, 2))
    assert set(two["kinds"].values()) == {"FSDP"} and set(one["kinds"].values()) == {"NO"}
    for name, losses in one["losses"].items():
        assert losses == pytest.approx(two["losses"][name], abs=2e-5), name
        assert max(losses) - min(losses) > 1e-4


def test_a_carried_state_is_what_it_was() -> None:
    model = create_model("language_model", **SIZES, memory="rmt")
    loop, carried = SegmentLoop(model, 8), CarriedState(model)
    tokens = torch.randint(256, (3, 17))
    assert carried.state is None
    other = CarriedState(model)
    other.load_state_dict(carried.state_dict())
    assert other.state is None
    _, carried.state = loop(tokens[:, :-1], tokens[:, 1:], carried.state)
    assert not any(tensor.requires_grad for _, tensor in named_tensors(carried.state))
    other.load_state_dict(carried.state_dict())
    assert loop(tokens[:, :-1], tokens[:, 1:], other.state)[0] == loop(tokens[:, :-1], tokens[:, 1:], carried.state)[0]
    with pytest.raises(ValueError, match="CarriedState"):
        CarriedState(create_model("language_model", **SIZES, memory="infini")).load_state_dict(carried.state_dict())
    refuses("LanguageModel", CarriedState, create_model("language_model", **SIZES))
