"""`cached plan` against the memory of real trainings, and refused plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli.measured_step import measured

from cached_lab.cli.main import main
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.plan import GIB, GpuForms, NoRoom, RehearsedStep, bare_model, plan_training, sized
from cached_lab.tasks.recipes import load_config
from cached_lab.training.config import RunConfig
from cached_transformers.memories.grc import equations
from cached_transformers.registry import MEMORIES, MODELS
from cached_transformers.state import nbytes

CLOSE = 0.02
"""Largest relative difference between plan and measurement; 1 % and less is usual."""
WORDS = "the quick brown fox jumps over the lazy dog while it rains\n"
TEXT, PAIRS = ["data.path={folder}/text.txt"], ["data.path={folder}", "data.vocabulary_size=300", "data.max_length=64"]
TRANSLATOR = [*PAIRS, "data.name=translation", "data.source=en", "data.target=de", "training.batch_tokens=null"]
DOCUMENTS = ["training.curriculum=null", "training.solved=null", "training.batch_size=8"]
SEGMENTS = [*TEXT, "model.memory={{name: rmt, length: 10}}", "training.segments=4", "training.bptt=2"]
SLOW = pytest.mark.slow

RUNS = [
    pytest.param("demo_text", [*TEXT, "training.accumulate=4"], id="accumulated"),
    pytest.param("digits_vit_grc", [], id="shared-cache"),
    pytest.param("demo_listops", [], id="rows-of-any-length"),
    pytest.param("demo_text", SEGMENTS, id="gradient-over-two-segments", marks=SLOW),
    pytest.param("multi30k_en_de_grc", TRANSLATOR, id="translation", marks=SLOW),
    pytest.param("demo_listops", ["training.precision=bfloat16"], id="bfloat16", marks=SLOW),
    pytest.param("digits_vit_grc", ["training.activation_checkpointing=true"], id="checkpointed", marks=SLOW),
    pytest.param("digits_vit_grc", ["model.width=256", "training.ema_decay=0.99"], id="average", marks=SLOW),
    pytest.param("digits_vit_plain", ["optimizer.name=sgd", "model.width=256"], id="momentum", marks=SLOW),
    pytest.param("rmt_documents", DOCUMENTS, id="documents", marks=SLOW),
    pytest.param("demo_text", [*TEXT, "model.feed_forward=4096"], id="wide", marks=SLOW),
]


def planned(name: str, overrides: list[str], length: int | None = None) -> int:
    """Return the bytes of a plan with the CPU form of the optimiser."""
    config, shape, rows, _ = sized(load_config(name, overrides), length)
    pieces = config.training.accumulate
    return sum(RehearsedStep(config, shape, gpu=False).parts(rows // pieces, pieces).values())


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_the_plan_is_what_a_training_takes(name: str, changes: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS * 2000)
    lines = [f"{' '.join(WORDS.split()[: 4 + row % 7])} {row % 50}\n" for row in range(400)]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.en").write_text("".join(lines))
        (tmp_path / f"{split}.de").write_text("".join(line.upper() for line in lines))
    overrides = [change.format(folder=tmp_path) for change in changes]
    peak, longest = measured(name, overrides, tmp_path / "run")
    length = longest if name in ("multi30k_en_de_grc", "demo_listops") else None
    assert abs(planned(name, overrides, length) / peak - 1) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MEMORIES.names()} - {"attention_cache", "convolution", "grc", "memorizing"}))
def test_every_causal_memory_takes_what_is_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS * 2000)
    overrides = [f"data.path={tmp_path}/text.txt", f"model.memory={{name: {name}}}"]
    peak, _ = measured("demo_text", overrides, tmp_path / "run")
    assert abs(planned("demo_text", overrides) / peak - 1) < CLOSE


def text_recipe(*overrides: str) -> RunConfig:
    return load_config("demo_text", ["data.path=x", "model.memory=null", "model.depth=1", *overrides])


def test_weights_optimiser_average_and_states_are_counted_to_the_byte() -> None:
    config, shape, *_ = sized(load_config("demo_text", ["data.path=x", "training.ema_decay=0.9"]))
    parameters = list(bare_model(config).parameters())
    weights = 4 * sum(p.numel() for p in parameters)
    found = RehearsedStep(config, shape).parts(4)
    assert found["weights"] == weights and found["inputs"] == 2 * 4 * 64 * 8
    assert found["optimiser"] == 2 * weights + 4 * len(parameters)  # two means of each, and the step of each tensor
    assert found["average of the weights"] == weights + sum(b.nbytes for b in bare_model(config).buffers())
    assert found["states of the rows"] == nbytes(MODELS.create(**config.model).init_state(4))
    sgd = sized(load_config("demo_text", ["data.path=x", "optimizer.name=sgd"]))[0]
    twice = RehearsedStep(sgd, shape).parts(8, 2)
    assert twice["optimiser"] == twice["gradients of earlier pieces"] == weights
    assert twice["states of the rows"] == 3 * 2 * found["states of the rows"]  # old and new; the piece's own is counted
    assert twice["activations"] > 1.9 * found["activations"]


def test_the_largest_piece_that_fits_is_found() -> None:
    whole = plan_training(text_recipe(), reserve_gib=0)
    assert whole.fits and (whole.micro_batch, whole.accumulate) == (16, 1)
    total = sum(whole.parts.values())
    tight = plan_training(text_recipe(), reserve_gib=0, memory_gib=0.6 * total / GIB)
    assert tight.fits and (tight.micro_batch, tight.accumulate) == (8, 2) and sum(tight.parts.values()) < 0.6 * total
    none = plan_training(text_recipe("training.batch_size=2"), reserve_gib=0, memory_gib=0.001)
    assert not none.fits and (none.micro_batch, none.accumulate) == (1, 2)
    begun = plan_training(text_recipe("training.accumulate=4"))
    assert (begun.micro_batch, begun.accumulate) == (4, 4)


def test_gpus_divide_rows_and_sizes_come_from_recipe_option_or_data() -> None:
    config = text_recipe("model.width=256")
    ddp, fsdp = (plan_training(config, gpus=4, parallel=parallel) for parallel in ("ddp", "fsdp"))
    weights = 4 * ddp.parameters
    assert ddp.micro_batch == fsdp.micro_batch == 4
    assert ddp.parts["weights"] == ddp.parts["buckets of DDP"] == weights and not ddp.parts["gathered by FSDP"]
    assert fsdp.parts["weights"] == fsdp.parts["gradients"] == weights // 4 and not fsdp.parts["buckets of DDP"]
    assert 0 < fsdp.parts["gathered by FSDP"] < 2 * weights
    config = load_config("demo_listops", [])
    (whole, long, *_), (short, row, *_) = sized(config), sized(config, 20)
    assert (long.tokens, row.tokens) == (64, 20) and whole.model["max_length"] == short.model["max_length"]
    assert sized(load_config("table5_paper", []))[3] == {"vocabulary": 267_735}
    config, shape, rows, _ = sized(load_config("iwslt14_de_en_grc", []), 64)
    assert (rows, shape.tokens, config.model["vocabulary"]) == (64, 64, 10_000)


@pytest.mark.parametrize("name", ["demo_text", "digits_vit_grc", "multi30k_en_de_grc"])
def test_the_search_for_pieces_rehearses_as_a_fresh_model_does(name: str) -> None:
    overrides = {"demo_text": ["data.path=x"], "multi30k_en_de_grc": ["training.batch_tokens=512"]}
    config, shape, rows, _ = sized(load_config(name, overrides.get(name, [])))
    step = RehearsedStep(config, shape)
    whole = step.parts(rows)
    for fraction in (0.3, 0.7):  # amid forward, and later
        with pytest.raises(NoRoom):
            step.parts(rows, 2, int(fraction * whole["activations"]))
    assert step.parts(rows // 2, 2) == RehearsedStep(config, shape).parts(rows // 2, 2)
    assert step.parts(rows) == whole == RehearsedStep(config, shape).parts(rows)


def test_grc_is_planned_in_the_blocks_of_a_gpu() -> None:
    u = torch.zeros(1).expand(32, 1000, 512)
    with GpuForms():
        assert len(list(equations._blocks(u))) == 1
    assert len(list(equations._blocks(u))) > 1


def test_bytes_are_counted_from_allocation_to_release() -> None:
    def work() -> None:
        kept = [torch.ones(1000) for _ in range(4)]
        del kept[::2]
        kept += [torch.ones(500).view(5, 100) for _ in range(6)]

    assert peak_bytes(work, "cpu") == 4 * (2 * 1000 + 6 * 500)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo_text", "--gpus", "3"], ["training.batch_size=16", "gpus=3"]),
        (["demo_text", "--gpus", "0"], ["gpus=0"]),
        (["demo_text", "--memory-gib", "2"], ["memory_gib=2.0", "reserve_gib=4.0"]),
        (["demo_text", "data={name: text, path: x, tokenizer: bpe}"], ["data.name=text", "model.vocabulary"]),
        (["lm_wikitext2_small_xl", "data={name: wikitext2, path: x, tokenizer: bpe}"], ["model.vocabulary"]),
        (["ernie_doc_documents"], ["data.name=reordered_documents", "model.classes"]),
        (["coco_mini_retinanet"], ["data.name=coco"]),
        (["lm_wikitext2_small_memorizing"], ["transformer_xl+memorizing"]),
        (["demo_text", "model.cutoffs=[20,60]"], ["model.cutoffs=null"]),
        (["digits_vit_grc", "model={name: timm, architecture: pvt_v2_b0, in_chans: 1}"], ["'timm'", "(8 x 8)"]),
    ],
)
def test_bad_plans_are_refused(words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["data.path=x"] if words[0] == "demo_text" and not words[-1].startswith("data=") else []
    assert main(["plan", *words, *overrides]) == 2
    error: Any = capsys.readouterr().err
    assert all(part in error for part in said)


def test_the_command_prints_parts_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits_vit_grc", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "fits (80 GiB less 4 in reserve): micro-batch 32 rows" in out and "model.classes=10" in out
    assert main(["plan", "demo_listops", "training.batch_size=1", "--memory-gib", "0.001", "--reserve-gib", "0"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imagenet_pvt_tiny_grc", "iwslt14_de_en_grc", "gpt2"])
def test_recipes_of_the_papers_size_are_planned(name: str) -> None:
    plan = plan_training(load_config(name, []), gpus=4)
    assert plan.fits and plan.parameters > 10e6
