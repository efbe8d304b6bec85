"""`cached read`: losses of each arm as by hand, keys that are found, tables, repeated commands, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from real_weights import TEXT, glass, glass_folder
from torch.nn import functional as F

from cached_lab.cli.main import main
from cached_lab.experiments import long_text
from cached_lab.experiments.long_text import LongTexts, parse_arms, read_text
from cached_lab.experiments.reports.read_page import read_tables
from cached_lab.tasks.language.completion import words_of_transformers
from cached_transformers.integrations.hub import records_memory

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
