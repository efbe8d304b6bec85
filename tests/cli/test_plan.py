"""`cached plan` against the memory of real trainings, and refused plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.measured_step import measured

from cached_lab.cli.main import main
from cached_lab.experiments.costs.flops import count_flops
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.experiments.plan.plan import CARDS, GIB, Machine, make_plan, parts_of
from cached_lab.experiments.plan.rehearsal import bare_model, rehearse, step_flops, zipf
from cached_lab.experiments.plan.sizes import Given, Sized, sized
from cached_lab.tasks.recipes import load_config
from cached_transformers.registry import MEMORIES, MODELS
from cached_transformers.state import nbytes

CLOSE = 0.02
"""Largest relative difference between plan and measurement; 1 % and less is usual."""
WORDS = "the quick brown fox jumps over the lazy dog while it rains\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(WORDS * 2000)
    lines = [f"{' '.join(WORDS.split()[: 4 + row % 7])} {row % 50}\n" for row in range(400)]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.en").write_text("".join(lines))
        (tmp_path / f"{split}.de").write_text("".join(line.upper() for line in lines))
    return tmp_path


TEXT, PAIRS = ["data.path={folder}/text.txt"], ["data.path={folder}", "data.vocabulary_size=300", "data.max_length=64"]
TRANSLATOR = [*PAIRS, "data.name=translation", "data.source=en", "data.target=de"]
RUNS: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "transformer_xl": ("demo_text", TEXT, {}),
    "rmt": (
        "demo_text",
        [*TEXT, "model.memory={{name: rmt, length: 10}}", "training.segments=4", "training.bptt=2"],
        {},
    ),
    "grc_vision": ("digits_vit_grc", [], {}),
    "translation": ("multi30k_en_de_grc", [*TRANSLATOR, "training.batch_tokens=null"], {}),
    "listops": ("demo_listops", [], {}),
}
"""Recipe, overrides and sizes of the data, by name."""
MORE: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "accumulated": ("demo_text", [*TEXT, "training.accumulate=4"], {}),
    "adaptive": ("demo_text", [*TEXT, "model.cutoffs=[20,60]"], {}),
    "average": ("digits_vit_grc", ["model.width=256", "training.batch_size=8", "training.ema_decay=0.99"], {}),
    "bfloat16": ("demo_listops", ["training.precision=bfloat16"], {}),
    "checkpointed": ("digits_vit_grc", ["training.activation_checkpointing=true"], {}),
    "documents": ("rmt_documents", ["training.curriculum=null", "training.solved=null", "training.batch_size=8"], {}),
    "momentum": ("digits_vit_plain", ["optimizer.name=sgd", "model.width=256", "training.batch_size=4"], {}),
    "plain": ("demo_text", [*TEXT, "model.memory=null", "model.width=256", "training.batch_size=2"], {}),
    "wide": ("demo_text", [*TEXT, "model.feed_forward=4096", "training.batch_size=2"], {}),
}


def planned(name: str, overrides: list[str], given: dict[str, int]) -> int:
    """Return the bytes of a plan with the CPU form of the optimiser."""
    recipe = sized(load_config(name, overrides), Given(**given))
    pieces = recipe.config.training.accumulate
    counted = rehearse(recipe.config, recipe.shape, recipe.rows // pieces, gradients_held=pieces > 1, gpu=False)
    return sum(parts_of(counted, pieces).values())


@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_plan_is_what_a_training_takes(run: str, folder: Path) -> None:
    name, changes, given = {**RUNS, **MORE}[run]
    overrides = [change.format(folder=folder) for change in changes]
    peak, longest = measured(name, overrides, folder / "run")
    if run in ("translation", "listops", "bfloat16"):
        given = {**given, "length": longest}
    ratio = planned(name, overrides, given) / peak
    print(f"{run}: measured {peak / 2**20:.2f} MiB, planned / measured {ratio:.4f}")
    assert abs(ratio - 1) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", sorted({*MEMORIES.names()} - {"attention_cache", "convolution", "grc", "memorizing"})
)
def test_every_causal_memory_takes_what_is_planned(memory: str, folder: Path) -> None:
    overrides = [f"data.path={folder}/text.txt", f"model.memory={{name: {memory}}}"]
    peak, _ = measured("demo_text", overrides, folder / "run")
    assert abs(planned("demo_text", overrides, {}) / peak - 1) < CLOSE


PLAIN = ["data.name=enwik8", "data.path=x", "model.memory=null"]


def text_recipe(*overrides: str) -> Sized:
    return sized(load_config("demo_text", [*PLAIN, *overrides]), Given())


def test_what_stays_is_counted_to_the_byte() -> None:
    recipe = text_recipe()
    bare = bare_model(recipe.config)
    parameters = list(bare.parameters())
    numbers = sum(p.numel() for p in parameters)
    found = rehearse(recipe.config, recipe.shape, 4, gradients_held=False)
    assert (found.weights, found.gradients) == (4 * numbers, 4 * numbers)
    assert found.optimizer == 8 * numbers + 4 * len(parameters)  # two means of each, and the step of each tensor
    assert found.inputs == 2 * 4 * 64 * 8
    sgd = rehearse(text_recipe("optimizer.name=sgd").config, recipe.shape, 4, gradients_held=False)
    assert sgd.optimizer == 4 * numbers
    averaged = rehearse(text_recipe("training.ema_decay=0.9").config, recipe.shape, 4, gradients_held=False)
    assert averaged.average == found.weights + found.buffers


def test_the_memory_of_the_rows_is_that_of_a_real_state() -> None:
    recipe = sized(load_config("demo_text", ["data.path=x"]), Given())
    found = rehearse(recipe.config, recipe.shape, 4, gradients_held=False)
    model = MODELS.create(**recipe.config.model)
    assert found.state == nbytes(model.init_state(4))
    twice = rehearse(recipe.config, recipe.shape, 8, gradients_held=False)
    assert twice.state == 2 * found.state and twice.activations > 1.9 * found.activations


def test_gradients_of_earlier_pieces_add_to_the_peak() -> None:
    recipe = text_recipe("model.width=256")
    alone, held = (rehearse(recipe.config, recipe.shape, 16, gradients_held=held) for held in (False, True))
    assert parts_of(held, 2)["gradients of earlier pieces"] == alone.gradients
    assert held.forward == alone.forward and held.update <= alone.update


def test_operations_are_those_of_a_real_step() -> None:
    recipe = text_recipe()
    forward = count_flops(
        MODELS.create(**recipe.config.model), torch.zeros(4, 32, dtype=torch.int64), mode="train", shapes_only=True
    )
    # Two segments; the backward pass has two products for each. Attention's are counted over the full matrix.
    assert step_flops(recipe.config, recipe.shape, 4) == 3 * 2 * forward


def test_the_largest_piece_that_fits_is_found() -> None:
    recipe = text_recipe()
    whole = make_plan(recipe, Machine(reserve_gib=0))
    assert whole.fits and (whole.micro_batch, whole.accumulate) == (16, 1)
    assert whole.total == sum(whole.parts.values()) and whole.room is not None and whole.room > 16
    tight = make_plan(recipe, Machine(reserve_gib=0, memory_gib=0.6 * whole.total / GIB))
    assert tight.fits and (tight.micro_batch, tight.accumulate) == (8, 2)
    assert tight.total < 0.6 * whole.total and tight.flops == whole.flops
    tighter = make_plan(recipe, Machine(reserve_gib=0, memory_gib=tight.total / GIB - 1e-9))
    assert tighter.fits and (tighter.micro_batch, tighter.accumulate) == (4, 4)
    assert not make_plan(recipe, Machine(reserve_gib=0, memory_gib=0.001)).fits


def test_a_shared_batch_is_divided_and_sends_what_rings_send() -> None:
    recipe = text_recipe("model.width=256")
    one = make_plan(recipe, Machine())
    ddp = make_plan(recipe, Machine(gpus=4, link_gib_s=1.0))
    weights = 4 * one.parameters
    assert ddp.micro_batch == 4 and ddp.flops == one.flops and ddp.parts["buckets of DDP"] == weights
    assert ddp.sent == 2 * 3 / 4 * weights and ddp.seconds == (one.seconds[0] / 4, ddp.sent / GIB)
    fsdp = make_plan(recipe, Machine(gpus=4, parallel="fsdp"))
    assert fsdp.sent == 3 / 4 * 3 * weights
    assert fsdp.parts["weights"] == weights // 4 and fsdp.parts["gradients"] == weights // 4
    assert 0 < fsdp.parts["gathered by FSDP"] < 2 * weights
    assert one.seconds[0] == pytest.approx(one.flops / (CARDS["a100"][0] * 1e12 * 0.35))
    half = make_plan(text_recipe("training.precision=bfloat16"), Machine(card="h100", mfu=0.5))
    assert half.seconds[0] == pytest.approx(half.flops / (989e12 * 0.5))
    assert half.hours == pytest.approx(400 * half.seconds[0] / 3600)


def test_clusters_are_taken_to_follow_zipf() -> None:
    exact = [sum(1 / r for r in range(low + 1, high + 1)) for low, high in ((20, 60), (60, 256))]
    whole = sum(1 / r for r in range(1, 257))
    assert zipf([0, 20, 60, 256]) == pytest.approx([part / whole for part in exact], rel=1e-3)


def test_a_peak_with_slack_is_hardly_lower() -> None:
    def work() -> None:
        kept = [torch.ones(100 + 7 * k) * 2 for k in range(50)]
        del kept[::2]
        kept += [torch.ones(300) for _ in range(20)]

    with LiveBytes() as exact:
        work()
    with LiveBytes(0.01) as rough:
        work()
    assert exact.peak / 1.01 <= rough.peak <= exact.peak


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo_text", "--gpus", "3"], "training.batch_size=16 does not divide evenly over --gpus 3; take --gpus 2"),
        (["demo_text", "--gpus", "0"], "--gpus 0 must be at least 1"),
        (["demo_text", "--gpus", "2", "--parallel", "none"], "--parallel ddp or fsdp"),
        (["demo_text", "--card", "a10O"], "unknown --card 'a10O'; did you mean 'a100'?"),
        (["demo_text", "--mfu", "35"], "--mfu 35.0 must lie in (0, 1]"),
        (["demo_text", "--memory-gib", "-1"], "--memory-gib -1.0 must be positive"),
        (["demo_text", "--memory-gib", "2"], "--reserve-gib 4.0 must lie in [0, 2)"),
        (["demo_text", "--length", "7"], "set training.segment_length"),
        (["demo_text", "--vocabulary", "0"], "--vocabulary 0 must be at least 1"),
        (["demo_text", "data={name: text, path: x, tokenizer: bpe}"], "give --vocabulary N, or set model.vocabulary=N"),
        (["digits_vit_grc", "--vocabulary", "9"], "--vocabulary 9 is not used by model 'vision_transformer'"),
        (["digits_vit_grc", "--length", "9"], "--length 9 is not used by model 'vision_transformer'"),
        (["gpt_small", "--image-size", "9"], "--image-size 9 is not used by model 'language_model'"),
        (["demo_listops", "--classes", "9", "model.classes=12"], "the recipe says model.classes=12"),
        (["lm_wikitext2_small_xl", "data={name: wikitext2, path: x, tokenizer: bpe}"], "give --vocabulary N"),
        (["ernie_doc_documents"], "give --classes N, or set model.classes=N"),
        (["coco_mini_retinanet"], "images with objects"),
        (["lm_wikitext2_small_memorizing"], "with memory 'transformer_xl+memorizing' depends on values of tensors"),
        (["no_such_recipe"], "unknown recipe 'no_such_recipe'"),
    ],
)
def test_what_cannot_be_planned_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["data.path=x"] if words[0] == "demo_text" and not words[-1].startswith("data=") else []
    assert main(["plan", *words, *overrides]) == 2
    assert said in capsys.readouterr().err


def test_the_command_says_it_for_people_programs_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits_vit_grc", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "fits (80 GiB less 4 in reserve): micro-batch 32 rows" in out and "classes 10, as digits has" in out
    assert main(["plan", "demo_text", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "demo_text" and found["rows"] == 16 and found["total"] == sum(found["parts"].values())
    assert main(["plan", "demo_text,digits_vit_grc", "--gpus", "2", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].startswith("| `demo_text` | 0.1 M | 8 x 1 |")
    assert main(["plan", "demo_listops", "--memory-gib", "0.001", "--reserve-gib", "0"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_row_may_be_shorter_than_the_longest() -> None:
    config = load_config("demo_listops", [])
    whole, short = sized(config, Given()), sized(config, Given(length=20))
    assert (whole.shape.tokens, short.shape.tokens) == (64, 20)
    assert whole.config.model["max_length"] == short.config.model["max_length"]
    words = sized(load_config("table5_paper", []), Given())
    assert words.config.model["vocabulary"] == 267_735 and "vocabulary 267,735, as wikitext103 has" in words.assumed
    pairs = sized(load_config("iwslt14_de_en_grc", []), Given(length=64))
    assert (pairs.rows, pairs.shape.tokens, pairs.config.model["vocabulary"]) == (64, 64, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imagenet_pvt_tiny_grc", "lm_wikitext103_xl_base", "iwslt14_de_en_grc", "gpt2"])
def test_paper_scale_is_planned_in_seconds(name: str) -> None:
    recipe = sized(load_config(name, []), Given())
    plan = make_plan(recipe, Machine(gpus=4))
    assert plan.fits and plan.parameters > 10e6 and 0.1 < plan.hours < 1000
