"""`cached read`: losses of each arm as by hand, keys that are found, tables, repeated commands, and refusals."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import refuses
from real_weights import TEXT, glass, glass_folder, glass_ids
from torch.nn import functional as F

from cached_lab.cli.main import main
from cached_lab.data.babi import Story
from cached_lab.experiments import long_text
from cached_lab.experiments.long_text import LongTexts, parse_arms, read_text
from cached_lab.experiments.recall import AskedText, asked_facts, asked_story, right_answers
from cached_lab.experiments.reports.read_page import read_tables
from cached_lab.tasks.language.completion import words_of_transformers
from cached_lab.yaml_tree import flatten
from cached_transformers import add_memory
from cached_transformers.integrations.hub import records_memory
from cached_transformers.state import nbytes

SEGMENT = 16
ARMS = "none,whole,streaming_llm:length=28,streaming_llm:length=512,block_retrieval:recent=8:block=8"


def measured(folder: Path, **more: Any) -> LongTexts:
    model, tokenizer = glass()
    given = {"name": "glass", "segment": SEGMENT, "seed": 0, "folder": folder, "command": "cached read", **more}
    return LongTexts(model, words_of_transformers(tokenizer), **given)


@torch.no_grad()
def losses(ids: list[int], begins: range, seen: Any) -> list[float]:
    """Nats of the tokens after `seen(begin)` to each place of a segment, by one forward for each segment."""
    model, found = glass()[0], []
    for begin in begins:
        first = seen(begin)
        logits = model(torch.tensor([ids[first : begin + SEGMENT]])).logits[0, begin - first :]
        found.append(
            F.cross_entropy(logits, torch.tensor(ids[begin + 1 : begin + SEGMENT + 1]), reduction="sum").item()
        )
    return found


def test_perplexities_are_those_of_each_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "FIRST_BIN", 32)
    texts, arms = measured(tmp_path), parse_arms(ARMS)
    assert len(list(texts.perplexities(arms, {"alice": TEXT * 2}, 96))) == len(arms)
    rows = {row["arm"]: row for row in texts.content["perplexity"]}
    words, begins = texts.words, range(0, 96, SEGMENT)
    ids = [*words.first, *words.encode(TEXT * 2)]
    for name, seen in (("no memory", lambda begin: begin), ("whole text", lambda begin: 0)):
        nats = losses(ids, begins, seen)
        expected = [(32, sum(nats[:2]) / 32), (64, sum(nats[2:4]) / 32), (96, sum(nats[4:]) / 32)]
        for (end, found), (right, mean) in zip(rows[name]["bins"], expected, strict=True):
            assert end == right and found == pytest.approx(math.exp(mean), rel=1e-4)
    # Slots for all that was read are the whole text.
    assert rows["streaming_llm:length=512"]["bins"] == [pytest.approx(b, rel=1e-4) for b in rows["whole text"]["bins"]]
    assert rows["streaming_llm:length=28"]["state_bytes"] < rows["whole text"]["state_bytes"]
    plain, ids_1N = glass()[0], torch.tensor([ids])
    assert torch.equal(texts.model(ids_1N).logits, plain(ids_1N).logits) and not records_memory(texts.model.config)
    again = measured(tmp_path)
    assert list(again.perplexities(arms, {"alice": TEXT * 2}, 96)) == []
    refuses("another alice.*--out", lambda: list(again.perplexities(arms, {"alice": TEXT}, 96)))
    refuses("seed.*--out", measured, tmp_path, seed=1)


def test_a_key_is_asked_for_after_its_text_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a model that knows the key is right; of each place in the text there is one trial."""
    texts, read = measured(tmp_path), []

    def generate(ids_1N: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append(ids_1N[0].tolist())
        text = texts.words.decode(read[-1])
        key = text.rpartition("Remember it. ")[2][:5] if len(read) != 2 else "1234"
        return torch.cat([ids_1N, torch.tensor([texts.words.encode(f" {key}.")])], 1)

    monkeypatch.setattr(texts.model, "generate", generate)
    list(texts.pass_keys(parse_arms("whole"), {"alice": TEXT * 9}, [400], 3))
    rows = texts.content["keys"]
    assert [row["right"] for row in rows] == [True, False, True, True, True, True] and rows[1]["digits"] < 1
    assert {len(ids) for ids in read} == {400} and all(ids[-1] == read[0][-1] for ids in read)
    places = [row["place"] for row in rows[:3]]
    assert places[1] == pytest.approx(places[0] / 2, abs=1) and places[2] == pytest.approx(1.5 * places[0], abs=2)
    refuses("keys 9", lambda: list(texts.pass_keys(parse_arms("none"), {}, [9], 1)))
    refuses("keys 99999.*short", lambda: list(texts.pass_keys(parse_arms("none"), {"short": TEXT}, [99_999], 1)))


def test_questions_lie_at_the_end_after_what_they_ask_for() -> None:
    words = words_of_transformers(glass()[1])
    hay, story = words.encode(TEXT * 40), Story([["mary", "went", "to", "the", "hallway", "."]] * 2, ["?"], "hallway")
    for make, more in ((asked_facts, ()), (asked_story, (story,))):
        text = make(words, hay, 1200, random.Random(0), *more)
        said = words.decode(text.ids)
        assert len(text.ids) == 1200 and text.answers[0][0] > 900
        for first, end in text.answers:
            answer = words.decode(text.ids[first:end])
            assert said.count(answer) >= 2 and words.decode(text.ids[:512]).count(answer) >= (make is asked_facts)
        refuses("length=40", make, words, hay, 40, random.Random(0), *more)


def test_answers_are_right_where_the_model_predicts_every_token() -> None:
    """A model that repeats is right about a text that repeats; each arm sees its part of the text."""
    model, seen = glass()[0], []

    def forward(ids_1N: torch.Tensor, **options: Any) -> Any:
        seen.append(ids_1N[0].tolist())
        guess = torch.tensor([[i + 1 for i in seen[-1]]])
        return SimpleNamespace(logits=F.one_hot(guess % 1024, 1024).float()[:, -(options["logits_to_keep"] or 9999) :])

    text = AskedText([*range(50), *range(100, 110)], [(48, 50), (49, 51), (52, 55)])
    model.forward = forward
    for arm, begins in (("no memory", [32, 48]), ("whole text", [0, 16, 32, 48])):
        seen.clear()
        assert right_answers(model, text, SEGMENT, arm) == [True, False, True]
        assert [ids[0] for ids in seen] == [text.ids[begin] for begin in begins]
    plain, real = glass()[0], AskedText(list(glass_ids(60)), [(58, 60)])
    expected = plain(torch.tensor([real.ids])).logits[0, 57:59].argmax(-1).tolist() == real.ids[58:60]
    assert right_answers(plain, real, SEGMENT, "whole text") == [expected]
    remembering = add_memory(plain, {"name": "streaming_llm", "length": 60, "relative": False}, segment_length=SEGMENT)
    assert right_answers(remembering, real, SEGMENT, "") == [expected]


def test_a_run_that_trained_on_the_model_is_an_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (book := tmp_path / "book.txt").write_text(TEXT * 60)
    for name, model in (("ahn", {"memory": {"name": "ahn", "length": 8, "relative": False}}), ("lora", {"lora": 2})):
        config = {"name": "transformers", "pretrained": str(glass_folder()), "trained": "memory", **model}
        given = [f"{key}={value}" for key, value in flatten({"model": config}).items()]
        given += ["data.name=text", f"data.path={book}", f"data.tokenizer={glass_folder()}", "training.metric=loss"]
        given += [
            "training.steps=1",
            "training.batch_size=2",
            "training.segment_length=16",
            "training.tensorboard=false",
        ]
        (recipe := tmp_path / f"{name}.yaml").write_text("training: {}\n")
        assert main(["train", str(recipe), *given, "--out", str(tmp_path / name)]) == 0
    arms = ["none", "whole", str(tmp_path / "ahn"), str(tmp_path / "lora")]
    words = ["read", str(glass_folder()), str(book), "--segment-length", "16", "--trials", "1", "--out"]
    words += [str(tmp_path / "out"), "--tokens", "64", "--facts", "1400", "--keys", "300", "--with", ",".join(arms)]
    assert main(words) == 0
    content = json.loads((tmp_path / "out/read.json").read_text())
    rows = {row["arm"]: row for row in content["perplexity"]}
    assert [*rows] == ["no memory", "whole text", "ahn", "lora"]
    assert rows["ahn"]["state_bytes"] > 0 == rows["lora"]["state_bytes"]
    assert rows["lora"]["bins"][0][1] != rows["no memory"]["bins"][0][1]
    assert [len(row["right"]) for row in content["facts"]] == [4] * 4
    assert "recalled" in capsys.readouterr().out
    assert main([*words, "--dtype", "bfloat16", "--out", str(tmp_path / "half")]) == 2
    assert "bfloat16" in capsys.readouterr().err
    assert main([*words, "--segment-length", "32", "--out", str(tmp_path / "longer")]) == 2
    assert "--segment-length 16" in capsys.readouterr().err
    assert main([*words, "--stories", "300"]) == 2 and "--babi" in capsys.readouterr().err


def controls_table(**arms: tuple[float, float, bool]) -> Any:
    """The table of arms with the nats of two texts, and whether they have a memory."""
    rows = [
        {"arm": arm, "text": text, "tokens": 1024, "bins": [(1024, 9.0)], "seconds": 1.0, "state_bytes": 1}
        | {"blocks": [nats], "memory": memory}
        for arm, (*both, memory) in arms.items()
        for text, nats in zip("xy", both, strict=True)
    ]
    tables = {t.title: t for t in read_tables({"perplexity": rows, "keys": [], "longest": 9999})}  # type: ignore[union-attr]
    return tables["Against the controls"]


def test_memories_are_compared_with_their_controls_block_by_block() -> None:
    """By the t interval of hand-made differences: 0.1 and 0.3 nats a token against no memory, over two texts."""
    controls = {"no memory": (3.0, 3.0, False), "lora": (2.8, 2.8, False), "window of a": (3, 3.2, True)}
    table = controls_table(a=(2.9, 2.7, True), **controls)  # type: ignore[arg-type]
    assert [row[:2] for row in table.rows] == [["a", "no memory"], ["a", "window of a"], ["a", "lora"]]
    assert table.rows[0][2] == "+0.200 [-1.071, +1.471]"  # 0.2 +- 12.706 * 0.1
    assert table.rows[2][2].startswith("-0.000") or table.rows[2][2].startswith("+0.000")


def test_seeds_are_one_row_each_against_the_control_of_its_seed() -> None:
    seeds = {"a/seed_0": (2.9, 2.7, True), "a/seed_1": (2.5, 2.4, True), "b": (2.7, 2.7, True)}
    seeds["a/seed_2"] = (2.7, 2.55, True)  # without a control of its seed: against the mean of both
    controls = {"no memory": (3.0, 3.0, False), "lora/seed_1": (2.6, 2.6, False), "lora/seed_0": (2.8, 2.9, False)}
    rows = {tuple(row[:2]): row[2:] for row in controls_table(**seeds, **controls).rows}
    assert rows["a", "no memory"][::2] == ["+0.375 [-0.578, +1.328]", "+0.200, +0.550, +0.375"]  # 0.3, 0.45
    assert rows["a", "lora"][::2] == ["+0.100 [-1.171, +1.371]", "+0.050, +0.150, +0.100"]
    assert rows["b", "lora"][2] == "" and rows["b", "lora"][0].startswith("+0.025")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_has_the_bytes_of_a_memory_in_the_precision_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """Slots have the model's precision, a matrix of AHN 32 bits in any."""
    texts = measured(tmp_path)
    texts.model.to(dtype)
    arm = parse_arms("ahn:length=8")[0]
    (window,) = texts.windows([arm])
    sizes = []
    for memory in (arm.memory, window.memory):
        state = add_memory(glass(dtype)[0], memory, segment_length=SEGMENT).init_memory_state(1)
        sizes.append(nbytes(state))
    assert 0.97 * sizes[0] < sizes[1] <= sizes[0]


def test_the_command_writes_tables_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (book := tmp_path / "book.txt").write_text(f"header *** START OF THIS ***\n{TEXT * 4}\n*** END OF THIS ***\nfooter")
    assert read_text(book) == (TEXT * 4).strip()
    words = ["read", str(glass_folder()), str(book), "--tokens", "112", "--keys", "200", "--trials", "1"]
    words += ["--segment-length", str(SEGMENT), "--out", str(tmp_path / "out"), "--control", "window", "--with"]
    assert main([*words, "none,whole,tova:length=28"]) == 0
    first = capsys.readouterr().out
    content = json.loads((tmp_path / "out/read.json").read_text())
    arms = ["no memory", "whole text", "tova:length=28", "window of tova:length=28"]
    assert [row["arm"] for row in content["perplexity"]] == arms
    states = [row["state_bytes"] for row in content["perplexity"]]
    assert 0.8 * states[2] < states[3] <= states[2] and "glass" in (tmp_path / "out/report.html").read_text()
    table = read_tables(content)[0]
    assert [row[0] for row in table.rows] == arms  # type: ignore[union-attr]
    assert main([*words, "none,whole,tova:length=28,h2o:length=9"]) == 0
    second = json.loads((tmp_path / "out/read.json").read_text())
    assert second["perplexity"][:4] == content["perplexity"] and "tova" in first
    for given, message in (("plain", "plain"), ("none,none", "none"), ("rmt", "rmt"), ("tovva", "tovva")):
        assert main([*words, given]) == 2
        assert message in capsys.readouterr().err
    assert main([*words, "none", "--dtype", "bfloat16"]) == 2 and "'dtype': 'bfloat16'" in capsys.readouterr().err
    assert main([*words[:3], "--tokens", "0"]) == 2 and main(words[:3]) == 2
    assert main([*words[:3], str(book), *words[3:], "none"]) == 2 and "2 texts" in capsys.readouterr().err
    assert main([*words, "none,block_retrieval"]) == 2 and "capacity" in capsys.readouterr().err
